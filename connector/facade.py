# SPDX-License-Identifier: Apache-2.0
"""What vLLM sees: a connector of two halves, of which each process has one."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from moonpool.connector import compat
from moonpool.connector.handover import Identity
from moonpool.connector.metadata import MoonpoolMetadata, PeerPlace
from moonpool.connector.namespace import check_supported, facts_of, hash_seed, namespace_of, shard_plan
from moonpool.connector.scheduler import SchedulerSide
from moonpool.connector.settings import ConnectorSettings
from moonpool.connector.stats import ConnectorPromMetrics, ConnectorStats
from moonpool.connector.worker import WorkerSide
from moonpool.errors import ConfigError

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

__all__ = ["MoonpoolConnector"]

_log = logging.getLogger(__name__)


class MoonpoolConnector(KVConnectorBase_V1, SupportsHMA):
    """Makes a vLLM instance use a pool. Forwards to the half of this process, and decides nothing.

    Raises:
        ConfigError: settings that cannot be, or a model or a setup that the pool cannot be used with.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        compat.check_version()
        settings, store = _of_extra(vllm_config.kv_transfer_config.kv_connector_extra_config)
        check_supported(vllm_config, kv_cache_config, settings)
        _recompute(vllm_config)
        layout = compat.layout_of(vllm_config, kv_cache_config)
        namespace = namespace_of(vllm_config, kv_cache_config, settings, layout)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            if hash_seed():
                _log.warning(
                    "moonpool: PYTHONHASHSEED is %r, so that KV is shared only with engines that have the same one: "
                    "unset it everywhere, or set it alike",
                    hash_seed(),
                )
            facts = facts_of(vllm_config, kv_cache_config, settings, layout)
            identity = Identity(str(vllm_config.kv_transfer_config.engine_id), namespace, facts)
            self._scheduler = SchedulerSide(vllm_config, settings, store, identity)
            try:
                self._scheduler.check_others()
            except ConfigError:
                self._scheduler.shutdown()
                raise
        else:
            plan = shard_plan(vllm_config, kv_cache_config)
            self._worker = WorkerSide(vllm_config, kv_cache_config, settings, store, namespace, plan)

    # ---------------------------------------------------------------- both halves

    def shutdown(self) -> None:
        """End every thread, and let the pool go."""
        (self._scheduler or self._the_worker).shutdown()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what has happened since the last time."""
        return (self._scheduler or self._the_worker).take_stats()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether layers are waited for, which a graph of the whole model would leave out."""
        return _of_extra(extra_config)[0].load_mode == "layerwise"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Return statistics as they came from another process."""
        return ConnectorStats(data={} if data is None else data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorPromMetrics:
        """Return what keeps the Prometheus metrics."""
        return ConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---------------------------------------------------------------- the half in the scheduler

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache owes nobody anything: what is not saved is computed again."""
        return False

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take the pool of blocks."""
        self._the_scheduler.bind_gpu_block_pool(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take where other engines reach the workers. Of those with the same bytes, the first."""
        places: dict[int, tuple[str, str]] = {}
        for _, one in sorted(metadata.items()):
            # MultiConnector gives each of its connectors what the first of them has said.
            if isinstance(one, PeerPlace):
                places.setdefault(one.shard, (one.address, one.incarnation))
        self._the_scheduler.take_peers(tuple(place for _, place in sorted(places.items())))

    def on_new_request(self, request: Any) -> None:
        """A request was added."""
        self._the_scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens the pool has beyond these."""
        return self._the_scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request got its blocks."""
        self._the_scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return what the workers are to begin with this step."""
        return self._the_scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take what the workers say of a step."""
        self._the_scheduler.update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has finished. Blocks that are being saved are kept by other means than its own."""
        return False, self._the_scheduler.request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has finished."""
        return self.request_finished(request, block_ids[0])

    def has_pending_push_work(self) -> bool:
        """Whether saves are under way."""
        return self._the_scheduler.has_pending_push_work()

    def take_events(self) -> Iterable[Any]:
        """Return KV events since the last time."""
        return self._the_scheduler.take_events()

    def reset_cache(self) -> bool:
        """Find nothing any more of what was saved before."""
        return self._the_scheduler.reset_cache()

    # ---------------------------------------------------------------- the half in a worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the cache of this worker."""
        self._the_worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return where other engines reach this worker; None: nowhere."""
        return self._the_worker.place

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Blocks may be written to from now on, unless a save keeps them."""
        self._the_worker.handle_preemptions(_own(kv_connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the loads of this step."""
        if self._connector_metadata is not None:
            computes, metadata = compat.has_forward(forward_context, kwargs), _own(self._connector_metadata)
            self._the_worker.start_load(metadata, computes=computes)
            if not computes:
                # Before 0.31 `wait_for_save` is not called then. What is called again does nothing.
                self._the_worker.wait_for_save(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait until a layer is loaded."""
        self._the_worker.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: what is saved was computed in earlier steps."""

    def wait_for_save(self) -> None:
        """Begin the saves of this step."""
        if self._connector_metadata is not None:
            self._the_worker.wait_for_save(_own(self._connector_metadata))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return which requests have their loads behind them.

        Those that failed are told by their blocks, so that what has come needs not be computed again.
        """
        finished, _ = self._the_worker.finished_loads()
        return None, finished or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that were not loaded."""
        return self._the_worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return what the scheduler is to know of this step."""
        return self._the_worker.take_metadata()

    # ---------------------------------------------------------------- inside

    @property
    def _the_scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None, "called in a worker"
        return self._scheduler

    @property
    def _the_worker(self) -> WorkerSide:
        assert self._worker is not None, "called in the scheduler"
        return self._worker


def _own(metadata: KVConnectorMetadata) -> MoonpoolMetadata:
    assert isinstance(metadata, MoonpoolMetadata)
    return metadata


def _of_extra(given: Mapping[str, Any]) -> tuple[ConnectorSettings, Mapping[str, Any]]:
    extra = dict(given)
    store = extra.pop("store_client", {})
    if not isinstance(store, Mapping):
        raise ConfigError(
            f"store_client in kv_connector_extra_config is a {type(store).__name__}",
            hint='"store_client": {"master": "host:port"}',
        )
    return ConnectorSettings.load(extra), store


def _recompute(vllm_config: Any) -> None:
    """Make vLLM compute what cannot be loaded. Its default fails the request."""
    outside = compat.configured_outside(vllm_config)
    if outside is not None and outside.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f"a request whose KV cannot be loaded would fail, as {outside.kv_connector} is set up",
            hint='"kv_load_failure_policy": "recompute" beside "kv_connector": "MultiConnector"',
        )
    given = vllm_config.kv_transfer_config.kv_load_failure_policy
    if given != "recompute":
        _log.info('kv_load_failure_policy is "%s": what cannot be loaded is recomputed all the same', given)
    vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
