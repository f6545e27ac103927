# SPDX-License-Identifier: Apache-2.0
"""Everything is restarted, one after the other, under load: what was committed and lies in a segment is a hit again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_testing.leaks import eventually
from store_testing import content, keys
from store_testing.disks import CLIENT, LENGTH, SPACE, check, on_disk, there_again

from moonpool.proto import pool_pb2 as pb
from moonpool.store_client import Outcome, StoreClient
from pool_chaos.place import MASTERS, NODES, Place
from pool_chaos.verdict import well_again

SECONDS = 60.0
#: More than `high_watermark` of the memory of all nodes, so that a part is pressed down to disks, until there is much
#: room below it again, which drains fill; with what the clients put far less than the memory of two of them, so that no
#: put has anything evicted that is not on a disk.
CHUNKS, DRAM, WATERMARKS = 105, 32 << 20, {"high_watermark": "0.3", "low_watermark": "0.1"}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path, seed=1, clients=0, dram=DRAM, ssd=128 << 20, **WATERMARKS) as made:
        yield made


def put_for_good(client: StoreClient, hashes: list[bytes]) -> None:
    """Put chunks and use them once more, so that they leave memory for a disk and not for ever."""
    for at in range(0, len(hashes), 5):
        missing = hashes[at : at + 5]
        while missing:
            client.put(SPACE, missing, [content(one, LENGTH) for one in missing]).require()
            found = check(client, missing)
            missing = [one for one, outcome in zip(missing, found, strict=True) if outcome != Outcome.OK]


def empty_memory(client: StoreClient, node: str) -> None:
    """Drain the memory of a node."""
    (memory,) = [one.segment for one in client.segments() if one.node == node and one.medium == pb.DRAM]
    client.drain(memory)
    assert eventually(lambda: not any(one.used_bytes for one in client.segments() if one.segment == memory), SECONDS)


def test_nothing_is_lost_when_everything_is_restarted_in_turn(place: Place) -> None:
    with place.pool.client(**CLIENT, timeout=SECONDS) as client:
        kept = keys(CHUNKS, "kept")
        put_for_good(client, kept)
        # Their drains would be taken back, and this one with them.
        place.add_clients(2, "drain")
        assert eventually(lambda: on_disk(client) > 10, SECONDS)
        for member in place.etcd.members:
            member.leave()
            there_again(client, kept[:10])
            place.etcd.start()
            place.etcd.await_ready()
        there_again(client, kept)
        # The one that waits first, so that there is one hand-over.
        for index in reversed(range(MASTERS)):
            place.pool.stop_master(index)
            place.pool.start_master(index)
            there_again(client, kept)
        for index in range(NODES):
            empty_memory(client, f"node-{index}")
            place.pool.stop_node(index)
            place.pool.start_node(index)
            assert well_again(client) == []
            there_again(client, kept)
        for one in place.clients:
            one.leave()
            seen, wrong = one.found()
            assert not wrong
            assert seen["get OK"] > 100
