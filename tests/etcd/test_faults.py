# SPDX-License-Identifier: Apache-2.0
"""What happens to the members of an etcd, and what becomes of the store meanwhile."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from etcd_testing import SECONDS, Cluster, Etcd, put, read, slots
from master_testing import call, eventually, stub
from store_testing.certificates import Authority, Pair

from moonpool.errors import ConfigError
from moonpool.master import Master
from moonpool.master.errors import StoreDamagedError, StoreLostError, StoreUnavailableError
from moonpool.master.store import EtcdOptions, EtcdStore, MetadataStore
from moonpool.master.store.etcd import owner
from moonpool.proto import pool_pb2 as pb
from moonpool.transfer_engine.testing import FaultProxy

Open = Callable[[EtcdOptions], EtcdStore]
Start = Callable[..., Cluster]


class Load:
    """One change after the other, from a thread, of which each is remembered with its outcome."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._end = threading.Event()
        self.done = 0
        self.failed: list[BaseException] = []
        self.expected: dict[int, bytes] = {}
        self.longest = 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        turn = 0
        while not self._end.is_set():
            turn += 1
            content = {turn % 50 + 50 * part: b"%d" % turn for part in range(4)}
            began = time.monotonic()
            error = put(self._store, content).exception(SECONDS)
            self.longest = max(self.longest, time.monotonic() - began)
            if error is None:
                self.done += 1
                self.expected.update(content)
            else:
                self.failed.append(error)

    def go_on(self, changes: int = 20) -> None:
        """Wait for more changes that went well."""
        before = self.done
        eventually(lambda: self.done >= before + changes, "changes that go well")

    def end(self) -> None:
        self._end.set()
        self._thread.join()


@contextlib.contextmanager
def load(store: MetadataStore) -> Iterator[Load]:
    """Yield a load, and see afterwards that the store has exactly what was said to be durable."""
    running = Load(store)
    try:
        running.go_on()
        yield running
    finally:
        running.end()
    assert running.failed == []
    assert read(store) == running.expected


def test_members_that_are_killed_stopped_and_restarted_cost_no_change(start: Start, opened: Open) -> None:
    cluster = start(3)
    store = opened(cluster.options(lease=3.0))
    with load(store) as running:
        for fault in ("killed", "stopped", "leader stopped"):
            members = store._members
            assert members is not None
            member = cluster.leader() if fault.startswith("leader") else cluster.members[members.current]
            _hit(cluster, member, fault, running)
        for member in cluster.members[:2]:
            member.stop()
        # Nothing is durable on one of three.
        before = running.done
        time.sleep(0.5)
        assert running.done <= before + 1
        for member in cluster.members[:2]:
            member.go_on()
        running.go_on()
        for member in cluster.members:
            member.kill()
            cluster.start()
            cluster.await_ready()
            running.go_on()
    assert not store.taken.done()
    # Every other figure is the machine's, but nothing may hang.
    assert running.longest < 20


def _hit(cluster: Cluster, member: Etcd, fault: str, running: Load) -> None:
    if fault == "killed":
        member.kill()
        running.go_on()
        cluster.start()
    else:
        member.stop()
        running.go_on()
        member.go_on()
    cluster.await_ready()
    running.go_on()


def test_all_members_down_and_back(start: Start, opened: Open, start_master: Callable[..., Master]) -> None:
    cluster = start(3)
    master = start_master(store=f"etcd:{cluster.endpoints}", etcd_lease=1.0, http=None)
    channel, pool = stub(master.address)
    with channel:
        request = pb.ExistsRequest(namespace="ns", hashes=bytes(32))
        call(pool.Exists, request)
        store = master.server._store
        assert store is not None
        with load(store) as running:
            cluster.kill()
            # It has to be silent until it knows that nobody else leads.
            eventually(lambda: not store.leading, "the end of its lease")
            with pytest.raises(Exception, match="cannot tell whether it still leads"):
                call(pool.Exists, request)
            cluster.start()
            cluster.await_ready()
            running.go_on()
        eventually(lambda: store.leading, "its lease")
        assert call(pool.Exists, request).statuses == bytes([pb.NOT_FOUND])


def test_cut_off_from_all_and_back(start: Start, opened: Open) -> None:
    cluster = start()
    with FaultProxy(cluster.members[0].address, seed=1) as network:
        store = opened(EtcdOptions.parse(network.address, None))
        with load(store) as running:
            for _ in range(3):
                network.stall()
                time.sleep(0.3)
                network.resume()
                running.go_on()
                network.cut()
                running.go_on()
        store.close()


