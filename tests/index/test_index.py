# SPDX-License-Identifier: Apache-2.0
"""What the index does, one thing at a time. Everything at once is in test_state_machine.py."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from index.model import Status
from index.packing import (
    hash_of,
    pack_records,
    statuses_of,
    u32s,
    u64s,
    unpack_extents,
    unpack_keys,
    unpack_pairs,
    unpack_records,
    unpack_u32s,
)

from moonpool._index import EXTENT_BYTES, HASH_BYTES, HEADER_BYTES, NO_SEGMENT, ChunkIndex

POLICIES = ["prefix", "s3fifo", "lru"]
OWNER, OTHER = 1, 2
SPACE = 7
MIB = 1 << 20


@pytest.fixture(params=POLICIES)
def index(request: pytest.FixtureRequest) -> ChunkIndex:
    made = ChunkIndex(policy=request.param, chunks_max=1000, epoch=3)
    made.add_segment(1, MIB, 1, 0, 0)
    made.add_segment(2, MIB, 2, 0, 0)
    return made


def names(count: int, what: str = "chunk") -> bytes:
    return b"".join(hash_of((what, number)) for number in range(count))


def start(
    index: ChunkIndex,
    hashes: bytes,
    *,
    owner: int = OWNER,
    length: int = 1000,
    shard: int = 0,
    shards: int = 1,
    replicas: int = 1,
    parents: bytes = b"",
    avoid: tuple[int, ...] = (),
    host: int = 0,
    now: int = 0,
    deadline: int = 100,
) -> tuple[list[Status], list[list[tuple[int, int, int, int]]]]:
    statuses, extents = index.start(
        owner, SPACE, hashes, parents, u64s([length]), shard, shards, replicas, avoid, host, now, deadline
    )
    return statuses_of(statuses), unpack_extents(extents, replicas)


def generations(extents: list[list[tuple[int, int, int, int]]]) -> bytes:
    return u64s(item[0][0] for item in extents)


def put(index: ChunkIndex, hashes: bytes, **how: object) -> dict[int, bytes]:
    """All the way; returns the rows of the store."""
    statuses, extents = start(index, hashes, **how)  # type: ignore[arg-type]
    assert set(statuses) == {Status.OK}
    shard = how.get("shard", 0)
    assert isinstance(shard, int)
    answer, slots, records = index.commit(OWNER, SPACE, hashes, generations(extents), shard, b"")
    assert not any(answer)
    index.publish(slots, 0)
    return dict(zip(unpack_u32s(slots), unpack_records(records), strict=True))


def exist(index: ChunkIndex, hashes: bytes) -> list[bool]:
    return [status is Status.OK for status in statuses_of(index.exists(SPACE, hashes))]


def free_bytes(index: ChunkIndex) -> int:
    free = index.stats()["free_bytes"]
    assert isinstance(free, int)
    return free


class TestPut:
    def test_what_is_written_is_not_there_before_it_is_published(self, index: ChunkIndex) -> None:
        hashes = names(3)
        _, extents = start(index, hashes)
        assert not any(exist(index, hashes))
        _, slots, _ = index.commit(OWNER, SPACE, hashes, generations(extents), 0, b"")
        assert not any(exist(index, hashes))
        published = unpack_keys(index.publish(slots, 0))
        assert published == [(SPACE, hashes[at : at + 32]) for at in range(0, 96, 32)]
        assert all(exist(index, hashes))

    def test_an_extent_is_aligned_and_has_room_for_its_header(self, index: ChunkIndex) -> None:
        _, extents = start(index, names(2), length=1)
        (_, first, length, segment), (_, second, _, other) = extents[0][0], extents[1][0]
        assert (length, segment) == (1, other)
        assert first % 64 == 0
        assert second - first == HEADER_BYTES + 64

    def test_what_is_there_is_said_to_be_there_and_other_lengths_conflict(self, index: ChunkIndex) -> None:
        put(index, names(1))
        assert start(index, names(1))[0] == [Status.ALREADY]
        assert start(index, names(1), length=5)[0] == [Status.CONFLICT]
        assert start(index, names(1), shards=2)[0] == [Status.CONFLICT]

    def test_only_one_writes(self, index: ChunkIndex) -> None:
        assert start(index, names(1) * 2)[0] == [Status.OK, Status.WRITING]
        assert start(index, names(1), owner=OTHER)[0] == [Status.WRITING]

    def test_nobody_commits_what_is_not_his(self, index: ChunkIndex) -> None:
        _, extents = start(index, names(1))
        for owner, generation in ((OTHER, generations(extents)), (OWNER, u64s([1]))):
            answer, slots, records = index.commit(owner, SPACE, names(1), generation, 0, b"")
            assert (statuses_of(answer), slots, records) == ([Status.NOT_OWNER], b"", b"")

    def test_a_commit_that_comes_twice_is_told_so(self, index: ChunkIndex) -> None:
        _, extents = start(index, names(1))
        _, slots, _ = index.commit(OWNER, SPACE, names(1), generations(extents), 0, b"")
        index.publish(slots, 0)
        again, slots, _ = index.commit(OWNER, SPACE, names(1), generations(extents), 0, b"")
        assert (statuses_of(again), slots) == ([Status.ALREADY], b"")

    def test_a_generation_has_the_epoch_and_is_never_given_twice(self, index: ChunkIndex) -> None:
        _, extents = start(index, names(100))
        seen = {item[0][0] for item in extents}
        assert len(seen) == 100
        assert {generation >> 40 for generation in seen} == {3}

    def test_shards_are_one_chunk_that_is_there_when_all_are(self, index: ChunkIndex) -> None:
        put(index, names(1), shard=0, shards=2)
        assert exist(index, names(1)) == [False]
        assert statuses_of(index.locate(SPACE, names(1), 0, 0, 0)[0]) == [Status.NOT_FOUND]
        put(index, names(1), shard=1, shards=2, length=77)
        assert exist(index, names(1)) == [True]
        _, extents, _ = index.locate(SPACE, names(1), 1, 0, 0)
        assert unpack_extents(extents, 1)[0][0][2] == 77
        assert statuses_of(index.locate(SPACE, names(1), 2, 0, 0)[0]) == [Status.INVALID]

    def test_commits_of_one_chunk_share_their_fate(self, index: ChunkIndex) -> None:
        """The record of the second has the first in it, so it may not be given up while that may be durable."""
        _, first = start(index, names(1), shard=0, shards=2)
        _, second = start(index, names(1), shard=1, shards=2)
        _, slot, _ = index.commit(OWNER, SPACE, names(1), generations(first), 0, b"")
        index.commit(OWNER, SPACE, names(1), generations(second), 1, b"")
        index.revoke(slot)
        assert unpack_keys(index.publish(slot, 0)) == [(SPACE, names(1))]
        assert exist(index, names(1)) == [True]

    def test_sizes_that_cannot_be(self, index: ChunkIndex) -> None:
        assert start(index, names(1), length=0)[0] == [Status.INVALID]
        assert start(index, names(1), length=MIB)[0] == [Status.TOO_LARGE]
        assert start(index, names(1), length=2**63)[0] == [Status.TOO_LARGE]
        assert start(index, names(1), shard=1)[0] == [Status.INVALID]

    def test_a_full_table_and_full_segments(self, index: ChunkIndex) -> None:
        assert start(index, names(1001), length=1)[0].count(Status.CHUNKS_MAX) == 1
        assert (
            Status.NO_SPACE in start(index, names(50, "large"), length=100_000)[0] or index.stats()["writing"] == 1000
        )


class TestPlacement:
    def test_replicas_are_on_different_hosts(self, index: ChunkIndex) -> None:
        index.add_segment(3, MIB, 2, 0, 0)
        _, extents = start(index, names(50), replicas=3)
        for item in extents:
            assert len(item) == 2, "there are two hosts"
            assert sum(segment == 1 for *_, segment in item) == 1

    def test_the_preferred_host_and_what_is_avoided(self, index: ChunkIndex) -> None:
        _, near = start(index, names(50), host=2)
        assert {item[0][3] for item in near} == {2}
        _, far = start(index, names(50, "far"), host=2, avoid=(2,))
        assert {item[0][3] for item in far} == {1}
        assert start(index, names(1, "nowhere"), avoid=(1, 2))[0] == [Status.NO_SPACE]

    def test_one_call_puts_neighbours_side_by_side(self, index: ChunkIndex) -> None:
        _, extents = start(index, names(100))
        offsets = [item[0][1] for item in extents]
        assert {item[0][3] for item in extents} in ({1}, {2})
        assert {after - before for before, after in pairwise(offsets)} == {1088}

    def test_a_new_segment_is_not_flooded(self) -> None:
        index = ChunkIndex(policy="lru", chunks_max=10_000)
        index.add_segment(1, 100 * MIB, 1, 0, 0)
        index.add_segment(2, 100 * MIB, 2, 1000, 0)
        counts = []
        for when in (0, 2000):
            placed = [start(index, hash_of((when, n)), length=64, now=when)[1][0][0][3] for n in range(1000)]
            counts.append(placed.count(2))
        assert counts[0] < 150 < 400 < counts[1] < 600

    def test_nothing_goes_where_it_must_not(self, index: ChunkIndex) -> None:
        index.set_segment(1, writable=False, readable=True)
        assert {item[0][3] for item in start(index, names(20))[1]} == {2}


class TestGivingUp:
    def test_settled_space_is_free_and_other_space_waits_for_the_fence(self, index: ChunkIndex) -> None:
        everything = free_bytes(index)
        _, extents = start(index, names(1))
        index.abort(OWNER, SPACE, names(1), generations(extents), 0, True)
        assert free_bytes(index) == everything
        _, extents = start(index, names(1))
        segment = extents[0][0][3]
        index.abort(OWNER, SPACE, names(1), generations(extents), 0, False)
        assert free_bytes(index) < everything
        assert unpack_pairs(index.to_fence()) == {(OWNER, segment)}
        index.expire(10**9)
        assert free_bytes(index) < everything, "no timer frees it"
        assert index.fenced(OWNER, segment) == 1088
        assert free_bytes(index) == everything
        assert index.to_fence() == b""

    def test_a_late_settled_ends_the_wait(self, index: ChunkIndex) -> None:
        everything = free_bytes(index)
        _, extents = start(index, names(1), replicas=2, deadline=50)
        assert index.expire(49) == b""
        assert unpack_pairs(index.expire(50)) == {(OWNER, 1), (OWNER, 2)}
        for status in (Status.OK, Status.NOT_OWNER):
            answer = index.abort(OWNER, SPACE, names(1), generations(extents), 0, True)
            assert statuses_of(answer) == [status]
        assert free_bytes(index) == everything

    def test_a_replica_that_was_not_written_waits(self, index: ChunkIndex) -> None:
        _, extents = start(index, names(1), replicas=2)
        _, slots, _ = index.commit(OWNER, SPACE, names(1), generations(extents), 0, b"\x02")
        index.publish(slots, 0)
        _, located, replicas = index.locate(SPACE, names(1), 0, 0, 0)
        assert replicas == 1
        assert unpack_extents(located, 1)[0][0][3] == extents[0][1][3]
        assert unpack_pairs(index.to_fence()) == {(OWNER, extents[0][0][3])}

    def test_the_end_of_a_session_is_the_end_of_its_writes_and_pins(self, index: ChunkIndex) -> None:
        put(index, names(2))
        index.pin(OWNER, 5, SPACE, names(2))
        index.pin(OTHER, 5, SPACE, names(1))
        _, extents = start(index, names(1, "new"))
        assert unpack_pairs(index.drop_owner(OWNER)) == {(OWNER, extents[0][0][3])}
        assert statuses_of(index.remove(SPACE, names(2))[0]) == [Status.IN_USE, Status.OK]
        assert index.stats()["pinned"] == 1
        assert start(index, names(1, "new"), owner=OTHER)[0] == [Status.OK]


class TestReads:
    def test_a_prefix_ends_at_the_first_hole(self, index: ChunkIndex) -> None:
        put(index, names(5))
        index.remove(SPACE, names(5)[64:96])
        assert index.match_prefix(SPACE, names(5), 0, 0) == 2
        assert index.match_prefix(SPACE + 1, names(5), 0, 0) == 0
        assert index.match_prefix(SPACE, b"", 0, 0) == 0

    def test_a_lease_keeps_the_space_but_not_the_chunk(self, index: ChunkIndex) -> None:
        everything = free_bytes(index)
        put(index, names(1))
        index.locate(SPACE, names(1), 0, 10, 40)
        assert index.stats()["leased_until_ms"] == 50
        _, slots = index.remove(SPACE, names(1))
        assert exist(index, names(1)) == [False]
        assert index.reclaim(slots, 49) == 0
        assert free_bytes(index) < everything
        assert index.reclaim(b"", 50) == 1088
        assert free_bytes(index) == everything

    def test_probes_neither_lease_nor_touch(self) -> None:
        index = ChunkIndex(policy="lru", chunks_max=10)
        index.add_segment(1, MIB, 1, 0, 0)
        put(index, names(2))
        exist(index, names(1))
        slots, keys, _ = index.evict(1, 0)
        assert (unpack_u32s(slots), unpack_keys(keys)) == ([0], [(SPACE, names(1))])

    def test_what_is_not_readable_is_not_offered(self, index: ChunkIndex) -> None:
        put(index, names(1), replicas=2)
        index.set_segment(1, writable=False, readable=False)
        assert exist(index, names(1)) == [True]
        assert [e[3] for e in unpack_extents(*index.locate(SPACE, names(1), 0, 0, 0)[1:])[0]] == [2]
        index.set_segment(2, writable=False, readable=False)
        assert exist(index, names(1)) == [False]
        assert index.match_prefix(SPACE, names(1), 0, 0) == 0

    def test_more_touches_than_are_kept_back(self, index: ChunkIndex) -> None:
        put(index, names(500))
        for _ in range(300):
            assert index.match_prefix(SPACE, names(500), 0, 0) == 500
        assert index.check() == ""

    def test_other_threads_read_meanwhile(self, index: ChunkIndex) -> None:
        put(index, names(100))
        found = set()

        def look() -> None:
            found.update(index.match_prefix(SPACE, names(100), 0, 5) for _ in range(200))

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for round_ in range(50):
            index.remove(SPACE, names(3, f"other {round_}"))
            put(index, names(3, f"other {round_}"))
        for thread in threads:
            thread.join()
        assert found == {100}
        assert index.check() == ""


class TestRemoval:
    def test_descendants_go_and_pinned_ones_stay(self, index: ChunkIndex) -> None:
        put(index, names(6), parents=bytes(32))
        index.pin(OWNER, 1, SPACE, names(6)[96:128])
        slots, pinned = index.remove_prefix(SPACE, names(6)[32:64])
        assert (len(slots) // 4, pinned) == (4, 1)
        assert exist(index, names(6)) == [True, False, False, True, False, False]

    def test_a_chain_shortens_from_its_end(self, index: ChunkIndex) -> None:
        put(index, names(6), parents=bytes(32))
        for left in range(5, -1, -1):
            slots, _, freed = index.evict(1, 0)
            assert freed == 1088
            index.reclaim(slots, 0)
            assert exist(index, names(6)) == [True] * left + [False] * (6 - left)

    def test_a_slot_is_used_again_only_after_reclaim(self, index: ChunkIndex) -> None:
        put(index, names(3))
        _, slots = index.remove(SPACE, names(1))
        assert list(put(index, names(1, "other"))) == [3]
        index.reclaim(slots, 0)
        assert list(put(index, names(1, "another"))) == [0]

    def test_leased_and_pinned_chunks_are_not_evicted(self, index: ChunkIndex) -> None:
        put(index, names(3))
        index.locate(SPACE, names(1), 0, 0, 100)
        index.pin(OWNER, 1, SPACE, names(2)[32:])
        slots, _, _ = index.evict(MIB, 0)
        assert unpack_u32s(slots) == [2]
        assert index.unpin(OWNER, 1) == 1
        assert index.unpin(OWNER, 1) == 0
        assert sorted(unpack_u32s(index.evict(MIB, 100)[0])) == [0, 1]


class TestSegments:
    def test_a_lost_segment_is_gone_at_once_and_swept_up_later(self, index: ChunkIndex) -> None:
        put(index, names(4), host=1)
        put(index, names(1, "both"), replicas=2)
        index.drop_segment(1)
        assert exist(index, names(4)) == [False] * 4
        assert exist(index, names(1, "both")) == [True]
        slots, complete = index.sweep(0, 100)
        assert (sorted(unpack_u32s(slots)), complete) == ([0, 1, 2, 3], True)
        index.reclaim(slots, 0)
        assert index.stats()["chunks"] == 1
        with pytest.raises(KeyError):
            index.segment_stats(1)

    def test_what_was_lost_can_be_put_again_before_the_sweep(self, index: ChunkIndex) -> None:
        rows = put(index, names(1), host=1)
        index.drop_segment(1)
        assert list(put(index, names(1))) == list(rows), "in the row that it had"
        assert exist(index, names(1)) == [True]

    def test_what_lies_in_a_segment_is_listed(self, index: ChunkIndex) -> None:
        put(index, names(10), host=2)
        listed = unpack_keys(index.chunks_in(2, 4))
        assert len(listed) == 4
        assert set(listed) <= {(SPACE, names(10)[at : at + 32]) for at in range(0, 320, 32)}

    def test_fragmentation_is_reported(self, index: ChunkIndex) -> None:
        put(index, names(11), host=1)
        _, slots = index.remove(SPACE, b"".join(names(11)[at : at + 32] for at in range(0, 320, 64)))
        index.reclaim(slots, 0)
        stats = index.segment_stats(1)
        assert stats["free_pieces"] == 6
        assert stats["extents"] == 6
        assert stats["largest_free_bytes"] == MIB - 11 * 1088


class TestRestart:
    def restored(self, rows: dict[int, bytes], **how: object) -> tuple[ChunkIndex, int]:
        index = ChunkIndex(chunks_max=1000, epoch=4)
        return index, index.restore(u32s(rows), pack_records(list(rows.values())))

    def test_everything_is_there_when_its_segments_are(self, index: ChunkIndex) -> None:
        rows = put(index, names(20), parents=bytes(32), replicas=2)
        backwards = dict(reversed(rows.items()))
        fresh, taken = self.restored(backwards)
        assert taken == 20
        assert not any(exist(fresh, names(20)))
        fresh.add_segment(1, MIB, 1, 0, 0)
        assert all(exist(fresh, names(20)))
        old = unpack_extents(*index.locate(SPACE, names(20), 0, 0, 0)[1:])
        new = unpack_extents(*fresh.locate(SPACE, names(20), 0, 0, 0)[1:])
        assert new == [[extent for extent in item if extent[3] == 1] for item in old]
        slots, _ = fresh.remove_prefix(SPACE, names(1))
        assert len(slots) == 80, "they are still a family"

    def test_what_cannot_be_is_refused_and_its_row_named(self, index: ChunkIndex) -> None:
        rows = put(index, names(3), host=1)
        rows[1] = rows[1][:-1] + bytes([rows[1][-1] ^ 1])
        rows[5000] = rows[2]
        fresh, taken = self.restored(rows)
        assert taken == 2
        assert fresh.stats()["refused_records"] == 2
        slots, _ = fresh.sweep(0, 10)
        assert unpack_u32s(slots) == [1, 5000]
        fresh.reclaim(slots, 0)
        fresh.add_segment(1, MIB, 1, 0, 0)
        assert exist(fresh, names(3)) == [True, False, True]
        assert list(put(fresh, names(1, "new"))) == [1]

    def test_restored_space_is_not_given_out(self, index: ChunkIndex) -> None:
        rows = put(index, names(5), host=1)
        fresh, _ = self.restored(rows)
        with pytest.raises(ValueError, match="beyond"):
            fresh.add_segment(1, 5 * 1088 - 64, 1, 0, 0)
        fresh.add_segment(1, 6 * 1088, 1, 0, 0)
        assert start(fresh, names(2, "new"))[0] == [Status.OK, Status.NO_SPACE]


class TestArguments:
    @pytest.mark.parametrize(
        "call",
        [
            lambda index: index.exists(SPACE, b"short"),
            lambda index: index.exists(-1, b""),
            lambda index: index.exists(2**32, b""),
            lambda index: index.match_prefix(SPACE, b"", 0, -1),
            lambda index: index.commit(OWNER, SPACE, names(2), u64s([1]), 0, b""),
            lambda index: index.commit(OWNER, SPACE, names(2), u64s([1, 2]), 0, b"\xff"),
            lambda index: index.start(OWNER, SPACE, names(3), names(2), u64s([1]), 0, 1, 1, [], 0, 0, 0),
            lambda index: index.start(OWNER, SPACE, names(3), b"", u64s([1, 1]), 0, 1, 1, [], 0, 0, 0),
            lambda index: index.start(OWNER, SPACE, names(3), b"", u64s([1]), 0, 0, 1, [], 0, 0, 0),
            lambda index: index.start(OWNER, SPACE, names(3), b"", u64s([1]), 0, 1, 9, [], 0, 0, 0),
            lambda index: index.publish(b"123", 0),
            lambda index: index.restore(u32s([0]), b""),
            lambda index: index.restore(b"", b"1"),
            lambda index: index.add_segment(NO_SEGMENT, MIB, 1, 0, 0),
            lambda index: index.add_segment(9, 63, 1, 0, 0),
            lambda index: index.add_segment(9, 2**60, 1, 0, 0),
            lambda index: index.remove_prefix(SPACE, b""),
        ],
    )
    def test_a_wrong_size_is_a_value_error(self, index: ChunkIndex, call: Callable[[ChunkIndex], object]) -> None:
        with pytest.raises(ValueError, match=r"must|as many"):
            call(index)
        assert index.stats()["chunks"] == 0

    def test_a_wrong_type_is_a_type_error(self, index: ChunkIndex) -> None:
        for wrong in (None, "text", bytearray(32), 5):
            with pytest.raises(TypeError):
                index.exists(SPACE, wrong)  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                index.exists(b"7", b"")  # type: ignore[arg-type]

    def test_settings_that_cannot_be(self) -> None:
        with pytest.raises(ValueError, match="prefix, s3fifo, lru"):
            ChunkIndex(policy="best")
        for wrong in ({"chunks_max": 0}, {"epoch": 2**24}, {"seed": -1}):
            with pytest.raises(ValueError, match="must be"):
                ChunkIndex(**wrong)  # type: ignore[arg-type]

    def test_segments_that_are_not_there(self, index: ChunkIndex) -> None:
        for call in (index.drop_segment, index.segment_stats):
            with pytest.raises(KeyError):
                call(77)
        with pytest.raises(KeyError):
            index.set_segment(77, writable=True, readable=True)
        assert index.fenced(OWNER, 77) == 0

    def test_the_sizes_are_those_of_the_protocol(self) -> None:
        assert (HASH_BYTES, EXTENT_BYTES, HEADER_BYTES, NO_SEGMENT) == (32, 32, 64, 0xFFFFFFFF)


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * 4096


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chunk_takes_at_most_200_bytes_and_gives_them_back(policy: str) -> None:
    count, batch = 200_000, 2000
    index = ChunkIndex(policy=policy)
    index.add_segment(1, count * 128, 1, 0, 0)
    gc.collect()
    before = resident_bytes()
    for first in range(0, count, batch):
        put(index, b"".join(number.to_bytes(32, "little") for number in range(first, first + batch)), length=64)
    gc.collect()
    assert index.stats()["memory_bytes"] / count < 200
    # Around it are the tests themselves, so this is no more than a plausibility check.
    assert (resident_bytes() - before) / count < 260
    for first in range(0, count, batch):
        hashes = b"".join(number.to_bytes(32, "little") for number in range(first, first + batch))
        index.reclaim(index.remove(SPACE, hashes)[1], 0)
    assert index.stats()["memory_bytes"] < count * 20
    assert index.check() == ""
