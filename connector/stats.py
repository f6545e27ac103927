# SPDX-License-Identifier: Apache-2.0
"""What the connector tells vLLM of itself: for its log, and as Prometheus metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from moonpool.connector.counting import OBSERVED_MAX

__all__ = ["COUNTERS", "GAUGES", "HISTOGRAMS", "ConnectorPromMetrics", "ConnectorStats"]

#: What is counted, and what it means. Its metric is ``moonpool_connector_<name>_total``.
COUNTERS: Final = {
    "loads_ok": "Loads of which every chunk came.",
    "loads_missing": "Loads of which a chunk was no longer there, or spoilt.",
    "loads_failed": "Loads that ended with an error.",
    "loads_late": "Loads that had not come when their time was over.",
    "loads_away": "Loads that found the pool out of reach.",
    "loads_cancelled": "Loads that nobody needed any more.",
    "loads_partial": "Loads, among those that are not OK, of which the first chunks came.",
    "load_chunks": "Chunks loaded.",
    "load_chunks_missed": "Loads cut short by a chunk that was not there.",
    "load_chunks_corrupt": "Loads cut short by a chunk of which every copy is spoilt.",
    "load_chunks_failed": "Loads cut short by a chunk that could not be read.",
    "load_straight_bytes": "Bytes loaded straight into the cache.",
    "load_staged_bytes": "Bytes of chunks loaded through the staging area, since only a part of them was needed.",
    "loads_direct": "Loads, among those that are OK, that came straight from the cache of another engine.",
    "loads_direct_failed": "Loads that could not come from there, and were looked for in the pool.",
    "load_direct_bytes": "Bytes loaded straight from the cache of another engine.",
    "load_layer_bytes": "Bytes loaded layer by layer.",
    "prefetches_ok": "Fetches into host memory of which every chunk came.",
    "prefetches_missing": "Fetches of which a chunk was no longer there, or spoilt.",
    "prefetches_failed": "Fetches that ended with an error.",
    "prefetches_late": "Fetches that had not come when their time was over.",
    "prefetches_away": "Fetches that found the pool out of reach.",
    "prefetches_cancelled": "Fetches that nobody needed any more.",
    "prefetches_full": "Fetches of more than the buffer had room for.",
    "prefetch_bytes": "Bytes fetched into host memory.",
    "saves_ok": "Saves of which every chunk is in the pool.",
    "saves_already": "Saves of chunks that were all there.",
    "saves_failed": "Saves that ended with an error.",
    "saves_late": "Saves that were not done when their time was over.",
    "saves_away": "Saves that found the pool out of reach.",
    "saves_cancelled": "Saves that waited when the worker was shut down.",
    "saves_dropped": "Saves given up because others waited already.",
    "save_chunks": "Chunks saved.",
    "save_bytes": "Bytes saved.",
    "errors": "Errors of the pool that the connector met.",
    "hits": "Requests that were admitted with tokens from the pool. Again after a preemption.",
    "hit_tokens": "Tokens that they had from there.",
    "misses_absent": "Requests that were admitted without, since the pool had none of their tokens.",
    "misses_local": "Requests of which vLLM's own cache had as much as the pool, or more.",
    "misses_short": "Requests of which there is too little to load.",
    "misses_late": "Requests that the pool had not answered for in time.",
    "misses_away": "Requests that came while the pool was out of reach.",
    "misses_failed": "Requests whose look-up ended with an error, or whose load has failed before.",
    "misses_full": "Requests that came while too many look-ups waited.",
    "misses_slow": "Requests whose prefetch took too long, so that they are computed.",
    "misses_slower": "Requests that are quicker to compute than to load, or that come while loads are late or fail.",
    "load_probes": "Loads that were begun although computing seemed quicker.",
    "misses_off": "Requests that came while nothing is loaded.",
    "handovers_offered": "Requests whose prompt is computed and saved here for an engine that goes on with them.",
    "handovers_taken": "Loads of requests that another engine has handed over.",
    "handovers_late": "Requests handed over of which the pool did not have everything in time.",
    "handovers_refused": "Requests that an engine with another kind of KV has handed over. They are computed.",
    "leases_granted": "Prompts whose blocks are kept for a decode engine.",
    "leases_returned": "Of these, those that the decode engine had read or did not want.",
    "leases_expired": "Of these, those that nobody needed for too long.",
    "leases_refused": "Prompts handed over through the pool only, since too many blocks were kept already.",
    "chunks_planned": "Chunks that the workers were told to save.",
    "chunks_dropped_full": "Chunks not saved when their request ended, since too many blocks or saves waited.",
    "chunks_dropped_away": "Chunks not saved when their request ended, since the pool was out of reach.",
}
#: State at the last step: of all workers, the largest. ``moonpool_connector_<name>``.
GAUGES: Final = {
    "loads_open": "Loads under way.",
    "saves_open": "Saves under way.",
    "oldest_transfer_seconds": "How long the oldest load or save has been under way.",
    "lookups_waiting": "Look-ups that wait for the master.",
    "load_level": "Of the adaptive choice: 0 every load, 1 one at a time, 2 none.",
    "load_tokens_per_second": "Of the adaptive choice: how fast loads are, beyond their latency.",
    "load_latency_seconds": "Of the adaptive choice: what a load takes however short it is.",
    "compute_tokens_per_second": "Of the adaptive choice: how fast prompts are computed.",
    "pinned_blocks": "Blocks of the cache that saves keep from being used again.",
    "lent_blocks": "Blocks of the cache that are kept for decode engines.",
}
#: ``moonpool_connector_<name>``.
HISTOGRAMS: Final = {
    "load_seconds": "From when a worker hears of a load until it has ended.",
    "prefetch_seconds": "From when a worker hears of a fetch until it has ended.",
    "save_seconds": "From when a worker hears of a save until it has ended.",
}
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass
class ConnectorStats(KVConnectorStats):
    """Numbers by name: counters and observations since the last time, and the state now."""

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """Add what another worker, or the same one later, says."""
        for name, value in other.data.items():
            if name in HISTOGRAMS:
                both = [*self.data.get(name, ()), *value]
                # The log does not take it along where it is not enabled.
                self.data[name] = both[-OBSERVED_MAX:]
            elif name in GAUGES:
                self.data[name] = max(value, self.data.get(name, 0))
            else:
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return a line of the log: counters and state as they are, the middle and the longest of what was observed."""
        reduced: dict[str, int | float] = {}
        for name, value in self.data.items():
            if name in HISTOGRAMS:
                ordered = sorted(value)
                reduced[f"{name}_median"] = round(ordered[len(ordered) // 2], 4)
                reduced[f"{name}_max"] = round(ordered[-1], 4)
            else:
                reduced[name] = round(value, 3)
        return reduced

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        """Return whether there is nothing to tell."""
        return not self.data


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """The metrics, for each engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[int, dict[str, Any]] = {engine: {} for engine in per_engine_labelvalues}
        for names, kind, options in (
            (COUNTERS, metric_types[Counter], {}),
            (GAUGES, metric_types[Gauge], {"multiprocess_mode": "mostrecent"}),
            (HISTOGRAMS, metric_types[Histogram], {"buckets": _SECONDS}),
        ):
            for name, documentation in names.items():
                metric = kind(
                    name=f"moonpool_connector_{name}", documentation=documentation, labelnames=labelnames, **options
                )
                for engine, values in per_engine_labelvalues.items():
                    self._metrics[engine][name] = metric.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record what `ConnectorStats` holds."""
        metrics = self._metrics[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in HISTOGRAMS:
                for one in value:
                    metrics[name].observe(one)
            elif name in GAUGES:
                metrics[name].set(value)
            else:
                metrics[name].inc(value)
