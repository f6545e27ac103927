# SPDX-License-Identifier: Apache-2.0
"""Chunks move between real nodes, and come to no harm: whoever dies, hangs or changes his mind in the middle."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from engine_testing.leaks import eventually
from store_testing import content, keys, locate, spoil

from moonpool.cli import cli
from moonpool.cluster import LocalCluster, local_cluster
from moonpool.errors import MoonpoolError
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client import Outcome, StoreArgumentError, StoreClient

if TYPE_CHECKING:
    from typing_extensions import Self

SPACE = "moving"
LENGTH = 50_000
# So that copies take a while, and something can happen in the middle of them.
SLOW = {"copy_bytes": "100KiB", "drain_rate": "3MiB", "lease_max": "200ms", "put_begin": "200ms"}


def number_of(client: StoreClient, node: int) -> int:
    return next(one.segment for one in client.segments() if one.node == f"node-{node}")


def segment(client: StoreClient, number: int) -> pb.Segment | None:
    return next((one for one in client.segments() if one.segment == number), None)


def fill(client: StoreClient, source: int, count: int = 60) -> list[bytes]:
    """Put chunks, all of which are in one segment then."""
    hashes = keys(count, SPACE)
    client.put(SPACE, hashes, [content(hash_, LENGTH) for hash_ in hashes]).require()
    client.move(SPACE, hashes, segment=source).require()
    return hashes


def check(client: StoreClient, hashes: list[bytes]) -> None:
    assert client.exists(SPACE, hashes).all()
    values = [content(hash_, LENGTH) for hash_ in hashes]

    def all_there() -> bool:
        # With leases so short, a machine that pauses makes misses of some.
        found = client.get(SPACE, hashes, lease=0.2)
        assert set(found.outcomes) <= {Outcome.OK, Outcome.MISS}
        assert not [value for value, expected in zip(found, values, strict=True) if value not in (None, expected)]
        return found.ok

    assert eventually(all_there, 30)


def emptied(client: StoreClient, number: int) -> None:
    def empty() -> bool:
        its = segment(client, number)
        return its is not None and its.state == pb.DRAINING and its.chunks == 0

    assert eventually(empty, 30)


def under_way(client: StoreClient, number: int) -> None:
    assert eventually(lambda: (its := segment(client, number)) is not None and its.draining.moved > 0, 30)


class Traffic:
    """Readers and writers beside what is tested: a read gives the bytes that were put, a miss, or a typed error."""

    def __init__(self, cluster: LocalCluster, hashes: list[bytes]) -> None:
        self._cluster = cluster
        self._hashes = hashes
        self._over = threading.Event()
        self.seen: Counter[str] = Counter()
        self.wrong: list[bytes] = []
        self._threads = [threading.Thread(target=work) for work in (self._read, self._read, self._write)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _read(self) -> None:
        with self._cluster.client(timeout=20.0, lease=0.2) as client:
            while not self._over.is_set():
                try:
                    found = client.get(SPACE, self._hashes)
                except MoonpoolError as error:
                    self.seen[f"get {error.code}"] += 1
                    continue
                self.seen.update(f"get {Outcome(outcome).name}" for outcome in found.outcomes)
                for hash_, value in zip(self._hashes, found, strict=True):
                    if value is not None and value != content(hash_, LENGTH):
                        self.wrong.append(hash_)
            self.seen["late"] += client.stats().get("gets_late", 0)

    def _write(self) -> None:
        with self._cluster.client(timeout=20.0) as client:
            for round_ in range(1_000_000):
                if self._over.is_set():
                    return
                hashes = keys(5, "traffic", round_ % 20)
                try:
                    outcomes = client.put(SPACE, hashes, [content(one, 10_000) for one in hashes]).outcomes
                    self.seen.update(f"put {Outcome(outcome).name}" for outcome in outcomes)
                    client.remove(SPACE, hashes[:3])
                except MoonpoolError as error:
                    self.seen[f"put {error.code}"] += 1


#: Of a node that is killed the master hears after this time.
SOON = {"session_timeout": "2s", "heartbeat_interval": "200ms"}


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(nodes=2, dram="32MiB", store="sqlite", master_options={**SLOW, **SOON}) as made:
        yield made


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_chunks_move_and_can_be_read_all_the_time(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_ENGINE_TRANSPORTS", transport)
    with local_cluster(nodes=2, dram="32MiB") as cluster, cluster.client() as client:
        hashes = keys(30, SPACE)
        lengths = [1 + (1 << index % 19) + index for index in range(30)]
        values = [content(hash_, length) for hash_, length in zip(hashes, lengths, strict=True)]
        client.put(SPACE, hashes, values).require()
        for node in (0, 1, 0):
            results = client.move_async(SPACE, hashes, node=f"node-{node}").result(60)
            assert set(results.outcomes) <= {Outcome.OK, Outcome.ALREADY}
            assert list(client.get(SPACE, hashes)) == values
            assert {one.node for one in client.segments() if one.chunks and one.state == pb.ACTIVE} >= {f"node-{node}"}
        assert client.move(SPACE, hashes, node="node-0").count(Outcome.ALREADY) == 30
        missing = client.move(SPACE, keys(2, "never"), segment=number_of(client, 0))
        assert missing.count(Outcome.MISS) == 2
        for wrong in ({}, {"segment": 1, "node": "node-0"}, {"node": "nobody"}, {"segment": -1}):
            with pytest.raises(StoreArgumentError):
                client.move(SPACE, hashes, **wrong)


def test_a_drain_beside_readers_and_writers_loses_nothing(cluster: LocalCluster) -> None:
    with cluster.client() as client:
        source = number_of(client, 0)
        hashes = fill(client, source)
        with client.pin(SPACE, hashes[:10]), Traffic(cluster, hashes) as traffic:
            client.drain(source)
            emptied(client, source)
        assert not traffic.wrong
        # Chunks that a machine that pauses got after their leases; there are no other misses.
        assert set(traffic.seen) <= {"get OK", "get MISS", "put OK", "put ALREADY", "late"}
        assert traffic.seen["get MISS"] <= traffic.seen["late"]
        assert traffic.seen["get OK"] > 100
        check(client, hashes)
        # Its node can leave.
        cluster.stop_node(0)
        check(client, hashes)


def test_the_destination_is_killed_in_the_middle(cluster: LocalCluster) -> None:
    with cluster.client() as client:
        source, target = number_of(client, 0), number_of(client, 1)
        hashes = fill(client, source)
        client.drain(source)
        under_way(client, source)
        cluster.kill_node(1)
        cluster.start_node(1)
        assert eventually(lambda: segment(client, target) is None, 30)
        emptied(client, source)
        there = client.exists(SPACE, hashes)
        # What had gone to the old one has gone with it; the rest is here, right to the last byte.
        assert there.any()
        check(client, [hash_ for hash_, its in zip(hashes, there, strict=True) if its])


def test_the_source_is_killed_in_the_middle(cluster: LocalCluster) -> None:
    with cluster.client() as client:
        source = number_of(client, 0)
        hashes = fill(client, source)
        client.drain(source)
        under_way(client, source)
        cluster.kill_node(0)
        assert eventually(lambda: segment(client, source) is None, 30)
        there = client.exists(SPACE, hashes)
        assert 0 < there.sum() < len(hashes)
        check(client, [hash_ for hash_, its in zip(hashes, there, strict=True) if its])
        assert eventually(lambda: client.master_stats()["copies"] == 0, 30)


def test_the_master_is_killed_in_the_middle(cluster: LocalCluster) -> None:
    with cluster.client(timeout=30.0) as client:
        source = number_of(client, 0)
        hashes = fill(client, source)
        with Traffic(cluster, hashes) as traffic:
            for _ in range(2):
                client.drain(source)
                under_way(client, source)
                cluster.restart_master()
            emptied(client, source)
        assert not traffic.wrong
        assert "get CORRUPT" not in traffic.seen
        check(client, hashes)
        assert segment(client, source).state == pb.DRAINING  # type: ignore[union-attr]


def test_what_a_stopped_node_copies_late_lands_in_nobodys_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped past the deadline of its copies, and goes on while others put into all that is free there."""
    monkeypatch.setenv("MOONPOOL_ENGINE_TRANSPORTS", "tcp")
    options = {**SLOW, "copy_bytes": "4MiB", "copy_deadline": "200ms", "drain_rate": "1GiB", "session_timeout": "60s"}
    with local_cluster(nodes=2, dram="16MiB", master_options=options) as cluster, cluster.client() as client:
        source, target = number_of(client, 0), number_of(client, 1)
        hashes = fill(client, source)
        # One that asks the stopped node for nothing, but writes into its memory.
        cluster.signal_node(1, signal.SIGSTOP)
        client.drain(source)
        assert eventually(lambda: client.master_stats()["index"]["moving"] > 0, 30)
        used = segment(client, target).used_bytes  # type: ignore[union-attr]
        assert used > 0
        time.sleep(0.5)
        assert segment(client, target).used_bytes == used  # type: ignore[union-attr]
        cluster.signal_node(1, signal.SIGCONT)
        others = keys(100, "others")
        client.put(SPACE, others, [content(one, LENGTH) for one in others], timeout=60.0)
        emptied(client, source)
        check(client, hashes)
        there = client.exists(SPACE, others)
        check(client, [one for one, its in zip(others, there, strict=True) if its])


