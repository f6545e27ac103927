# SPDX-License-Identifier: Apache-2.0
"""Move and Drain: chunks go from one segment to another."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Final

from moonpool.master.copies import COUNT_MAX, moves_of
from moonpool.master.core import Core, now_ms
from moonpool.master.errors import InvalidRequestError
from moonpool.master.packed import HASH_BYTES, count_of, take
from moonpool.master.segments import Segment
from moonpool.proto import pool_pb2 as pb

__all__ = ["MoveCalls"]

# A call that takes longer is made again by its caller.
_WAIT_MAX_S: Final = 2.0
_LOOK_S: Final = 0.05


class MoveCalls:
    """Move, Drain."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def Move(self, request: pb.MoveRequest) -> pb.ItemsReply:
        """Move chunks to a segment, with all their shards."""
        core = self._core
        core.check_open()
        count = count_of(request.hashes, core.settings.batch_max)
        _check_memory(core.segments.get(request.segment))
        moving = _Moving(core, request, count)
        await moving.run(time.monotonic() + min(request.wait_ms / 1000, _WAIT_MAX_S))
        return pb.ItemsReply(header=core.header, statuses=bytes(moving.statuses))

    async def Drain(self, request: pb.DrainRequest) -> pb.DrainReply:
        """Put nothing new into a segment and move away what it has, or use it again."""
        core = self._core
        segment = core.segments.get(request.segment)
        if request.drop:
            return self._drop(segment)
        _check_memory(segment)
        await core.to_the_end(self._drain(segment, not request.undo))
        chunks = core.segments.figures(segment)["extents"]
        return pb.DrainReply(header=core.header, chunks=chunks, draining=core.drains.told(segment))

    def _drop(self, segment: Segment) -> pb.DrainReply:
        if not segment.row.disk:
            raise InvalidRequestError(f"segment {segment.row.segment} is no disk", hint="a drain without drop")
        chunks = self._core.segments.figures(segment)["extents"]
        self._core.lose(segment, "what it holds is given up")
        return pb.DrainReply(header=self._core.header, chunks=chunks)

    async def _drain(self, segment: Segment, draining: bool) -> None:
        core = self._core
        async with segment.changing:
            while (before := core.segments.get(segment.row.segment).row).draining != draining:
                row = dataclasses.replace(before, draining=draining)
                await core.durable(core.store.put_segment(row))
                if segment.row is not before:
                    continue  # its node went or came back meanwhile, with a row that says something else
                segment.row = row
                if segment.session is not None:
                    core.segments.apply(segment)
                core.segments.tell(segment)
                core.drains.wake()


def _check_memory(segment: Segment) -> None:
    if segment.row.disk:
        raise InvalidRequestError(
            f"segment {segment.row.segment} is a disk: what it holds stays there",
            hint="the memory of its node; moonpool drain --drop-disk gives up what the disk holds",
        )


class _Moving:
    """One Move.

    Attributes:
        statuses: of each chunk, as far as is known.
    """

    def __init__(self, core: Core, request: pb.MoveRequest, count: int) -> None:
        self._core = core
        self._request = request
        self._namespace = core.namespace(request.namespace)
        self.statuses = bytearray([pb.WRITING]) * count
        self._left = list(range(count))
        #: Chunks of which this call has moved a shard.
        self._moved: set[int] = set()

    async def run(self, until: float) -> None:
        """Move as many as can be by then."""
        core, target = self._core, self._request.segment
        while self._left:
            segment = core.segments.all.get(target)
            usable = segment is not None and segment.connected
            begun = False
            if usable and core.copies.room_at(target) and now_ms() >= core.held_until_ms:
                begun = await self._step(COUNT_MAX, until)
            left = until - time.monotonic()
            if left <= 0 or core.closing.is_set():
                break
            if self._left and not begun:
                await core.copies.wait(min(left, _LOOK_S))
        segment = core.segments.all.get(target)
        # The index does not know one that is lost, nor one of before whose node is not back.
        known = segment is not None and not segment.row.lost and (segment.session is not None or not segment.held)
        if self._left and known:
            await self._step(0, until)  # what was moved last may be all that there was to move

    async def _step(self, most: int, until: float) -> bool:
        """Begin so many moves, and wait for them. Returns whether there were any."""
        core, request = self._core, self._request
        statuses, moves = core.index.move_to(
            self._namespace,
            take(request.hashes, HASH_BYTES, self._left),
            request.segment,
            most,
            core.settings.copy_bytes,
        )
        outcomes = iter(await self._carried_out(moves, until)) if moves else iter(())
        left = []
        for place, status in zip(self._left, statuses, strict=True):
            outcome = next(outcomes) if status == pb.OK else status
            if outcome == pb.OK:
                self._moved.add(place)
                outcome = pb.WRITING  # there may be more shards of it
            elif outcome == pb.ALREADY and place in self._moved:
                outcome = pb.OK
            self.statuses[place] = outcome
            if outcome == pb.WRITING:
                left.append(place)
        self._left = left
        return bool(moves)

    async def _carried_out(self, moves: bytes, until: float) -> bytes:
        """Return what has become of moves: OK, NOT_MOVED, or WRITING: not in time, or it was spoilt."""
        core = self._core
        copies = core.copies.begin(moves_of(moves))
        await asyncio.wait([copy.done for copy in copies], timeout=max(0.0, until - time.monotonic()))
        outcomes = bytearray([pb.WRITING]) * sum(len(copy.places) for copy in copies)
        for copy in copies:
            for place, status in zip(copy.places, copy.done.result() if copy.done.done() else b"", strict=False):
                outcomes[place] = status
        return bytes(outcomes)
