# SPDX-License-Identifier: Apache-2.0
"""Move: what nodes are asked to copy, and what becomes of the chunk and of the room when something goes wrong."""

from __future__ import annotations

import struct
from collections.abc import Callable
from concurrent.futures import Future

import pytest
from master_testing import Member, eventually, hashes

from moonpool.master import Master
from moonpool.master.errors import SegmentLostError, SegmentUnknownError, StoreUnavailableError
from moonpool.proto import pool_pb2 as pb

Start = Callable[..., Master]
Join = Callable[..., Member]
MIB = 1 << 20
MINUTE = 60_000


class Pool:
    """A master with two nodes; the chunks are in segment 1, and go to 2."""

    def __init__(self, start_master: Start, join: Join, *, answers: bool = True, **options: object) -> None:
        self.master = start_master(**options)
        self.client = join(self.master)
        self.old = join(self.master, pb.NODE, host="old")
        assert self.old.mount(MIB) == 1
        self.new = join(self.master, pb.NODE, host="new", answers=answers)
        assert self.new.mount(MIB) == 2

    def put(self, count: int = 4, length: int = 1000, **more: object) -> bytes:
        chunks = hashes(count)
        assert not any(self.client.put(chunks, length, avoid=[2], **more))
        return chunks

    def used(self, segment: int) -> int:
        return self.client.segments()[segment].used_bytes

    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = self.client.status()["counts"]
        return counts


@pytest.fixture
def pool(start_master: Start, join: Join) -> Pool:
    return Pool(start_master, join)


@pytest.fixture
def silent(start_master: Start, join: Join) -> Pool:
    """The node to which the chunks go answers nothing by itself."""
    return Pool(start_master, join, answers=False)


def ordered(pool: Pool, chunks: bytes) -> pb.Copy:
    """Have chunks moved by a node that does not answer, and return what it was asked for."""
    asked = len(pool.new.copies)
    assert set(pool.client.move(chunks, 2, wait_ms=50)) == {pb.WRITING}
    eventually(lambda: len(pool.new.copies) > asked, "the copy")
    return pool.new.copies[-1]


def test_the_node_that_gets_the_bytes_is_told_where_they_are(pool: Pool) -> None:
    chunks = pool.put()
    before = pool.client.locate(chunks)
    assert pool.client.move(chunks, 2) == bytes(4)
    (copy,) = pool.new.copies
    assert (copy.source.segment, copy.source.node, copy.source.region, copy.segment) == (1, "old", "pool", 2)
    assert copy.source.incarnation == pool.old.incarnation
    after = pool.client.locate(chunks)
    told = list(struct.iter_unpack("<QQQQII32s", copy.extents))
    for place, (generation, there, here, length, shard, _, name) in enumerate(told):
        assert before.extents[32 * place :][:28] == struct.pack("<QQQI", generation, there, length, 1)
        assert after.extents[32 * place :][:28] == struct.pack("<QQQI", generation, here, length, 2)
        assert (shard, name) == (0, chunks[32 * place :][:32])
    assert pool.used(1) == 0
    assert pool.client.move(chunks, 2) == bytes([pb.ALREADY] * 4)
    assert pool.client.move(hashes(1), 2) == bytes([pb.NOT_FOUND])
    assert pool.counts()["moved_items"] == 4
    assert pool.counts()["moved_bytes"] == 4000


def test_what_cannot_be_copied_stays_where_it_is(pool: Pool) -> None:
    chunks = pool.put()
    pool.new.copied = pb.NOT_MOVED
    assert pool.client.move(chunks, 2) == bytes([pb.NOT_MOVED] * 4)
    assert pool.client.where(chunks) == [1] * 4
    assert pool.used(2) == 0
    assert pool.counts()["not_moved_items"] == 4


def test_every_shard_of_a_chunk_moves(pool: Pool) -> None:
    chunks = hashes(2)
    for shard in range(3):
        given = pool.client.start(chunks, 500, shard=shard, shards=3, avoid=[2])
        assert not any(pool.client.commit(given, shard=shard))
    assert pool.client.move(chunks, 2) == bytes(2)
    assert pool.client.segments()[1].chunks == 0
    assert pool.client.segments()[2].chunks == 6


def test_pinned_chunks_move_and_stay_pinned(pool: Pool) -> None:
    chunks = pool.put(1)
    pin = pool.client.pin(chunks).pin
    assert pool.client.move(chunks, 2) == bytes(1)
    assert pool.client.remove(chunks) == bytes([pb.IN_USE])
    assert pool.client.unpin(pin) == 1
    assert pool.client.remove(chunks) == bytes(1)


