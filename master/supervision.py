# SPDX-License-Identifier: Apache-2.0
"""Loops that go on when a round of them fails, and that can be seen to be alive."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

__all__ = ["Loop", "Supervisor"]

_log = logging.getLogger("moonpool.master")
# A round that failed is tried again after its period, but not faster than this.
_PAUSE: Final = 0.1
# Rounds may be late by so much, since machines pause.
_LATE: Final = 5.0
_FAILURES_IN_A_ROW: Final = 5


class Loop:
    """One loop: a function that is called again and again, `period` seconds apart, or earlier when it is woken.

    Attributes:
        name: for people and metrics.
        rounds: that went well.
        failures: rounds that raised.
        error: what the last one that failed raised, or "".
    """

    def __init__(self, name: str, period: float, work: Callable[[], Awaitable[None] | None]) -> None:
        self.name = name
        self.rounds = 0
        self.failures = 0
        self.error = ""
        self._failed_in_a_row = 0
        self._period = period
        self._work = work
        self._wake = asyncio.Event()
        self._began = time.monotonic()
        self._beat = self._began

    @property
    def alive(self) -> bool:
        """Whether rounds come to an end, and not all of the last ones with a failure."""
        on_time = time.monotonic() - self._beat < self._period + _LATE
        return on_time and self._failed_in_a_row < _FAILURES_IN_A_ROW

    def wake(self) -> None:
        """Have the next round come at once."""
        self._wake.set()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            try:
                result = self._work()
                if inspect.isawaitable(result):
                    await result
                self.rounds += 1
                self._failed_in_a_row = 0
            except Exception as error:  # noqa: BLE001  # logged, counted, and shown by health
                self.failures += 1
                self._failed_in_a_row += 1
                self.error = f"{type(error).__name__}: {error}"
                _log.exception("a round of the loop %r failed; it goes on", self.name)
                await asyncio.sleep(_PAUSE)
            self._beat = time.monotonic()
            # A loop that wakes itself must let others run in between.
            await asyncio.sleep(0)
            await self._pause()

    async def _pause(self) -> None:
        try:
            await asyncio.wait_for(self._wake.wait(), self._period)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            return
        finally:
            self._wake.clear()


class Supervisor:
    """The loops of a master. One that ends, whyever, is started again."""

    def __init__(self) -> None:
        self.loops: dict[str, Loop] = {}
        self.restarts = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def add(self, name: str, period: float, work: Callable[[], Awaitable[None] | None]) -> Loop:
        """Start a loop. Its first round comes at once."""
        loop = self.loops[name] = Loop(name, period, work)
        self._start(loop)
        return loop

    @property
    def dead(self) -> list[str]:
        """The loops that are not alive."""
        return [name for name, loop in self.loops.items() if not loop.alive]

    async def close(self) -> None:
        """End every loop, and wait for that."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, loop: Loop) -> None:
        task = asyncio.get_running_loop().create_task(loop.run(), name=f"moonpool-{loop.name}")
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(loop, done))

    def _ended(self, loop: Loop, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._closed:
            return
        self.restarts += 1
        _log.error("the loop %r ended (%s); it is started again", loop.name, task)
        asyncio.get_running_loop().call_later(_PAUSE, lambda: None if self._closed else self._start(loop))
