# SPDX-License-Identifier: Apache-2.0
"""Saves: blocks that nobody changes are copied into staging memory, and from there into the pool.

What is in the pool already is not moved. A save ends at the latest when its time is over, but never while one of its
blocks is being read.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moonpool.connector.moving import window_chunks
from moonpool.errors import MoonpoolError
from moonpool.store_client import MasterUnavailableError, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from moonpool.connector.counting import Counts
    from moonpool.connector.jobs import SaveJob
    from moonpool.connector.layout import PagedCache
    from moonpool.connector.moving import Area, Pool
    from moonpool.store_client import Results

__all__ = ["Save", "Saves"]

_log = logging.getLogger("moonpool.connector")
_HASH_BYTES: Final = 32
#: Until the threads have noticed that the client is closed.
_CLOSE_SECONDS: Final = 5.0


class _State(enum.Enum):
    WAITING = enum.auto()  # in the queue, or for the pool to take what was copied
    READING = enum.auto()  # from its blocks
    ENDED = enum.auto()


@dataclass(eq=False, slots=True)
class Save:
    """A save, from when the worker hears of it. It belongs to `Saves` until it has ended.

    Attributes:
        job: what is to be saved.
        began: when the worker heard of it.
        saved: whether all of it is in the pool.
        state: how far it is.
    """

    job: SaveJob
    began: float
    saved: bool = False
    state: _State = _State.WAITING


class Saves:
    """The saves of one worker, carried out by a thread for each staging area. `close` ends the threads.

    Methods are those of the worker's main thread, and return at once.
    """

    def __init__(
        self, pool: Pool, cache: PagedCache, areas: Sequence[Area], counts: Counts, *, timeout: float, waiting_max: int
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._counts = counts
        self._chunks = window_chunks(cache.chunk_bytes)
        self._timeout = timeout
        self._waiting_max = waiting_max
        self._changed = threading.Condition()
        self._queue: deque[Save] = deque()
        self._ended: list[Save] = []
        self._open: dict[int, Save] = {}
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, args=(area,), name=f"moonpool-save-{number}", daemon=True)
            for number, area in enumerate(areas)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, jobs: Iterable[SaveJob]) -> None:
        """Begin saves. What is too many, or cannot go anywhere, ends at once."""
        now, away = time.monotonic(), self._pool.link.client is None
        with self._changed:
            for job in jobs:
                save = self._open[job.job_id] = Save(job, now)
                if away:
                    self._end(save, "away")
                elif len(self._queue) >= self._waiting_max:
                    self._end(save, "dropped")
                else:
                    self._queue.append(save)
            self._changed.notify_all()

    def ended(self) -> list[Save]:
        """Return saves that have ended, each once."""
        if not self._open:
            return []
        late = time.monotonic() - self._timeout
        with self._changed:
            for save in self._open.values():
                if save.began > late:
                    break  # they are in the order in which they began
                self._end_unless_reading(save, "late")
            ended, self._ended = self._ended, []
            for save in ended:
                del self._open[save.job.job_id]
        return ended

    def oldest(self, now: float) -> float:
        """Return how long ago the oldest save that is under way began; 0: there is none."""
        return now - min((save.began for save in self._open.values()), default=now)

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        """End all saves, and the threads. The client is closed already, so that none of them waits for it."""
        with self._changed:
            self._closing = True
            for save in self._open.values():
                self._end_unless_reading(save, "dropped")
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)
            if thread.is_alive():
                _log.error("moonpool: %s does not end", thread.name)

    # ---------------------------------------------------------------- on the threads

    def _work(self, area: Area) -> None:
        while (save := self._next()) is not None:
            try:
                reason = self._run(save, area)
            except MoonpoolError as error:
                if isinstance(error, MasterUnavailableError):
                    self._pool.link.failed(error)
                self._counts.complain("a save has failed", error)
                reason = "failed"
            except Exception:  # noqa: BLE001 - it is logged, and must not keep the blocks for ever
                _log.exception("moonpool: a save of request %s has failed", save.job.request_id)
                reason = "failed"
            with self._changed:
                self._end(save, reason)

    def _next(self) -> Save | None:
        with self._changed:
            while True:
                if self._closing:
                    return None
                if self._queue:
                    save = self._queue.popleft()
                    if save.state is not _State.ENDED:
                        return save
                else:
                    self._changed.wait()

    def _run(self, save: Save, area: Area) -> str:
        """Save chunk after chunk; return why it ended."""
        job, until = save.job, save.began + self._timeout
        client, left = self._pool.link.client, until - time.monotonic()
        if client is None or left <= 0:
            return "away" if client is None else "late"
        missing = np.flatnonzero(~client.exists(self._pool.namespace, job.hashes, timeout=left))
        self._pool.link.answered()
        if not len(missing):
            return "already"
        table = self._cache.table(job.block_ids)
        hashes = np.frombuffer(job.hashes, dtype=np.uint8).reshape(-1, _HASH_BYTES)
        parents = np.frombuffer(job.parent + job.hashes[:-_HASH_BYTES], dtype=np.uint8).reshape(-1, _HASH_BYTES)
        straight = self._cache.straight
        step = self._chunks if straight else len(area.offsets)
        for begin in range(0, len(missing), step):
            some = missing[begin : begin + step]
            if not self._begin_reading(save):
                return "late"  # it has ended meanwhile
            places: Any
            if straight:
                places = self._cache.spans(table[some])
            else:
                places = area.region, area.offsets[: len(some)], self._cache.chunk_bytes
                self._cache.gather(table[some], area.region, area.offsets[: len(some)])
                self._end_reading(save)
            if (left := until - time.monotonic()) <= 0:
                return "late"
            results = client.put(
                self._pool.namespace,
                hashes[some].tobytes(),
                places,
                parents=parents[some].tobytes(),
                shard=self._pool.shard,
                shards=self._pool.shards,
                timeout=left,
            )
            if straight:
                self._end_reading(save)
            if not self._all_there(results):
                return "failed"
        return "ok"

    def _all_there(self, results: Results) -> bool:
        put = results.count(Outcome.OK)
        way = "save_straight_bytes" if self._cache.straight else "save_staged_bytes"
        self._counts.add(save_chunks=put, **{way: put * self._cache.chunk_bytes})
        if results.ok:
            return True
        self._counts.complain("a chunk was not saved", results.errors[min(results.errors)])
        return False

    def _begin_reading(self, save: Save) -> bool:
        with self._changed:
            if save.state is _State.ENDED:
                return False
            save.state = _State.READING
            return True

    def _end_reading(self, save: Save) -> None:
        with self._changed:
            save.state = _State.WAITING

    # ---------------------------------------------------------------- with the lock

    def _end_unless_reading(self, save: Save, reason: str) -> None:
        if save.state is not _State.READING:
            self._end(save, reason)

    def _end(self, save: Save, reason: str) -> None:
        if save.state is _State.ENDED:
            return
        save.state = _State.ENDED
        save.saved = reason in ("ok", "already")
        self._ended.append(save)
        self._counts.add(**{f"saves_{reason}": 1})
        self._counts.observe("save_seconds", time.monotonic() - save.began)
