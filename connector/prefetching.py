# SPDX-License-Identifier: Apache-2.0
"""Prefetches: chunks come from the pool into a buffer in host memory, and from there, at once, into the cache.

A request needs no blocks of the cache meanwhile. What is in the buffer was verified when it came.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from moonpool.connector.buffer import Buffer, Entry
from moonpool.connector.layout import SEAL_BYTES
from moonpool.connector.loading import Load, good_of
from moonpool.connector.moving import Crew, Moving, Pool, window_chunks
from moonpool.errors import ConfigError
from moonpool.store_client.packing import HASH_BYTES

if TYPE_CHECKING:
    from moonpool.connector.counting import Counts
    from moonpool.connector.jobs import FetchJob, LoadJob
    from moonpool.connector.layout import PagedCache
    from moonpool.store_client import StoreClient
    from moonpool.transfer_engine import TransferEngine

__all__ = ["Fetch", "Prefetches"]


@dataclass(eq=False, slots=True, kw_only=True)
class Fetch(Moving):
    """A fetch, until its chunks are taken or it is dropped.

    Attributes:
        job: what is fetched.
        entries: of its chunks in the buffer, from the first one on. They stay there for it.
        good: how many of these chunks are there, counted from the first one.
    """

    job: FetchJob
    entries: list[Entry] = field(default_factory=list)
    good: int = 0


class Prefetches(Crew[Fetch]):
    """The fetches of one worker, and the buffer that they go to.

    Args:
        engine: allocates the buffer.
        pool: where the chunks are.
        cache: where they go in the end.
        counts: of this worker.
        threads: how many fetches run at the same time.
        buffer_bytes: most memory of the buffer.

    Raises:
        ConfigError: that is less than one chunk.
    """

    def __init__(
        self, engine: TransferEngine, pool: Pool, cache: PagedCache, counts: Counts, *, threads: int, buffer_bytes: int
    ) -> None:
        slots = buffer_bytes // cache.chunk_bytes
        if not slots:
            raise ConfigError(
                f"prefetch_bytes is {buffer_bytes}, and a chunk of this model has {cache.chunk_bytes} bytes",
                hint="prefetch_bytes for the chunks of several requests, or fewer chunk_tokens",
            )
        self._pool = pool
        self._cache = cache
        self._chunks = window_chunks(cache.chunk_bytes)
        self._region = engine.allocate(slots * cache.chunk_bytes)
        self._buffer = Buffer(slots)
        self._fetches: dict[int, Fetch] = {}
        self._loaded: list[Load] = []
        super().__init__("prefetch", pool.link, counts, threads)

    @property
    def used(self) -> int:
        """How many chunks in the buffer requests wait for."""
        with self._changed:
            return self._buffer.used

    def begin(self, jobs: Iterable[FetchJob]) -> None:
        """Begin fetches."""
        now = time.monotonic()
        with self._changed:
            for job in jobs:
                fetch = self._fetches[job.fetch_id] = Fetch(job=job, began=now, until=now + job.timeout)
                self._begin(fetch)

    def drop(self, fetch_ids: Iterable[int]) -> None:
        """Nobody waits for these any more. What has come stays until there is need of its room."""
        with self._changed:
            for fetch_id in fetch_ids:
                fetch = self._fetches.pop(fetch_id)
                fetch.cancelled = True
                self._changed.notify_all()
                if fetch.is_over:
                    self._release(fetch)
                else:
                    self._end_if_waiting(fetch, "cancelled")

    def load(self, jobs: Sequence[LoadJob]) -> None:
        """Copy chunks that were fetched into the cache."""
        for job in jobs:
            load = Load(job=job, chunk_blocks=self._cache.chunk_blocks, until=time.monotonic() + job.timeout)
            fetch = self._fetches.pop(job.fetch_id)
            at = {entry.key: entry.slot for entry in fetch.entries[: fetch.good]}
            keys = (job.hashes[begin : begin + HASH_BYTES] for begin in range(0, len(job.hashes), HASH_BYTES))
            # Steps that run ahead would not notice it in time if something was missing, so the plan has to be right.
            slots = np.array([at[key] for key in keys], dtype=np.int64)
            table = self._cache.table(job.block_ids, job.begin_block)
            assert len(table) == load.chunks, "the plan has other blocks than chunks"
            if self._cache.mark().reached(load.until):
                self._cache.scatter(table, self._region, slots * self._cache.chunk_bytes)
                load.good = load.chunks
            with self._changed:
                self._release(fetch)
            self._loaded.append(load)
            self._counts.add(
                load_chunks=load.good,
                load_staged_bytes=load.good * self._cache.chunk_bytes,
                **{"loads_ok" if load.good else "loads_late": 1},
            )
            self._counts.observe("load_seconds", time.monotonic() - load.began)

    def loaded(self) -> list[Load]:
        """Return loads since the last time."""
        loaded, self._loaded = self._loaded, []
        return loaded

    # ---------------------------------------------------------------- with the lock

    def _end(self, item: Fetch, reason: str) -> None:
        super()._end(item, reason)
        if item.cancelled:
            self._release(item)

    def _release(self, fetch: Fetch) -> None:
        # What comes last in a prefix is of the least use to others, so it goes first.
        self._buffer.release(reversed(fetch.entries))
        fetch.entries = []

    # ---------------------------------------------------------------- on the threads

    def _run(self, item: Fetch, thread: int) -> str:
        """Fetch some chunks after the other."""
        chunks = len(item.job.hashes) // HASH_BYTES
        while item.good < chunks:
            client = self._pool.link.client
            if item.cancelled or item.until <= time.monotonic():
                return "cancelled" if item.cancelled else "late"
            if client is None:
                return "away"
            window, mine = self._take(item, min(chunks, item.good + self._chunks))
            if not window:
                return "full"
            self._bring(client, item, mine)
            if not self._all_there(item, window):
                return "missing"
        return "ok"

    def _take(self, fetch: Fetch, end: int) -> tuple[list[Entry], list[Entry]]:
        """Return entries for the next chunks, fewer where the buffer is full, and which of them are to be filled."""
        mine = []
        with self._changed:
            for chunk in range(len(fetch.entries), end):
                entry = self._buffer.take(fetch.job.hashes[HASH_BYTES * chunk : HASH_BYTES * (chunk + 1)])
                if entry is None:
                    break
                fetch.entries.append(entry)
                if not entry.filled and not entry.filling:
                    entry.filling = True
                    mine.append(entry)
            return fetch.entries[fetch.good :], mine

    def _bring(self, client: StoreClient, fetch: Fetch, mine: list[Entry]) -> None:
        """Fill entries."""
        if not mine:
            return
        size, good = self._cache.chunk_bytes, 0
        offsets = np.array([entry.slot for entry in mine], dtype=np.int64) * size
        try:
            got = client.get_into(
                self._pool.namespace,
                b"".join(entry.key for entry in mine),
                (self._region, offsets, np.full(len(mine), size)),
                shard=self._pool.shard,
                timeout=max(0.001, fetch.until - time.monotonic()),
            )
            sealed = self._cache.are_seals(self._region, offsets + size - SEAL_BYTES)
            good = good_of(got, size, sealed, self._counts)
        finally:
            with self._changed:
                for number, entry in enumerate(mine):
                    entry.filled, entry.filling = number < good, False
                self._changed.notify_all()
        self._pool.link.answered()
        self._counts.add(prefetch_bytes=good * size)

    def _all_there(self, fetch: Fetch, window: list[Entry]) -> bool:
        """Wait for what other fetches are filling; return whether all of these are there."""
        with self._changed:
            while any(entry.filling for entry in window) and not fetch.cancelled:
                left = fetch.until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            filled = [entry.filled for entry in window]
            fetch.good += filled.index(False) if False in filled else len(filled)
            return all(filled)
