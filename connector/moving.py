# SPDX-License-Identifier: Apache-2.0
"""What loads and saves have in common: chunks that threads move in the background, each job within its time."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, Literal, TypeVar

from moonpool.connector.ordering import AT_ONCE, Mark
from moonpool.errors import MoonpoolError
from moonpool.store_client import MasterUnavailableError

if TYPE_CHECKING:
    from moonpool.connector.counting import Counts
    from moonpool.connector.pool import PoolLink

__all__ = ["Crew", "Moving", "Pool", "window_chunks"]

_log = logging.getLogger("moonpool.connector")
#: What goes together: so little that a cancelled load ends soon, so much that calls cost nothing beside it.
_WINDOW_BYTES: Final = 32 << 20
_SEVERAL: Final = {"load": "loads", "save": "saves", "prefetch": "prefetches"}
#: Until the threads have noticed that the client is closed.
_CLOSE_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Pool:
    """Which chunks of which pool a worker moves.

    Attributes:
        link: the way to it.
        namespace: of the chunks.
        shard: the part of each that this worker has.
        shards: how many parts there are.
    """

    link: PoolLink
    namespace: str
    shard: int
    shards: int


def window_chunks(chunk_bytes: int) -> int:
    """Return how many chunks go together at most."""
    return max(1, _WINDOW_BYTES // chunk_bytes)


class _State(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


@dataclass(eq=False, slots=True, kw_only=True)
class Moving:
    """A job of a crew, from when the worker hears of it. It belongs to the crew until it has ended.

    Attributes:
        until: when its time is over, of `time.monotonic`.
        began: when the worker heard of it.
        cancelled: nobody needs it any more.
        started: when a thread took it up; 0: none has.
        seconds: how long that took.
        mark: work of the device that has to have ended before its blocks are touched.
        reason: what came of it, as it is counted.
        state: how far it is. While it is running, its blocks are written or read.
    """

    until: float
    began: float = field(default_factory=time.monotonic)
    cancelled: bool = False
    started: float = 0.0
    seconds: float = 0.0
    mark: Mark = AT_ONCE
    reason: str = ""
    state: _State = _State.WAITING

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state is _State.ENDED


T = TypeVar("T", bound=Moving)


class Crew(Generic[T]):
    """Threads that carry out jobs, in the order in which they came.

    A job that waits ends when its time is over. One that runs ends with the call of the client that it is in, which
    has what was left of that time as its timeout and returns when nothing touches the blocks any more.

    Methods are those of the worker's main thread. `close` ends the threads.
    """

    def __init__(self, kind: Literal["load", "save", "prefetch"], link: PoolLink, counts: Counts, threads: int) -> None:
        self._kind = kind
        self._link = link
        self._counts = counts
        self._changed = threading.Condition()
        self._queue: deque[T] = deque()
        self._open: dict[T, None] = {}
        self._ended: list[T] = []
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"moonpool-{kind}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, item: T, thread: int) -> str:
        """Carry out a job on a thread; return what came of it, as it is counted."""
        raise NotImplementedError

    def ended(self) -> list[T]:
        """Return jobs that have ended, each once."""
        if not self._open:
            return []
        now = time.monotonic()
        with self._changed:
            for item in self._open:
                if item.until <= now:
                    self._end_if_waiting(item, "late")
            ended, self._ended = self._ended, []
        for item in ended:
            del self._open[item]
        return ended

    def wait(self, items: Iterable[T]) -> None:
        """Wait until these have ended, which each does in its time."""
        with self._changed:
            for item in items:
                while item.state is not _State.ENDED:
                    left = item.until - time.monotonic()
                    if left <= 0 and self._end_if_waiting(item, "late"):
                        break
                    self._changed.wait(left if left > 0 else None)

    def finish(self, seconds: float) -> None:
        """Wait until all jobs have ended, but no longer than that."""
        until = time.monotonic() + seconds
        with self._changed:
            while any(not item.is_over for item in self._open) and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)

    def oldest(self, now: float) -> float:
        """Return how long ago the oldest job that has not ended began; 0: there is none."""
        return now - min((item.began for item in self._open), default=now)

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        """End all jobs, and the threads. The client is closed already, so that none of them waits for it."""
        with self._changed:
            self._closing = True
            for item in self._open:
                self._end_if_waiting(item, "cancelled")
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)
            if thread.is_alive():
                _log.error("moonpool: the thread %s does not end", thread.name)

    # ---------------------------------------------------------------- with the lock

    def _begin(self, item: T) -> None:
        self._open[item] = None
        self._queue.append(item)
        self._changed.notify()

    def _refuse(self, item: T, reason: str) -> None:
        self._open[item] = None
        self._end(item, reason)

    def _end_if_waiting(self, item: T, reason: str) -> bool:
        if item.state is not _State.WAITING:
            return False
        self._end(item, reason)
        return True

    def _end(self, item: T, reason: str) -> None:
        now = time.monotonic()
        item.state, item.reason = _State.ENDED, reason
        item.seconds = now - item.started if item.started else 0.0
        self._ended.append(item)
        self._counts.add(**{f"{_SEVERAL[self._kind]}_{reason}": 1})
        self._counts.observe(f"{self._kind}_seconds", now - item.began)
        self._changed.notify_all()

    # ---------------------------------------------------------------- on the threads

    def _work(self, thread: int) -> None:
        while (item := self._next()) is not None:
            try:
                reason = self._run(item, thread)
            except MoonpoolError as error:
                if isinstance(error, MasterUnavailableError):
                    self._link.failed(error)
                self._counts.complain(f"a {self._kind} has failed", error)
                reason = "failed"
            except Exception:  # noqa: BLE001 - it is logged, and must not keep the blocks for ever
                _log.exception("moonpool: a %s has failed, by a fault of the connector", self._kind)
                reason = "failed"
            with self._changed:
                self._end(item, reason)

    def _next(self) -> T | None:
        with self._changed:
            while not self._closing:
                if not self._queue:
                    self._changed.wait()
                    continue
                item = self._queue.popleft()
                if item.state is _State.WAITING:
                    item.state, item.started = _State.RUNNING, time.monotonic()
                    return item
            return None