def test_user_password_and_tls(start: Start, opened: Open, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    server, mine = authority.issue("etcd"), authority.issue("master")
    cluster = start(tls=(server, mine))
    cluster.protect("sesame")
    files = {"ca": mine.tls_ca, "cert": mine.tls_cert, "key": mine.tls_key}
    right = cluster.options(user="pool", password=b"sesame", **files)
    store = opened(right)
    with load(store):
        # Tokens are in the memory of the member, so a new one is needed.
        cluster.kill()
        cluster.start()
        cluster.await_ready()
    store.close()
    with pytest.raises(StoreUnavailableError, match="authentication failed"):
        opened(cluster.options(user="root", password=b"simsalabim", **files))
    with pytest.raises(StoreUnavailableError, match="etcd_user"):
        opened(cluster.options(**files))
    with pytest.raises(StoreUnavailableError, match="permission denied"):
        opened(cluster.options("not-its-own", user="pool", password=b"sesame", **files))
    _wrong_files(cluster, tmp_path, mine)


def _wrong_files(cluster: Cluster, tmp_path: Path, mine: Pair) -> None:
    with pytest.raises(ConfigError, match=r"etcd_ca: .*nowhere"):
        EtcdStore(cluster.options(ca=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match="etcd_cert and etcd_key"):
        cluster.options(ca=mine.tls_ca, cert=mine.tls_cert)


def test_no_space_is_said_and_ends(start: Start, opened: Open) -> None:
    cluster = start(1, "--quota-backend-bytes", str(6 << 20))
    store = opened(cluster.options(lease=3.0))
    durable: dict[int, bytes] = {}
    refused = None
    # Overwriting the same slots takes no room that compaction does not give back.
    for turn in range(4000):
        content = dict.fromkeys(range(turn % 8, 64, 8), b"%04d" % turn * 1000)
        error = put(store, content).exception(SECONDS)
        if error is None:
            durable.update(content)
            if refused is not None:
                break
        else:
            refused = error
            assert isinstance(error, StoreUnavailableError)
            assert not isinstance(error, StoreLostError)
            assert error.retryable
            assert error.retry_after_ms > 0
            # What makes room is taken.
            store.apply(b"", b"", slots(0)).result(SECONDS)
            durable.pop(0, None)
            time.sleep(error.retry_after_ms / 4000)
    assert refused is not None
    assert read(store) == durable
    for what in ("compactions", "defragmentations", "alarms"):
        eventually(lambda what=what: store.stats()[what] > 0, what)


def test_where_an_operator_makes_space_the_store_waits_for_that(start: Start, opened: Open) -> None:
    cluster = start(1, "--quota-backend-bytes", str(6 << 20))
    store = opened(cluster.options(upkeep=False))
    # Each is another one: what is there already needs no space.
    contents = (b"%04d" % turn * 50_000 for turn in range(1000))
    refused = (put(store, {1: content}).exception(SECONDS) for content in contents)
    assert "no space" in str(next(filter(None, refused)))
    said = json.loads(cluster.ctl("endpoint", "status", "-w", "json").stdout)
    cluster.ctl("compact", str(said[0]["Status"]["header"]["revision"]))
    cluster.ctl("defrag")
    cluster.ctl("alarm", "disarm")
    eventually(lambda: put(store, {1: b"after"}).exception(SECONDS) is None, "space")
    assert read(store) == {1: b"after"}


def test_an_old_snapshot_is_noticed_by_who_leads(start: Start, opened: Open, tmp_path: Path) -> None:
    cluster = start()
    store = opened(cluster.options(lease=3.0))
    put(store, {1: b"before"}).result(SECONDS)
    cluster.ctl("snapshot", "save", str(tmp_path / "snapshot"))
    for turn in range(20):
        put(store, {1: b"after %d" % turn}).result(SECONDS)
    cluster.restore(tmp_path / "snapshot")
    error = put(store, {2: b"late"}).exception(SECONDS)
    assert isinstance(error, StoreLostError)
    assert "set back" in str(error) or "another etcd" in str(error)
    assert isinstance(store.taken.result(SECONDS), StoreLostError)


def test_an_old_snapshot_is_noticed_by_who_starts(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start()

    def epoch() -> int:
        store = EtcdStore(cluster.options())
        try:
            return store.open().epoch
        finally:
            store.close()

    epoch()
    cluster.ctl("snapshot", "save", str(tmp_path / "snapshot"))
    last = max(epoch() for _ in range(3))
    cluster.restore(tmp_path / "snapshot", "--initial-cluster-token", "another")
    with pytest.raises(StoreDamagedError, match="snapshot that was restored") as caught:
        epoch()
    key = "/moonpool/moonpool/epoch"
    assert f"etcdctl del {key}" in str(caught.value)
    cluster.ctl("del", key)
    # Ten minutes later, which a snapshot takes to be found and restored, no generation is given twice.
    monkeypatch.setattr("moonpool.master.store.etcd.owner._FIRST_MINUTE", owner._FIRST_MINUTE - 10)
    assert epoch() > last
