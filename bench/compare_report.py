# SPDX-License-Identifier: Apache-2.0
"""The table of a comparison, and what it comes down to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moonpool.bench.compare import REFERENCE, CompareRow
from moonpool.bench.measure import median
from moonpool.bench.report import ORDER_TEXTS, digits, fitted, header, work_text
from moonpool.bench.work import Work
from moonpool.units import format_bytes

__all__ = ["lead_text", "measured", "paths_text", "print_comparison", "print_trouble"]

_NONE: Final = "–"
_WorkColumn = tuple[str, Callable[[CompareRow], str], Literal["left", "right"]]


def print_comparison(
    console: Console, environment: dict[str, Any], rows: Sequence[CompareRow], skipped: Mapping[str, str]
) -> None:
    """Print the header, the table, the ratios in short, and what went wrong."""
    console.print(header(environment), "", sep="\n")
    names = measured(rows)
    fitted(console, _table(rows, names))
    console.print("", Text(_legend(rows, names), style="dim"), "", sep="\n")
    for name in names:
        if name != REFERENCE and (text := _in_short(rows, name)):
            console.print(Text(text), soft_wrap=True)
    print_trouble(console, rows, skipped, work_text)


def measured(rows: Sequence[CompareRow]) -> list[str]:
    """Return the names of those that have a window."""
    return list(dict.fromkeys(name for row in rows for name, entry in row.entries.items() if entry.windows))


def print_trouble(
    console: Console, rows: Sequence[CompareRow], skipped: Mapping[str, str], text_of: Callable[[Work], str]
) -> None:
    """Print who was left out, who failed, and whose bytes were wrong; `text_of` says which row it is."""
    for name, reason in skipped.items():
        console.print(Text(f"skipped: {name}: {reason}", style="yellow"), soft_wrap=True)
    for row in rows:
        for name, entry in row.entries.items():
            where = f"{name}: {text_of(row.work)}"
            if entry.failure and name not in skipped:
                console.print(Text(f"failed: {where}: {entry.failure}", style="yellow"), soft_wrap=True)
            for complaint in entry.result.complaints:
                console.print(Text(f"NOT VERIFIED: {where}: {complaint}", style="bold red"), soft_wrap=True)


def paths_text(rows: Sequence[CompareRow], names: Sequence[str]) -> str:
    """Return a line, with its beginning, that says over what they went; ``""`` where that is not known."""
    paths = {
        name: sorted({entry.result.path for row in rows if (entry := row.entries.get(name)) and entry.result.path})
        for name in names
    }
    told = "; ".join(f"{name} over {', '.join(found)}" for name, found in paths.items() if found)
    return f"\nPaths: {told}." if told else ""


def _table(rows: Sequence[CompareRow], names: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    work_columns: list[_WorkColumn] = [
        ("op", lambda row: row.work.op, "left"),
        ("memory", lambda row: row.work.memory, "left"),
        ("thr", lambda row: str(row.work.threads), "right"),
        ("order", lambda row: ORDER_TEXTS[row.work.order], "left"),
        ("block", lambda row: format_bytes(row.work.block_bytes), "right"),
        ("batch", lambda row: str(row.work.batch), "right"),
    ]
    optional = {"memory", "thr", "order"}
    shown = [
        column for column in work_columns if column[0] not in optional or len({column[1](row) for row in rows}) > 1
    ]
    for title, _, justify in shown:
        table.add_column(f"\n{title}", justify=justify, no_wrap=True)
    for name in names:
        table.add_column(f"{name}\nGB/s", justify="right", no_wrap=True)
        table.add_column("\np50" if name == REFERENCE else "\nratio", justify="right", no_wrap=True)
        table.add_column("\nCPU", justify="right", no_wrap=True)
    groups: list[str] = []
    for row in rows:
        cells: list[str | Text] = [cell(row) for _, cell, _ in shown]
        group = [str(cell) for (title, _, _), cell in zip(shown, cells, strict=True) if title not in ("block", "batch")]
        if groups and group != groups:
            table.add_row()
        groups = group
        for name in names:
            cells.extend(_figures(row, name))
        table.add_row(*cells)
    return table


def _figures(row: CompareRow, name: str) -> list[Text]:
    entry = row.entries.get(name)
    if entry is None or not entry.windows:
        return [Text("failed" if entry is not None and entry.failure else _NONE, style="dim"), Text(_NONE), Text(_NONE)]
    result = entry.result
    rate = Text(digits(result.gbytes_per_s)) if result.verified else Text("BAD", style="bold red")
    cpu = result.cpu_s_per_gb
    p50 = digits(result.latency.p50_us if result.latency else None)
    return [rate, Text(p50) if name == REFERENCE else lead_text(row, name), Text(digits(sum(cpu) if cpu else None))]


def lead_text(row: CompareRow, name: str) -> Text:
    """Return the ratio in the colour that says whether the reference is ahead."""
    ratio = row.ratio(name)
    if ratio is None:
        return Text(_NONE)
    return Text(digits(ratio), style="green" if ratio >= 1 else "red")


def _in_short(rows: Sequence[CompareRow], name: str) -> str:
    ratios = [(ratio, row) for row in rows if (ratio := row.ratio(name)) is not None]
    if not ratios:
        return ""
    least, where = min(ratios, key=lambda pair: pair[0])
    ahead = sum(ratio >= 1 for ratio, _ in ratios)
    place = f"{work_text(where.work)}, {where.work.threads} thread{'s' if where.work.threads > 1 else ''}"
    return (
        f"{REFERENCE} / {name}: at least {digits(least)} ({place}), median "
        f"{digits(median([ratio for ratio, _ in ratios]))}; not slower in {ahead} of {len(ratios)} rows"
    )


def _legend(rows: Sequence[CompareRow], names: Sequence[str]) -> str:
    return (
        "GB = 10^9 bytes; p50 in µs, of one transfer (a whole batch); CPU: seconds per GB, of both processes;\n"
        f"ratio: {REFERENCE} / this one, round by round. Every figure is the median over the rounds."
        + paths_text(rows, names)
        + "\nEvery byte was checked after every window, on both sides."
    )
