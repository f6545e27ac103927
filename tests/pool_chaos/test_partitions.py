# SPDX-License-Identifier: Apache-2.0
"""Networks that are cut: of a member of etcd, between a master and etcd, and of a client. Nobody is told of it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from engine_testing.leaks import eventually

from pool_chaos.lan import Host, Lans
from pool_chaos.place import CLIENT_END_SECONDS, MASTER_OPTIONS, Reports

SECRET = "partitions"
#: The networks: of etcd with the masters, and of masters, nodes and clients.
ETCD, CLIENTS = "a", "b"
SECONDS = 60.0
#: Of all outcomes that say that a client goes on.
SOME = 200


class Asked(NamedTuple):
    """An answer of a master, and when it was asked and came."""

    asked: float
    answered: float
    said: str


class Pool:
    """Three members of etcd, two masters, a node, and clients that check what they get, each on a host of its own."""

    def __init__(self, lans: Lans, folder: Path) -> None:
        self._folder = folder
        self.etcd = [lans.host(ETCD) for _ in range(3)]
        self.masters = [lans.host(ETCD, CLIENTS) for _ in range(2)]
        self.node, self.clients = lans.host(CLIENTS), [lans.host(CLIENTS) for _ in range(2)]
        self._workloads: dict[Host, subprocess.Popen[str]] = {}
        self._start_etcd()
        store = ",".join(f"{host.addresses[ETCD]}:2379" for host in self.etcd)
        for host in self.masters:
            listen = f"{host.addresses[CLIENTS]}:7600"
            arguments = ("master", "--listen", listen, "--http", "none", "--store", f"etcd:{store}")
            host.start_moonpool(*arguments, folder=folder, secret=SECRET, **MASTER_OPTIONS)
        self.addresses = [f"{host.addresses[CLIENTS]}:7600" for host in self.masters]
        self._all = ",".join(self.addresses)
        listen = f"{self.node.addresses[CLIENTS]}:0"
        arguments = ("node", "--master", self._all, "--dram", "32MiB", "--listen", listen)
        self.node.start_moonpool(*arguments, folder=folder, secret=SECRET)

    def _start_etcd(self) -> None:
        urls = [f"http://{host.addresses[ETCD]}" for host in self.etcd]
        members = ",".join(f"m{number}={url}:2380" for number, url in enumerate(urls))
        for number, (host, url) in enumerate(zip(self.etcd, urls, strict=True)):
            command = [
                "etcd",
                "--name",
                f"m{number}",
                "--data-dir",
                str(self._folder / f"m{number}"),
                "--logger",
                "zap",
            ]
            command += ["--listen-client-urls", f"{url}:2379", "--advertise-client-urls", f"{url}:2379"]
            command += ["--listen-peer-urls", f"{url}:2380", "--initial-advertise-peer-urls", f"{url}:2380"]
            command += ["--initial-cluster", members, "--heartbeat-interval", "50", "--election-timeout", "500"]
            host.start(command)
        assert eventually(lambda: all(self.member_takes_writes(host) for host in self.etcd), SECONDS)

    def member_takes_writes(self, host: Host) -> bool:
        url = f"http://{host.addresses[ETCD]}:2379"
        return host.run("env", "ETCDCTL_API=3", "etcdctl", "--endpoints", url, "endpoint", "health").returncode == 0

    def start_client(self, host: Host) -> None:
        report = self._folder / f"{host.name}.json"
        with (self._folder / f"{host.name}.log").open("w", encoding="utf-8") as log:
            command = [sys.executable, "-m", "pool_chaos.client", self._all, SECRET, "1", str(report), "drain"]
            self._workloads[host] = host.start(command, log)

    def goes_on(self, host: Host) -> None:
        """Wait for many more hits of a client."""
        reports = Reports(self._folder, host.name)
        before = reports.read()[0]["get OK"]
        assert eventually(lambda: reports.read()[0]["get OK"] >= before + SOME, SECONDS)

    def end(self) -> None:
        """Have the clients end, of which none has met what must not be."""
        for host, process in self._workloads.items():
            process.send_signal(signal.SIGTERM)
            assert process.wait(CLIENT_END_SECONDS) == 0
            assert Reports(self._folder, host.name).read()[1] == []

    def ask(self, number: int) -> Callable[[], list[Asked]]:
        """Ask a master all the time. Returns what looks at its answers so far."""
        path = self._folder / f"asked-{number}"
        path.touch()
        self.node.start([sys.executable, "-m", "pool_chaos.asking", self.addresses[number], SECRET, str(path)])

        def answers() -> list[Asked]:
            lines = path.read_text(encoding="utf-8").split("\n")[:-1]
            return [Asked(float(asked), float(came), said) for asked, came, said in map(str.split, lines)]

        return answers


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with Lans(ETCD, CLIENTS) as lans:
        yield Pool(lans, tmp_path)


def test_a_member_of_etcd_that_is_cut_off_costs_nothing(pool: Pool) -> None:
    (client, _) = pool.clients
    pool.start_client(client)
    pool.goes_on(client)
    for member in pool.etcd:
        member.cut(ETCD)
        pool.goes_on(client)
        assert not pool.member_takes_writes(member)
        member.join(ETCD)
        assert eventually(lambda member=member: pool.member_takes_writes(member), SECONDS)
        pool.goes_on(client)
    pool.end()


def test_a_master_that_is_cut_off_from_etcd_answers_no_longer_than_nobody_else_does(pool: Pool) -> None:
    first, second = pool.ask(0), pool.ask(1)
    (client, _) = pool.clients
    pool.start_client(client)
    pool.goes_on(client)
    assert first()[-1].said == "OK"
    assert {answer.said for answer in second()} == {"NotLeaderError"}
    pool.masters[0].cut(ETCD)
    # Clients reach it as ever. The one that can keep its lease takes over.
    assert eventually(lambda: any(answer.said == "OK" for answer in second()), SECONDS)
    pool.goes_on(client)
    pool.masters[0].join(ETCD)
    since = len(first())
    assert eventually(lambda: len(first()) > since + 50, SECONDS)
    # No call that began after the next one led was answered by the one before, neither when it was back.
    led = next(answer.answered for answer in second() if answer.said == "OK")
    assert [answer for answer in first() if answer.said == "OK" and answer.asked > led] == []
    assert first()[-1].said == "NotLeaderError"
    pool.goes_on(client)
    pool.end()


def test_a_client_that_is_cut_off_gets_errors_in_time_and_goes_on_afterwards(pool: Pool) -> None:
    cut, other = pool.clients
    for client in pool.clients:
        pool.start_client(client)
        pool.goes_on(client)
    cut.cut(CLIENTS)
    reports = Reports(pool._folder, cut.name)
    failed = "raised MasterUnavailableError"
    assert eventually(lambda: any(failed in what for what in reports.read()[0]), SECONDS)
    # Its session is over by then, and what it held is free.
    pool.goes_on(other)
    cut.join(CLIENTS)
    pool.goes_on(cut)
    pool.end()
