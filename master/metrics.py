# SPDX-License-Identifier: Apache-2.0
"""Counters and gauges, and their text form for Prometheus.

The few kinds that are needed cost a dictionary look-up each; the official client library takes a lock for every one.
All is used from the event loop only.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["Metrics", "render"]

# Seconds: from what a small call takes to what a put may wait.
_BUCKETS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0, 10.0)


class _Calls:
    __slots__ = ("buckets", "count", "items", "refused", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.items = 0
        self.seconds = 0.0
        self.buckets = [0] * (len(_BUCKETS) + 1)
        self.refused: dict[str, int] = {}


class Metrics:
    """What the master counts itself. What the index and the store count is asked for when somebody looks."""

    def __init__(self, methods: Iterable[str]) -> None:
        self.calls = {method: _Calls() for method in methods}
        self.counts: dict[str, int] = {
            "lookups_items": 0,
            "lookup_hits_items": 0,
            "evicted_bytes": 0,
            "put_waits_calls": 0,
            "no_space_items": 0,
            "sessions_timed_out": 0,
            "probes": 0,
            "probes_failed": 0,
            "writes_expired_calls": 0,
            "moved_items": 0,
            "moved_bytes": 0,
            "not_moved_items": 0,
            "spoilt_items": 0,
            "spoilt_replaced_items": 0,
            "spoilt_lost_items": 0,
            "demoted_items": 0,
            "demoted_bytes": 0,
            "shed_items": 0,
            "loaded_items": 0,
            "loaded_bytes": 0,
            "disk_failed_items": 0,
            "disk_evicted_bytes": 0,
        }

    def called(self, method: str, seconds: float, items: int) -> None:
        """Count a call that was carried out."""
        calls = self.calls[method]
        calls.count += 1
        calls.items += items
        calls.seconds += seconds
        calls.buckets[bisect.bisect_left(_BUCKETS, seconds)] += 1

    def refused(self, method: str, code: str) -> None:
        """Count a call that was answered with an error."""
        refused = self.calls[method].refused
        refused[code] = refused.get(code, 0) + 1

    def render(self, gauges: Mapping[str, float | Mapping[str, float]]) -> str:
        """Return everything as text for Prometheus.

        Args:
            gauges: name (without ``moonpool_master_``) -> value, or label text -> value.
        """
        lines: list[str] = []
        for name, value in self.counts.items():
            lines += render(f"{name}_total", "counter", {"": value})
        for name, gauge in gauges.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += render(name, kind, gauge if isinstance(gauge, Mapping) else {"": gauge})
        lines += self._render_calls()
        return "\n".join(lines) + "\n"

    def _render_calls(self) -> list[str]:
        used = {method: calls for method, calls in self.calls.items() if calls.count or calls.refused}
        items = {f'method="{method}"': float(calls.items) for method, calls in used.items()}
        refused = {
            f'method="{method}",code="{code}"': float(count)
            for method, calls in used.items()
            for code, count in calls.refused.items()
        }
        lines = render("call_items_total", "counter", items) + render("calls_refused_total", "counter", refused)
        lines.append("# TYPE moonpool_master_call_seconds histogram")
        for method, calls in used.items():
            total = 0
            for bound, count in zip((*map(str, _BUCKETS), "+Inf"), calls.buckets, strict=True):
                total += count
                lines.append(f'moonpool_master_call_seconds_bucket{{method="{method}",le="{bound}"}} {total}')
            lines.append(f'moonpool_master_call_seconds_sum{{method="{method}"}} {calls.seconds:.9g}')
            lines.append(f'moonpool_master_call_seconds_count{{method="{method}"}} {total}')
        return lines


def render(name: str, kind: str, values: Mapping[str, float]) -> list[str]:
    """Return the lines of one metric."""
    lines = [f"# TYPE moonpool_master_{name} {kind}"]
    lines += [
        f"moonpool_master_{name}{{{labels}}} {value:.15g}" if labels else f"moonpool_master_{name} {value:.15g}"
        for labels, value in values.items()
    ]
    return lines
