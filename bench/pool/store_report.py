# SPDX-License-Identifier: Apache-2.0
"""What ``mooncake-bench store`` shows, and its JSON form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from moonpool.bench.jsonform import SCHEMA, rounded
from moonpool.bench.pool.work import StoreResult
from moonpool.bench.report import Column, digits, fitted, header, rate, ratio_text, table_of, time_text, verified_text
from moonpool.units import format_bytes

__all__ = ["document", "print_report"]

_LEGEND: Final = """\
GB = 10^9 bytes of payload, each chunk counted once; times in µs, of one call (a whole batch).
limit: GB/s and p50 of the engine's own transfers of the same bytes, here{path}, to or from the same places.
ratio: client / limit, in turn. Every figure is the median over the rounds.
ok: every byte was checked after every window: of gets where it has come, of puts in every replica."""

_COLUMNS: Final[tuple[Column[StoreResult], ...]] = (
    Column("op", lambda row: row.store.op, left=True, grouped=True),
    Column("memory", lambda row: row.store.memory, varies=lambda row: row.store.memory, left=True, grouped=True),
    Column("located", lambda row: row.store.located, varies=lambda row: row.store.located, left=True, grouped=True),
    Column("replicas", lambda row: str(row.store.replicas), varies=lambda row: row.store.replicas),
    Column("thr", lambda row: str(row.store.threads), varies=lambda row: row.store.threads),
    Column("chunk", lambda row: format_bytes(row.store.block_bytes)),
    Column("batch", lambda row: str(row.store.batch)),
    Column("GB/s", lambda row: _gbytes(row.gbytes_per_s)),
    Column("chunks/s", lambda row: rate(row.ops_per_s)),
    Column("p50", lambda row: time_text(row.latency, "p50_us")),
    Column("p99", lambda row: time_text(row.latency, "p99_us")),
    Column("limit", lambda row: digits(row.limit_gbytes_per_s)),
    Column("p50", lambda row: time_text(row.limit_latency, "p50_us")),
    Column("ratio", lambda row: ratio_text(row.ratio)),
    Column("", lambda row: verified_text(row.verified)),
)


def _gbytes(value: float | None) -> str:
    """As `digits`; single small chunks come to a few MB in a second."""
    return f"{value:.2g}" if value is not None and 0 < value < 0.1 else digits(value)


def print_report(console: Console, environment: dict[str, Any], results: Sequence[StoreResult]) -> None:
    """Print the header, the table and what it means."""
    console.print(header(environment, [("pool", _pool(environment["pool"]))]), "", sep="\n")
    fitted(console, table_of(_COLUMNS, results))
    paths = sorted({result.path for result in results if result.path})
    console.print("", Text(_LEGEND.format(path=f" over {', '.join(paths)}" if paths else ""), style="dim"), sep="\n")
    for result in results:
        for text in result.complaints:
            console.print(Text(f"NOT VERIFIED: {result.store.text}: {text}", style="bold red"))


def _pool(pool: dict[str, Any]) -> str:
    started = "started for this" if pool["started"] else f"running at {pool['master']}"
    nodes = f"{pool['nodes']} node{'' if pool['nodes'] == 1 else 's'}"
    kept = f" · metadata in {pool['store']}" if pool["store"] else ""
    return f"{started} · {nodes} · {format_bytes(pool['capacity_bytes'])}{kept}"


def document(environment: dict[str, Any], results: Sequence[StoreResult], *, interrupted: bool) -> dict[str, Any]:
    """Return the whole run."""
    return {
        "schema": SCHEMA,
        "environment": environment,
        "interrupted": interrupted,
        "rows": [_row(result) for result in results],
    }


def _row(result: StoreResult) -> dict[str, Any]:
    work, latency, best = result.store, result.latency, result.limit_latency
    return {
        "backend": result.backend,
        "op": work.op,
        "block_bytes": work.block_bytes,
        "batch": work.batch,
        "replicas": work.replicas,
        "threads": work.threads,
        "memory": work.memory,
        "located": work.located,
        "path": result.path,
        "gbytes_per_s": rounded(result.gbytes_per_s),
        "chunks_per_s": rounded(result.ops_per_s),
        "p50_us": rounded(latency.p50_us if latency else None),
        "p99_us": rounded(latency.p99_us if latency else None),
        "p999_us": rounded(latency.p999_us if latency else None),
        "limit": result.limit,
        "limit_gbytes_per_s": rounded(result.limit_gbytes_per_s),
        "limit_p50_us": rounded(best.p50_us if best else None),
        "limit_p99_us": rounded(best.p99_us if best else None),
        "ratio": rounded(result.ratio),
        "ratios": [rounded(ratio) for ratio in result.ratios],
        "rounds": result.rounds,
        "footprint_bytes": work.footprint_bytes,
        "verified": result.verified,
        "complaints": result.complaints,
    }
