# SPDX-License-Identifier: Apache-2.0
"""One thread that writes to SQLite: all that waits goes into one transaction."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

from moonpool.master.errors import StoreUnavailableError

__all__ = ["Change", "WriteQueue"]

_log = logging.getLogger("moonpool.master")

Change = Callable[[sqlite3.Connection], object]
# Beyond this callers are refused: the disk does not keep up, and memory is no place to hide that.
_WAITING_MAX: Final = 65_536
# Changes of one transaction, so that the first one does not wait for ever.
_GROUP_MAX: Final = 1024


@dataclass
class _Waiting:
    change: Change
    writes: int = 0
    deletes: int = 0
    done: Future[Any] = field(default_factory=Future)
    #: A query: run apart from any transaction, its result is the future's.
    query: bool = False

    def __post_init__(self) -> None:
        # It cannot be cancelled: whoever waited may be gone, but the change is carried out.
        self.done.set_running_or_notify_cancel()


class WriteQueue:
    """Runs changes on a thread of its own, in order, as many in one transaction as wait. Thread-safe.

    Args:
        database: used by nobody else from now on.
        see: raises when what was committed is in no file that a later start would find.
        translate: makes the error that callers get out of SQLite's.
    """

    def __init__(
        self, database: sqlite3.Connection, see: Callable[[], None], translate: Callable[[Exception], Exception]
    ) -> None:
        self._database = database
        self._see = see
        self._translate = translate
        self._waiting: deque[_Waiting] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._counts = {"writes": 0, "deletes": 0, "transactions": 0, "failures": 0}
        self._thread = threading.Thread(target=self._work, name="moonpool-store", daemon=True)
        self._thread.start()

    def submit(self, change: Change, writes: int = 0, deletes: int = 0) -> Future[None]:
        """Queue a change; it is durable when the future is done. Counted as so many rows."""
        return self._queue(_Waiting(change, writes, deletes))

    def read(self, query: str, values: tuple[Any, ...]) -> Future[list[Any]]:
        """Queue a query; the future's result are its rows."""
        return self._queue(_Waiting(lambda database: database.execute(query, values).fetchall(), query=True))

    def _queue(self, waiting: _Waiting) -> Future[Any]:
        with self._changed:
            if self._closed or len(self._waiting) >= _WAITING_MAX:
                self._counts["failures"] += 1
                cause = "it is closed" if self._closed else f"{_WAITING_MAX} changes wait already"
                waiting.done.set_exception(
                    StoreUnavailableError("the metadata store takes no more", cause=cause, retryable=not self._closed)
                )
            else:
                self._waiting.append(waiting)
                self._changed.notify()
        return waiting.done

    def stats(self) -> dict[str, int]:
        """Return counters."""
        with self._changed:
            return {**self._counts, "waiting": len(self._waiting)}

    def close(self) -> None:
        """Carry out what waits, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while group := self._take():
            if group[0].query:
                self._look_up(group[0])
            else:
                self._write(group)

    def _take(self) -> list[_Waiting]:
        """Wait for work. A query comes alone; nothing at all means the end."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            group: list[_Waiting] = []
            while self._waiting and len(group) < _GROUP_MAX and not (group and self._waiting[0].query):
                group.append(self._waiting.popleft())
                if group[-1].query:
                    break
            return group

    def _look_up(self, waiting: _Waiting) -> None:
        try:
            rows = waiting.change(self._database)
        except Exception as error:  # noqa: BLE001  # whatever it is, the caller gets it
            waiting.done.set_exception(error)
        else:
            waiting.done.set_result(rows)

    def _write(self, group: list[_Waiting]) -> None:
        try:
            self._transact(group)
        except Exception as error:  # noqa: BLE001  # whatever it is, the callers get it
            self._refuse(group, error)
            return
        with self._changed:
            self._counts["transactions"] += 1
            self._counts["writes"] += sum(waiting.writes for waiting in group)
            self._counts["deletes"] += sum(waiting.deletes for waiting in group)
        for waiting in group:
            waiting.done.set_result(None)

    def _transact(self, group: list[_Waiting]) -> None:
        self._see()  # also before: what was cut off is as long as before, once more is written
        self._database.execute("BEGIN IMMEDIATE")
        try:
            for waiting in group:
                waiting.change(self._database)
            self._database.execute("COMMIT")
            self._see()
        except BaseException:
            # SQLite has rolled back by itself after some errors, a full disk among them.
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    def _refuse(self, group: list[_Waiting], error: Exception) -> None:
        translated = self._translate(error)
        if not isinstance(translated, StoreUnavailableError):
            # A change that makes no sense is a fault of this program; the others in the group pay for it once.
            _log.error("a transaction of %d changes failed: %s", len(group), error)
        with self._changed:
            self._counts["failures"] += len(group)
        for waiting in group:
            waiting.done.set_exception(translated)
