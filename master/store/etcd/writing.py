# SPDX-License-Identifier: Apache-2.0
"""Changes on their way into etcd: as many in one transaction as wait, and several transactions under way at once.

Two transactions that are under way at once never have a key in common, and only records of chunks go that way; whatever
else is changed waits until all before it is done, and all after it waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

from moonpool.errors import MoonpoolError
from moonpool.master.errors import StoreLostError, StoreUnavailableError
from moonpool.master.store.etcd.calls import RefusedError
from moonpool.master.store.etcd.owner import Change, Owner

__all__ = ["Writing"]

_log = logging.getLogger("moonpool.master")
# What etcd takes in one transaction by default (--max-txn-ops), and far below what it takes in bytes (1.5 MiB).
_OPERATIONS_MAX: Final = 128
_BYTES_MAX: Final = 512 << 10
# More of them gain nothing: etcd writes its log for one group of them after the other.
_LANES: Final = 4
# Beyond this callers are refused: etcd does not keep up, and memory is no place to hide that.
_WAITING_MAX: Final = 65_536
# What has not been sent is refused when etcd has answered nothing for so many seconds. Nothing of it has happened.
_PATIENCE: Final = 5.0
_TICK: Final = 0.25
# What is refused for want of space may be asked for again so much later.
_FULL_RETRY: Final = 1.0


class _Asked:
    """One change that somebody waits for."""

    __slots__ = (
        "alone",
        "applied",
        "asked",
        "changes",
        "deletes",
        "done",
        "failure",
        "keys",
        "place",
        "puts",
        "under_way",
    )

    def __init__(self, changes: Sequence[Change], alone: bool) -> None:
        self.changes = changes
        self.alone = alone
        self.puts = sum(value is not None for _, value in changes)
        self.deletes = len(changes) - self.puts
        self.keys: set[bytes] | None = None
        self.asked = time.monotonic()
        #: Changes before it have been sent.
        self.place = 0
        #: Whether a part of it is under way: one after the other, so that a first one that is refused ends it.
        self.under_way = False
        #: Whether a part of it is durable.
        self.applied = False
        self.failure: MoonpoolError | None = None
        self.done: Future[None] = Future()
        # It cannot be cancelled: whoever waited may be gone, but the change is carried out.
        self.done.set_running_or_notify_cancel()

    @property
    def sent(self) -> bool:
        """Whether all of it was sent."""
        return self.place == len(self.changes)

    def has_a_key_of(self, large: _Asked) -> bool:
        """Whether both change the same key. The keys of `large` are looked at once, however often this is asked."""
        if large.keys is None:
            large.keys = {key for key, _ in large.changes}
        return not large.keys.isdisjoint(key for key, _ in self.changes)


class Writing:
    """Carries out changes. `submit`, `stats` and `stop_taking` are thread-safe, the rest is for the event loop.

    Args:
        owner: carries out one transaction.
        loop: the event loop.
        full: called when etcd has no space.
    """

    def __init__(self, owner: Owner, loop: asyncio.AbstractEventLoop, full: asyncio.Event) -> None:
        self._owner = owner
        self._loop = loop
        self._full = full
        self._full_until = 0.0
        self._lock = threading.Lock()
        self._incoming: deque[_Asked] = deque()
        self._woken = False
        self._closed = False
        self._waiting = 0
        self._counts = {"writes": 0, "deletes": 0, "transactions": 0, "failures": 0}
        # From here on: the event loop's.
        self._pending: deque[_Asked] = deque()
        self._busy: set[bytes] = set()
        self._lanes: set[asyncio.Task[None]] = set()
        #: What is under way is not to be joined by anything.
        self._alone = False
        self._answered = 0.0

    # ---------------------------------------------------------------- any thread

    def submit(self, changes: Sequence[Change], *, alone: bool = False) -> Future[None]:
        """Queue a change of distinct keys; it is durable when the future is done.

        Args:
            changes: puts, and deletes.
            alone: it waits for all before it, and all after it waits for it. Else it may be carried out in parts.
        """
        asked = _Asked(changes, alone)
        with self._lock:
            refusal = self._refusal(asked)
            if refusal is None:
                self._waiting += 1
                self._incoming.append(asked)
                wake, self._woken = not self._woken, True
            else:
                self._counts["failures"] += 1
        if refusal is not None:
            asked.done.set_exception(refusal)
        elif wake:
            self._loop.call_soon_threadsafe(self._take)
        return asked.done

    def _refusal(self, asked: _Asked) -> StoreUnavailableError | None:
        if self._owner.lost is not None:
            return self._owner.lost
        if self._closed or self._waiting >= _WAITING_MAX:
            cause = "it is closed" if self._closed else f"{_WAITING_MAX} changes wait already"
            return StoreUnavailableError("the metadata store takes no more", cause=cause, retryable=not self._closed)
        if asked.puts and time.monotonic() < self._full_until:
            return _no_space()
        return None

    def stats(self) -> dict[str, int]:
        """Return counters."""
        with self._lock:
            return {**self._counts, "waiting": self._waiting}

    def stop_taking(self) -> None:
        """Refuse every change from now on."""
        with self._lock:
            self._closed = True

    # ---------------------------------------------------------------- the event loop

    def _take(self) -> None:
        with self._lock:
            self._woken = False
            self._pending.extend(self._incoming)
            self._incoming.clear()
        self._pump()

    async def watch(self) -> None:
        """Refuse what waits for too long, for ever."""
        while True:
            await asyncio.sleep(_TICK)
            self._refuse_if_silent()

    def _refuse_if_silent(self) -> None:
        before = time.monotonic() - _PATIENCE
        if self._answered < before:
            self._refuse(before, None)

    def _refuse(self, before: float, lost: StoreLostError | None) -> None:
        """Refuse what was asked for before a time and has not been begun. With `lost`: also what was begun."""
        kept: deque[_Asked] = deque()
        while self._pending:
            asked = self._pending.popleft()
            if lost is not None:
                asked.failure = asked.failure or lost
                asked.place = len(asked.changes)
                self._settle(asked)
            elif asked.place or asked.asked > before:
                kept.append(asked)
            else:
                asked.failure = _unavailable("etcd did not take it in time", f"it waited for {_PATIENCE:g} s")
                asked.place = len(asked.changes)
                self._settle(asked)
        self._pending = kept

    def _pump(self) -> None:
        """Send what may be sent."""
        while len(self._lanes) < _LANES and not self._alone and (group := self._group()):
            parts, batch = group
            self._alone = parts[0].alone
            self._busy.update(batch)
            task = self._loop.create_task(self._carry_out(parts, batch))
            self._lanes.add(task)
            task.add_done_callback(self._ended)

    def _group(self) -> tuple[list[_Asked], dict[bytes, bytes | None]] | None:
        """Take from what waits, in its order, what goes into one transaction."""
        parts: list[_Asked] = []
        batch: dict[bytes, bytes | None] = {}
        overtaken: list[_Asked] = []
        room = _BYTES_MAX
        while self._pending and len(batch) < _OPERATIONS_MAX and room > 0:
            asked = self._pending[0]
            if asked.under_way:
                # One that is large is sent in parts, and whatever has other keys need not wait for all of them.
                overtaken.append(self._pending.popleft())
                continue
            # Deletes make room, so they are not to be refused with puts where there is none.
            other = bool(parts) and bool(parts[0].puts) != bool(asked.puts)
            alone = asked.alone and bool(parts or overtaken or self._lanes)
            if other or alone or any(asked.has_a_key_of(one) for one in overtaken):
                break
            before = asked.place
            room = self._take_part(asked, batch, room)
            if asked.place > before or not asked.changes:
                asked.under_way = True
                parts.append(asked)
            if not asked.sent:
                break
            self._pending.popleft()
            if asked.alone:
                break
        self._pending.extendleft(reversed(overtaken))
        return (parts, batch) if parts else None

    def _take_part(self, asked: _Asked, batch: dict[bytes, bytes | None], room: int) -> int:
        """Take as much of a change into a transaction as it may have. Returns the bytes that are left."""
        while not asked.sent and len(batch) < _OPERATIONS_MAX and room > 0:
            key, value = asked.changes[asked.place]
            if key in self._busy:
                break
            # Of two changes of one key in one transaction the later one is what comes of both.
            batch[key] = value
            room -= len(value) if value is not None else 0
            asked.place += 1
        return room

    async def _carry_out(self, parts: list[_Asked], batch: dict[bytes, bytes | None]) -> None:
        failure: MoonpoolError | None = _unknown()
        try:
            failure = await self._change(parts, list(batch.items()))
        except Exception as error:  # noqa: BLE001  # a fault of this program: nobody can say what is durable
            failure = self._owner.give_up(error)
        finally:
            self._busy.difference_update(batch)
            self._alone = False
            if failure is None:
                self._answered = time.monotonic()
                with self._lock:
                    self._counts["transactions"] += 1
            for asked in parts:
                asked.under_way = False
                asked.applied = asked.applied or failure is None
                asked.failure = failure
                if failure is not None and not asked.sent:
                    # Nothing more of it is sent.
                    asked.place = len(asked.changes)
                    self._pending.remove(asked)
                self._settle(asked)

    def _ended(self, lane: asyncio.Task[None]) -> None:
        self._lanes.discard(lane)
        self._pump()

    async def _change(self, parts: list[_Asked], changes: list[Change]) -> MoonpoolError | None:
        """Carry out a transaction. Returns why it has changed nothing; None: it has."""
        try:
            while not await self._owner.change(changes):
                self._full_until = time.monotonic() + _FULL_RETRY
                self._full.set()
                if not any(asked.applied for asked in parts):
                    return _no_space()
                # Other parts of the same change are there already: it is carried out, whenever that is.
                await asyncio.sleep(_FULL_RETRY)
        except StoreLostError as error:
            self._refuse(0, error)
            return error
        except RefusedError as error:
            if any(asked.applied for asked in parts):
                # A part of a change is there and the rest never will be. Who starts again reads what is there.
                return self._owner.give_up(error)
            return _unavailable("etcd refuses a change", str(error))
        return None

    def _settle(self, asked: _Asked) -> None:
        if asked.done.done() or asked.under_way or not asked.sent:
            return
        failure = asked.failure
        with self._lock:
            self._waiting -= 1
            if failure is None:
                self._counts["writes"] += asked.puts
                self._counts["deletes"] += asked.deletes
            else:
                self._counts["failures"] += 1
        if failure is None:
            asked.done.set_result(None)
        else:
            asked.done.set_exception(failure)

    async def drain(self, seconds: float) -> None:
        """Carry out what waits, for so long, then give up the rest."""
        self._take()
        end = time.monotonic() + seconds
        while (self._lanes or self._pending) and time.monotonic() < end:
            if self._lanes:
                await asyncio.wait(self._lanes, timeout=_TICK)
            await asyncio.sleep(0)
        self._refuse(float("inf"), None)
        for lane in list(self._lanes):
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)
        self._refuse(0, _unknown())


def _unknown() -> StoreLostError:
    return StoreLostError("the store was closed before etcd answered", cause="what came of the change is not known")


def _no_space() -> StoreUnavailableError:
    error = _unavailable("etcd has no space", "its database is as large as --quota-backend-bytes lets it be")
    error.retry_after_ms = round(_FULL_RETRY * 1000)
    return error


def _unavailable(what: str, cause: str) -> StoreUnavailableError:
    return StoreUnavailableError(what, cause=cause, retryable=True, hint="see etcd and the log of the master")
