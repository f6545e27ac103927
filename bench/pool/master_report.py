# SPDX-License-Identifier: Apache-2.0
"""What ``mooncake-bench master`` shows, and its JSON form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from moonpool.bench.jsonform import SCHEMA, rounded
from moonpool.bench.pool.calls import CALLS
from moonpool.bench.pool.rpc import RpcResult
from moonpool.bench.report import Column, digits, fitted, header, rate, ratio_text, table_of, verified_text

__all__ = ["MasterFindings", "document", "print_report"]

_LEGEND: Final = """\
calls/s of so many in flight; items/s: chunks; times in µs, of one call, where put and pin are two, one after the other.
CPU µs: of the server, for one call: where a machine is busy with something else, it says more than the rates.
echo: calls/s, p50 and CPU of a gRPC server that does nothing, with the same bytes there and back.
ratio: master / echo, in turn. Every figure is the median over the rounds.
ok: every answer was looked at."""


@dataclass
class MasterFindings:
    """What a run found; what was not measured is None or empty."""

    rows: list[RpcResult] = field(default_factory=list)
    memory: dict[str, Any] | None = None
    recovery: dict[str, Any] | None = None

    def __bool__(self) -> bool:
        return bool(self.complete or self.memory or self.recovery)

    @property
    def complete(self) -> list[RpcResult]:
        """Rows with at least one round, or with something wrong."""
        return [row for row in self.rows if row.master or row.complaints]

    @property
    def complaints(self) -> list[str]:
        """Everything that was wrong."""
        found = [f"{row.work.text}: {text}" for row in self.rows for text in row.complaints]
        if self.memory is not None and not self.memory["verified"]:
            found.append("memory: not every chunk that was put was there and could be removed")
        if self.recovery is not None and not self.recovery["verified"]:
            found.append("recovery: not every chunk was at the same place as before")
        return found


_COLUMNS: Final[tuple[Column[RpcResult], ...]] = (
    Column("call", lambda row: CALLS[row.work.call].name, left=True, grouped=True),
    Column("hashes", lambda row: f"{row.work.hashes:,}"),
    Column("in flight", lambda row: str(row.work.in_flight)),
    Column("calls/s", lambda row: rate(row.per_s(row.master))),
    Column("items/s", lambda row: rate(_items_per_s(row))),
    Column("p50", lambda row: digits(row.time_us(row.master, "p50_us"))),
    Column("p99", lambda row: digits(row.time_us(row.master, "p99_us"))),
    Column("CPU µs", lambda row: digits(row.cpu_us(row.master))),
    Column("echo", lambda row: rate(row.per_s(row.echo))),
    Column("p50", lambda row: digits(row.time_us(row.echo, "p50_us"))),
    Column("CPU µs", lambda row: digits(row.cpu_us(row.echo))),
    Column("ratio", lambda row: ratio_text(row.ratio)),
    Column("", lambda row: verified_text(not row.complaints)),
)


def _items_per_s(row: RpcResult) -> float | None:
    calls = row.per_s(row.master)
    return None if calls is None else calls * row.work.hashes


def print_report(console: Console, environment: dict[str, Any], findings: MasterFindings) -> None:
    """Print the header, the table, and memory and recovery."""
    console.print(header(environment), "", sep="\n")
    if findings.complete:
        fitted(console, table_of(_COLUMNS, findings.complete))
        console.print("", Text(_LEGEND, style="dim"), sep="\n")
    for name, text in (("memory", _memory(findings.memory)), ("recovery", _recovery(findings.recovery))):
        if text:
            console.print("", Text.assemble((f"{name}  ", "bold"), text), sep="\n", soft_wrap=True)
    for complaint in findings.complaints:
        console.print(Text(f"NOT VERIFIED: {complaint}", style="bold red"))


def _memory(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    return (
        f"{found['bytes_per_chunk']:.0f} bytes per chunk at {found['chunks']:,} chunks (the index alone: "
        f"{found['index_bytes_per_chunk']:.0f}) over an empty master of {found['rss_empty_bytes'] / 1e6:.0f} MB; "
        f"{found['bytes_per_chunk_after_removal']:.0f} after their removal; loaded at "
        f"{rate(found['chunks_loaded_per_s'])} chunks/s"
    )


def _recovery(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    return (
        f"{found['all_hits_s']:.2f} s from its start after kill -9 until all {found['chunks']:,} chunks were hits "
        f"(serving after {found['serving_s']:.2f} s), from {found['store_bytes'] / 1e6:.0f} MB of SQLite"
    )


def document(environment: dict[str, Any], findings: MasterFindings, *, interrupted: bool) -> dict[str, Any]:
    """Return the whole run."""
    return {
        "schema": SCHEMA,
        "environment": environment,
        "interrupted": interrupted,
        "rows": [_row(result) for result in findings.complete],
        "memory": _figures(findings.memory),
        "recovery": _figures(findings.recovery),
    }


def _row(result: RpcResult) -> dict[str, Any]:
    return {
        "call": result.work.call,
        "rpcs": list(CALLS[result.work.call].methods),
        "hashes": result.work.hashes,
        "in_flight": result.work.in_flight,
        "calls_per_s": rounded(result.per_s(result.master)),
        "items_per_s": rounded(_items_per_s(result)),
        "p50_us": rounded(result.time_us(result.master, "p50_us")),
        "p99_us": rounded(result.time_us(result.master, "p99_us")),
        "p999_us": rounded(result.time_us(result.master, "p999_us")),
        "cpu_us_per_call": rounded(result.cpu_us(result.master)),
        "limit": "echo",
        "limit_calls_per_s": rounded(result.per_s(result.echo)),
        "limit_p50_us": rounded(result.time_us(result.echo, "p50_us")),
        "limit_p99_us": rounded(result.time_us(result.echo, "p99_us")),
        "limit_cpu_us_per_call": rounded(result.cpu_us(result.echo)),
        "ratio": rounded(result.ratio),
        "ratios": [rounded(ratio) for ratio in result.ratios],
        "p50_ratio": rounded(result.p50_ratio),
        "rounds": len(result.master),
        "verified": not result.complaints,
        "complaints": result.complaints,
    }


def _figures(found: dict[str, Any] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {name: rounded(value) if isinstance(value, float) else value for name, value in found.items()}
