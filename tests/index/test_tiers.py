# SPDX-License-Identifier: Apache-2.0
"""Memory and the disks below it, as the master calls the index."""

from __future__ import annotations

import random

import pytest
from index.calls import MIB, OWNER, POLICIES, SPACE, exist, generations, names, put, start
from index.model_parts import Status
from index.packing import (
    pack_records,
    statuses_of,
    u32s,
    u64s,
    unpack_extents,
    unpack_moves,
    unpack_records,
    unpack_u32s,
)

from moonpool._index import MOVE_BYTES, NO_SEGMENT, ChunkIndex

MEMORY, DISK, FAR, FAR_DISK = 1, 2, 3, 4
BLOCK = 4096
#: What an extent of `put` takes in memory.
EXTENT = 1088
ALL = 1 << 40


@pytest.fixture(params=POLICIES)
def index(request: pytest.FixtureRequest) -> ChunkIndex:
    return make(request.param)


def make(policy: str = "prefix", epoch: int = 3) -> ChunkIndex:
    made = ChunkIndex(policy=policy, chunks_max=1000, epoch=epoch)
    made.add_segment(MEMORY, MIB, 1, 0, 0)
    made.add_segment(DISK, 64 * BLOCK, 1, 0, 0, disk_of=MEMORY)
    return made


def use(index: ChunkIndex, hashes: bytes, now: int = 0) -> None:
    index.locate(SPACE, hashes, 0, now, 0)


def demote(index: ChunkIndex, want: int = ALL, now: int = 0, uses_min: int = 2) -> tuple[bytes, bytes, int]:
    """Returns (slots that are gone, moves, the disk without room)."""
    slots, _, _, _, moves, full = index.evict(want, now, uses_min=uses_min, count_max=1000, bytes_max=ALL)
    return slots, moves, full


def numbers(moves: bytes) -> bytes:
    return b"".join(moves[at : at + 8] for at in range(0, len(moves), MOVE_BYTES))


def finish(index: ChunkIndex, moves: bytes, now: int = 0) -> dict[int, bytes]:
    """The bytes are copied. Returns the rows of the store."""
    statuses, slots, records = index.commit_moves(numbers(moves))
    assert not any(statuses)
    index.publish_moves(numbers(moves), now)
    return dict(zip(unpack_u32s(slots), unpack_records(records), strict=True))


def where(index: ChunkIndex, hashes: bytes, shard: int = 0) -> list[Status]:
    return statuses_of(index.locate(SPACE, hashes, shard, 0, 0)[0])


def test_what_is_used_again_goes_to_the_disk_and_comes_back(index: ChunkIndex) -> None:
    often, once = names(3), names(3, "once")
    put(index, often)
    put(index, once)
    use(index, often)
    slots, moves, full = demote(index)
    # What was put and never wanted is not written.
    assert len(slots) == 3 * 4
    index.reclaim(slots, 0)
    assert full == NO_SEGMENT
    assert exist(index, once) == [False] * 3
    assert {move[1:3] for move in unpack_moves(moves)} == {(MEMORY, DISK)}
    assert all(move[5] % BLOCK == 0 for move in unpack_moves(moves))
    # Until it is there, readers find it in memory.
    assert where(index, often) == [Status.OK] * 3
    finish(index, moves)
    assert index.check() == ""
    assert exist(index, often) == [True] * 3
    assert index.match_prefix(SPACE, often, 0, 0) == 3
    assert index.stats()["on_disk"] == 3
    assert index.stats()["used_bytes"] == 0
    assert index.segment_stats(DISK)["used_bytes"] == 3 * BLOCK
    statuses, extents, _ = index.locate(SPACE, often, 0, 0, 0)
    assert statuses_of(statuses) == [Status.LOADING] * 3
    assert unpack_extents(extents, 1) == [[]] * 3

    statuses, moves, no_room = index.promote(SPACE, often, 0, 2, ALL)
    assert statuses_of(statuses) == [Status.OK, Status.OK, Status.WRITING]
    assert no_room == 0
    assert {move[1:3] for move in unpack_moves(moves)} == {(DISK, MEMORY)}
    assert statuses_of(index.promote(SPACE, often, 0, 0, ALL)[0]) == [Status.WRITING] * 3
    finish(index, moves)
    assert where(index, often) == [Status.OK, Status.OK, Status.LOADING]
    statuses, extents, _ = index.locate(SPACE, often, 0, 0, 0)
    assert [item[0][3] for item in unpack_extents(extents, 1)[:2]] == [MEMORY] * 2
    assert statuses_of(index.promote(SPACE, often, 0, 9, ALL)[0])[:2] == [Status.ALREADY] * 2
    assert index.segment_stats(DISK)["used_bytes"] == 3 * BLOCK
    assert index.check() == ""


