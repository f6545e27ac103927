# SPDX-License-Identifier: Apache-2.0
"""Moves of the model: replicas that go from one segment to another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from index.model_parts import Chunk, Extent, Key, Row, Shard, Status

if TYPE_CHECKING:
    from index.model import Model


@dataclass
class Move:
    number: int
    chunk: Chunk | None  # None: it has gone
    shard: int
    old: Extent
    new: Extent | None  # None: it moves to nowhere, because it is spoilt
    committed: bool = False


class Moves:
    def __init__(self, model: Model) -> None:
        self._model = model
        self.all: dict[int, Move] = {}

    def of(self, chunk: Chunk) -> Move | None:
        return next((move for move in self.all.values() if move.chunk is chunk), None)

    def on_its_way(self, chunk: Chunk) -> bool:
        """Whether a record of it is."""
        move = self.of(chunk)
        return move is not None and move.committed

    def leave(self, chunk: Chunk, shard: int | None = None) -> None:
        """The chunk is gone, or this shard of it."""
        move = self.of(chunk)
        if move is not None and not move.committed and shard in (None, move.shard):
            move.chunk = None
            if move.new is None:
                del self.all[move.number]  # nothing is copied, and no room is held until that is over

    def may_move(self, chunk: Chunk) -> bool:
        return not (chunk.removed or chunk.written or self.of(chunk))

    def movable(self, segment: int) -> dict[tuple[Key, int], Extent]:
        """What could leave a segment."""
        if not self._model.segments[segment].readable:
            return {}
        return {
            (chunk.key, number): extent
            for chunk in self._model.chunks.values()
            for number, shard in chunk.shards.items()
            for extent in shard.extents
            if extent.segment == segment and shard.committed and self.may_move(chunk)
        }

    def targets(self, key: Key, shard: int, old: Extent, avoid: Iterable[int]) -> set[int]:
        """Where the bytes of a replica may go, as there is room now."""
        model = self._model
        others = [e for e in model.chunks[key].shards[shard].extents if e != old and not model.lost(e)]
        hosts = {model.segments[e.segment].host for e in others}
        usable = [
            s
            for s in model.segments.values()
            if s.writable
            and s.number not in {*avoid, *(e.segment for e in others)}
            and model.largest_gap(s) >= old.size
        ]
        elsewhere = {segment.number for segment in usable if segment.host not in hosts}
        return elsewhere or {segment.number for segment in usable}

    def may_go(self, key: Key, target: int, enough: bool) -> tuple[Status, int, Extent | None]:
        """What `move_to` says of a chunk, which shard is to go, and from where."""
        model, chunk, segment = self._model, self._model.chunks.get(key), self._model.segments[target]
        if chunk is None or not model.visible(chunk):
            return Status.NOT_FOUND, 0, None
        left = [n for n in range(chunk.count) if all(e.segment != target for e in chunk.shards[n].extents)]
        if not left:
            return Status.ALREADY, 0, None
        if enough or not self.may_move(chunk):
            return Status.WRITING, 0, None
        old = self._source(chunk.shards[left[0]], target)
        if old is None:
            return Status.NOT_FOUND, 0, None
        if old.size > segment.capacity:
            return Status.TOO_LARGE, 0, None
        room = segment.writable and model.largest_gap(segment) >= old.size
        return (Status.OK if room else Status.NO_SPACE), left[0], old

    def _source(self, shard: Shard, target: int) -> Extent | None:
        segments = self._model.segments
        there = [e for e in shard.extents if not self._model.lost(e)]
        same_host = [e for e in there if segments[e.segment].host == segments[target].host]
        if any(not segments[e.segment].readable for e in same_host):
            return None
        readable = [e for e in there if segments[e.segment].readable]
        left_alone = [e for e in readable if not segments[e.segment].writable]
        return next(iter([*same_host, *left_alone, *readable]), None)

    def may_mend(self, key: Key, shard: int, generation: int, old: Extent) -> tuple[Status, list[Extent]]:
        """What `mend` says of a copy, and which others there are; none: the chunk goes."""
        chunk = self._model.chunks.get(key)
        its = chunk.shards.get(shard) if chunk is not None else None
        if its is None or chunk is None or not its.committed or its.generation != generation:
            return Status.NOT_FOUND, []
        if old not in its.extents or self._model.lost(old):
            return Status.NOT_FOUND, []
        if not self.may_move(chunk):
            return Status.WRITING, []
        return Status.OK, [e for e in its.extents if e != old and not self._model.lost(e)]

    def begin(self, number: int, key: Key, shard: int, old: Extent, new: Extent | None) -> None:
        assert number not in self.all
        self.all[number] = Move(number, self._model.chunks[key], shard, old, new)

    def commit(self, number: int) -> tuple[Status, tuple[int, Row] | None]:
        move = self.all.get(number)
        if move is None or move.committed:
            return Status.NOT_FOUND, None
        status = self._may_commit(move)
        if status is not Status.OK or move.chunk is None:
            del self.all[number]
            return status, None
        move.committed = True
        shard = move.chunk.shards[move.shard]
        before, shard.extents = shard.extents, self._after(move, shard)
        row = self._model.row_of(move.chunk)
        shard.extents = before
        return Status.OK, (move.chunk.slot, row)

    @staticmethod
    def _after(move: Move, shard: Shard) -> list[Extent]:
        after = [move.new if e == move.old else e for e in shard.extents]
        return [e for e in after if e is not None]

    def _may_commit(self, move: Move) -> Status:
        if move.chunk is None or self._model.lost(move.old) or (move.new and self._model.lost(move.new)):
            return Status.NOT_FOUND
        if move.chunk.written:
            return Status.WRITING
        extents = move.chunk.shards[move.shard].extents
        others = [e for e in extents if e != move.old and not self._model.lost(e)]
        return Status.OK if move.old in extents and (move.new or others) else Status.NOT_FOUND

    def publish(self, numbers: list[int], now: int) -> int:
        freed = 0
        for number in numbers:
            move = self.all.get(number)
            if move is None or not move.committed or move.chunk is None or move.chunk.removed:
                continue
            del self.all[number]
            shard = move.chunk.shards[move.shard]
            shard.extents = self._after(move, shard)
            if self._model.lost(move.old):
                continue
            if move.chunk.leased_until > now:
                self._model.read.append((move.chunk.leased_until, move.old))
            else:
                freed += move.old.size
        return freed

    def abort(self, numbers: list[int]) -> int:
        gone = [self.all.pop(number) for number in numbers if number in self.all]
        return sum(move.new.size for move in gone if move.new and not self._model.lost(move.new))

    def reclaimed(self, chunk: Chunk) -> int:
        """The removal of a chunk is durable. Returns bytes."""
        move = self.of(chunk)
        return 0 if move is None else self.abort([move.number])
