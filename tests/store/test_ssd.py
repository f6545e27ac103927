# SPDX-License-Identifier: Apache-2.0
"""Disks below the memory of nodes, through everything: what leaves memory comes back with the bytes that it had."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_testing.leaks import eventually, nothing_left_behind
from store_testing import content, keys

from moonpool.cluster import LocalCluster, local_cluster
from moonpool.node import StoreNode
from moonpool.node.slab import BLOCK, Slab
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client import Outcome, StoreClient

SPACE = "ssd"
LENGTH = 300_000
#: So small that what is put twice over does not fit into memory, and short leases, so that it can go.
OPTIONS = {
    "high_watermark": "0.6",
    "low_watermark": "0.4",
    "lease_max": "200ms",
    "put_begin": "300ms",
    "put_deadline": "5s",
    "heartbeat_interval": "100ms",
    "session_timeout": "1s",
    "ramp_up": "0s",
}
CLIENT = {"lease": 0.2, "staging_bytes": "16MiB", "locations_max": 0}


def cluster_of(**how: Any) -> Any:
    options = {"nodes": 1, "dram": "8MiB", "ssd": "32MiB", "store": "sqlite", "master_options": OPTIONS, **how}
    return local_cluster(**options)


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with cluster_of() as made:
        yield made


def fill(client: StoreClient, hashes: list[bytes], *, uses: int = 2) -> None:
    """Put chunks a few at a time, and use them, so that eviction in the background keeps up."""
    for at in range(0, len(hashes), 5):
        missing = hashes[at : at + 5]
        while missing:
            client.put(SPACE, missing, [content(one, LENGTH) for one in missing]).require()
            # What was never used is the first to go, if need be before it is used.
            found = check(client, missing) if uses > 1 else [Outcome.OK] * len(missing)
            missing = [one for one, outcome in zip(missing, found, strict=True) if outcome != Outcome.OK]
        assert eventually(lambda: used(client) < 0.62 * (8 << 20), 30)


def used(client: StoreClient) -> int:
    found: int = client.master_stats()["index"]["used_bytes"]
    return found


def count(client: StoreClient, what: str) -> int:
    found: int = client.master_stats()["counts"][what]
    return found


def on_disk(client: StoreClient) -> int:
    """Return how many chunks are on disks only."""
    found: int = client.master_stats()["index"]["on_disk"]
    return found


def no_failures(client: StoreClient, hashes: list[bytes]) -> bool:
    """Return whether the memory of a node that is gone is not asked any more, in time."""
    return eventually(lambda: Outcome.FAILED not in check(client, hashes), 30)


def wait_for_writes(client: StoreClient) -> None:
    before = count(client, "demoted_items")
    assert eventually(lambda: count(client, "demoted_items") > before, 30)


def check(client: StoreClient, hashes: list[bytes], *, at_once: int = 4) -> list[int]:
    """Get chunks; what is there is what was put. Returns the outcomes."""
    outcomes: list[int] = []
    for at in range(0, len(hashes), at_once):
        some = hashes[at : at + at_once]
        found = client.get(SPACE, some)
        for hash_, value in zip(some, found, strict=True):
            assert value is None or value == content(hash_, LENGTH)
        outcomes += found.outcomes
    return outcomes


def there_again(client: StoreClient, hashes: list[bytes]) -> None:
    """What is on disks is found, as soon as memory takes chunks again."""
    assert eventually(lambda: client.exists(SPACE, hashes).all(), 30)
    missing = set(hashes)

    def found() -> bool:
        asked = sorted(missing)
        missing.difference_update(
            hash_ for hash_, outcome in zip(asked, check(client, asked), strict=True) if outcome == Outcome.OK
        )
        return not missing

    assert eventually(found, 30)


def test_what_is_used_again_outlives_its_place_in_memory(cluster: LocalCluster) -> None:
    with cluster.client(**CLIENT) as client:
        hashes = keys(40, "often")
        fill(client, hashes)
        assert on_disk(client) > 20
        assert client.exists(SPACE, hashes).all()
        assert client.match_prefix(SPACE, hashes) == 40
        written = count(client, "demoted_items")
        there_again(client, hashes)
        assert count(client, "loaded_items") > 20
        assert count(client, "spoilt_items") == 0
        # Its copy is still there, so it leaves memory again without being written.
        assert eventually(lambda: count(client, "shed_items") > 0, 30)
        assert count(client, "demoted_items") - written < 15
        memory, disk = sorted(client.segments(), key=lambda one: one.medium)
        assert (memory.medium, disk.medium, disk.region, disk.state) == (pb.DRAM, pb.DISK, "", pb.ACTIVE)
        assert disk.used_bytes % BLOCK == 0
        assert client.remove(SPACE, hashes).count(Outcome.OK) == 40
        assert eventually(lambda: all(one.used_bytes == 0 for one in client.segments()), 30)


def test_a_look_up_brings_chunks_into_memory(cluster: LocalCluster) -> None:
    with cluster.client(**CLIENT) as client:
        hashes = keys(30, "prefix")
        fill(client, hashes)
        cold = [one for one in hashes if on_disk(client) and one in hashes[:8]]
        loaded = count(client, "loaded_items")
        assert client.match_prefix(SPACE, cold) == 8
        assert count(client, "loaded_items") == loaded
        assert client.match_prefix(SPACE, cold, lease=0.2) == 8
        assert eventually(lambda: count(client, "loaded_items") > loaded, 30)


def test_what_is_wanted_once_is_never_written(cluster: LocalCluster) -> None:
    with cluster.client(**CLIENT) as client:
        fill(client, keys(60, "once"), uses=1)
        assert count(client, "demoted_items") == 0
        assert count(client, "evicted_bytes") > 0
        assert all(one.used_bytes == 0 for one in client.segments() if one.medium == pb.DISK)


def test_the_quota_is_kept(cluster: LocalCluster) -> None:
    with cluster.client(**CLIENT) as client:
        for round_ in range(4):
            fill(client, keys(40, "many", round_))
        assert count(client, "disk_evicted_bytes") > 0
        assert cluster.slab(0).stat().st_blocks * 512 <= (32 << 20) + 17 * BLOCK
        (disk,) = [one for one in client.segments() if one.medium == pb.DISK]
        assert disk.used_bytes <= 32 << 20
        assert Outcome.OK in check(client, keys(40, "many", 3))


@pytest.mark.parametrize("what", ["master", "node", "both"])
def test_after_a_restart_what_is_on_the_disk_is_a_hit(cluster: LocalCluster, what: str) -> None:
    with cluster.client(**CLIENT, timeout=30.0) as client:
        hashes = keys(40, "kept")
        fill(client, hashes)
        # All of them are on the disk when the rest has been pressed out of memory.
        fill(client, keys(30, "others"), uses=2)
        kept = [hash_ for hash_ in hashes if hash_ in set(hashes[:20])]
        if what in ("master", "both"):
            cluster.kill_master()
        if what in ("node", "both"):
            cluster.kill_node(0)
        if what in ("master", "both"):
            cluster.start_master()
        if what in ("node", "both"):
            cluster.start_node(0)
        there_again(client, kept)


def test_a_node_that_is_killed_while_it_writes_leaves_nothing_wrong(cluster: LocalCluster) -> None:
    with cluster.client(**CLIENT, timeout=20.0) as client, cluster.client(**CLIENT, timeout=1.0) as writer:
        right = 0
        for round_ in range(2):
            hashes = keys(30, "killed", round_)
            over = threading.Event()
            writing = threading.Thread(target=write, args=(writer, hashes, over))
            writing.start()
            try:
                wait_for_writes(client)
            finally:
                cluster.kill_node(0)
                over.set()
                writing.join()
            cluster.start_node(0)
            assert eventually(lambda: sum(one.state == pb.ACTIVE for one in client.segments()) >= 2, 30)
            assert no_failures(client, hashes)
            right += check(client, hashes).count(Outcome.OK)
        assert right > 0


def write(client: StoreClient, hashes: list[bytes], over: threading.Event) -> None:
    while not over.is_set():
        for at in range(0, len(hashes), 5):
            some = hashes[at : at + 5]
            client.put(SPACE, some, [content(one, LENGTH) for one in some])
            check(client, some)


def test_what_is_damaged_on_the_disk_is_a_miss_and_forgotten(cluster: LocalCluster) -> None:
    with cluster.client(**CLIENT, timeout=20.0) as client:
        hashes = keys(40, "damaged")
        fill(client, hashes)
        cluster.kill_node(0)
        with cluster.slab(0).open("r+b") as file:
            # All of the first half, from within each chunk on; and the second half is not there any more.
            for at in range(16 * BLOCK + 1000, 8 << 20, BLOCK):
                file.seek(at)
                file.write(b"\xff" * 8)
        os.truncate(cluster.slab(0), 8 << 20)
        cluster.start_node(0)
        assert eventually(lambda: client.exists(SPACE, hashes).any(), 30)
        outcomes = check(client, hashes)
        assert set(outcomes) <= {Outcome.MISS, Outcome.FAILED, Outcome.OK}
        assert eventually(lambda: not set(check(client, hashes)) - {Outcome.MISS}, 30)
        assert count(client, "spoilt_items") > 10
        # They can be put again.
        fill(client, hashes[:10])
        there_again(client, hashes[:10])


def test_a_disk_that_fails_is_left_alone_until_it_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = threading.Event()
    read, write = Slab._read, Slab._write

    def fail(what: Any) -> Any:
        def call(slab: Slab, buffer: Any, at: int) -> None:
            if broken.is_set():
                raise OSError(errno.EIO, "injected")
            what(slab, buffer, at)

        return call

    monkeypatch.setattr(Slab, "_read", fail(read))
    monkeypatch.setattr(Slab, "_write", fail(write))
    with cluster_of(nodes=0) as cluster, nothing_left_behind():
        options: dict[str, Any] = {"master": cluster.master, "secret": cluster.secret, "self_test": False}
        with StoreNode(dram="8MiB", ssd=f"{tmp_path}:32MiB", **options), cluster.client(**CLIENT) as client:

            def states() -> list[int]:
                return [one.state for one in client.segments() if one.medium == pb.DISK]

            assert eventually(lambda: states() == [pb.ACTIVE], 30)
            hashes = keys(40, "failing")
            fill(client, hashes)
            broken.set()
            assert eventually(lambda: (check(client, hashes, at_once=1), states() == [pb.QUARANTINED])[1], 30)
            # Memory goes on, and what leaves it is gone.
            new = keys(30, "new")
            for hash_ in new:
                client.put(SPACE, [hash_], [content(hash_, LENGTH)]).require()
                assert check(client, [hash_]) == [Outcome.OK]
            broken.clear()
            assert eventually(lambda: states() == [pb.ACTIVE], 30)
            assert set(check(client, hashes)) <= {Outcome.OK, Outcome.MISS}
            again = keys(30, "again")
            fill(client, again)
            there_again(client, again)
