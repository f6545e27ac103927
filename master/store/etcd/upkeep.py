# SPDX-License-Identifier: Apache-2.0
"""What etcd needs now and then: old revisions thrown away, files made smaller, the alarm about space taken back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any, Final

from moonpool.errors import MoonpoolError
from moonpool.master.store.etcd.calls import Members, RefusedError, UnansweredError

__all__ = ["Upkeep"]

_log = logging.getLogger("moonpool.master")
_PERIOD: Final = 60.0
# Whoever follows what happens has at least a period to do so.
_AGAIN_WHEN_FULL: Final = 2.0
# A file is made smaller when more than half of it is free, and that is worth it. The member stands still meanwhile.
_WASTE_BYTES: Final = 64 << 20
_WASTE_PART: Final = 0.5
_COMPACT_S: Final = 60.0
_DEFRAGMENT_S: Final = 120.0
_STATUS_S: Final = 5.0


class Upkeep:
    """A loop beside the requests. Used from one event loop.

    Args:
        members: of the etcd.
        mine: do it; False: an operator does, and this only notices when there is space again.

    Attributes:
        full: set by whoever was refused for want of space.
    """

    def __init__(self, members: Members, mine: bool) -> None:
        self.full = asyncio.Event()
        self._members = members
        self._rpc = members.rpc
        self._mine = mine
        self._counts = {"compactions": 0, "defragmentations": 0, "alarms": 0, "upkeep_failures": 0}
        self._before = 0

    def stats(self) -> dict[str, int]:
        """Return counters."""
        return dict(self._counts)

    async def work(self) -> None:
        """Do it, for ever."""
        while True:
            try:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.full.wait(), _PERIOD)
                if self.full.is_set():
                    await self._make_space()
                elif self._mine:
                    await self._round()
            except (UnansweredError, RefusedError, MoonpoolError) as error:
                self._counts["upkeep_failures"] += 1
                _log.warning("etcd is not kept up: %s", error)
            if self.full.is_set():
                self.full.clear()
                await asyncio.sleep(_AGAIN_WHEN_FULL)

    async def _round(self) -> None:
        """Throw away what was old a round ago already."""
        before, self._before = self._before, self._members.revision
        if before and before != self._before:
            await self._compact(before)
        await self._defragment(wasteful=True)

    async def _make_space(self) -> None:
        if not self._mine:
            return
        _log.warning("etcd has no space: old revisions are thrown away, and its files made smaller")
        await self._compact(self._members.revision)
        await self._defragment(wasteful=False)
        rpc = self._rpc
        raised = await self._members.attempt("Alarm", rpc.AlarmRequest(action=rpc.AlarmRequest.GET, alarm=rpc.NOSPACE))
        for one in raised.alarms:
            request = rpc.AlarmRequest(action=rpc.AlarmRequest.DEACTIVATE, memberID=one.memberID, alarm=rpc.NOSPACE)
            await self._members.attempt("Alarm", request)
            self._counts["alarms"] += 1

    async def _compact(self, revision: int) -> None:
        try:
            # Physical: what is asked for next is to find the space free.
            request = self._rpc.CompactionRequest(revision=revision, physical=True)
            await self._members.ask_member(self._members.current, "Compact", request, _COMPACT_S)
        except RefusedError as error:
            if not error.compacted:
                raise
        self._counts["compactions"] += 1

    async def _defragment(self, *, wasteful: bool) -> None:
        """One member after the other, the one that leads them last.

        Args:
            wasteful: only what is worth it, and only where all others answer meanwhile, of which there are some.
        """
        found = []
        for number in range(len(self._members)):
            with contextlib.suppress(UnansweredError):
                status = await self._members.ask_member(number, "Status", self._rpc.StatusRequest(), _STATUS_S)
                found.append((status.leader == status.header.member_id, number, status))
        if wasteful and not 1 < len(found) == len(self._members):
            return
        for _, number, status in sorted(found, key=lambda one: one[:2]):
            if not wasteful or _is_wasteful(status):
                self._members.avoid(number)
                began = time.monotonic()
                request = self._rpc.DefragmentRequest()
                await self._members.ask_member(number, "Defragment", request, _DEFRAGMENT_S)
                self._counts["defragmentations"] += 1
                _log.info(
                    "etcd member %s is smaller, in %.1f s", self._members.address(number), time.monotonic() - began
                )


def _is_wasteful(status: Any) -> bool:
    waste = status.dbSize - status.dbSizeInUse
    return bool(waste > _WASTE_BYTES and waste > _WASTE_PART * status.dbSize)
