# SPDX-License-Identifier: Apache-2.0
"""What a comparison of pools shows, and its JSON form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from moonpool.bench.compare import REFERENCE, CompareRow, Entry
from moonpool.bench.compare_report import lead_text, measured, paths_text, print_trouble
from moonpool.bench.jsonform import comparison, rounded
from moonpool.bench.report import Column, digits, fitted, header, rate, table_of, time_text
from moonpool.bench.work import Work
from moonpool.units import format_bytes

__all__ = ["document", "print_report", "text_of"]

_LEGEND: Final = """\
GB = 10^9 bytes of payload; /s: {items} a second; p50 in µs, of one call (a whole batch).
ratio: {reference} / this one, round by round. Every figure is the median over the rounds.
Every {what} was looked at, of every pool.{paths}"""


def text_of(work: Work) -> str:
    """Return which row it is."""
    threads = f", {work.threads} threads" if work.threads > 1 else ""
    if _asks(work):
        return f"{work.op} of {work.batch:,}{threads}"
    return f"{work.op} {format_bytes(work.block_bytes)} × {work.batch}{threads}"


def _asks(work: Work) -> bool:
    return work.transport == "master"


def print_report(
    console: Console, environment: dict[str, Any], rows: Sequence[CompareRow], skipped: Mapping[str, str]
) -> None:
    """Print the header, the table, the least ratios, and what went wrong."""
    versions = " · ".join(f"{name} {version}" for name, version in environment["versions"].items())
    console.print(header(environment, [("peers", versions)]), "", sep="\n")
    names = measured(rows)
    fitted(console, table_of(_columns(rows, names), rows))
    console.print("", Text(_legend(rows, names), style="dim"), sep="\n")
    for name in names:
        ratios = [(ratio, row.work) for row in rows if (ratio := row.ratio(name)) is not None]
        if ratios:
            least, work = min(ratios, key=lambda pair: pair[0])
            text = f"{REFERENCE} / {name}: at least {digits(least)} ({text_of(work)})"
            console.print(Text(text), soft_wrap=True)
    print_trouble(console, rows, skipped, text_of)


def _legend(rows: Sequence[CompareRow], names: Sequence[str]) -> str:
    asks = _asks(rows[0].work)
    return _LEGEND.format(
        items="keys" if asks else "chunks",
        reference=REFERENCE,
        what="answer" if asks else "byte",
        paths=paths_text(rows, names),
    )


def _columns(rows: Sequence[CompareRow], names: Sequence[str]) -> list[Column[CompareRow]]:
    asks = _asks(rows[0].work)
    columns: list[Column[CompareRow]] = [
        Column("call" if asks else "op", lambda row: row.work.op, left=True, grouped=True),
    ]
    if not asks:
        columns.append(Column("chunk", lambda row: format_bytes(row.work.block_bytes)))
    columns += [
        Column("batch", lambda row: f"{row.work.batch:,}"),
        Column("thr", lambda row: str(row.work.threads), varies=lambda row: row.work.threads),
    ]
    for name in names:
        columns += _columns_of(name, asks=asks)
    return columns


def _columns_of(name: str, *, asks: bool) -> list[Column[CompareRow]]:
    def entry(row: CompareRow) -> Entry | None:
        found = row.entries.get(name)
        return found if found is not None and found.windows else None

    def items(row: CompareRow) -> str | Text:
        found = entry(row)
        if found is not None and not found.result.verified:
            return Text("BAD", style="bold red")
        return rate(found.result.ops_per_s if found else None)

    def gbytes(row: CompareRow) -> str:
        found = entry(row)
        return digits(found.result.gbytes_per_s if found else None)

    def p50(row: CompareRow) -> str:
        found = entry(row)
        return time_text(found.result.latency if found else None, "p50_us")

    columns: list[Column[CompareRow]] = [Column(f"{name} /s", items)]
    if not asks:
        columns.append(Column("GB/s", gbytes))
    columns.append(Column("p50", p50))
    if name != REFERENCE:
        columns.append(Column("ratio", lambda row: lead_text(row, name)))
    return columns


def document(
    environment: dict[str, Any], rows: Sequence[CompareRow], skipped: Mapping[str, str], *, interrupted: bool
) -> dict[str, Any]:
    """Return the whole run: one row for each work and pool."""
    return comparison(environment, rows, skipped, interrupted=interrupted, form=_row)


def _row(of: CompareRow, entry: Entry) -> dict[str, Any]:
    work, result, latency = of.work, entry.result, entry.result.latency
    asks = _asks(work)
    return {
        "backend": result.backend,
        "op": work.op,
        "block_bytes": work.block_bytes,
        "batch": work.batch,
        "threads": work.threads,
        "footprint_bytes": work.footprint_bytes,
        "path": result.path,
        "gbytes_per_s": None if asks else rounded(result.gbytes_per_s),
        "items_per_s": rounded(result.ops_per_s),
        "p50_us": rounded(latency.p50_us if latency else None),
        "p99_us": rounded(latency.p99_us if latency else None),
        "p999_us": rounded(latency.p999_us if latency else None),
        "moonpool_ratio": rounded(of.ratio(result.backend)),
        "moonpool_ratios": [rounded(ratio) for ratio in entry.ratios(of.reference)],
        "rounds": result.rounds,
        "verified": result.verified,
        "complaints": result.complaints,
        "failure": entry.failure or None,
    }