def test_leaving_again_costs_no_write(index: ChunkIndex) -> None:
    hashes = names(2)
    put(index, hashes)
    use(index, hashes)
    finish(index, demote(index)[1])
    finish(index, index.promote(SPACE, hashes, 0, 9, ALL)[1])
    assert index.stats()["on_disk"] == 0
    # Also in the call of who needs room at once, and copies nothing.
    rows: dict[int, bytes] = {}
    while index.stats()["used_bytes"]:
        slots, _, lost, freed, moves, _ = index.evict(1, 0)
        assert (slots, lost, freed) == (b"", 0, EXTENT)
        assert [move[2] for move in unpack_moves(moves)] == [NO_SEGMENT]
        rows |= finish(index, moves)
    assert index.stats()["on_disk"] == len(rows) == 2
    assert index.check() == ""


def test_a_copy_in_memory_that_is_spoilt_leaves_the_one_on_the_disk(index: ChunkIndex) -> None:
    put(index, names(1))
    use(index, names(1))
    finish(index, demote(index)[1])
    cold = index.promote(SPACE, names(1), 0, 9, ALL)[1]
    finish(index, cold)
    extent = index.locate(SPACE, names(1), 0, 0, 0)[1]
    statuses, moves, slots = index.mend(SPACE, names(1), 0, extent, True, 0)
    assert (statuses_of(statuses), slots) == ([Status.OK], b"")
    # There is no other copy in memory that could be read.
    assert [move[1:3] for move in unpack_moves(moves)] == [(MEMORY, NO_SEGMENT)]
    assert index.check() == ""
    finish(index, moves)
    assert where(index, names(1)) == [Status.LOADING]
    assert (index.stats()["on_disk"], index.stats()["used_bytes"]) == (1, 0)
    # What is on the disk is read by its node only, which looks at it then.
    generation, there = unpack_moves(cold)[0][3:5]
    on_disk = u64s([generation, there, 1000, DISK])
    assert statuses_of(index.mend(SPACE, names(1), 0, on_disk, True, 0)[0]) == [Status.NOT_FOUND]
    assert index.check() == ""


def test_what_is_spared_is_not_copied_to_the_disk_either(index: ChunkIndex) -> None:
    kept, young, other = names(1, "kept"), names(1, "young"), names(1, "other")
    for one in (kept, other, young):
        put(index, one)
        use(index, one)
    generation = unpack_extents(index.locate(SPACE, young, 0, 0, 0)[1], 1)[0][0][0]

    def evict(newest: int) -> tuple[bytes, bytes, int, int, bytes, int]:
        return index.evict(ALL, 0, uses_min=2, count_max=9, bytes_max=ALL, namespace=SPACE, hashes=kept, newest=newest)

    slots, _, _, _, moves, _ = evict(generation - 1)
    assert slots == b""
    assert [move[8] for move in unpack_moves(moves)] == [other]
    slots, _, _, _, moves, _ = evict(generation)
    assert slots == b""
    assert [move[8] for move in unpack_moves(moves)] == [young]
    assert index.check() == ""


