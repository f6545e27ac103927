# SPDX-License-Identifier: Apache-2.0
"""Which chunks are fetched into the host memory of the workers before a request gets any blocks."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

from moonpool.connector.keys import Keys
from moonpool.connector.metadata import FetchJob
from moonpool.connector.tracked import Tracked

__all__ = ["Fetches", "Fetching"]


@dataclass(slots=True)
class Fetching:
    """A fetch, until a load takes its chunks or it is dropped.

    Attributes:
        fetch_id: of it, never used again.
        first: chunk of the request that is the first.
        chunks: how many are fetched.
        good: how many chunks all workers have that have said so yet.
        workers: how many have not said that it has ended.
        until: when the request stops waiting for it.
    """

    fetch_id: int
    first: int
    chunks: int
    good: int
    workers: int
    until: float

    @property
    def end(self) -> int:
        """The chunk after those that are there."""
        return self.first + self.good


class Fetches:
    """Plans fetches, and remembers what came of them.

    Args:
        keys: of chunks.
        workers: how many have to have each chunk.
    """

    def __init__(self, keys: Keys, workers: int) -> None:
        self._keys = keys
        self._workers = workers
        self._ids = itertools.count(1)
        self._open: dict[int, Fetching] = {}
        self._jobs: list[FetchJob] = []
        self._dropped: list[int] = []

    @property
    def untold(self) -> bool:
        """Whether workers hold chunks for nobody, and have not been told."""
        return bool(self._dropped)

    def begin(self, tracked: Tracked, first: int, last: int, timeout: float) -> int:
        """Fetch chunks of a request, for as long as it is worth it; return the number of the fetch."""
        request, fetch_id = tracked.request, next(self._ids)
        fetching = Fetching(fetch_id, first, last - first, last - first, self._workers, time.monotonic() + timeout)
        tracked.fetch = self._open[fetch_id] = fetching
        hashes = b"".join(self._keys.some(request, first, last))
        self._jobs.append(FetchJob(fetch_id, request.request_id, hashes, timeout))
        return fetch_id

    def fetched(self, fetch_id: int, workers: int, chunks: int) -> None:
        """A fetch has ended on some workers, which all have so many of its chunks."""
        fetching = self._open.get(fetch_id)
        if fetching is not None:  # else it was dropped meanwhile
            fetching.workers -= workers
            fetching.good = min(fetching.good, chunks)

    def take(self, tracked: Tracked) -> int:
        """A load takes what was fetched: return the fetch, which is none of the request any more."""
        fetching, tracked.fetch = tracked.fetch, None
        assert fetching is not None, "a load of what was not fetched"
        assert not fetching.workers, "a load of what is not there yet"
        del self._open[fetching.fetch_id]
        return fetching.fetch_id

    def drop(self, tracked: Tracked) -> None:
        """A request does not want what is fetched for it."""
        fetching, tracked.fetch = tracked.fetch, None
        if fetching is not None:
            del self._open[fetching.fetch_id]
            self._dropped.append(fetching.fetch_id)

    def told(self) -> tuple[list[FetchJob], list[int]]:
        """Return what is to be told to the workers: fetches, and those that were dropped."""
        told = self._jobs, self._dropped
        self._jobs, self._dropped = [], []
        return told
