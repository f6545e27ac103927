# SPDX-License-Identifier: Apache-2.0
"""Loads: chunks come from the pool straight into the blocks of a request that waits for them.

A chunk of which the request needs only some blocks comes into a staging area, as a whole, and is copied from there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from moonpool.connector.layout import Area, CacheLayoutError, partial_rows
from moonpool.connector.moving import Crew, Moving, Pool, window_chunks
from moonpool.errors import ConfigError, MoonpoolError
from moonpool.store_client import Outcome
from moonpool.store_client.packing import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from moonpool.connector.borrowing import Borrowing
    from moonpool.connector.counting import Counts
    from moonpool.connector.jobs import LoadJob
    from moonpool.connector.layout import Int64s, PagedCache
    from moonpool.store_client import GetResults, StoreClient
    from moonpool.transfer_engine import TransferEngine

__all__ = ["CUT_SHORT", "OK", "Load", "Loads", "complain_of_layout", "good_of"]

# numpy takes an enumeration for an object to be asked about itself, at every use.
OK: Final = int(Outcome.OK)
CUT_SHORT: Final = {int(Outcome.MISS): "load_chunks_missed", int(Outcome.CORRUPT): "load_chunks_corrupt"}


@dataclass(eq=False, slots=True, kw_only=True)
class Load(Moving):
    """A load under way.

    Attributes:
        job: what is to be loaded.
        chunk_blocks: of a whole chunk.
        good: chunks that are in the cache, counted from the first one.
    """

    job: LoadJob
    chunk_blocks: int
    good: int = 0

    @property
    def chunks(self) -> int:
        """How many chunks it is of."""
        return len(self.job.hashes) // HASH_BYTES

    @property
    def failed_blocks(self) -> list[int]:
        """The blocks that have not come."""
        return self.job.block_ids[max(0, self.good * self.chunk_blocks - self.job.begin_block) :]


def good_of(got: GetResults, chunk_bytes: int, sealed: npt.NDArray[np.bool_], counts: Counts) -> int:
    """Return how many of the first chunks have come, whole and as this worker stores them."""
    outcomes = np.frombuffer(got.outcomes, dtype=np.uint8)
    bad = (outcomes != OK) | (np.array(got.lengths) != chunk_bytes) | ~sealed
    if not bad.any():
        return len(got)
    first = int(bad.argmax())
    counts.add(**{CUT_SHORT.get(int(outcomes[first]), "load_chunks_failed"): 1})
    if outcomes[first] == OK:
        complain_of_layout(counts)
    if first in got.errors:
        counts.complain("a chunk cannot be had and is computed", got.errors[first])
    return first


def complain_of_layout(counts: Counts) -> None:
    """Say that a chunk has another seal."""
    counts.complain(
        "a chunk cannot be used",
        CacheLayoutError(
            "a chunk was stored by a worker whose cache has another layout", hint="a `tenant` for each of them"
        ),
    )


class Loads(Crew[Load]):
    """The loads of one worker.

    Args:
        engine: with which the cache is registered.
        pool: where the chunks are.
        cache: where they go.
        counts: of this worker.
        threads: how many loads run at the same time.
        staging_bytes: most memory for chunks that go only in part: room for one of each thread.
        borrowing: reads what other engines lend; None: nothing is.

    Raises:
        ConfigError: that is too little.
    """

    def __init__(
        self,
        engine: TransferEngine,
        pool: Pool,
        cache: PagedCache,
        counts: Counts,
        *,
        threads: int,
        staging_bytes: int,
        borrowing: Borrowing | None = None,
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._borrowing = borrowing
        self._chunks = window_chunks(cache.chunk_bytes)
        room = cache.area_bytes(self._chunks)
        if threads * room > staging_bytes:
            raise ConfigError(
                f"staging_bytes is {staging_bytes}: {threads} threads need room for a chunk of {cache.chunk_bytes} "
                "bytes each",
                hint=f"staging_bytes of {threads * room} or more, fewer chunk_tokens or load_threads",
            )
        staging = engine.allocate(max(1, threads * room))
        self._areas = [Area(staging, thread * room) for thread in range(threads)]
        super().__init__("load", pool.link, counts, threads)

    def begin(self, jobs: Iterable[LoadJob]) -> list[Load]:
        """Begin loads."""
        now, mark = time.monotonic(), self._cache.mark()
        loads = [
            Load(job=job, chunk_blocks=self._cache.chunk_blocks, began=now, until=now + job.timeout, mark=mark)
            for job in jobs
        ]
        with self._changed:
            for load in loads:
                self._begin(load)
        return loads

    def cancel(self, request_ids: Iterable[str]) -> None:
        """These need what they load no more. Each still ends, as soon as its blocks are quiet."""
        wanted = set(request_ids)
        with self._changed:
            for load in self._open:
                if load.job.request_id in wanted:
                    load.cancelled = True
                    self._end_if_waiting(load, "cancelled")

    # ---------------------------------------------------------------- on the threads

    def _run(self, item: Load, thread: int) -> str:
        """Load some chunks after the other."""
        table, tail = self._cache.table(item.job.block_ids, item.job.begin_block), item.job.tail_blocks
        assert len(table) == item.chunks, "the plan has other blocks than chunks"
        if not item.mark.reached(item.until):
            return self._cut_short(item, "late")
        whole = len(table) - bool(tail)
        if self._borrow(item, thread):
            return "ok"
        while item.good < item.chunks:
            client = self._pool.link.client
            if item.cancelled or item.until <= time.monotonic():
                return self._cut_short(item, "cancelled" if item.cancelled else "late")
            if client is None:
                return self._cut_short(item, "away")
            rows = self._window(table[item.good : whole]) if item.good < whole else table[whole:, :tail]
            cache = self._cache if item.good < whole else self._cache.of(tail)
            good = self._bring(client, item, cache, rows, self._areas[thread])
            item.good += good
            if good < len(rows):
                return self._cut_short(item, "missing")
        return "ok"

    def _borrow(self, item: Load, thread: int) -> bool:
        """Read what another engine lends; return whether all of it has come."""
        lent, now = item.job.lent, time.monotonic()
        if lent is None or self._borrowing is None or item.cancelled:
            return False
        try:
            # What does not come this way has as long to come from the pool.
            until = now + (item.until - now) / 2
            nbytes = self._borrowing.read(lent, item.job.block_ids, until, thread)
        except MoonpoolError as error:
            self._counts.add(loads_direct_failed=1)
            self._counts.complain("what another engine lends comes from the pool, or is computed", error)
            return False
        item.good = item.chunks
        self._counts.add(loads_direct=1, load_chunks=item.chunks, load_direct_bytes=nbytes)
        return True

    def _window(self, table: Int64s) -> Int64s:
        """Return the first chunks that go together, of which one may go in part."""
        partial = partial_rows(table)
        return table[: min(self._chunks, int(partial[1]) if len(partial) > 1 else len(table))]

    def _bring(self, client: StoreClient, load: Load, cache: PagedCache, rows: Int64s, area: Area) -> int:
        """Get chunks into these blocks; return how many of the first ones have come."""
        begin = load.good * HASH_BYTES
        hashes = load.job.hashes[begin : begin + len(rows) * HASH_BYTES]
        places = cache.destinations(rows, area)
        left = max(0.001, load.until - time.monotonic())
        got = client.get_into(self._pool.namespace, hashes, places, shard=self._pool.shard, timeout=left)
        self._pool.link.answered()
        good = good_of(got, cache.chunk_bytes, cache.sealed(rows, area), self._counts)
        staged = [row for row in partial_rows(rows).tolist() if row < good]
        if staged:
            cache.scatter(rows[staged], area.region, np.array([area.begin]))
        size = cache.chunk_bytes
        self._counts.add(
            load_chunks=good, load_straight_bytes=(good - len(staged)) * size, load_staged_bytes=len(staged) * size
        )
        return good

    def _cut_short(self, load: Load, reason: str) -> str:
        if load.good:
            self._counts.add(loads_partial=1)
        return reason
