# SPDX-License-Identifier: Apache-2.0
"""What holds of the index and its model at any time."""

from __future__ import annotations

from hypothesis.stateful import RuleBasedStateMachine, invariant
from index.model import Model
from index.packing import unpack_pairs, unpack_u32s

from moonpool._index import ChunkIndex

__all__ = ["AtAnyTime"]


class AtAnyTime(RuleBasedStateMachine):
    index: ChunkIndex
    model: Model
    epoch: int

    def generation(self, number: int) -> int:
        return self.model.epoch << 40 | number

    @invariant()
    def nothing_contradicts_itself(self) -> None:
        assert self.index.check() == ""

    @invariant()
    def what_is_to_be_fenced_is_known(self) -> None:
        assert unpack_pairs(self.index.to_fence()) == set(self.model.fences)

    @invariant()
    def the_sums_are_right(self) -> None:
        stats = self.index.stats()
        shards = [shard for chunk in self.model.slots.values() for shard in chunk.shards.values()]
        assert stats["chunks"] == len(self.model.lru.order) + len(self.model.lru.parked)
        assert stats["writing"] == sum(not shard.committed for shard in shards)
        assert stats["moving"] == len(self.model.moves.all)
        assert stats["pinned"] == sum(map(len, self.model.pins.values()))
        assert stats["evicted"] == self.model.evicted
        assert stats["generation"] == self.generation(self.model.generations)
        assert set(unpack_u32s(self.index.namespaces())) == {chunk.key[0] for chunk in self.model.slots.values()}
        writable = [segment for segment in self.model.segments.values() if segment.writable]
        assert stats["capacity_bytes"] == sum(segment.capacity for segment in writable)
        assert stats["capacity_bytes"] == stats["used_bytes"] + stats["free_bytes"] + stats["condemned_bytes"]
        taken = self.model.taken()
        for segment in self.model.segments.values():
            its = self.index.segment_stats(segment.number)
            size = sum(extent.size for extent in taken if extent.segment == segment.number)
            assert its["used_bytes"] + its["waiting_bytes"] == size
            live = [shard for chunk in self.model.chunks.values() for shard in chunk.shards.values() if shard.committed]
            assert its["chunks"] == sum(extent.segment == segment.number for its_ in live for extent in its_.extents)
            assert its["largest_free_bytes"] == self.model.largest_gap(segment)
