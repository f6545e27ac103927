# SPDX-License-Identifier: Apache-2.0
"""Awaiting transfers: one eventfd per event loop, which the native core writes when an awaited transfer ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, Final

from moonpool.transfer_engine.errors import ForkedError

if TYPE_CHECKING:
    from moonpool.transfer_engine.transfers import Transfer

__all__ = ["Waker", "ended"]

_STEP_SECONDS: Final = 0.1


class Waker:
    """Wakes the tasks of one event loop. Everything but `release` runs in the thread of that loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiting: dict[Transfer, list[asyncio.Future[None]]] = {}
        loop.add_reader(self._fd, self._wake)

    async def wait(self, transfer: Transfer, loop: asyncio.AbstractEventLoop) -> None:
        future: asyncio.Future[None] = loop.create_future()
        futures = self._waiting.setdefault(transfer, [])
        futures.append(future)
        try:
            if len(futures) == 1:
                # Writes at once when the transfer has ended meanwhile, so no wake-up can be lost.
                transfer._set_eventfd(self._fd)
            await future
        finally:
            # Still listed when the task was cancelled: the transfer goes on, without anybody to wake.
            if future in futures:
                futures.remove(future)
                if not futures:
                    self._forget(transfer)

    def _wake(self) -> None:
        os.eventfd_read(self._fd)
        for transfer in [transfer for transfer in self._waiting if transfer.done()]:
            for future in self._forget(transfer):
                if not future.done():
                    future.set_result(None)

    def _forget(self, transfer: Transfer) -> list[asyncio.Future[None]]:
        """Stop waiting for `transfer`; return the futures that did."""
        # Taken back even from a transfer that has ended: the core may not have written yet, and once this returns it
        # never will. Otherwise a write could hit a descriptor that was closed and given out again.
        # In a forked child nothing of the core runs, so there is nothing to take back.
        with contextlib.suppress(ForkedError):
            transfer._set_eventfd(-1)
        with _lock:
            del transfer._waker
        futures = self._waiting.pop(transfer)
        forgotten = list(futures)
        futures.clear()
        return forgotten

    def release(self) -> None:
        """Close the descriptor; the loop is closed or gone."""
        for transfer in list(self._waiting):
            self._forget(transfer)
        os.close(self._fd)


_lock = threading.Lock()
_wakers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Waker, weakref.finalize[..., object]]] = (
    weakref.WeakKeyDictionary()
)


async def ended(transfer: Transfer) -> None:
    """Return once `transfer` is no longer running. Cancelling the task that awaits this does not touch the transfer."""
    loop = asyncio.get_running_loop()
    waker = _waker_of(loop)
    with _lock:
        # A transfer has one eventfd, so it belongs to the first loop that awaits it.
        owner = getattr(transfer, "_waker", None)
        if owner is None:
            transfer._waker = owner = waker
    if owner is waker:
        await waker.wait(transfer, loop)
    else:
        # Another loop awaits it already, which is rare enough for a thread. In steps: the thread outlives a task that
        # is cancelled, and its loop cannot be closed before it returns.
        while not transfer.done():
            await loop.run_in_executor(None, transfer._wait, _STEP_SECONDS)


def _waker_of(loop: asyncio.AbstractEventLoop) -> Waker:
    with _lock:
        entry = _wakers.get(loop)
        if entry is not None:
            return entry[0]
        closed = [_wakers.pop(other)[1] for other in list(_wakers) if other.is_closed()]
    # Outside the lock: releasing takes it.
    for finalize in closed:
        finalize()
    waker = Waker(loop)
    finalize = weakref.finalize(loop, waker.release)
    # The end of the process closes descriptors by itself, also that of a forked child, where transfers cannot be used.
    finalize.atexit = False
    with _lock:
        _wakers[loop] = (waker, finalize)
    return waker
