# SPDX-License-Identifier: Apache-2.0
"""Empties segments that are DRAINING: a loop that moves what lies there to others, slowly enough for everybody else.

It fills the others up to `high_watermark` and no further. So nothing is evicted because of it, and puts find the room
that they would find without it. What does not fit stays where it is. Used from the event loop only.
"""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from moonpool._index import NO_SEGMENT
from moonpool.master.clock import now_ms
from moonpool.master.copies import COUNT_MAX, Copy, moves_of
from moonpool.proto import pool_pb2 as pb

if TYPE_CHECKING:
    from moonpool.master.core import Core
    from moonpool.master.segments import Segment

__all__ = ["Drains"]

# Extents that one look at a segment takes in: a millisecond or so.
_LOOKS: Final = 16_384
# What may be moved at once after a pause, in seconds of the rate.
_BURST_S: Final = 0.25
_FULL: Final = "no room elsewhere: the others are full up to high_watermark"
# Before a segment of which nothing could be moved is looked at again.
_PAUSE_FIRST_MS: Final = 250
_PAUSE_LAST_MS: Final = 2000


@dataclass(eq=False)
class _Drain:
    # One segment. `at`, `no_room`, `tried`, `failed` and `failure` are of the round that goes on.
    refilled_ms: int
    allowance: float = 0.0
    at: int = 0
    no_room: int = 0
    failed: int = 0
    failure: str = ""
    tried: int = 0
    moved: int = 0
    stuck: int = 0
    cause: str = ""
    pause_ms: int = _PAUSE_FIRST_MS
    paused_until_ms: int = 0


class Drains:
    """The drains of a master.

    Args:
        core: its state.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._all: dict[int, _Drain] = {}

    def told(self, segment: Segment) -> pb.Draining | None:
        """Return how far a segment has got; None: it is not being drained."""
        if not segment.row.draining or segment.row.lost:
            return None
        number = segment.row.segment
        drain = self._all.get(number)
        moving = self._core.copies.moving_from(number)
        if drain is None:
            return pb.Draining(moving=moving)
        return pb.Draining(moved=drain.moved, stuck=drain.stuck, moving=moving, cause=drain.cause)

    def wake(self) -> None:
        """Have the loop look at once."""
        if (loop := self._core.supervisor.loops.get("drains")) is not None:
            loop.wake()

    async def work(self) -> None:
        """Do as much as may be done now."""
        core = self._core
        draining = {
            number: segment
            for number, segment in core.segments.all.items()
            if segment.row.draining and not segment.row.lost
        }
        self._all = {number: drain for number, drain in self._all.items() if number in draining}
        if now_ms() < core.held_until_ms:
            return  # readers of before may still read the old extents, and nobody knows which
        for number, segment in draining.items():
            drain = self._all.setdefault(number, _Drain(now_ms()))
            self._refill(drain)
            if segment.session is not None and not segment.quarantined:
                await self._advance(segment, drain)

    def _room(self) -> int:
        """Return how many bytes may be moved before puts would miss the room."""
        stats = self._core.index.stats()
        taken: int = stats["capacity_bytes"] - stats["free_bytes"]
        return int(self._core.settings.high_watermark * stats["capacity_bytes"]) - taken

    def _refill(self, drain: _Drain) -> None:
        now, rate = now_ms(), self._core.settings.drain_rate
        drain.allowance = min(drain.allowance + rate * (now - drain.refilled_ms) / 1000, rate * _BURST_S)
        drain.refilled_ms = now

    def _may(self, segment: Segment, drain: _Drain) -> bool:
        core = self._core
        return (
            drain.allowance > 0
            and now_ms() >= drain.paused_until_ms
            # Those who wait for room come first.
            and not core.waiting_puts
            and core.copies.room_at(segment.row.segment)
            and core.segments.any_writable(core.copies.crowded())
            and segment.row.draining
            and segment.session is not None
            and not core.closing.is_set()
        )

    async def _advance(self, segment: Segment, drain: _Drain) -> None:
        core, number = self._core, segment.row.segment
        if now_ms() >= drain.paused_until_ms and not core.segments.any_writable(()):
            self._all_stuck(number, drain, "no other segment takes chunks now")
        while self._may(segment, drain):
            crowded, room = core.copies.crowded(), self._room()
            if room <= 0:
                self._all_stuck(number, drain, _FULL)
                return
            nbytes = min(int(drain.allowance) + 1, core.settings.copy_bytes)
            moves, following, no_room = core.index.move_out(
                number, drain.at, _LOOKS, COUNT_MAX, nbytes, room, crowded, now_ms()
            )
            drain.at = 0 if following == NO_SEGMENT else following
            drain.no_room += no_room
            for copy in core.copies.begin(moves_of(moves)):
                drain.tried += len(copy.places)
                drain.allowance -= copy.nbytes
                copy.done.add_done_callback(functools.partial(self._done, drain, copy))
            if following == NO_SEGMENT:
                self._round_is_over(drain, sure=not crowded)
                return
            await asyncio.sleep(0)

    def _done(self, drain: _Drain, copy: Copy, done: asyncio.Future[bytes]) -> None:
        moved, failed = (done.result().count(status) for status in (pb.OK, pb.NOT_MOVED))
        drain.moved += moved
        drain.failed += failed
        if failed:
            drain.failure = copy.cause
        if moved:
            drain.pause_ms = _PAUSE_FIRST_MS
        else:
            self._pause(drain)
        self.wake()

    def _all_stuck(self, number: int, drain: _Drain, cause: str) -> None:
        left = self._core.index.segment_stats(number)["extents"]
        drain.stuck, drain.cause = max(0, left - self._core.copies.moving_from(number)), cause
        self._pause(drain)

    def _pause(self, drain: _Drain) -> None:
        drain.paused_until_ms = now_ms() + drain.pause_ms
        drain.pause_ms = min(2 * drain.pause_ms, _PAUSE_LAST_MS)

    def _round_is_over(self, drain: _Drain, *, sure: bool) -> None:
        """Everything in a segment has been looked at.

        Args:
            drain: of it.
            sure: whether every other segment could have been chosen.
        """
        if sure:
            drain.stuck = drain.no_room + drain.failed
            no_room = f"{drain.no_room} find no room elsewhere, or have a copy in each other segment"
            failed = f"{drain.failed} could not be copied: {drain.failure}"
            drain.cause = "; ".join([no_room] * bool(drain.no_room) + [failed] * bool(drain.failed))
        if not drain.tried:
            self._pause(drain)
        drain.no_room = drain.failed = drain.tried = 0