def test_what_leaves_memory_is_not_evicted_again(index: ChunkIndex) -> None:
    put(index, names(1))
    use(index, names(1))
    finish(index, demote(index)[1])
    finish(index, index.promote(SPACE, names(1), 0, 9, ALL)[1])
    assert index.evict(ALL, 0)[3] == EXTENT
    assert index.evict(ALL, 0)[3] == 0
    assert demote(index) == (b"", b"", NO_SEGMENT)


def test_readers_of_what_leaves_memory_keep_its_space(index: ChunkIndex) -> None:
    hashes = names(1)
    put(index, hashes)
    use(index, hashes)
    moves = demote(index)[1]
    index.locate(SPACE, hashes, 0, 0, 50)
    finish(index, moves, now=10)
    assert index.segment_stats(MEMORY)["waiting_bytes"] == EXTENT
    assert index.reclaim(b"", 49) == 0
    assert index.reclaim(b"", 51) == EXTENT
    assert index.check() == ""


def test_chains_leave_memory_and_the_disk_from_their_ends(index: ChunkIndex) -> None:
    chain = names(4)
    put(index, chain, parents=bytes(32))
    use(index, chain)
    gone = []
    for left in (3, 2, 1, 0):
        slots, moves, _ = demote(index, 1)
        assert slots == b""
        gone += [move[8] for move in unpack_moves(moves)]
        finish(index, moves)
        assert where(index, chain) == [Status.OK] * left + [Status.LOADING] * (4 - left)
    assert gone == [chain[at : at + 32] for at in (96, 64, 32, 0)]
    for left in (3, 2, 1, 0):
        slots, _, freed = index.evict_disk(DISK, 1, 0)
        assert freed == BLOCK
        index.reclaim(slots, 0)
        assert index.match_prefix(SPACE, chain, 0, 0) == left
        assert index.check() == ""
    assert index.segment_stats(DISK)["used_bytes"] == 0


def test_a_full_disk_waits_for_eviction_and_otherwise_is_none(index: ChunkIndex) -> None:
    index.add_segment(DISK, 2 * BLOCK, 1, 0, 0, disk_of=MEMORY)
    cold, warm = names(2, "cold"), names(2, "warm")
    put(index, cold)
    use(index, cold)
    finish(index, demote(index)[1])
    put(index, warm)
    use(index, warm)
    slots, moves, full = demote(index)
    assert (slots, moves, full) == (b"", b"", DISK)
    slots, _, freed = index.evict_disk(DISK, 1, 0)
    assert freed == BLOCK
    index.reclaim(slots, 0)
    moves = demote(index)[1]
    assert len(moves) == MOVE_BYTES
    finish(index, moves)
    finish(index, index.promote(SPACE, cold + warm, 0, 9, ALL)[1])
    # What is on the disk is in memory too: nothing can be evicted there, so what finds no room is gone.
    more = names(2, "more")
    put(index, more)
    use(index, more)
    assert index.evict_disk(DISK, 1, 0)[0] == b""
    slots, moves, full = demote(index)
    assert full == NO_SEGMENT
    assert not any(move[2] == DISK for move in unpack_moves(moves))
    assert index.check() == ""


def test_what_is_leased_pinned_or_being_read_stays_on_the_disk(index: ChunkIndex) -> None:
    hashes = names(4)
    put(index, hashes)
    use(index, hashes)
    finish(index, demote(index)[1])
    index.locate(SPACE, hashes[:32], 0, 0, 50)
    index.pin(OWNER, 9, SPACE, hashes[32:64])
    reading = index.promote(SPACE, hashes[64:96], 0, 9, ALL)[1]
    slots, _, freed = index.evict_disk(DISK, ALL, 10)
    assert (len(slots), freed) == (4, BLOCK)
    index.reclaim(slots, 10)
    assert exist(index, hashes) == [True, True, True, False]
    index.abort_moves(numbers(reading))
    assert index.check() == ""


