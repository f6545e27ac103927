# SPDX-License-Identifier: Apache-2.0
"""What is read, removed, lost and restored, one thing at a time. Everything at once is in test_state_machine.py."""

from __future__ import annotations

import threading

import pytest
from index.calls import MIB, OWNER, SPACE, exist, free_bytes, names, put, start
from index.model_parts import Status
from index.packing import (
    pack_records,
    u32s,
    unpack_extents,
    unpack_keys,
    unpack_u32s,
)

from moonpool._index import ChunkIndex


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
        slots, keys, *_ = index.evict(1, 0)
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
            slots, _, freed, *_ = index.evict(1, 0)
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
        slots, *_ = index.evict(MIB, 0)
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
        slots, complete = index.sweep(100)
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
        slots, _ = fresh.sweep(10)
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
