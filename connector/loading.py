# SPDX-License-Identifier: Apache-2.0
"""Loads: chunks come from the pool into staging memory, and from there into blocks that a request waits for.

A load ends at the latest when its time is over, with the chunks that are there by then. It never ends while one of its
blocks is being written: a thread that comes back too late finds its load ended, and leaves the blocks alone.
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
    from moonpool.connector.jobs import LoadJob
    from moonpool.connector.layout import Int64s, PagedCache
    from moonpool.connector.moving import Area, Pool
    from moonpool.store_client import GetResults

__all__ = ["Load", "Loads"]

_log = logging.getLogger("moonpool.connector")
_HASH_BYTES: Final = 32
# numpy takes an enumeration for an object to be asked about itself, at every use.
_OK: Final = int(Outcome.OK)
_CHUNKS: Final = {int(Outcome.MISS): "load_chunks_missed", int(Outcome.CORRUPT): "load_chunks_corrupt"}
#: Until the threads have noticed that the client is closed.
_CLOSE_SECONDS: Final = 5.0


class _State(enum.Enum):
    WAITING = enum.auto()  # in the queue, or for bytes that go to the staging area
    WRITING = enum.auto()  # into its blocks
    ENDED = enum.auto()


@dataclass(eq=False, slots=True)
class Load:
    """A load, from when the worker hears of it. It belongs to `Loads` until it has ended.

    Attributes:
        job: what is to be loaded.
        chunk_blocks: of a whole chunk.
        began: when the worker heard of it.
        good: chunks that are in the cache, counted from the first one.
        cancelled: nobody needs it any more.
        state: how far it is.
    """

    job: LoadJob
    chunk_blocks: int
    began: float
    good: int = 0
    cancelled: bool = False
    state: _State = _State.WAITING

    @property
    def until(self) -> float:
        """When its time is over."""
        return self.began + self.job.timeout

    @property
    def chunks(self) -> int:
        """How many chunks it is of."""
        return len(self.job.hashes) // _HASH_BYTES

    @property
    def failed_blocks(self) -> list[int]:
        """The blocks that have not come."""
        return self.job.block_ids[max(0, self.good * self.chunk_blocks - self.job.begin_block) :]


class Loads:
    """The loads of one worker, carried out by a thread for each staging area. `close` ends the threads.

    Methods are those of the worker's main thread.
    """

    def __init__(self, pool: Pool, cache: PagedCache, areas: Sequence[Area], counts: Counts) -> None:
        self._pool = pool
        self._cache = cache
        self._counts = counts
        self._chunks = window_chunks(cache.chunk_bytes)
        self._changed = threading.Condition()
        self._queue: deque[Load] = deque()
        self._ended: list[Load] = []
        self._open: dict[str, Load] = {}
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, args=(area,), name=f"moonpool-load-{number}", daemon=True)
            for number, area in enumerate(areas)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, jobs: Iterable[LoadJob]) -> list[Load]:
        """Begin loads."""
        now = time.monotonic()
        loads = [Load(job, self._cache.chunk_blocks, now) for job in jobs]
        with self._changed:
            for load in loads:
                self._open[load.job.request_id] = load
                self._queue.append(load)
            self._changed.notify(len(loads))
        return loads

    def cancel(self, request_ids: Iterable[str]) -> None:
        """These need what they load no more. Each still ends, as soon as its blocks are quiet."""
        with self._changed:
            for request_id in request_ids:
                load = self._open.get(request_id)
                if load is not None:
                    load.cancelled = True
                    self._end_unless_writing(load, "cancelled")

    def ended(self) -> list[Load]:
        """Return loads that have ended, each once."""
        if not self._open:
            return []
        now = time.monotonic()
        with self._changed:
            for load in self._open.values():
                if load.until <= now:
                    self._end_unless_writing(load, "late")
            ended, self._ended = self._ended, []
            for load in ended:
                del self._open[load.job.request_id]
        return ended

    def wait(self, loads: Iterable[Load]) -> None:
        """Wait until these have ended, which each does in its time."""
        with self._changed:
            for load in loads:
                while load.state is not _State.ENDED:
                    left = load.until - time.monotonic()
                    if left <= 0 and self._end_unless_writing(load, "late"):
                        break
                    # What is being written is a copy in memory, which ends by itself.
                    self._changed.wait(left if left > 0 else None)

    def oldest(self, now: float) -> float:
        """Return how long ago the oldest load that is under way began; 0: there is none."""
        return now - min((load.began for load in self._open.values()), default=now)

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        """End all loads, and the threads. The client is closed already, so that none of them waits for it."""
        with self._changed:
            self._closing = True
            for load in self._open.values():
                self._end_unless_writing(load, "cancelled")
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)
            if thread.is_alive():
                _log.error("moonpool: %s does not end", thread.name)

    # ---------------------------------------------------------------- on the threads

    def _work(self, area: Area) -> None:
        while (load := self._next()) is not None:
            try:
                reason = self._run(load, area)
            except MoonpoolError as error:
                if isinstance(error, MasterUnavailableError):
                    self._pool.link.failed(error)
                self._counts.complain("a load has failed and is computed", error)
                reason = "failed"
            except Exception:  # noqa: BLE001 - it is logged, and the request waiting for ever
                _log.exception("moonpool: the load of request %s has failed and is computed", load.job.request_id)
                reason = "failed"
            with self._changed:
                self._end(load, reason)

    def _next(self) -> Load | None:
        with self._changed:
            while True:
                if self._closing:
                    return None
                if self._queue:
                    load = self._queue.popleft()
                    if load.state is not _State.ENDED:
                        return load
                else:
                    self._changed.wait()

    def _run(self, load: Load, area: Area) -> str:
        """Load chunk after chunk; return why it ended."""
        table = self._cache.table(load.job.block_ids, load.job.begin_block)
        assert len(table) == load.chunks, "the plan has other blocks than chunks"
        while load.good < load.chunks:
            client, left = self._pool.link.client, load.until - time.monotonic()
            if load.cancelled or left <= 0:
                return "cancelled" if load.cancelled else "late"
            if client is None:
                return "away"
            rows = self._window(table[load.good :], area)
            straight = self._cache.straight
            staged = np.flatnonzero((rows < 0).any(axis=1)) if straight else np.arange(len(rows))
            offsets = area.offsets[: len(staged)]
            hashes = load.job.hashes[load.good * _HASH_BYTES : (load.good + len(rows)) * _HASH_BYTES]
            places: Any = area.region, offsets, self._cache.chunk_bytes
            if straight:
                places = self._cache.spans(rows, staged, area.region, offsets)
            if straight and not self._begin_writing(load):
                continue
            got = client.get_into(self._pool.namespace, hashes, places, shard=self._pool.shard, timeout=left)
            self._pool.link.answered()
            good = self._good(got)
            if not straight and not self._begin_writing(load):
                continue
            came = staged[staged < good]
            self._cache.scatter(rows[came], area.region, offsets[: len(came)])
            with self._changed:
                load.state, load.good = _State.WAITING, load.good + good
            self._count(good, len(came))
            if good < len(rows):
                return "missing"
        return "ok"

    def _window(self, table: Int64s, area: Area) -> Int64s:
        """Return the first chunks that go together: those with blocks left out always pass through the area."""
        staged = np.cumsum((table < 0).any(axis=1)) if self._cache.straight else np.arange(1, len(table) + 1)
        return table[: min(self._chunks, int(np.searchsorted(staged, len(area.offsets), side="right")))]

    def _count(self, chunks: int, staged: int) -> None:
        size = self._cache.chunk_bytes
        self._counts.add(load_chunks=chunks)
        for name, some in (("load_straight_bytes", chunks - staged), ("load_staged_bytes", staged)):
            if some:
                self._counts.add(**{name: some * size})

    def _good(self, got: GetResults) -> int:
        """Return how many of the first chunks have come, whole and of the right length."""
        outcomes = np.frombuffer(got.outcomes, dtype=np.uint8)
        bad = (outcomes != _OK) | (np.array(got.lengths) != self._cache.chunk_bytes)
        if not bad.any():
            return len(got)
        first = int(bad.argmax())
        self._counts.add(**{_CHUNKS.get(int(outcomes[first]), "load_chunks_failed"): 1})
        if first in got.errors:
            self._counts.complain("a chunk cannot be had and is computed", got.errors[first])
        return first

    def _begin_writing(self, load: Load) -> bool:
        with self._changed:
            if load.state is _State.ENDED:
                return False
            if load.cancelled or load.until <= time.monotonic():
                return False
            load.state = _State.WRITING
            return True

    # ---------------------------------------------------------------- with the lock

    def _end_unless_writing(self, load: Load, reason: str) -> bool:
        if load.state is _State.WRITING:
            return False
        self._end(load, reason)
        return True

    def _end(self, load: Load, reason: str) -> None:
        if load.state is _State.ENDED:
            return
        load.state = _State.ENDED
        self._ended.append(load)
        self._counts.add(**{f"loads_{reason}": 1})
        if 0 < load.good < load.chunks:
            self._counts.add(loads_partial=1)
        self._counts.observe("load_seconds", time.monotonic() - load.began)
        self._changed.notify_all()
