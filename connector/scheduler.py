# SPDX-License-Identifier: Apache-2.0
"""The side of the connector in vLLM's scheduler: decides what is loaded and saved, and moves nothing."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from moonpool.connector import compat, handover, roster
from moonpool.connector.adapters import Adapters
from moonpool.connector.events import Events
from moonpool.connector.handover import HandOver, HandOverRefusedError, Identity
from moonpool.connector.keys import Keys, Known
from moonpool.connector.lease_plan import Holds, Leases
from moonpool.connector.load_plan import Loads
from moonpool.connector.lookups import Lookups
from moonpool.connector.metadata import MoonpoolMetadata, MoonpoolWorkerMetadata
from moonpool.connector.pool import PoolLink
from moonpool.connector.save_plan import Saves
from moonpool.connector.settings import ConnectorSettings
from moonpool.connector.stats import ConnectorStats
from moonpool.connector.tracked import Tracked
from moonpool.store_client import StoreClient, StoreClientSettings

__all__ = ["SchedulerSide"]

_log = logging.getLogger(__name__)
#: Prefill engines whose first refusal is in the log. Further ones are counted only.
_REFUSED_MAX: Final = 64


class SchedulerSide:
    """One for an engine. Every method is called on the engine's thread, and none of them waits.

    Args:
        vllm_config: of the engine.
        settings: of the connector.
        store: options of `StoreClientSettings`.
        identity: of the engine, with the namespace of its chunks.
    """

    def __init__(
        self, vllm_config: Any, settings: ConnectorSettings, store: Mapping[str, Any], identity: Identity
    ) -> None:
        transfer, block_tokens = vllm_config.kv_transfer_config, vllm_config.cache_config.block_size
        blocks = settings.chunk_tokens // block_tokens
        kv_events = vllm_config.kv_events_config
        self._settings = settings
        self._identity = identity
        self._block_tokens = block_tokens
        self._refused: set[str] = set()
        self._loading = settings.load_mode != "off" and transfer.is_kv_consumer
        self._saving = settings.save_mode != "off" and transfer.is_kv_producer
        self._counts: Counter[str] = Counter()
        self._idle_said = True
        self._tracked: dict[str, Tracked] = {}
        self._adapters = Adapters()
        self._keys = Keys(blocks, self._adapters)
        self._known = Known(settings.known_max)
        self._events = Events(bool(kv_events and kv_events.enable_kv_cache_events), block_tokens, blocks)
        options = StoreClientSettings.load(store)
        self._role = str(transfer.kv_role)
        self._compares = settings.handover_check > 0 and roster.is_of_one_role(self._role)
        entry = (roster.roster_of(identity), roster.entry_of(identity, self._role)) if self._compares else None
        self._link = PoolLink(lambda: _client(store, entry), settings.retry)
        self._lookups = Lookups(
            self._link,
            identity.namespace,
            lease=options.lease,
            timeout=settings.lookup_timeout,
            most=settings.lookups_max,
            retry=settings.retry,
        )
        workers = vllm_config.parallel_config.world_size
        self._loads = Loads(self._lookups, self._keys, settings, block_tokens, self._counts, workers)
        self._leases = Leases(settings, workers, self._counts)
        self._holds = Holds()
        self._saves = Saves(
            self._link,
            self._keys,
            self._known,
            settings,
            blocks,
            workers,
            self._counts,
            self._events,
        )

    def check_others(self) -> None:
        """See when the engine starts whether it fits the engines that it would work with, where the pool knows.

        Raises:
            ConfigError: there are some, and it fits none of them.
        """
        client = self._link.wait(self._settings.handover_check) if self._compares else None
        if client is not None:
            roster.check_others(self._identity, self._role, client.roster)

    # ---------------------------------------------------------------- requests

    def on_new_request(self, request: Any) -> None:
        """A request was added: ask what the pool has of it."""
        tracked = self._tracked[request.request_id] = Tracked(request)
        if not self._adapters.knows(request):
            self._bar(request)
        elif self._loading:
            tracked.handed = self._handed(request)
            if tracked.handed is not None and tracked.handed.lent is not None:
                self._holds.begin(request.request_id, tracked.handed.lent)
            self._loads.ask(tracked)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded beyond these (None: ask again), and whether in the background."""
        tracked = self._tracked[request.request_id]
        if not self._loading:
            tracked.local, tracked.reason = num_computed_tokens, "off"
            return 0, False
        tokens = self._loads.matched(tracked, num_computed_tokens)
        return tokens, bool(tokens) and self._loads.in_background(tracked)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request got its blocks, and its load can begin."""
        tracked = self._tracked[request.request_id]
        tracked.loading = -1
        if request.num_computed_tokens:
            # For the second time, after a load in the background, which has put all of that there.
            tracked.admitted = request.num_computed_tokens
            return
        tracked.admitted = tracked.local + num_external_tokens
        block_ids = blocks.get_block_ids()[0] if num_external_tokens else []
        self._loads.admit(tracked, block_ids, num_external_tokens)
        if not num_external_tokens:
            self._holds.end(request.request_id)

    def request_finished(self, request: Any, block_ids: list[int]) -> dict[str, Any] | None:
        """A request has finished, or was aborted. What it still has that others may want is saved.

        Returns:
            What the engine is to be told that goes on with it, where one does.
        """
        offered = None
        tracked = self._tracked.pop(request.request_id)
        computed = compat.computed_tokens(request)
        if self._may_save(tracked, computed):
            self._loads.heed(tracked)
            self._saves.plan(tracked, computed, block_ids)
            offered = self._offered(tracked, computed, block_ids)
            self._saves.drop(tracked, computed)
        self._loads.finished(tracked, parked=tracked.loading >= 0)
        if tracked.loading < 0:
            self._holds.end(request.request_id)
        return offered

    # ---------------------------------------------------------------- steps

    def build_connector_meta(self, scheduler_output: Any) -> MoonpoolMetadata:
        """Return what the workers are to begin with this step."""
        if self._saving:
            self._plan_saves(scheduler_output)
        loads, cancelled = self._loads.take()
        if self._loads.choice is not None:
            waits = any(not load.is_async for load in loads)
            self._loads.choice.step_begins(scheduler_output, waits=waits)
        self._leases.expire()
        lent = *self._leases.told(), *self._holds.told()
        return MoonpoolMetadata(loads, self._saves.take(), cancelled, *self._loads.fetches.told(), *lent)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take what the workers say of a step."""
        said = connector_output.kv_connector_worker_meta
        choice = self._loads.choice
        if choice is not None:
            choice.step_ended()
            for name, (chunks, seconds, trouble) in said.times.items() if said is not None else ():
                choice.load_ended(name, chunks * self._settings.chunk_tokens, seconds, trouble=trouble)
        if said is not None:
            assert isinstance(said, MoonpoolWorkerMetadata)
            for request_id, chunks in said.loaded.items():
                self._loads.loaded(request_id, self._tracked.get(request_id), chunks)
            self._saves.ended(said)
            for fetch_id, (workers, chunks) in said.fetched.items():
                self._loads.fetches.fetched(fetch_id, workers, chunks)
            self._leases.heard(said.renewed, said.returned)
            self._leases.wiped(said.wiped)
        for request_id in connector_output.finished_recving or ():
            self._holds.end(request_id)
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.loading = -1

    def has_pending_push_work(self) -> bool:
        """Whether the engine has to go on stepping without requests, so that saves end and workers know of it."""
        return self._saves.pending > 0 or self._loads.fetches.untold or self._leases.pending or self._holds.untold

    # ---------------------------------------------------------------- the rest

    def bind_gpu_block_pool(self, pool: Any) -> None:
        """Take the block pool, in which the blocks of saves are kept."""
        self._loads.bind(pool)
        self._saves.bind(pool)
        self._leases.bind(pool)

    def take_peers(self, peers: tuple[tuple[str, str], ...]) -> None:
        """Take where other engines reach the workers, and which incarnation of each, in the order of their shards."""
        self._leases.peers = peers

    def take_stats(self) -> ConnectorStats | None:
        """Return what has been counted since the last time, and the state now; None: nothing, as before."""
        saves, waiting = self._saves, self._lookups.waiting
        busy = bool(saves.pending or waiting or self._leases.pending)
        state: dict[str, Any] = {}
        if busy or not self._idle_said:
            state = {
                "lookups_waiting": waiting,
                "pinned_blocks": saves.pinned_blocks,
                "lent_blocks": self._leases.blocks,
                "oldest_transfer_seconds": saves.oldest,
            }
            self._idle_said = not busy
        elif not self._counts:
            return None
        if self._loads.choice is not None:
            state |= self._loads.choice.state
        data = {**self._counts, **state}
        self._counts.clear()
        return ConnectorStats(data=data)

    def take_events(self) -> list[Any]:
        """Return KV events since the last time."""
        return self._events.take()

    def reset_cache(self) -> bool:
        """Find nothing any more of what was saved before: weights may have changed.

        The pool keeps it, for engines that were not reset. Requests that have begun are neither loaded nor saved any
        more, since vLLM may keep what they have computed.
        """
        self._keys.renew()
        self._known.clear()
        self._leases.end()
        for tracked in self._tracked.values():
            tracked.lookup = None
            self._loads.fetches.drop(tracked)
            tracked.barred = tracked.barred or tracked.admitted < math.inf
            if not tracked.barred:
                tracked.handed = None
        return True

    def shutdown(self) -> None:
        """End every thread."""
        self._lookups.close()
        self._link.close()

    # ---------------------------------------------------------------- inside

    def _bar(self, request: Any) -> None:
        # Those that were added before its adapter changed too.
        for tracked in self._tracked.values():
            if self._adapters.same(tracked.request, request):
                tracked.barred = True
                self._loads.fetches.drop(tracked)

    def _plan_saves(self, scheduler_output: Any) -> None:
        if not self._saves.has_room:
            return
        for request_id in scheduler_output.num_scheduled_tokens:
            tracked = self._tracked[request_id]
            # Of all requests at every step: first what can be said without a call.
            if tracked.request.num_computed_tokens < tracked.save_at:
                continue
            computed = compat.computed_tokens(tracked.request)
            if computed >= tracked.save_at and self._may_save(tracked, computed):
                block_ids = compat.block_ids_of(scheduler_output, request_id)
                if block_ids is not None:
                    self._loads.heed(tracked)
                    self._saves.plan(tracked, computed, block_ids)

    def _offered(self, tracked: Tracked, computed: int, block_ids: list[int]) -> dict[str, Any] | None:
        request = tracked.request
        if not handover.is_asked_for(request) or self._keys.renewed or not compat.has_ended_well(request):
            return None
        blocks = self._saves.plan_tail(tracked, computed, block_ids)
        whole = min(request.num_prompt_tokens, computed) // self._block_tokens
        lent = self._leases.lend(block_ids[:whole], self._keys.of_blocks(request, whole)) if whole else None
        if lent is not None:
            blocks = whole
        if not blocks:
            return None
        self._counts["handovers_offered"] += 1
        return handover.offered(request, self._identity, blocks * self._block_tokens, lent)

    def _handed(self, request: Any) -> HandOver | None:
        if self._keys.renewed:
            return None
        try:
            handed = handover.taken(request, self._identity, self._block_tokens, self._settings.handover_wait)
        except HandOverRefusedError as error:
            self._counts["handovers_refused"] += 1
            if len(self._refused) < _REFUSED_MAX and error.message not in self._refused:
                self._refused.add(error.message)
                _log.warning("moonpool: what was handed over is computed instead: %s", error)
            return None
        if handed is not None and not self._settings.peer_reads:
            return replace(handed, lent=None)
        return handed

    def _may_save(self, tracked: Tracked, computed: int) -> bool:
        # Blocks that were there at admission may be computed or loaded, by this or another request, in the very step
        # of the admission. Once a token beyond them is computed, that step has ended.
        return self._saving and not tracked.barred and computed > tracked.admitted


def _client(store: Mapping[str, Any], entry: tuple[str, bytes] | None) -> StoreClient:
    # It only asks: it moves nothing, and never gets what it has found.
    small = {"name": "vllm-scheduler", **store, "staging_bytes": 1 << 20, "locations_max": 0, "threads": 1}
    return StoreClient(roster=entry, **small)
