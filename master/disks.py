# SPDX-License-Identifier: Apache-2.0
"""Disks below the memory of nodes: what leaves memory is copied there first, and read back when somebody wants it.

The copies go the way of every move. Only their node reads and writes a disk, so what a client is told is always an
extent in memory; until there is one, the chunk is LOADING. Used from the event loop only.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from typing import TYPE_CHECKING, Final

from moonpool._index import NO_SEGMENT
from moonpool.master.clock import now_ms
from moonpool.master.copies import COUNT_MAX, moves_of
from moonpool.master.errors import StoreUnavailableError
from moonpool.master.events import Entry
from moonpool.master.packed import HASH_BYTES, take
from moonpool.proto import pool_pb2 as pb

if TYPE_CHECKING:
    from moonpool.master.copies import Copy, Move
    from moonpool.master.core import Core
    from moonpool.master.segments import Segment

__all__ = ["Disks"]

_log = logging.getLogger("moonpool.master")
# A load looks again after so long, also when no copy has ended.
_LOOK_S: Final = 0.05
# How often a load has chunks evicted that are in its way, before what finds no room is a miss.
_EVICTIONS: Final = 4


class Disks:
    """What a master does about disks.

    Args:
        core: its state.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        #: Disks that are quarantined because they hang.
        self._hung: set[int] = set()

    @property
    def any(self) -> bool:
        """Whether there is a disk, be its node there or not."""
        return self._core.segments.disks > 0

    # ---------------------------------------------------------------- down

    def leaving_bytes(self) -> int:
        """Return how many bytes leave memory when the copies are done that are under way."""
        return sum(copy.nbytes for copy in self._core.copies.under_way.values() if copy.down)

    def crowded(self) -> list[int]:
        """Return the disks that are written to as much as they may be, or whose nodes are not connected."""
        core = self._core
        found = []
        for number, segment in core.segments.all.items():
            if segment.row.disk:
                writing = sum(copy.target == number for copy in core.copies.under_way.values())
                if writing >= core.settings.copies_at_once or not segment.connected:
                    found.append(number)
        return found

    async def carry_out(self, moves: bytes) -> None:
        """Have chunks leave memory that the index has chosen: those that are on disks already at once."""
        each = moves_of(moves)
        for copy in self._core.copies.begin([move for move in each if move.target != NO_SEGMENT]):
            copy.done.add_done_callback(functools.partial(self._copied, copy))
        if shed := [move for move in each if move.target == NO_SEGMENT]:
            await self._core.to_the_end(self._shed(shed))

    async def _shed(self, moves: list[Move]) -> None:
        good, _ = await self._core.copies.commit(moves)
        self._core.metrics.counts["shed_items"] += len(good)
        self._core.freed()

    def _copied(self, copy: Copy, done: asyncio.Future[bytes]) -> None:
        """Chunks of several shards go on with the next one; and there may be more to evict."""
        core = self._core
        core.metrics.counts["demoted_items"] += done.result().count(pb.OK)
        core.metrics.counts["demoted_bytes"] += copy.nbytes * done.result().count(pb.OK) // len(copy.places)
        if copy.slots and not core.closing.is_set():
            more = core.index.demote_more(copy.slots, core.settings.disk_uses, [])
            if more:
                core.run(self.carry_out(more))
        # Not when it could not be written: that would only be tried again at once.
        if pb.OK in done.result() and (loop := core.supervisor.loops.get("evict")) is not None:
            loop.wake()

    async def make_room(self, number: int, want: int) -> int:
        """Evict from a disk what was not used for longest. Returns bytes.

        Raises:
            StoreUnavailableError: what was evicted is gone, but its space is not free before the store works again.
        """
        core = self._core
        if now_ms() < core.held_until_ms or not core.pins_known:
            return 0
        slots, records, freed = core.index.evict_disk(number, want, now_ms())
        if slots:
            core.metrics.counts["disk_evicted_bytes"] += freed
            core.events.add(Entry(pb.Event.EVICTED, records))
            await core.to_the_end(core.delete(slots))
        return freed

    async def work(self) -> None:
        """Keep some room on every disk, and give up those that hang."""
        core = self._core
        for number, segment in list(core.segments.all.items()):
            if not segment.row.disk or segment.session is None or segment.row.lost:
                continue
            self._look_at(segment)
            if segment.quarantined:
                continue
            used = core.segments.figures(segment)["used_bytes"]
            capacity = segment.row.capacity_bytes
            if used > core.settings.high_watermark * capacity:
                await self.make_room(number, used - round(core.settings.low_watermark * capacity))

    def _look_at(self, segment: Segment) -> None:
        """Quarantine a disk that does not do in time what it was asked for, until it has done it."""
        number, core = segment.row.segment, self._core
        copies = [copy for copy in core.copies.under_way.values() if number in (copy.source, copy.target)]
        late = any(copy.deadline_ms < now_ms() for copy in copies)
        if late and not segment.quarantined:
            _log.warning("the disk of node %r hangs", segment.row.node)
            self._hung.add(number)
            core.segments.quarantine(segment)
        elif not late and number in self._hung:
            self._hung.discard(number)
            if segment.quarantined:
                core.segments.readmit(segment)

    # ---------------------------------------------------------------- up

    def prefetch(self, namespace: int, hashes: bytes, shard: int) -> None:
        """Begin to read into memory what lies on disks only, as far as there is room."""
        if self.any:
            self._begin(namespace, hashes, shard)

    def _begin(self, namespace: int, hashes: bytes, shard: int) -> tuple[bytes, int]:
        """Begin as many loads as may be under way. Returns (statuses, bytes that found no room)."""
        core = self._core
        if now_ms() < core.held_until_ms:
            # Readers of an earlier start may still read what is free now. That takes longer than anybody wants to wait.
            return bytes([pb.NO_SPACE]) * (len(hashes) // HASH_BYTES), 0
        loading = sum(copy.nbytes for copy in core.copies.under_way.values() if copy.up)
        while True:
            # In parts, so that who waits for the first of them does not wait for all.
            most = min(core.settings.copy_bytes, core.settings.load_bytes - loading)
            statuses, moves, no_room = core.index.promote(
                namespace, hashes, shard, COUNT_MAX if most > 0 else 0, max(0, most)
            )
            if not moves:
                return statuses, no_room
            for copy in core.copies.begin(moves_of(moves)):
                loading += copy.nbytes
                copy.done.add_done_callback(functools.partial(self._loaded, copy))

    def _loaded(self, copy: Copy, done: asyncio.Future[bytes]) -> None:
        core = self._core
        core.metrics.counts["loaded_items"] += done.result().count(pb.OK)
        core.metrics.counts["loaded_bytes"] += copy.nbytes * done.result().count(pb.OK) // len(copy.places)

    async def load(self, namespace: int, hashes: bytes, shard: int, seconds: float) -> list[int]:
        """Have chunks read into memory that lie on disks only, and wait for so long.

        Returns the positions of those that cannot be: there is no room, nor did eviction make any in time.
        """
        core = self._core
        until = time.monotonic() + seconds
        left = list(range(len(hashes) // HASH_BYTES))
        evictions = 0
        while True:
            changed = core.copies.changed
            statuses, no_room = self._begin(namespace, take(hashes, HASH_BYTES, left), shard)
            hopeless = [place for place, status in zip(left, statuses, strict=True) if status == pb.NO_SPACE]
            left = [place for place, status in zip(left, statuses, strict=True) if status in (pb.WRITING, pb.NO_SPACE)]
            if not left or core.closing.is_set():
                return []
            wait = until - time.monotonic()
            if hopeless and (wait <= 0 or now_ms() < core.held_until_ms):
                return hopeless
            if wait <= 0:
                return []
            if hopeless and evictions < _EVICTIONS:
                evictions += 1
                # It may free what is of no use here: the room has to be in the memory above the disk.
                if await self._evict(no_room * evictions):
                    continue
            # Or until others' leases are over.
            await _wait_for(changed, min(wait, _LOOK_S))

    async def _evict(self, want: int) -> int:
        try:
            # As in the background: what is wanted again leaves memory for the disk, which takes a moment.
            return await self._core.evict(want, demote=True)
        except StoreUnavailableError as error:
            _log.warning("what was evicted is not free yet: %s", error)
            return 0

    async def spoilt(self, moves: bytes) -> None:
        """What these moves, by number, were to read from disks is not there: they and their chunks are given up."""
        core = self._core
        slots, records = core.index.spoilt(moves)
        core.index.abort_moves(moves)
        core.metrics.counts["spoilt_items"] += len(moves) // 8
        if slots:
            core.metrics.counts["spoilt_lost_items"] += len(slots) // 4
            core.events.add(Entry(pb.Event.REMOVED, records))
            try:
                await core.delete(slots)
            except StoreUnavailableError as error:
                _log.warning("%s", error)


async def _wait_for(changed: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(changed.wait(), seconds)
    except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
        return