def test_what_is_spoilt_is_gone(index: ChunkIndex) -> None:
    hashes = names(3)
    put(index, hashes)
    use(index, hashes)
    finish(index, demote(index)[1])
    index.pin(OWNER, 9, SPACE, hashes[32:64])
    moves = numbers(index.promote(SPACE, hashes, 0, 9, ALL)[1])
    slots, keys = index.spoilt(moves[:16])
    assert len(slots) == 8
    assert len(keys) == 2 * 36
    index.abort_moves(moves[:16])
    assert index.commit_moves(moves[:8])[0] == bytes([Status.NOT_FOUND])
    finish(index, index.promote(SPACE, hashes, 0, 0, ALL)[1])
    index.reclaim(slots, 0)
    assert exist(index, hashes) == [False, False, True]
    assert index.unpin(OWNER, 9) == 0
    assert index.segment_stats(DISK)["used_bytes"] == BLOCK
    # What is in memory by now is not touched.
    index.commit_moves(moves[16:])
    index.publish_moves(moves[16:], 0)
    assert index.spoilt(moves[16:]) == (b"", b"")
    assert index.check() == ""


def test_chunks_of_several_shards_leave_as_a_whole(index: ChunkIndex) -> None:
    hashes = names(2)
    for shard in range(3):
        put(index, hashes, shard=shard, shards=3)
    use(index, hashes)
    moves, shards = demote(index)[1], []
    while moves:
        assert index.stats()["on_disk"] == 0
        shards.append({move[7] for move in unpack_moves(moves)})
        rows = finish(index, moves)
        moves = index.demote_more(u32s(rows), 2, [])
    assert shards == [{0}, {1}, {2}]
    assert index.stats()["on_disk"] == 2
    assert index.stats()["used_bytes"] == 0
    finish(index, index.promote(SPACE, hashes, 1, 9, ALL)[1])
    assert where(index, hashes, 1) == [Status.OK] * 2
    assert where(index, hashes, 0) == [Status.LOADING] * 2
    assert index.check() == ""
    slots = index.remove(SPACE, hashes)[1]
    index.reclaim(slots, 0)
    assert index.segment_stats(DISK)["used_bytes"] == index.segment_stats(MEMORY)["used_bytes"] == 0


@pytest.mark.parametrize("lost", [MEMORY, DISK])
def test_a_chunk_in_both_outlives_the_loss_of_one(index: ChunkIndex, lost: int) -> None:
    hashes = names(2)
    put(index, hashes)
    use(index, hashes)
    finish(index, demote(index)[1])
    finish(index, index.promote(SPACE, hashes, 0, 9, ALL)[1])
    index.drop_segment(lost)
    assert exist(index, hashes) == [True] * 2
    slots, complete = index.sweep(1000)
    assert (slots, complete) == (b"", True)
    assert index.stats()["on_disk"] == (2 if lost == MEMORY else 0)
    assert where(index, hashes) == [Status.LOADING if lost == MEMORY else Status.OK] * 2
    assert index.check() == ""
    if lost == MEMORY:
        assert statuses_of(index.promote(SPACE, hashes, 0, 9, ALL)[0]) == [Status.NOT_FOUND] * 2
        index.add_segment(FAR, MIB, 1, 0, 0)
        index.add_segment(DISK, 64 * BLOCK, 1, 0, 0, disk_of=FAR)
        finish(index, index.promote(SPACE, hashes, 0, 9, ALL)[1])
        assert where(index, hashes) == [Status.OK] * 2


