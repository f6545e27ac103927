# SPDX-License-Identifier: Apache-2.0
"""What becomes of puts, one thing at a time. Everything at once is in test_state_machine.py."""

from __future__ import annotations

from itertools import pairwise

from index.calls import MIB, OTHER, OWNER, SPACE, exist, free_bytes, generations, names, put, start
from index.model_parts import Status
from index.packing import (
    hash_of,
    statuses_of,
    u64s,
    unpack_extents,
    unpack_keys,
    unpack_pairs,
)

from moonpool._index import HEADER_BYTES, ChunkIndex


class TestPut:
    def test_what_is_written_is_not_there_before_it_is_published(self, index: ChunkIndex) -> None:
        hashes = names(3)
        _, extents = start(index, hashes)
        assert not any(exist(index, hashes))
        _, slots, _ = index.commit(OWNER, SPACE, hashes, generations(extents), 0, b"")
        assert not any(exist(index, hashes))
        published = unpack_keys(index.publish(slots))
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
        index.publish(slots)
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
        assert unpack_keys(index.publish(slot)) == [(SPACE, names(1))]
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
        index.publish(slots)
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
