# SPDX-License-Identifier: Apache-2.0
"""The stable JSON form of a run: schema 1, documented in ``docs/bench.md``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from moonpool.bench.results import RowResult

if TYPE_CHECKING:
    from moonpool.bench.compare import CompareRow, Entry

__all__ = ["SCHEMA", "comparison", "document", "rounded", "row"]

#: Changed when a key disappears or changes its meaning; new keys do not change it.
SCHEMA: Final = 1


def document(environment: dict[str, Any], results: Sequence[RowResult], *, interrupted: bool = False) -> dict[str, Any]:
    """Return the whole run."""
    return {
        "schema": SCHEMA,
        "environment": environment,
        "interrupted": interrupted,
        "rows": [row(result) for result in results],
    }


def _compared(of: CompareRow, entry: Entry) -> dict[str, Any]:
    """Return what one backend did in one row."""
    return {
        **row(entry.result),
        "moonpool_ratio": rounded(of.ratio(entry.result.backend)),
        "moonpool_ratios": [rounded(ratio) for ratio in entry.ratios(of.reference)],
        "failure": entry.failure or None,
    }


def comparison(
    environment: dict[str, Any],
    rows: Sequence[CompareRow],
    skipped: Mapping[str, str],
    *,
    interrupted: bool = False,
    form: Callable[[CompareRow, Entry], dict[str, Any]] = _compared,
) -> dict[str, Any]:
    """Return a whole comparison: one row, which `form` makes, for each work and backend."""
    return {
        "schema": SCHEMA,
        "environment": environment,
        "interrupted": interrupted,
        "skipped": [{"backend": name, "reason": reason} for name, reason in skipped.items()],
        "rows": [form(row, entry) for row in rows for entry in row.entries.values()],
    }


def row(result: RowResult) -> dict[str, Any]:
    """Return one row. What was not measured is None."""
    work, latency, best = result.work, result.latency, result.limit_latency
    cpu = result.cpu_s_per_gb
    return {
        "backend": result.backend,
        "transport": work.transport,
        "op": work.op,
        "block_bytes": work.block_bytes,
        "batch": work.batch,
        "order": work.order,
        "lanes": result.lanes,
        "threads": work.threads,
        "gbytes_per_s": rounded(result.gbytes_per_s),
        "ops_per_s": rounded(result.ops_per_s),
        "p50_us": rounded(latency.p50_us if latency else None),
        "p99_us": rounded(latency.p99_us if latency else None),
        "p999_us": rounded(latency.p999_us if latency else None),
        "cpu_s_per_gb": rounded(sum(cpu) if cpu else None),
        "limit": result.limit,
        "limit_gbytes_per_s": rounded(result.limit_gbytes_per_s),
        "ratio": rounded(result.ratio),
        "verified": result.verified,
        # Beyond the core of the schema.
        "cpu_s_per_gb_initiator": rounded(cpu[0] if cpu else None),
        "cpu_s_per_gb_target": rounded(cpu[1] if cpu else None),
        "limit_width": result.limit_width,
        "limit_p50_us": rounded(best.p50_us if best else None),
        "limit_p99_us": rounded(best.p99_us if best else None),
        "ratios": [rounded(ratio) for ratio in result.ratios],
        "rounds": result.rounds,
        "footprint_bytes": work.footprint_bytes,
        "complaints": result.complaints,
        "memory": work.memory,
        "depth": work.depth,
        "path": result.path,
        "no_limit": result.no_limit,
        "rail_bytes": result.rail_bytes,
        "tuning": dataclasses.asdict(work.tuning),
    }


def rounded(value: float | None) -> float | None:
    """Return six significant digits: more would pretend."""
    return None if value is None else float(f"{value:.6g}")
