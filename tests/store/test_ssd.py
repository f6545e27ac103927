# SPDX-License-Identifier: Apache-2.0
"""Disks below the memory of nodes, through everything: what leaves memory comes back with the bytes that it had."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_testing.leaks import eventually, nothing_left_behind
from store_testing import content, keys
from store_testing.disks import CLIENT, LENGTH, SPACE, check, cluster_of, count, fill, on_disk, there_again

from moonpool.cluster import LocalCluster
from moonpool.node import StoreNode
from moonpool.node.slab import BLOCK, Slab
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client import Outcome


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    # Room for everything that a test has on the disk: after a restart of the master that is all there is.
    with cluster_of(ssd="64MiB") as made:
        yield made


def test_what_is_used_again_outlives_its_place_in_memory(cluster: LocalCluster) -> None:
    with cluster.client(**CLIENT) as client:
        hashes = keys(40, "often")
        fill(client, hashes)
        assert on_disk(client) > 20
        assert client.exists(SPACE, hashes).all()
        assert client.match_prefix(SPACE, hashes) == 40
        there_again(client, hashes)
        assert count(client, "loaded_items") > 20
        assert count(client, "spoilt_items") == 0
        # Its copy is still there, so it leaves memory again without being written.
        assert eventually(lambda: count(client, "shed_items") > 0, 30)
        assert count(client, "demoted_items") <= 40, "each is written once"
        memory, disk = sorted(client.segments(), key=lambda one: one.medium)
        assert (memory.medium, disk.medium, disk.region, disk.state) == (pb.DRAM, pb.DISK, "", pb.ACTIVE)
        assert disk.used_bytes % BLOCK == 0
        assert client.remove(SPACE, hashes).count(Outcome.OK) == 40
        assert eventually(lambda: all(one.used_bytes == 0 for one in client.segments()), 30)


def test_a_look_up_brings_chunks_into_memory(cluster: LocalCluster) -> None:
    with cluster.client(**CLIENT) as client:
        hashes = keys(30, "prefix")
        fill(client, hashes)
        cold = hashes[:8]
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


@pytest.mark.parametrize("what", ["master", "node", "both"])
def test_after_a_restart_what_is_on_the_disk_is_a_hit(cluster: LocalCluster, what: str) -> None:
    with cluster.client(**CLIENT, timeout=30.0) as client:
        hashes = keys(40, "kept")
        fill(client, hashes)
        # All of them are on the disk when the rest has been pressed out of memory.
        fill(client, keys(30, "others"), uses=2)
        kept = hashes[:20]
        if what in ("master", "both"):
            cluster.kill_master()
        if what in ("node", "both"):
            cluster.kill_node(0)
        if what in ("master", "both"):
            cluster.start_master()
        if what in ("node", "both"):
            cluster.start_node(0)
        there_again(client, kept)


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