def test_a_disk_that_is_away_makes_its_chunks_misses_and_they_can_be_put_again(index: ChunkIndex) -> None:
    hashes = names(2)
    put(index, hashes)
    use(index, hashes)
    finish(index, demote(index)[1])
    index.set_segment(DISK, writable=False, readable=False)
    assert exist(index, hashes) == [False] * 2
    assert where(index, hashes) == [Status.NOT_FOUND] * 2
    put(index, hashes[:32])
    assert exist(index, hashes) == [True, False]
    index.set_segment(DISK, writable=True, readable=True)
    assert where(index, hashes) == [Status.OK, Status.LOADING]
    assert start(index, hashes)[0] == [Status.ALREADY] * 2
    assert index.segment_stats(DISK)["used_bytes"] == BLOCK
    assert index.check() == ""


def test_nobody_knows_how_often_was_used_what_was_put_before_a_restart(index: ChunkIndex) -> None:
    rows = put(index, names(3))
    after = ChunkIndex(policy=index.stats()["policy"], chunks_max=1000, epoch=4)
    assert after.restore(u32s(rows), pack_records(list(rows.values()))) == 3
    after.add_segment(MEMORY, MIB, 1, 0, 0)
    after.add_segment(DISK, 64 * BLOCK, 1, 0, 0, disk_of=MEMORY)
    put(after, names(2, "after"))
    slots, moves, _ = demote(after)
    # It may have been wanted a thousand times. What was put since then and not used is known.
    assert len(slots) == 2 * 4
    assert sorted(move[8] for move in unpack_moves(moves)) == sorted(names(3)[at : at + 32] for at in (0, 32, 64))
    finish(after, moves)
    assert after.stats()["on_disk"] == 3
    assert after.check() == ""


def test_a_restart_finds_what_is_on_disks(index: ChunkIndex) -> None:
    hashes, rows = names(5), {}
    rows.update(put(index, hashes))
    use(index, hashes)
    rows.update(finish(index, demote(index)[1]))
    rows.update(finish(index, index.promote(SPACE, hashes[:64], 0, 9, ALL)[1]))
    after = ChunkIndex(epoch=4)
    after.know_disk(DISK)
    assert after.restore(u32s(rows), pack_records(list(rows.values()))) == 5
    after.add_segment(FAR, MIB, 1, 0, 0)
    after.add_segment(DISK, 64 * BLOCK, 1, 0, 0, disk_of=FAR)
    after.drop_unknown([])
    assert after.sweep(1000) == (b"", True)
    assert where(after, hashes) == [Status.LOADING] * 5
    assert after.segment_stats(DISK)["used_bytes"] == 5 * BLOCK
    assert after.segment_stats(DISK)["largest_free_bytes"] == 59 * BLOCK
    finish(after, after.promote(SPACE, hashes, 0, 9, ALL)[1])
    assert after.check() == ""


def test_no_room_in_memory_is_said_and_disks_take_no_puts(index: ChunkIndex) -> None:
    hashes = names(1, "large")
    put(index, hashes, length=200_000)
    use(index, hashes)
    finish(index, demote(index)[1])
    put(index, names(2), length=500_000)
    statuses, moves, no_room = index.promote(SPACE, hashes, 0, 9, ALL)
    assert statuses_of(statuses) == [Status.NO_SPACE]
    assert (moves, no_room) == (b"", 200_064)
    assert start(index, names(1, "more"), length=100_000)[0] == [Status.NO_SPACE]
    assert index.stats()["capacity_bytes"] == MIB
    assert index.move_out(DISK, 0, 100, 100, ALL, ALL, [], 0) == (b"", NO_SEGMENT, 0)


def test_disks_are_below_memory_and_nothing_else(index: ChunkIndex) -> None:
    for above in (9, DISK):
        with pytest.raises(KeyError):
            index.add_segment(FAR, MIB, 1, 0, 0, disk_of=above)
    with pytest.raises(KeyError):
        index.add_segment(MEMORY, MIB, 1, 0, 0, disk_of=MEMORY)
    with pytest.raises(KeyError):
        index.evict_disk(MEMORY, 1, 0)
    with pytest.raises(ValueError, match="dropped"):
        index.know_disk(MEMORY)
    assert index.check() == ""