@pytest.mark.parametrize("timeout", [1.0, 2.5])  # less than one call to the master waits, and more
def test_a_move_that_is_not_over_in_time_says_so_of_each_chunk(timeout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    left = []

    def call(method: str, request: pb.MoveRequest, deadline: float) -> object:
        left.append(deadline - time.monotonic() - request.wait_ms / 1000)
        return asked(method, request, deadline)

    with local_cluster(nodes=2, dram="16MiB") as cluster, cluster.client() as client:
        target = number_of(client, 1)
        hashes = fill(client, number_of(client, 0), 3)
        cluster.signal_node(1, signal.SIGSTOP)
        asked = client._core.call
        monkeypatch.setattr(client._core, "call", call)
        results = client.move(SPACE, [*keys(1, "absent"), *hashes], segment=target, timeout=timeout)
        cluster.signal_node(1, signal.SIGCONT)
        assert results.outcomes == bytes([Outcome.MISS] + [Outcome.FAILED] * 3)
        assert {error.code for error in results.errors.values()} == {"CHUNK_BUSY"}
        assert min(left) > 0.1 * timeout  # for the answer of the master


def test_damage_is_not_copied(cluster: LocalCluster) -> None:
    with cluster.client() as client:
        source, target = number_of(client, 0), number_of(client, 1)
        hashes = fill(client, source, 6)
        places = locate(client, SPACE, hashes)
        for row, at in ((0, 64 + LENGTH // 2), (1, 9)):  # in the payload, and in the generation of the header
            spoil(client, places[row, 0], at)
        moved = client.move(SPACE, hashes, segment=target)
        # There was no other copy of those two, and their node has seen that this one is good for nothing.
        assert moved.outcomes == bytes([Outcome.MISS] * 2 + [Outcome.OK] * 4)
        assert client.exists(SPACE, hashes).tolist() == [False] * 2 + [True] * 4
        assert locate(client, SPACE, hashes[2:])["segment"][:, 0].tolist() == [target] * 4
        check(client, hashes[2:])


def test_what_finds_no_room_stays_and_undo_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_cluster(nodes=2, dram="4MiB") as cluster, cluster.client() as client:
        run = CliRunner(
            env={"MOONPOOL_STORE_CLIENT_SECRET": cluster.secret, "MOONPOOL_STORE_CLIENT_MASTER": cluster.master}
        )
        # Longer than the master's pause between two looks, so that what it says of the last one is not old.
        monkeypatch.setattr("moonpool.store_client.commands.drain._PATIENCE", 3.0)
        hashes = keys(100, SPACE)
        client.put(SPACE, hashes, [content(one, LENGTH) for one in hashes]).require()
        for node, some in enumerate((hashes[:50], hashes[50:])):
            client.move(SPACE, some, node=f"node-{node}").require()
        stuck = run.invoke(cli, ["drain", "node-0", "--wait", "--json"])
        assert stuck.exit_code == 1
        assert "no room" in stuck.output
        told = json.loads(stuck.stdout[: stuck.stdout.index("}") + 1])
        assert told["stuck"] == told["chunks"] > 0
        assert told["state"] == "draining"
        assert "no room elsewhere" in told["cause"]
        for command in ("ls", "status"):
            assert "stuck: " in run.invoke(cli, [command]).output
        undone = run.invoke(cli, ["drain", "node-0", "--undo"])
        assert "used again" in undone.output
        assert client.exists(SPACE, hashes).all()
        failed = client.move(SPACE, hashes, node="node-0")
        assert failed.count(Outcome.FAILED) > 0
        assert {error.code for error in failed.errors.values()} == {"NO_SPACE"}


def test_the_commands() -> None:
    with (
        local_cluster(nodes=2, dram="16MiB", master_options={"lease_max": "100ms"}) as cluster,
        cluster.client() as client,
    ):
        run = CliRunner(
            env={"MOONPOOL_STORE_CLIENT_SECRET": cluster.secret, "MOONPOOL_STORE_CLIENT_MASTER": cluster.master}
        )
        hashes = keys(4, SPACE)
        client.put(SPACE, hashes, [content(one, LENGTH) for one in hashes]).require()
        names = [one.hex() for one in hashes]
        moved = run.invoke(cli, ["move", SPACE, *names, keys(1, "no")[0].hex(), "--node", "node-1", "--json"])
        told = json.loads(moved.output)
        assert (told["moved"] + told["there_before"], told["missing"], told["failed"]) == (4, 1, {})
        assert "4 were there before" in run.invoke(cli, ["move", SPACE, *names, "--node", "node-1"]).output
        assert run.invoke(cli, ["move", SPACE, *names]).exit_code != 0
        drained = run.invoke(cli, ["drain", "node-1", "--wait"])
        assert drained.exit_code == 0, drained.output
        assert "can be stopped" in drained.output
        cluster.stop_node(1)
        check(client, hashes)
