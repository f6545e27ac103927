# SPDX-License-Identifier: Apache-2.0
"""Copies: extents that nodes are asked to read out of other nodes' memory, and what becomes of the moves they are for.

The node that gets the bytes is the only one that writes there. So the new extents of a copy are free again when that
node says that nothing of it can write any more: with CopyDone, with CopiesOver on a later stream, or by being gone
with all of its memory. No timer frees them. Used from the event loop only.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from moonpool._index import MOVE_BYTES
from moonpool.master.clock import now_ms
from moonpool.master.errors import StoreDamagedError, StoreUnavailableError
from moonpool.master.packed import positions, take
from moonpool.proto import pool_pb2 as pb

if TYPE_CHECKING:
    from moonpool.master.core import Core
    from moonpool.master.segments import Segment
    from moonpool.master.sessions import Outbox, Session

__all__ = ["COUNT_MAX", "Copies", "Copy"]

_log = logging.getLogger("moonpool.master")
#: Extents of one copy. A stream carries it in one message.
COUNT_MAX: Final = 512
# Of a move as the index gives it: its number, the two segments, and what the node is told.
_NUMBER, _SEGMENTS, _TOLD = slice(0, 8), slice(8, 16), slice(16, MOVE_BYTES)
_LENGTH: Final = slice(40, 48)


@dataclass(eq=False)
class Copy:
    """One copy, from one segment to another.

    Attributes:
        node: that carries it out.
        stream: over which it was asked for.
        source: the segment that it reads.
        target: the segment that it writes.
        moves: their numbers in the index, n x u64.
        places: of each of them among the moves that `Copies.begin` was given.
        nbytes: of payload.
        up: it reads a disk.
        down: it writes a disk.
        slots: in the index, of the chunks that it has moved.
        deadline_ms: when the node should have answered.
        done: the outcome, for each OK or NOT_MOVED. It never fails.
    """

    number: int
    node: Session
    stream: Outbox | None
    source: int
    target: int
    moves: bytes
    places: list[int]
    nbytes: int
    deadline_ms: int
    up: bool = False
    down: bool = False
    slots: bytes = b""
    done: asyncio.Future[bytes] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Copies:
    """Every copy that is under way.

    Args:
        core: of the master.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._number = 0
        #: Not answered yet.
        self._waiting: dict[int, Copy] = {}
        #: Also those whose records are on their way.
        self.under_way: dict[int, Copy] = {}
        self.changed = asyncio.Event()

    # ---------------------------------------------------------------- bounds

    def room_at(self, segment: int) -> bool:
        """Whether the node of a segment may have one more copy, to read or to write."""
        # Disks have bounds of their own, and are no reason for others to wait.
        others = (copy for copy in self.under_way.values() if not (copy.up or copy.down))
        at_once = sum(segment in (copy.source, copy.target) for copy in others)
        return at_once < self._core.settings.copies_at_once

    def crowded(self) -> list[int]:
        """Return the segments that may have no more, or whose nodes are not connected."""
        segments = self._core.segments.all
        return [number for number, segment in segments.items() if not (segment.connected and self.room_at(number))]

    def moving_from(self, segment: int) -> int:
        """Return how many moves out of a segment are under way."""
        return sum(len(copy.places) for copy in self.under_way.values() if copy.source == segment)

    def overdue(self) -> int:
        """Return how many copies should have been answered."""
        return sum(copy.deadline_ms < now_ms() for copy in self._waiting.values())

    async def wait(self, seconds: float) -> None:
        """Wait until a copy has ended, or for so long."""
        try:
            await asyncio.wait_for(self.changed.wait(), seconds)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            return

    # ---------------------------------------------------------------- their life

    def begin(self, moves: bytes) -> list[Copy]:
        """Have nodes carry out moves that the index has begun."""
        each = [moves[at : at + MOVE_BYTES] for at in range(0, len(moves), MOVE_BYTES)]
        by_segments: dict[tuple[int, int], list[int]] = {}
        for place, move in enumerate(each):
            by_segments.setdefault(struct.unpack("<II", move[_SEGMENTS]), []).append(place)
        return [self._begin(each, source, target, places) for (source, target), places in by_segments.items()]

    def _begin(self, moves: list[bytes], source: int, target: int, places: list[int]) -> Copy:
        its = [moves[place] for place in places]
        node = self._core.segments.all[target].session
        assert node is not None, "the index places nothing where no node is"
        patience_ms = round(self._core.settings.copy_deadline * 1000)
        self._number += 1
        copy = Copy(
            number=self._number,
            node=node,
            stream=node.outbox,
            source=source,
            target=target,
            moves=b"".join(move[_NUMBER] for move in its),
            places=places,
            nbytes=sum(int.from_bytes(move[_LENGTH], "little") for move in its),
            deadline_ms=now_ms() + patience_ms,
            up=self._core.segments.all[source].row.disk,
            down=self._core.segments.all[target].row.disk,
        )
        self._waiting[copy.number] = self.under_way[copy.number] = copy
        if copy.stream is None:
            # Its stream has broken; it has never heard of this.
            self._over(copy, b"", "the node is not connected")
        else:
            copy.stream.put(
                copy=pb.Copy(
                    copy=copy.number,
                    source=_told(self._core.segments.all[source]),
                    segment=target,
                    extents=b"".join(move[_TOLD] for move in its),
                    deadline_ms=patience_ms,
                )
            )
        return copy

    def answered(self, node: Session, done: pb.CopyDone) -> None:
        """A node has ended a copy. An answer that nobody waits for says nothing."""
        copy = self._waiting.get(done.copy)
        if copy is not None and copy.node is node:
            self._over(copy, done.statuses, done.cause)

    def over_before(self, node: Session, stream: Outbox) -> None:
        """A node says that what it was asked for over earlier streams than this one is over."""
        for copy in list(self._of(node)):
            if copy.stream is not stream:
                self._over(copy, b"", "the stream of the node broke")

    def lost(self, segment: int) -> None:
        """A segment is lost: nothing more is written there that anybody would read."""
        for copy in list(self._waiting.values()):
            if copy.target == segment:
                self._over(copy, b"", "the node is gone")

    def _of(self, node: Session) -> Iterator[Copy]:
        return (copy for copy in self._waiting.values() if copy.node is node)

    def _over(self, copy: Copy, statuses: bytes, cause: str) -> None:
        """Nothing of it can write any more."""
        del self._waiting[copy.number]
        if len(statuses) != len(copy.places):
            statuses = bytes([pb.NOT_MOVED]) * len(copy.places)
        if failed := len(copy.places) - statuses.count(pb.OK):
            _log.info("copy of %d extents from segment %d to %d: %s", failed, copy.source, copy.target, cause[:1024])
        self._core.run(self._finish(copy, statuses))

    async def _finish(self, copy: Copy, statuses: bytes) -> None:
        core = self._core
        found = bytearray([pb.NOT_MOVED]) * len(copy.places)
        try:
            good = positions(statuses, pb.OK)
            if spoilt := positions(statuses, pb.SPOILT):
                await core.disks.spoilt(take(copy.moves, 8, spoilt))
            if bad := [place for place, status in enumerate(statuses) if status not in (pb.OK, pb.SPOILT)]:
                core.index.abort_moves(take(copy.moves, 8, bad))
            moved_now, copy.slots = await self.commit(take(copy.moves, 8, good))
            for place in moved_now:
                found[good[place]] = pb.OK
        finally:
            moved = found.count(pb.OK)
            if copy.up or copy.down:
                core.metrics.counts["disk_failed_items"] += len(found) - moved
            else:
                core.metrics.counts["moved_items"] += moved
                core.metrics.counts["moved_bytes"] += copy.nbytes * moved // len(found)
                core.metrics.counts["not_moved_items"] += len(found) - moved
            del self.under_way[copy.number]
            copy.done.set_result(bytes(found))
            self.changed.set()
            self.changed = asyncio.Event()
            core.freed()

    async def commit(self, moves: bytes) -> tuple[list[int], bytes]:
        """Make moves durable, then visible. Returns which ones, and the slots of their chunks."""
        core = self._core
        try:
            statuses, slots, records = core.index.commit_moves(moves)
        except BaseException:
            core.index.abort_moves(moves)
            raise
        good = positions(statuses, pb.OK)
        if not good:
            return [], b""
        good_moves = take(moves, 8, good)
        try:
            await core.durable(core.store.apply(slots, records, b""))
        except (StoreUnavailableError, StoreDamagedError) as error:
            core.index.abort_moves(good_moves)
            _log.warning("%d moves are not durable, and have not happened: %s", len(good), error)
            return [], b""
        core.index.publish_moves(good_moves, now_ms())
        return good, slots


def _told(segment: Segment) -> pb.Segment:
    row = segment.row
    return pb.Segment(
        segment=row.segment, node=row.node, address=row.address, region=row.region, incarnation=row.incarnation
    )
