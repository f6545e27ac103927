# SPDX-License-Identifier: Apache-2.0
"""Disks: what a node is asked to copy to them and from them, and what becomes of chunks when one fails or goes."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from master_testing import Member, eventually, hashes

from moonpool.master import Master
from moonpool.master.errors import InvalidRequestError, SegmentLostError
from moonpool.proto import pool_pb2 as pb

Start = Callable[..., Master]
Join = Callable[..., Member]
BLOCK = 4096
#: Of the chunks here, in memory; 16 of them fill it.
EXTENT = 4032 + 64
MEMORY_BYTES = 16 * EXTENT
DISK_BYTES = 64 * BLOCK
MEMORY, DISK = 1, 2
OPTIONS = {"high_watermark": 0.5, "low_watermark": 0.3, "lease_max": 0.5}


class Pool:
    """A master and a node with memory and a disk. Chunks are put and used one after the other."""

    def __init__(self, start_master: Start, join: Join, **options: object) -> None:
        self.join = join
        self.master = start_master(**{**OPTIONS, **options})
        self.client = join(self.master)
        self.node = join(self.master, pb.NODE, host="node")
        assert self.node.mount(MEMORY_BYTES) == MEMORY
        assert self.node.mount_disk(DISK_BYTES) == DISK

    def fill(self, count: int = 16) -> bytes:
        """Put chunks and use each of them, slowly enough for the disk."""
        chunks = hashes(count)
        for at in range(0, len(chunks), 32):
            one = chunks[at : at + 32]
            assert self.client.put(one, 4032) == bytes(1)
            self.client.locate(one)
            eventually(lambda: self.index()["used_bytes"] <= MEMORY_BYTES // 2, "room")
        return chunks

    def cold(self, chunks: bytes) -> bytes:
        """Return those of which nothing is in memory, without loading them."""
        locate = self.master.server.core.index.locate
        statuses = locate(1, chunks, 0, 0, 0)[0]
        return b"".join(chunks[32 * at :][:32] for at, status in enumerate(statuses) if status == pb.LOADING)

    def index(self) -> dict[str, int]:
        index: dict[str, int] = self.client.status()["index"]
        return index

    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = self.client.status()["counts"]
        return counts

    def state(self, segment: int = DISK) -> int:
        state: int = self.client.segments()[segment].state
        return state


@pytest.fixture
def pool(start_master: Start, join: Join) -> Pool:
    return Pool(start_master, join)


def test_chunks_go_down_and_come_up_through_their_node(pool: Pool) -> None:
    chunks = pool.fill()
    down = [copy for copy in pool.node.copies if copy.segment == DISK]
    assert down
    assert all(copy.source.segment == MEMORY and copy.source.incarnation == pool.node.incarnation for copy in down)
    for copy in down:
        assert all(here % BLOCK == 0 for _, _, here, *_ in struct.iter_unpack("<QQQQII32s", copy.extents))
    assert pool.client.exists(chunks) == bytes(16)
    cold = pool.cold(chunks)[:64]
    reply = pool.client.locate(cold, lease_ms=500, wait_ms=250)
    assert reply.statuses == bytes(2)
    assert pool.client.where(cold) == [MEMORY] * 2
    up = [copy for copy in pool.node.copies if copy.segment == MEMORY]
    assert {copy.source.segment for copy in up} == {DISK}
    disk = pool.client.segments()[DISK]
    assert (disk.medium, disk.region, disk.state) == (pb.DISK, "", pb.ACTIVE)
    assert pool.counts()["loaded_items"] == 2
    assert pool.index()["on_disk"] == disk.chunks - 2


def test_what_is_not_there_in_time_is_loading(pool: Pool) -> None:
    cold = pool.cold(pool.fill())
    pool.node.answers = False
    began = time.monotonic()
    # Half of the lease at most: the caller counts it from when it asked.
    assert pool.client.locate(cold, lease_ms=300, wait_ms=60_000).statuses == bytes([pb.LOADING]) * (len(cold) // 32)
    assert time.monotonic() - began < 5.0
    asked = len(pool.node.copies)
    assert set(pool.client.locate(cold).statuses) == {pb.LOADING}
    assert len(pool.node.copies) == asked, "it is on its way already"
    for copy in pool.node.copies:
        pool.node.copy_done(copy)
    eventually(lambda: set(pool.client.locate(cold[:64], lease_ms=200, wait_ms=100).statuses) == {pb.OK}, "the chunks")


def test_a_look_up_with_a_lease_begins_to_load(pool: Pool) -> None:
    cold = pool.cold(pool.fill())[:96]
    request = pb.MatchPrefixRequest(namespace="ns", hashes=cold)
    assert pool.client.pool.MatchPrefix(request).matched == 3
    assert pool.counts()["loaded_items"] == 0
    request.lease_ms = 200
    assert pool.client.pool.MatchPrefix(request).matched == 3
    eventually(lambda: pool.counts()["loaded_items"] == 3, "the chunks")


def test_what_the_disk_does_not_give_back_is_gone(pool: Pool) -> None:
    chunks = pool.fill()
    cold = pool.cold(chunks)[:64]
    pool.node.copied = pb.SPOILT
    assert pool.client.locate(cold, lease_ms=2000, wait_ms=1000).statuses == bytes([pb.NOT_FOUND] * 2)
    assert pool.client.exists(cold) == bytes([pb.NOT_FOUND] * 2)
    assert pool.counts()["spoilt_items"] == 2
    pool.node.copied = pb.OK
    assert pool.client.put(cold, 4032) == bytes(2)
    # One that was given up, or could not be asked, says nothing of the chunk.
    other = pool.cold(chunks)[:32]
    pool.node.copied = pb.NOT_MOVED
    assert pool.client.locate(other, lease_ms=200, wait_ms=100).statuses == bytes([pb.LOADING])
    assert pool.client.exists(other) == bytes(1)


def test_what_is_spoilt_in_memory_is_not_kept_for_the_disk(pool: Pool) -> None:
    pool.node.copied = pool.node.looked = pb.SPOILT
    for _ in range(12):
        one = hashes(1)
        assert pool.client.put(one, 4032, wait_ms=5000) == bytes(1)
        pool.client.locate(one)
    eventually(lambda: pool.counts()["spoilt_lost_items"] > 0, "the end of a chunk without a good copy")
    assert pool.counts()["demoted_items"] == 0


def test_what_cannot_be_written_stays_in_memory_until_it_is_in_the_way(pool: Pool) -> None:
    pool.node.copied = pb.NOT_MOVED
    for _ in range(40):
        one = hashes(1)
        assert pool.client.put(one, 4032, wait_ms=5000) == bytes(1)
        pool.client.locate(one)
    assert pool.counts()["demoted_items"] == 0
    assert pool.client.segments()[DISK].used_bytes <= DISK_BYTES
    eventually(lambda: pool.client.segments()[DISK].used_bytes == 0 or pool.index()["moving"], "the room of copies")


def test_a_disk_without_room_evicts_what_was_used_least_lately(pool: Pool) -> None:
    chunks = pool.fill(80)
    assert pool.counts()["disk_evicted_bytes"] > 0
    disk = pool.client.segments()[DISK]
    assert disk.used_bytes <= DISK_BYTES
    assert pool.client.exists(chunks[-32 * 10 :]) == bytes(10)


def test_a_disk_is_mounted_below_memory(start_master: Start, join: Join) -> None:
    master = start_master()
    node, client = join(master, pb.NODE), join(master)
    with pytest.raises(InvalidRequestError, match="without memory"):
        node.mount_disk(DISK_BYTES)
    with pytest.raises(InvalidRequestError, match="a disk has none"):
        node.mount(MEMORY_BYTES, region="")
    with pytest.raises(InvalidRequestError, match="lends no memory"):
        client.mount_disk(DISK_BYTES)
    assert node.mount(MEMORY_BYTES) == MEMORY
    with pytest.raises(SegmentLostError):
        node.mount_disk(DISK_BYTES, segment=77)
    assert node.mount_disk(DISK_BYTES) == node.mount_disk(DISK_BYTES) == DISK
    assert node.mount_disk(DISK_BYTES, segment=DISK) == DISK
    with pytest.raises(InvalidRequestError, match="same memory"):
        node.mount_disk(2 * DISK_BYTES, segment=DISK)
    for call in (client.drain, lambda number: client.move(hashes(1), number)):
        with pytest.raises(InvalidRequestError, match="is a disk"):
            call(DISK)
    assert client.put(hashes(1), DISK_BYTES // 2) == bytes([pb.TOO_LARGE]), "puts go to memory"


def test_a_node_that_comes_back_takes_its_disk_over(pool: Pool) -> None:
    chunks = pool.fill()
    cold = pool.cold(chunks)
    again = pool.join(pool.master, pb.NODE, host="node")
    with pytest.raises(SegmentLostError):
        again.mount(MEMORY_BYTES, segment=MEMORY)
    memory = again.mount(MEMORY_BYTES)
    # The one before has not been missed yet, and may be asked for something still.
    assert again.mount_disk(DISK_BYTES, segment=DISK) == DISK
    assert pool.client.exists(cold) == bytes(len(cold) // 32)
    assert pool.client.locate(cold[:64], lease_ms=500, wait_ms=250).statuses == bytes(2)
    assert pool.client.where(cold[:64]) == [memory] * 2
    pool.node.goodbye()
    assert pool.state() == pb.ACTIVE
    assert pool.client.exists(cold) == bytes(len(cold) // 32)
    with pytest.raises(SegmentLostError):
        again.mount_disk(DISK_BYTES, segment=DISK, identity=b"e" * 16)


def test_a_disk_is_kept_without_its_node_for_a_while(start_master: Start, join: Join) -> None:
    pool = Pool(start_master, join, disk_grace=3.0)
    cold = pool.cold(pool.fill())
    pool.node.goodbye()
    assert set(pool.client.exists(cold)) == {pb.NOT_FOUND}
    assert pool.state() == pb.QUARANTINED
    again = join(pool.master, pb.NODE)
    again.mount(MEMORY_BYTES)
    again.mount_disk(DISK_BYTES, segment=DISK)
    assert set(pool.client.exists(cold)) == {pb.OK}
    again.goodbye()
    eventually(lambda: DISK not in pool.client.segments(), "the end of the disk")
    eventually(lambda: pool.index()["chunks"] == 0, "that of its chunks")


def test_after_a_restart_of_the_master_the_disk_is_the_same(start_master: Start, join: Join, tmp_path: Path) -> None:
    pool = Pool(start_master, join, store=f"sqlite:{tmp_path}/master.db")
    chunks = pool.fill()
    cold = pool.cold(chunks)
    pool.master.close()
    pool.node.vanish()
    master = start_master(**OPTIONS, store=f"sqlite:{tmp_path}/master.db")
    client, node = join(master), join(master, pb.NODE)
    assert set(client.exists(cold)) == {pb.NOT_FOUND}
    memory = node.mount(MEMORY_BYTES)
    assert node.mount_disk(DISK_BYTES, segment=DISK) == DISK
    assert set(client.exists(cold)) == {pb.OK}
    # What is free may still be read by those of before: nothing is loaded, and nobody waits for it.
    began = time.monotonic()
    assert client.locate(cold[:64], lease_ms=60_000, wait_ms=60_000).statuses == bytes([pb.NOT_FOUND] * 2)
    assert time.monotonic() - began < 5.0
    eventually(lambda: client.locate(cold[:64], lease_ms=500, wait_ms=250).statuses == bytes(2), "the leases of before")
    assert client.where(cold[:64]) == [memory] * 2


def test_a_disk_that_fails_is_left_alone_until_it_is_mounted_again(pool: Pool) -> None:
    cold = pool.cold(pool.fill())
    pool.client.report(DISK)
    assert pool.state() == pb.ACTIVE, "a client knows nothing of disks"
    pool.node.report(DISK)
    assert pool.state() == pb.QUARANTINED
    assert set(pool.client.exists(cold)) == {pb.NOT_FOUND}
    assert not pool.node.probes
    assert pool.client.put(hashes(3), 4032) == bytes(3), "memory goes on"
    pool.node.mount_disk(DISK_BYTES, segment=DISK)
    assert pool.state() == pb.ACTIVE
    assert set(pool.client.exists(cold)) == {pb.OK}


def test_a_disk_that_hangs_is_left_alone_until_it_answers(start_master: Start, join: Join) -> None:
    pool = Pool(start_master, join, copy_deadline=0.3)
    cold = pool.cold(pool.fill())
    pool.node.answers = False
    asked = len(pool.node.copies)
    assert pool.client.locate(cold[:32], lease_ms=200, wait_ms=100).statuses == bytes([pb.LOADING])
    eventually(lambda: pool.state() == pb.QUARANTINED, "the master to notice")
    assert set(pool.client.exists(cold)) == {pb.NOT_FOUND}
    pool.node.answers = True
    for copy in pool.node.copies[asked:]:
        pool.node.copy_done(copy)
    eventually(lambda: pool.state() == pb.ACTIVE, "the master to use it again")
    assert set(pool.client.exists(cold)) == {pb.OK}


def test_many_who_want_the_same_are_served_by_one_read(pool: Pool) -> None:
    cold = pool.cold(pool.fill())[:128]
    asked = len(pool.node.copies)
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(pool.client.locate(cold, lease_ms=2000, wait_ms=1000).statuses))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [bytes(4)] * 8
    up = [copy for copy in pool.node.copies[asked:] if copy.segment == MEMORY]
    assert sum(len(copy.extents) // 72 for copy in up) == 4
