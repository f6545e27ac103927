# SPDX-License-Identifier: Apache-2.0
"""Saves: chunks go into the pool straight from blocks that nobody changes meanwhile.

What is in the pool already is not moved.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moonpool.connector.moving import Crew, Moving, Pool, window_chunks
from moonpool.store_client import Outcome
from moonpool.store_client.packing import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moonpool.connector.counting import Counts
    from moonpool.connector.jobs import SaveJob
    from moonpool.connector.layout import PagedCache
    from moonpool.store_client import Results

__all__ = ["Save", "Saves"]


@dataclass(eq=False, slots=True, kw_only=True)
class Save(Moving):
    """A save under way.

    Attributes:
        job: what is to be saved.
        saved: whether all of it is in the pool.
    """

    job: SaveJob
    saved: bool = False


class Saves(Crew[Save]):
    """The saves of one worker.

    Args:
        pool: where the chunks go.
        cache: where they are.
        counts: of this worker.
        threads: how many saves run at the same time.
        timeout: seconds that a save may take from when the worker hears of it.
        waiting_max: saves that may wait. What is beyond that ends at once.
    """

    def __init__(
        self, pool: Pool, cache: PagedCache, counts: Counts, *, threads: int, timeout: float, waiting_max: int
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._chunks = window_chunks(cache.chunk_bytes)
        self._timeout = timeout
        self._waiting_max = waiting_max
        super().__init__("save", pool.link, counts, threads)

    def begin(self, jobs: Iterable[SaveJob]) -> None:
        """Begin saves. What is too many, or cannot go anywhere, ends at once."""
        now, away, mark = time.monotonic(), self._pool.link.client is None, self._cache.mark()
        with self._changed:
            for job in jobs:
                save = Save(job=job, began=now, until=now + self._timeout, mark=mark)
                if away:
                    self._refuse(save, "away")
                elif len(self._queue) >= self._waiting_max:
                    self._refuse(save, "dropped")
                else:
                    self._begin(save)

    # ---------------------------------------------------------------- on the threads

    def _run(self, item: Save, thread: int) -> str:
        """Save some chunks after the other."""
        job = item.job
        cache = self._cache.of(job.tail_blocks)
        client, left = self._pool.link.client, item.until - time.monotonic()
        if client is None or left <= 0:
            return "away" if client is None else "late"
        missing = np.flatnonzero(~client.exists(self._pool.namespace, job.hashes, timeout=left))
        self._pool.link.answered()
        if not item.mark.reached(item.until):
            return "late"
        table = cache.table(job.block_ids)
        hashes = np.frombuffer(job.hashes, dtype=np.uint8).reshape(-1, HASH_BYTES)
        parents = np.frombuffer(job.parent + job.hashes[:-HASH_BYTES], dtype=np.uint8).reshape(-1, HASH_BYTES)
        for begin in range(0, len(missing), self._chunks):
            some = missing[begin : begin + self._chunks]
            if (left := item.until - time.monotonic()) <= 0:
                return "late"
            results = client.put(
                self._pool.namespace,
                hashes[some].tobytes(),
                cache.values(table[some]),
                parents=parents[some].tobytes(),
                shard=self._pool.shard,
                shards=self._pool.shards,
                timeout=left,
            )
            if not self._all_there(results, cache):
                return "failed"
        item.saved = True
        return "ok" if len(missing) else "already"

    def _all_there(self, results: Results, cache: PagedCache) -> bool:
        put = results.count(Outcome.OK)
        self._counts.add(save_chunks=put, save_bytes=put * cache.chunk_bytes)
        if results.ok:
            return True
        self._counts.complain("a chunk was not saved", results.errors[min(results.errors)])
        return False