class World:
    """An index, and what the store holds. Copies end in any order, well or not."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.index = ChunkIndex(policy=self.random.choice(POLICIES), chunks_max=1000, epoch=3)
        for memory, disk in ((MEMORY, DISK), (FAR, FAR_DISK)):
            self.index.add_segment(memory, 40 * EXTENT, memory, 0, 0)
            self.index.add_segment(disk, 60 * BLOCK, memory, 0, 0, disk_of=memory)
        self.rows: dict[int, bytes] = {}
        self.moves: list[bytes] = []
        self.next_segment = 10
        self.disks = {DISK: MEMORY, FAR_DISK: FAR}
        self.now = 0

    def step(self) -> None:
        what = self.random.choice(
            [
                "put",
                "put",
                "use",
                "use",
                "evict",
                "demote",
                "finish",
                "finish",
                "load",
                "disk",
                "remove",
                "node",
                "look",
            ]
        )
        getattr(self, what)()
        self.now += self.random.randrange(3)

    def some(self) -> bytes:
        first = self.random.randrange(60)
        return b"".join(names(1, str(first + at)) for at in range(self.random.randrange(1, 8)))

    def put(self) -> None:
        hashes, shards = self.some(), self.random.choice((1, 1, 2))
        for shard in range(shards):
            replicas = self.random.choice((1, 2))
            parents = self.random.choice((b"", bytes(32)))
            statuses, extents = start(
                self.index, hashes, shard=shard, shards=shards, replicas=replicas, parents=parents, now=self.now,
                deadline=self.now + 100,
            )  # fmt: skip
            good = [at for at, status in enumerate(statuses) if status is Status.OK]
            if not good:
                continue
            packed = b"".join(hashes[at * 32 : at * 32 + 32] for at in good)
            given = generations([extents[at] for at in good])
            _, slots, records = self.index.commit(OWNER, SPACE, packed, given, shard, b"")
            self.keep(slots, records)
            self.index.publish(slots)

    def keep(self, slots: bytes, records: bytes) -> None:
        self.rows.update(zip(unpack_u32s(slots), unpack_records(records), strict=True))

    def drop(self, slots: bytes) -> None:
        for slot in unpack_u32s(slots):
            self.rows.pop(slot, None)
        self.index.reclaim(slots, self.now)

    def use(self) -> None:
        self.index.locate(SPACE, self.some(), 0, self.now, self.random.choice((0, 5)))

    def evict(self) -> None:
        slots, _, _, _, moves, _ = self.index.evict(self.random.randrange(8 * EXTENT), self.now)
        assert all(move[2] == NO_SEGMENT for move in unpack_moves(moves))
        self.commit(numbers(moves))
        self.drop(slots)

    def demote(self) -> None:
        want = self.random.randrange(8 * EXTENT)
        slots, _, _, _, moves, full = self.index.evict(
            want, self.now, uses_min=self.random.choice((1, 2)), count_max=4, bytes_max=ALL
        )
        self.moves += [moves[at : at + MOVE_BYTES] for at in range(0, len(moves), MOVE_BYTES)]
        self.drop(slots)
        if full != NO_SEGMENT:
            self.drop(self.index.evict_disk(full, 4 * BLOCK, self.now)[0])

    def finish(self) -> None:
        if not self.moves:
            return
        move = self.moves.pop(self.random.randrange(len(self.moves)))
        number = move[:8]
        ending = self.random.choice(["good", "good", "good", "not", "spoilt"])
        if ending == "good":
            slots = self.commit(number)
            more = self.index.demote_more(slots, 2, [])
            self.moves += [more[at : at + MOVE_BYTES] for at in range(0, len(more), MOVE_BYTES)]
            return
        slots = self.index.spoilt(number)[0] if ending == "spoilt" else b""
        self.index.abort_moves(number)
        self.drop(slots)

    def commit(self, given: bytes) -> bytes:
        statuses, slots, records = self.index.commit_moves(given)
        good = b"".join(given[at * 8 : at * 8 + 8] for at, status in enumerate(statuses) if status == Status.OK)
        if self.random.random() < 0.1:
            self.index.abort_moves(good)  # the store did not take them
            return b""
        self.keep(slots, records)
        removed = self.index.remove(SPACE, self.some())[1] if self.random.random() < 0.1 else b""
        self.index.publish_moves(good, self.now)
        self.drop(removed)
        return slots

    def load(self) -> None:
        moves = self.index.promote(SPACE, self.some(), self.random.choice((0, 0, 1)), 4, ALL)[1]
        self.moves += [moves[at : at + MOVE_BYTES] for at in range(0, len(moves), MOVE_BYTES)]

    def disk(self) -> None:
        disk = self.random.choice(list(self.disks))
        self.drop(self.index.evict_disk(disk, self.random.randrange(4 * BLOCK), self.now)[0])

    def remove(self) -> None:
        self.drop(self.index.remove(SPACE, self.some()[:64])[1])

    def node(self) -> None:
        """A node is started anew: its memory is lost, its disk comes back."""
        if self.random.random() < 0.8:
            return
        disk = self.random.choice(list(self.disks))
        self.index.set_segment(disk, writable=False, readable=False)
        self.index.drop_segment(self.disks[disk])
        if self.random.random() < 0.5:
            self.put()
        self.drop(self.index.sweep(1000)[0])
        memory, self.next_segment = self.next_segment, self.next_segment + 1
        self.index.add_segment(memory, 40 * EXTENT, disk, 0, self.now)
        self.index.add_segment(disk, 60 * BLOCK, disk, 0, self.now, disk_of=memory)
        self.disks[disk] = memory

    def look(self) -> None:
        """Nobody is given an extent on a disk, nor one that another chunk has."""
        hashes = b"".join(names(1, str(at)) for at in range(68))
        statuses, extents, replicas = self.index.locate(SPACE, hashes, 0, self.now, 0)
        seen = set()
        for status, item in zip(statuses_of(statuses), unpack_extents(extents, replicas), strict=True):
            assert (status is Status.OK) == bool(item)
            for _, offset, _, segment in item:
                assert segment not in self.disks
                assert (segment, offset) not in seen
                seen.add((segment, offset))


@pytest.mark.parametrize("seed", range(6))
def test_random_calls_leave_the_index_in_order(seed: int) -> None:
    world = World(seed)
    for _ in range(600):
        world.step()
        assert world.index.check() == ""
    for move in world.moves:
        world.index.abort_moves(move[:8])
    world.index.reclaim(b"", world.now + 1000)
    # What the store holds is what there is.
    after = ChunkIndex(chunks_max=1000, epoch=4)
    for disk in world.disks:
        after.know_disk(disk)
    assert after.restore(u32s(world.rows), pack_records(list(world.rows.values()))) == len(world.rows)
    for disk, memory in world.disks.items():
        after.add_segment(memory, 40 * EXTENT, disk, 0, 0)
        after.add_segment(disk, 60 * BLOCK, disk, 0, 0, disk_of=memory)
    after.drop_unknown([])
    hashes = b"".join(names(1, str(at)) for at in range(68))
    assert after.exists(SPACE, hashes) == world.index.exists(SPACE, hashes)
    assert after.check() == ""
    # All of it can be removed, and everything is free then.
    slots = world.index.remove(SPACE, hashes)[1]
    world.index.reclaim(slots, world.now + 1000)
    world.index.reclaim(world.index.sweep(1000)[0], world.now + 1000)
    # Chunks of which a shard could not be put are found by nobody.
    world.index.reclaim(world.index.evict(ALL, world.now + 1000)[0], world.now + 1000)
    for disk in world.disks:
        assert world.index.segment_stats(disk)["extents"] == 0
    assert world.index.stats()["used_bytes"] == 0
