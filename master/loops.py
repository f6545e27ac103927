# SPDX-License-Identifier: Apache-2.0
"""What the master does by itself.

It ends silent sessions, gives up late writes, fences, reclaims, sweeps, evicts, demotes, drains, readmits, watches its
store.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from typing import Final

from moonpool.master.core import Core, now_ms
from moonpool.master.packed import pairs
from moonpool.master.segments import Segment

__all__ = ["start_loops"]

_TICK: Final = 0.1
_EVICT_PERIOD: Final = 0.25
_SWEEP_PERIOD: Final = 0.5
_STORE_PERIOD: Final = 1.0
# Slots that a step looks at: a millisecond or so.
_SWEEP_SLOTS: Final = 16_384
# What one step of background eviction gives up at most, so that other calls come in between: a few milliseconds.
_EVICT_CHUNKS: Final = 4096
_EVICT_STEPS: Final = 256
# Of `put_begin`: a put that waits for room for the rest of a batch does so for as long, and writes before and after.
_YOUNG: Final = 2


def start_loops(core: Core) -> None:
    """Start every loop of a master."""
    interval = core.settings.heartbeat_interval
    add = core.supervisor.add
    add("sessions", min(interval, core.settings.session_timeout / 4), _Sessions(core).work)
    add("fences", _TICK, lambda: _fences(core))
    add("reclaim", _TICK, core.reclaim)
    add("sweep", _SWEEP_PERIOD, _Sweep(core).work)
    add("evict", _EVICT_PERIOD, _Evict(core).work)
    add("drains", _TICK, core.drains.work)
    add("store", _STORE_PERIOD, lambda: asyncio.to_thread(core.store.look))
    add("disks", _EVICT_PERIOD, core.disks.work)
    add("segments", min(1.0, core.settings.quarantine / 4), lambda: _segments(core))


class _Sessions:
    """Ends sessions that are silent."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._timeout_ms = round(core.settings.session_timeout * 1000)
        self._period_ms = round(min(core.settings.heartbeat_interval, core.settings.session_timeout / 4) * 1000)
        self._last_ms = now_ms()

    def work(self) -> None:
        now, core = now_ms(), self._core
        late, self._last_ms = now - self._last_ms - self._period_ms, now
        sessions = list(core.sessions.alive.values())
        if late > self._period_ms:
            # This process stood still. That others were silent meanwhile says nothing about them.
            for session in sessions:
                session.seen_ms += late
        for session in sessions:
            if now - session.seen_ms > self._timeout_ms:
                core.metrics.counts["sessions_timed_out"] += 1
                core.end_session(session, f"silent for {(now - session.seen_ms) / 1000:.1f} s")


def _fences(core: Core) -> None:
    for owner, _ in pairs(core.index.expire(now_ms())):
        core.metrics.counts["writes_expired_calls"] += 1
        if (session := core.sessions.by_owner.get(owner)) is not None:
            session.given_up += 1
    core.forget_writers(core.fences.work(now_ms()))
    if now_ms() >= core.held_until_ms and core.segments.leases_over():
        core.freed()


class _Sweep:
    """Removes chunks that lost their extents with a segment, then the rows of lost segments."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def work(self) -> None:
        core = self._core
        if core.sweep_round and not any(segment.row.lost for segment in core.segments.all.values()):
            return  # the first round is for records that were refused
        slots, complete = core.index.sweep(_SWEEP_SLOTS)
        if slots:
            await core.to_the_end(core.delete(slots))
        if not complete:
            core.supervisor.loops["sweep"].wake()
            return
        core.sweep_round += 1
        # A round that began after the loss has seen every slot, and no record names the segment any more.
        for number, segment in list(core.segments.all.items()):
            if segment.row.lost and core.sweep_round >= segment.lost_round + 2:
                await core.durable(core.store.remove_segment(number))
                del core.segments.all[number]


class _Evict:
    """Evicts down to the low watermark, but nothing so young that the put may be under way that it came with.

    Where that would go next by the policy, puts that need room evict for themselves, and not what they have put.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._young_ms = round(core.settings.put_begin * _YOUNG * 1000)
        #: When a round was, and the last generation then.
        self._rounds: deque[tuple[int, int]] = deque()

    async def work(self) -> None:
        core, settings, now, rounds = self._core, self._core.settings, now_ms(), self._rounds
        rounds.append((now, core.index.stats()["generation"]))
        while len(rounds) > 1 and rounds[1][0] <= now - self._young_ms:
            rounds.popleft()
        used, capacity, chunks = _used(core)
        if used <= settings.high_watermark * capacity:
            return
        for _ in range(_EVICT_STEPS):
            excess = used - round(settings.low_watermark * capacity) - core.disks.leaving_bytes()
            want = min(excess, _EVICT_CHUNKS * used // max(chunks, 1) + 1)
            if excess <= 0 or not await core.evict(want, demote=True, newest=rounds[0][1]):
                return
            await asyncio.sleep(0)
            used, capacity, chunks = _used(core)


def _used(core: Core) -> tuple[int, int, int]:
    """Return bytes in use, without what waits to be free, the capacity, and chunks, of memory."""
    stats = core.index.stats()
    return stats["used_bytes"], stats["capacity_bytes"], stats["chunks"] - stats["on_disk"]


def _segments(core: Core) -> None:
    settings, now = core.settings, now_ms()
    for segment in core.segments.quiet(
        round(settings.quarantine * 1000), now, round(settings.heartbeat_interval * 2000)
    ):
        core.probes.begin(segment, functools.partial(_readmit, core, segment))
    if now - core.started_ms > settings.segment_grace * 1000:
        for segment in list(core.segments.all.values()):
            # Not one that is new, and whose row is on its way to the store.
            if segment.held and segment.session is None and not segment.row.lost and not segment.row.disk:
                core.lose(segment, "it did not come back after the restart")
    for disk in list(core.segments.all.values()):
        gone = disk.row.disk and disk.session is None and not disk.row.lost
        if gone and now - max(disk.gone_ms, core.started_ms) > settings.disk_grace * 1000:
            core.lose(disk, "its node did not come back")


def _readmit(core: Core, segment: Segment, works: bool) -> None:
    if works and segment.quarantined:
        core.segments.readmit(segment)
        core.freed()
