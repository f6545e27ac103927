# SPDX-License-Identifier: Apache-2.0
"""Copies: extents that nodes are asked to read out of other nodes' memory, and what becomes of the moves they are for.

The node that gets the bytes is the only one that writes there. So the new extents of a copy are free again when that
node says that nothing of it can write any more: with CopyDone, with CopiesOver on a later stream, or by being gone
with all of its memory. No timer frees them. A node is also asked to look at what it has itself, which writes nothing.
Used from the event loop only.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from moonpool._index import MOVE_BYTES
from moonpool.master.clock import now_ms
from moonpool.master.errors import StoreDamagedError, StoreUnavailableError
from moonpool.master.packed import positions
from moonpool.proto import pool_pb2 as pb

if TYPE_CHECKING:
    from moonpool.master.core import Core
    from moonpool.master.segments import Segment
    from moonpool.master.sessions import Outbox, Session

__all__ = ["COUNT_MAX", "Copies", "Copy", "Move", "moves_of"]

_log = logging.getLogger("moonpool.master")
#: Extents of one copy. A stream carries it in one message.
COUNT_MAX: Final = 512
_MOVE: Final = struct.Struct("<QIIIIQQQQII32s")
assert _MOVE.size == MOVE_BYTES
# What the node is told of it.
_TOLD: Final = slice(24, MOVE_BYTES)


class Move(NamedTuple):
    """A move as the index gives it; or, with number 0, an extent to be looked at where it is."""

    number: int
    leaves: int
    target: int
    source: int
    namespace: int
    generation: int
    there: int
    here: int
    length: int
    shard: int
    zero: int
    hash: bytes

    @property
    def extent(self) -> bytes:
        """The extent that is read, as `ChunkIndex.locate` gives it."""
        return struct.pack("<QQQII", self.generation, self.there, self.length, self.source, 0)

    def look(self) -> Move:
        """Return what the node of the segment that is read is asked, to look at this extent itself."""
        return self._replace(number=0, leaves=self.source, target=self.source, here=self.there)


def moves_of(packed: bytes) -> list[Move]:
    """Return moves as the index gives them."""
    return [Move._make(move) for move in _MOVE.iter_unpack(packed)]


def _numbers(moves: Iterable[Move]) -> bytes:
    return b"".join(move.number.to_bytes(8, "little") for move in moves)


@dataclass(eq=False)
class Copy:
    """One copy, from one segment to another.

    Attributes:
        node: that carries it out.
        stream: over which it was asked for.
        moves: what for; all of the same segments.
        places: of each of them among the moves that `Copies.begin` was given.
        up: it reads a disk.
        down: it writes a disk.
        slots: in the index, of the chunks that it has moved.
        deadline_ms: when the node should have answered.
        cause: of the first that is not OK, once it is done.
        done: the outcome, for each OK, NOT_MOVED, or WRITING: it was spoilt, its node has seen that too, and it is
            replaced or dropped, so that there is something else to be moved now, or nothing. What was to be replaced,
            or was looked at, is SPOILT instead. It never fails.
    """

    number: int
    node: Session
    stream: Outbox | None
    moves: list[Move]
    places: list[int]
    deadline_ms: int
    up: bool = False
    down: bool = False
    slots: bytes = b""
    cause: str = ""
    done: asyncio.Future[bytes] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def source(self) -> int:
        """The segment that it reads."""
        return self.moves[0].source

    @property
    def target(self) -> int:
        """The segment that it writes."""
        return self.moves[0].target

    @property
    def looks(self) -> bool:
        """Whether the node only looks at what it has."""
        return not self.moves[0].number

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return sum(move.length for move in self.moves)


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
        copies = (copy for copy in self.under_way.values() if not copy.looks)
        return sum(len(copy.places) for copy in copies if copy.moves[0].leaves == segment)

    def overdue(self) -> int:
        """Return how many copies should have been answered."""
        return sum(copy.deadline_ms < now_ms() for copy in self._waiting.values())

    async def ended(self, copies: Iterable[Copy]) -> None:
        """Wait until these are done, or their deadlines are over, or the master is being stopped."""
        waited: set[asyncio.Future[Any]] = {copy.done for copy in copies}
        closing: asyncio.Future[Any] = asyncio.ensure_future(self._core.closing.wait())
        end = time.monotonic() + self._core.settings.copy_deadline
        try:
            while waited and not closing.done() and (left := end - time.monotonic()) > 0:
                await asyncio.wait({*waited, closing}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                waited = {one for one in waited if not one.done()}
        finally:
            closing.cancel()

    async def wait(self, seconds: float) -> None:
        """Wait until a copy has ended, or for so long."""
        try:
            await asyncio.wait_for(self.changed.wait(), seconds)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            return

    # ---------------------------------------------------------------- their life

    def begin(self, moves: list[Move]) -> list[Copy]:
        """Have nodes carry out moves that the index has begun, or look at extents."""
        by_segments: dict[tuple[int, int, int], list[int]] = {}
        for place, move in enumerate(moves):
            by_segments.setdefault((move.leaves, move.source, move.target), []).append(place)
        return [self._begin([moves[place] for place in places], places) for places in by_segments.values()]

    def _begin(self, moves: list[Move], places: list[int]) -> Copy:
        source, target = (self._core.segments.all[number] for number in (moves[0].source, moves[0].target))
        node = target.session
        assert node is not None, "the index places nothing where no node is"
        patience_ms = round(self._core.settings.copy_deadline * 1000)
        self._number += 1
        copy = Copy(
            number=self._number,
            node=node,
            stream=node.outbox,
            moves=moves,
            places=places,
            deadline_ms=now_ms() + patience_ms,
            up=source.row.disk,
            down=target.row.disk,
        )
        self._waiting[copy.number] = self.under_way[copy.number] = copy
        if copy.stream is None:
            # Its stream has broken; it has never heard of this.
            self._over(copy, b"", "the node is not connected")
        else:
            copy.stream.put(
                copy=pb.Copy(
                    copy=copy.number,
                    source=_told(source),
                    segment=target.row.segment,
                    extents=b"".join(_MOVE.pack(*move)[_TOLD] for move in moves),
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
            copy.cause = cause[:1024]
            _log.info("copy of %d extents from segment %d to %d: %s", failed, copy.source, copy.target, cause[:1024])
        if copy.looks:
            self._done(copy, statuses)
        else:
            self._core.run(self._finish(copy, statuses))

    def _done(self, copy: Copy, found: bytes) -> None:
        self.under_way.pop(copy.number, None)
        copy.done.set_result(found)
        self.changed.set()
        self.changed = asyncio.Event()

    async def _finish(self, copy: Copy, statuses: bytes) -> None:
        core = self._core
        found = bytearray([pb.NOT_MOVED]) * len(copy.places)
        try:
            good = positions(statuses, pb.OK)
            spoilt = positions(statuses, pb.SPOILT)
            if copy.up and spoilt:
                await core.disks.spoilt(_numbers(copy.moves[place] for place in spoilt))
            ended = (pb.OK, pb.SPOILT) if copy.up else (pb.OK,)
            if bad := [move for move, status in zip(copy.moves, statuses, strict=True) if status not in ended]:
                core.index.abort_moves(_numbers(bad))
            moved_now, copy.slots = await self.commit([copy.moves[place] for place in good])
            for place in moved_now:
                found[good[place]] = pb.OK
            moved = found.count(pb.OK)
            self._count(copy, moved)
            # Others may be copied while the source looks.
            del self.under_way[copy.number]
            core.freed()
            if spoilt and not copy.up:
                await self._spoilt(copy, spoilt, found)
        finally:
            self._done(copy, bytes(found))

    def _count(self, copy: Copy, moved: int) -> None:
        counts, items = self._core.metrics.counts, len(copy.moves)
        if copy.up or copy.down:
            counts["disk_failed_items"] += items - moved
        else:
            counts["moved_items"] += moved
            counts["moved_bytes"] += copy.nbytes * moved // items
            counts["not_moved_items"] += items - moved

    async def _spoilt(self, copy: Copy, places: list[int], found: bytearray) -> None:
        """What was read is not what it should be: at its place, or only on the way?"""
        looks = {copy.moves[place].look(): place for place in places}
        if copy.moves[0].leaves != copy.source:
            # It was to replace another one. Whoever does that goes on with it.
            bad, status = list(looks), pb.SPOILT
        else:
            bad, status = await self._core.mending.mend(copy.source, list(looks)), pb.WRITING
        for look in bad:
            found[looks[look]] = status

    async def commit(self, moves: list[Move]) -> tuple[list[int], bytes]:
        """Make moves durable, then visible. Returns which ones, and the slots of their chunks."""
        core, packed = self._core, _numbers(moves)
        try:
            statuses, slots, records = core.index.commit_moves(packed)
        except BaseException:
            core.index.abort_moves(packed)
            raise
        good = positions(statuses, pb.OK)
        if not good:
            return [], b""
        good_moves = _numbers(moves[place] for place in good)
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
