# SPDX-License-Identifier: Apache-2.0
"""Loads and saves of one worker with a paged cache of its own, without vLLM."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from store_testing import keys

from moonpool.cluster import LocalCluster
from moonpool.connector.counting import Counts
from moonpool.connector.jobs import Lent, LoadJob, SaveJob
from moonpool.connector.layout import PagedCache
from moonpool.connector.loading import Load, Loads
from moonpool.connector.moving import Pool
from moonpool.connector.pool import PoolLink
from moonpool.connector.saving import Save, Saves
from moonpool.store_client import ROOT, StoreClient, StoreClientSettings
from moonpool.store_client.core import open_engine
from worker_testing import Cache

CHUNK_BLOCKS = 2
#: That go together.
WINDOW_CHUNKS = 3


class Rig:
    """What a worker has, made so small that a job goes in several parts."""

    def __init__(
        self,
        cluster: LocalCluster,
        namespace: str,
        *,
        shard: int = 0,
        shards: int = 1,
        load_threads: int = 2,
        save_threads: int = 1,
        timeout: float = 10.0,
        waiting_max: int = 8,
        retry: float = 0.1,
        wait: bool = True,
        cache: Cache | None = None,
        chunk_blocks: int = CHUNK_BLOCKS,
        listen: str | None = None,
        **options: Any,
    ) -> None:
        self.cache = cache or Cache(blocks=64, heads=2, tokens=16, content=64)
        settings = StoreClientSettings.load({"master": cluster.master, **cluster.client_options, **options})
        self.engine = engine = open_engine(settings, listen)
        self.link = PoolLink(lambda: StoreClient(engine=engine, settings=settings), retry)
        pool = Pool(self.link, namespace, shard, shards)
        self.paged = PagedCache(engine, self.cache.views(), self.cache.blocks, chunk_blocks, self.cache.layout)
        self.counts = Counts()
        self.loads = Loads(engine, pool, self.paged, self.counts, threads=load_threads, staging_bytes=1 << 28)
        self.saves = Saves(
            pool, self.paged, self.counts, threads=save_threads, timeout=timeout, waiting_max=waiting_max
        )
        self.loads._chunks = self.saves._chunks = WINDOW_CHUNKS
        self._jobs = itertools.count()
        if wait:
            self.wait_for_pool()

    def wait_for_pool(self) -> None:
        deadline = time.monotonic() + 30
        while self.link.client is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def save(
        self, hashes: Sequence[bytes], blocks: Sequence[int], parent: bytes = ROOT, *, tail_blocks: int = 0
    ) -> int:
        """Begin a save."""
        job = SaveJob(next(self._jobs), "request", b"".join(hashes), parent, list(blocks), tail_blocks)
        self.saves.begin([job])
        return job.job_id

    def saved(self, count: int = 1, seconds: float = 30.0) -> dict[int, Save]:
        """Return the next saves that end."""
        ended: dict[int, Save] = {}
        deadline = time.monotonic() + seconds
        while len(ended) < count:
            for save in self.saves.ended():
                assert save.job.job_id not in ended
                ended[save.job.job_id] = save
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return ended

    def load(
        self,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        *,
        begin_block: int = 0,
        request_id: str = "",
        timeout: float = 10.0,
        tail_blocks: int = 0,
        lent: Lent | None = None,
    ) -> Load:
        """Begin a load."""
        request_id = request_id or f"request-{next(self._jobs)}"
        job = LoadJob(
            request_id, b"".join(hashes), begin_block, list(blocks), True, timeout, tail_blocks=tail_blocks, lent=lent
        )
        (load,) = self.loads.begin([job])
        return load

    def loaded(self, count: int = 1, seconds: float = 30.0) -> dict[str, Load]:
        """Return the next loads that end."""
        ended: dict[str, Load] = {}
        deadline = time.monotonic() + seconds
        while len(ended) < count:
            for load in self.loads.ended():
                assert load.job.request_id not in ended
                ended[load.job.request_id] = load
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return ended

    def counted(self) -> Counter[str]:
        """Return what was counted since the last time, without what was observed."""
        return Counter({name: value for name, value in self.counts.take().items() if isinstance(value, int) and value})

    def put(self, count: int, *parts: Any) -> list[bytes]:
        """Fill the cache at random, save chunks that lie in its first blocks, and return their keys."""
        hashes = keys(count, *parts)
        self.cache.fill(count)
        self.save(hashes, range(count * CHUNK_BLOCKS))
        assert all(save.saved for save in self.saved().values())
        return hashes

    def close(self) -> None:
        self.link.close()
        self.loads.close()
        self.saves.close()
        self.engine.close()
