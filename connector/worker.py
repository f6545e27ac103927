# SPDX-License-Identifier: Apache-2.0
"""The worker side: moves what the scheduler side has decided, and never makes a step wait for the pool.

Only loads that a step cannot do without (sync, layerwise) are waited for, each as long as its timeout.
"""

from __future__ import annotations

import socket
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from moonpool.address import Address, parse_address
from moonpool.connector.borrowing import Borrowing
from moonpool.connector.compat import layout_of
from moonpool.connector.counting import Counts
from moonpool.connector.layerwise import Layerwise
from moonpool.connector.layout import CacheLayoutError, PagedCache
from moonpool.connector.lending import Lending
from moonpool.connector.loading import Load, Loads
from moonpool.connector.metadata import MoonpoolMetadata, MoonpoolWorkerMetadata, PeerPlace
from moonpool.connector.moving import Pool
from moonpool.connector.pool import PoolLink
from moonpool.connector.prefetching import Prefetches
from moonpool.connector.saving import Saves
from moonpool.connector.stats import ConnectorStats
from moonpool.store_client import StoreClient, StoreClientSettings
from moonpool.store_client.core import open_engine

if TYPE_CHECKING:
    from moonpool.connector.settings import ConnectorSettings
    from moonpool.connector.shards import ShardPlan
    from moonpool.transfer_engine import TransferEngine

__all__ = ["WorkerSide"]


