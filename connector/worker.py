# SPDX-License-Identifier: Apache-2.0
"""The worker side: moves what the scheduler side has decided, and never makes a step wait for the pool.

Only loads that a step cannot do without (sync) are waited for, each as long as its timeout.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moonpool.connector.compat import layout_of
from moonpool.connector.counting import Counts
from moonpool.connector.layout import CacheLayoutError, PagedCache
from moonpool.connector.loading import Loads
from moonpool.connector.metadata import MoonpoolMetadata, MoonpoolWorkerMetadata
from moonpool.connector.moving import Pool
from moonpool.connector.pool import PoolLink
from moonpool.connector.saving import Saves
from moonpool.connector.stats import ConnectorStats
from moonpool.store_client import StoreClient, StoreClientSettings
from moonpool.store_client.core import open_engine

if TYPE_CHECKING:
    from moonpool.connector.settings import ConnectorSettings
    from moonpool.connector.shards import ShardPlan
    from moonpool.transfer_engine import TransferEngine

__all__ = ["WorkerSide"]


class WorkerSide:
    """What `MoonpoolConnector` does in a worker. All methods are those of the worker's main thread.

    Args:
        vllm_config: of the engine.
        kv_cache_config: of this worker.
        settings: of the connector.
        store: settings of the store client by name.
        namespace: of the chunks.
        plan: which part of them this worker has.

    Raises:
        ConfigError: a setting of the store client is impossible.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        settings: ConnectorSettings,
        store: Mapping[str, Any],
        namespace: str,
        plan: ShardPlan,
    ) -> None:
        self._settings = settings
        self._plan = plan
        self._kv_cache_config = kv_cache_config
        self._layout = layout_of(vllm_config, kv_cache_config)
        self._counts = Counts()
        self._taken = MoonpoolWorkerMetadata()
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._begun: list[MoonpoolMetadata | None] = [None, None]
        self._idle_said = True
        client_settings = StoreClientSettings.load({"name": "vllm-worker", **store})
        # One engine for the client and the cache, so that the cache is registered memory of the client too.
        engine = open_engine(client_settings)
        link = PoolLink(lambda: StoreClient(engine=engine, settings=client_settings), settings.retry)
        self._pool = Pool(link, namespace, plan.shard, plan.shards)
        self._parts = _Parts(link, engine)
        # Also when the worker is forgotten, or the interpreter ends.
        self._finalizer = weakref.finalize(self, self._parts.close)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the paged cache, and start the threads.

        Raises:
            CacheLayoutError: the cache lies in memory in a way that is not known, or there is one already.
            ConfigError: `staging_bytes` is too small for chunks of this size.
        """
        if self._parts.loads is not None:
            raise CacheLayoutError("the KV cache was registered already", hint="a new engine: it cannot be replaced")
        settings, config, engine = self._settings, self._kv_cache_config, self._parts.engine
        chunk_blocks = settings.chunk_tokens // config.kv_cache_groups[0].kv_cache_spec.block_size
        cache = PagedCache(engine, kv_caches, config.num_blocks, chunk_blocks, self._layout)
        self._parts.loads = Loads(
            engine,
            self._pool,
            cache,
            self._counts,
            threads=settings.load_threads if settings.load_mode != "off" else 0,
            staging_bytes=settings.staging_bytes,
        )
        self._parts.saves = Saves(
            self._pool,
            cache,
            self._counts,
            threads=settings.save_threads if settings.save_mode != "off" and self._plan.writes else 0,
            timeout=settings.save_timeout,
            waiting_max=settings.saves_max,
        )

    # ---------------------------------------------------------------- each step

    def handle_preemptions(self, metadata: MoonpoolMetadata) -> None:
        """Nothing: blocks that are being saved are pinned, and a request that loads is not preempted."""

    def start_load(self, metadata: MoonpoolMetadata) -> None:
        """Begin the loads of a step, and wait for those that it cannot do without. Again: nothing."""
        if metadata is self._begun[0]:
            return
        self._begun[0] = metadata
        if not metadata.loads and not metadata.cancelled:
            return
        loads = self._parts.loads
        assert loads is not None, "a load before the cache is registered"
        begun = loads.begin(metadata.loads)
        loads.cancel(metadata.cancelled)
        needed = [load for load in begun if not load.job.is_async]
        if needed:
            loads.wait(needed)
            self._collect_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: what a step needs is there when `start_load` returns."""

    def save_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any) -> None:
        """Nothing: what is saved was computed in earlier steps."""

    def wait_for_save(self, metadata: MoonpoolMetadata) -> None:
        """Begin the saves of a step. Nothing is waited for. Again: nothing."""
        if metadata is self._begun[1]:
            return
        self._begun[1] = metadata
        if not metadata.saves:
            return
        if not self._plan.writes:
            # Another worker has the same bytes and saves them.
            self._taken.ended_saves.update((job.job_id, 1) for job in metadata.saves)
            return
        assert self._parts.saves is not None, "a save before the cache is registered"
        self._parts.saves.begin(metadata.saves)

    def finished_loads(self) -> tuple[set[str], set[str]]:
        """Return (requests whose async load has ended, those of them of which not everything came), each once."""
        self._collect_loads()
        if not self._finished:
            return set(), set()
        finished, failed = self._finished, self._failed
        self._finished, self._failed = set(), set()
        return finished, failed

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks that loads which have ended did not fill, each once."""
        if not self._failed_blocks:
            return set()
        taken, self._failed_blocks = self._failed_blocks, set()
        return taken

    def take_metadata(self) -> MoonpoolWorkerMetadata | None:
        """Return what the scheduler side has to know since the last time; None: nothing."""
        self._collect_saves()
        taken = self._taken
        if not (taken.ended_saves or taken.loaded):
            return None
        self._taken = MoonpoolWorkerMetadata()
        return taken

    def take_stats(self) -> ConnectorStats | None:
        """Return what has been counted since the last time; None: nothing, as before."""
        data: dict[str, Any] = self._counts.take()
        loads, saves = self._parts.loads, self._parts.saves
        state: dict[str, Any] = {}
        if loads or saves or not self._idle_said:
            now = time.monotonic()
            oldest = max(loads.oldest(now) if loads else 0.0, saves.oldest(now) if saves else 0.0)
            state = {"loads_open": len(loads or ()), "saves_open": len(saves or ()), "oldest_transfer_seconds": oldest}
            self._idle_said = not (loads or saves)
        elif not data:
            return None
        return ConnectorStats(data={**data, **state})

    def shutdown(self) -> None:
        """End everything under way, every thread and the engine. Again: nothing."""
        self._finalizer()

    # ---------------------------------------------------------------- inside

    def _collect_loads(self) -> None:
        loads = self._parts.loads
        if not loads:
            return
        for load in loads.ended():
            request_id = load.job.request_id
            self._taken.loaded[request_id] = load.good
            failed = load.failed_blocks
            self._failed_blocks.update(failed)
            if load.job.is_async:
                self._finished.add(request_id)
                if failed:
                    self._failed.add(request_id)

    def _collect_saves(self) -> None:
        saves = self._parts.saves
        if not saves:
            return
        for save in saves.ended():
            self._taken.ended_saves[save.job.job_id] = 1
            if not save.saved:
                self._taken.unsaved.add(save.job.job_id)


class _Parts:
    """What has threads and memory of its own, apart from the worker that may be forgotten."""

    def __init__(self, link: PoolLink, engine: TransferEngine) -> None:
        self.link = link
        self.engine = engine
        self.loads: Loads | None = None
        self.saves: Saves | None = None

    def close(self) -> None:
        # First the client, so that what waits for the pool comes back.
        self.link.close()
        for part in (self.loads, self.saves):
            if part is not None:
                part.close()
        self.engine.close()