def test_what_has_no_room_there_is_told_so(pool: Pool) -> None:
    chunks = pool.put(2, 600_000 // 2)
    assert not any(pool.client.put(hashes(1), 900_000, avoid=[1]))
    assert pool.client.move(chunks, 2) == bytes([pb.NO_SPACE] * 2)
    pool.client.drain(2)
    assert pool.client.move(chunks, 2) == bytes([pb.NO_SPACE] * 2)
    for segment, error in ((0, SegmentUnknownError), (9, SegmentUnknownError)):
        with pytest.raises(error):
            pool.client.move(chunks, segment)


def test_room_is_kept_until_the_node_says_that_nothing_can_write_there(silent: Pool) -> None:
    chunks = silent.put()
    copy = ordered(silent, chunks)
    assert silent.used(2) >= 4 * 1064
    silent.client.pin(chunks)
    # Nobody else is given that room, whatever the time; and a late answer is as good as an early one.
    others = hashes(2000)
    given = silent.client.start(others, 1000, avoid=[1])
    assert pb.NO_SPACE in given.statuses
    here = {extent[2] for extent in struct.iter_unpack("<QQQQII32s", copy.extents)}
    taken = [given.extents[32 * place :][:32] for place, status in enumerate(given.statuses) if status == pb.OK]
    assert len(taken) > 900
    assert here.isdisjoint(int.from_bytes(extent[8:16], "little") for extent in taken)
    silent.client.abort(given, settled=True)
    silent.new.copy_done(copy)
    assert silent.client.move(chunks, 2) == bytes([pb.ALREADY] * 4)


def test_a_copy_that_is_late_is_counted_and_nothing_is_freed(start_master: Start, join: Join) -> None:
    pool = Pool(start_master, join, answers=False, copy_deadline=0.05)
    copy = ordered(pool, pool.put(1))
    assert copy.deadline_ms == 50
    eventually(lambda: pool.master.server.core.copies.overdue() == 1, "a copy that is late")
    assert pool.used(2) >= 1064
    pool.new.copy_done(copy, pb.NOT_MOVED)
    eventually(lambda: pool.used(2) == 0, "the room")


def test_a_new_stream_of_the_node_ends_what_it_was_asked_before(silent: Pool, join: Join) -> None:
    chunks = silent.put()
    copy = ordered(silent, chunks)
    silent.new.vanish()
    assert silent.used(2) > 0  # it may come back, and is still at it for all that is known
    again = join(silent.master, pb.NODE, host="new", session=silent.new.id, incarnation=silent.new.incarnation)
    eventually(lambda: silent.used(2) == 0, "the room")
    again.copy_done(copy)  # it says nothing any more
    assert silent.client.where(chunks) == [1] * 4
    assert silent.client.move(chunks, 2) == bytes(4)


def test_a_node_that_is_lost_takes_nothing_with_it(silent: Pool) -> None:
    chunks = silent.put()
    ordered(silent, chunks)
    silent.new.goodbye()
    eventually(lambda: 2 not in silent.client.segments(), "the loss")
    assert silent.client.where(chunks) == [1] * 4
    assert silent.client.status()["index"]["moving"] == 0
    with pytest.raises((SegmentLostError, SegmentUnknownError)):
        silent.client.move(chunks, 2)


def test_a_chunk_whose_source_is_lost_meanwhile_is_lost(silent: Pool) -> None:
    chunks = silent.put()
    copy = ordered(silent, chunks)
    silent.old.goodbye()
    eventually(lambda: 1 not in silent.client.segments(), "the loss")
    silent.new.copy_done(copy)
    eventually(lambda: silent.used(2) == 0, "the room")
    assert silent.client.exists(chunks) == bytes([pb.NOT_FOUND] * 4)


def test_a_chunk_that_is_removed_meanwhile_is_gone(silent: Pool) -> None:
    chunks = silent.put()
    copy = ordered(silent, chunks)
    assert silent.client.remove(chunks) == bytes(4)
    eventually(lambda: silent.used(1) == 0, "the old room")
    assert silent.client.put(chunks, 1000, avoid=[2]) == bytes(4)
    silent.new.copy_done(copy)
    eventually(lambda: silent.client.status()["index"]["moving"] == 0, "the end of the moves")
    assert silent.client.where(chunks) == [1] * 4
    assert silent.used(2) == 0


def test_a_move_that_is_not_durable_has_not_happened(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = pool.put()

    def apply(*_: object) -> Future[None]:
        failed: Future[None] = Future()
        failed.set_exception(StoreUnavailableError("the disk is full", retryable=True))
        return failed

    with monkeypatch.context() as broken:
        broken.setattr(pool.master.server.core.store, "apply", apply)
        assert pool.client.move(chunks, 2) == bytes([pb.NOT_MOVED] * 4)
    assert pool.client.where(chunks) == [1] * 4
    assert pool.used(2) == 0
    assert pool.client.move(chunks, 2) == bytes(4)


def test_answers_that_make_no_sense_move_nothing(silent: Pool) -> None:
    chunks = silent.put()
    copy = ordered(silent, chunks)
    short = pb.Copy(copy=copy.copy, extents=copy.extents[:72])
    silent.old.copy_done(copy)  # of a node that was not asked
    silent.new.copy_done(short)
    silent.new.copy_done(copy)
    eventually(lambda: silent.client.status()["copies"] == 0, "the end of the copy")
    assert silent.client.where(chunks) == [1] * 4
    assert silent.client.put(hashes(1)) == bytes(1)