#: Ends of loads that tell of a pool under pressure.
_TROUBLE: Final = ("late", "failed")


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
        self._drafts = getattr(vllm_config, "speculative_config", None) is not None
        self._kv_cache_config = kv_cache_config
        self._layout = layout_of(vllm_config, kv_cache_config)
        self._counts = Counts()
        self._taken = MoonpoolWorkerMetadata()
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._begun: list[MoonpoolMetadata | None] = [None, None, None]
        self._idle_said = True
        client_settings = StoreClientSettings.load({"name": "vllm-worker", **store})
        # One engine for the client and the cache, so that the cache is registered memory of the client too.
        engine = open_engine(client_settings, _listen(settings, vllm_config))
        link = PoolLink(lambda: StoreClient(engine=engine, settings=client_settings), settings.retry)
        self._pool = Pool(link, namespace, plan.shard, plan.shards)
        self._connect_timeout = client_settings.connect_timeout
        self._parts = _Parts(link, engine, settings.shutdown_wait)
        # Also when the worker is forgotten, or the interpreter ends.
        self._finalizer = weakref.finalize(self, self._parts.close)

    @property
    def place(self) -> PeerPlace | None:
        """Where other engines reach this worker; None: nowhere."""
        engine = self._parts.engine
        if engine.address is None:
            return None
        there = parse_address(engine.address)
        any_host = there.host in ("0.0.0.0", "::")
        host = self._settings.peer_host or (socket.gethostname() if any_host else there.host)
        return PeerPlace(str(Address(host, there.port)), engine.incarnation, self._plan.shard)

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
        # One worker tells other engines what is needed of them, and hears what they need.
        self._speaks = self._plan.shard == 0 and self._plan.writes
        threads = settings.load_threads if settings.load_mode != "off" else 0
        if threads and settings.peer_reads:
            self._parts.borrowing = Borrowing(
                engine,
                cache,
                self._counts,
                namespace=self._pool.namespace,
                shard=self._plan.shard,
                connect_timeout=self._connect_timeout,
                threads=threads,
                keeps=self._speaks,
            )
        if engine.address is not None:
            self._parts.lending = Lending(engine, cache, self._pool.namespace)
        self._parts.loads = Loads(
            engine,
            self._pool,
            cache,
            self._counts,
            # What is handed over comes in the background in every mode.
            threads=threads,
            staging_bytes=settings.staging_bytes,
            borrowing=self._parts.borrowing,
        )
        if settings.load_mode == "prefetch":
            self._parts.prefetches = Prefetches(
                engine,
                self._pool,
                cache,
                self._counts,
                threads=settings.load_threads,
                buffer_bytes=settings.prefetch_bytes,
            )
        if settings.load_mode == "layerwise":
            self._parts.layerwise = Layerwise(engine, self._pool, cache, self._counts, drafts=self._drafts)
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
        """Lend, before the step computes, what a decode engine may know of already. Again: nothing.

        For preemptions nothing is to be done: what is saved or lent is pinned, and what loads is not preempted.
        """
        if metadata is self._begun[2]:
            return
        self._begun[2] = metadata
        lending, borrowing = self._parts.lending, self._parts.borrowing
        if lending is not None:
            lending.lend(metadata.lending)
            lending.wipe(metadata.wiping)
            self._taken.wiped.update((slot, 1) for slot in metadata.wiping)
        if borrowing is not None and (metadata.holding or metadata.returning):
            borrowing.hold(metadata.holding)
            borrowing.give_back(metadata.returning)

    def start_load(self, metadata: MoonpoolMetadata, *, computes: bool = True) -> None:
        """Begin the loads of a step, and wait for those that it cannot do without. Again: nothing.

        Args:
            metadata: of the step.
            computes: whether it has a forward pass, which waits for layers.
        """
        if metadata is self._begun[0]:
            return
        self._begun[0] = metadata
        loads, layerwise, prefetches = self._parts.loads, self._parts.layerwise, self._parts.prefetches
        if prefetches is not None:
            # What is taken or dropped makes room for what begins.
            prefetches.load([job for job in metadata.loads if job.fetch_id])
            prefetches.drop(metadata.dropped)
            prefetches.begin(metadata.fetches)
        if not metadata.loads and not metadata.cancelled:
            return
        assert loads is not None, "a load before the cache is registered"
        needed = [job for job in metadata.loads if not job.is_async and not job.fetch_id]
        loads.begin(job for job in metadata.loads if job.is_async)
        loads.cancel(metadata.cancelled)
        if needed and layerwise is not None:
            layerwise.begin(needed, computes=computes)
        elif needed:
            loads.wait(loads.begin(needed))
            self._collect_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for a layer of what is loaded layer by layer. All else that a step needs is there already."""
        if self._parts.layerwise is not None:
            self._parts.layerwise.wait_for_layer(layer_name)

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
        for fetch in self._parts.prefetches.ended() if self._parts.prefetches else ():
            self._taken.fetched[fetch.job.fetch_id] = 1, fetch.good
            self._taken.times[fetch.job.fetch_id] = fetch.good, fetch.seconds, fetch.reason in _TROUBLE
        taken = self._taken
        if self._parts.lending is not None and self._speaks:
            taken.renewed, taken.returned = self._parts.lending.heard()
        if not (taken.ended_saves or taken.loaded or taken.fetched or taken.wiped or taken.renewed or taken.returned):
            return None
        self._taken = MoonpoolWorkerMetadata()
        return taken

    def take_stats(self) -> ConnectorStats | None:
        """Return what has been counted since the last time; None: nothing, as before."""
        data: dict[str, Any] = self._counts.take()
        parts, saves = self._parts, len(self._parts.saves or ())
        loads = sum(len(part or ()) for part in (parts.layerwise, parts.prefetches, parts.loads))
        state: dict[str, Any] = {}
        if loads or saves or not self._idle_said:
            now = time.monotonic()
            every = (parts.layerwise, parts.prefetches, parts.loads, parts.saves)
            oldest = max(part.oldest(now) for part in every if part is not None)
            state = {"loads_open": loads, "saves_open": saves, "oldest_transfer_seconds": oldest}
            self._idle_said = not (loads or saves)
        elif not data:
            return None
        return ConnectorStats(data={**data, **state})

    def shutdown(self) -> None:
        """End everything under way, every thread and the engine. Again: nothing."""
        self._finalizer()

    # ---------------------------------------------------------------- inside

    def _collect_loads(self) -> None:
        ended: list[Load] = self._parts.layerwise.ended() if self._parts.layerwise else []
        if self._parts.prefetches is not None:
            ended += self._parts.prefetches.loaded()
        if self._parts.loads:
            ended += self._parts.loads.ended()
        for load in ended:
            request_id = load.job.request_id
            self._taken.loaded[request_id] = load.good
            if not load.job.fetch_id:
                self._taken.times[request_id] = load.good, load.seconds, load.reason in _TROUBLE
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

    def __init__(self, link: PoolLink, engine: TransferEngine, shutdown_wait: float) -> None:
        self.link = link
        self.engine = engine
        self.shutdown_wait = shutdown_wait
        self.loads: Loads | None = None
        self.layerwise: Layerwise | None = None
        self.prefetches: Prefetches | None = None
        self.saves: Saves | None = None
        self.lending: Lending | None = None
        self.borrowing: Borrowing | None = None

    def close(self) -> None:
        # What the last requests have left is worth a moment.
        if self.saves is not None:
            self.saves.finish(self.shutdown_wait)
        # First the client, so that what waits for the pool comes back.
        self.link.close()
        for part in (self.borrowing, self.layerwise, self.prefetches, self.loads, self.saves):
            if part is not None:
                part.close()
        self.engine.close()
        # Its thread waits for what peers say.
        if self.lending is not None:
            self.lending.close()


def _listen(settings: ConnectorSettings, vllm_config: Any) -> str | None:
    """Return where this worker accepts other engines; None: nowhere."""
    if settings.peer_listen is None:
        return None
    address = parse_address(settings.peer_listen)
    return str(Address(address.host, address.port + vllm_config.parallel_config.rank if address.port else 0))
