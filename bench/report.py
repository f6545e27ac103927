# SPDX-License-Identifier: Apache-2.0
"""The table and its header, for people with a terminal of 120 columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from moonpool.bench.doctor import Finding
from moonpool.bench.measure import Percentiles
from moonpool.bench.results import RowResult
from moonpool.bench.work import Work
from moonpool.units import format_bytes, format_duration

__all__ = [
    "ORDER_TEXTS",
    "Column",
    "digits",
    "doctor_table",
    "fitted",
    "header",
    "print_report",
    "rate",
    "ratio_text",
    "table_of",
    "time_text",
    "verified_text",
    "work_text",
]

_NONE: Final = "–"
R = TypeVar("R")
#: Ratios from which a row is good, and from which it is fair.
_GOOD: Final = 0.85
_FAIR: Final = 0.60
#: With more columns than this the table is set closer, to stay within 120 characters.
_COLUMNS_AIRY: Final = 15


@dataclass(frozen=True)
class Column(Generic[R]):
    """One column of a table with a line per row."""

    title: str
    cell: Callable[[R], str | Text]
    #: Shown only when the rows differ in it; otherwise the header says it.
    varies: Callable[[R], object] | None = None
    left: bool = False
    #: A repeated value is left blank, so that groups are seen.
    grouped: bool = False


def _run(parameters: dict[str, Any]) -> str:
    rounds = _count(parameters["rounds"], "round")
    if "duration" not in parameters:  # windows end with what there is to do, rather than with a time
        return rounds
    return (
        f"{rounds}, each with windows of {format_duration(parameters['duration'])} "
        f"after {format_duration(parameters['warmup'])} of warm-up"
    )


def header(
    environment: dict[str, Any], further: Sequence[tuple[str, str]] = (), *, run: str | None = None
) -> RenderableType:
    """Return where and with what the run was made, in a few lines.

    Args:
        environment: of the run.
        further: lines with a name and a text.
        run: how it was measured; None: in windows.
    """
    parameters = environment["parameters"]
    same = [f"{name} {value}" for name, value in parameters["fixed"].items()]
    lines = [
        ("host", _machine(environment)),
        ("target", environment["target"] and _machine(environment["target"])),
        *further,
        ("run", run or _run(parameters)),
        ("rows", " · ".join(same)),
        ("tuned", " · ".join(f"{name} {value}" for name, value in environment["engine_settings"].items())),
    ]
    grid = Table.grid(padding=(0, 2))
    for name, text in lines:
        if text:
            grid.add_row(Text(name, style="bold"), Text(text, style="dim"))
    return grid


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _machine(host: dict[str, Any]) -> str:
    version = host["moonpool"] + (f" ({host['revision']})" if host["revision"] else "")
    parts = [
        host["host"],
        host["cpu"] or "unknown CPU",
        _count(host["cores"], "core"),
        f"Linux {host['kernel']}",
        f"Python {host['python']}",
        f"moonpool {version}",
    ]
    if host["transparent_hugepage"]:
        parts.append(f"THP {host['transparent_hugepage']}")
    if host["governor"]:
        parts.append(f"governor {host['governor']}")
    return " · ".join(parts)


def print_report(console: Console, environment: dict[str, Any], results: Sequence[RowResult]) -> None:
    """Print the header, the table and what it means."""
    console.print(header(environment), "", sep="\n")
    fitted(console, rows_table(results))
    console.print("", notes(results), sep="\n")


def fitted(console: Console, table: Table) -> None:
    """Print a table with all its digits: in a narrow terminal lines are broken, but nothing is left out."""
    own_width = console.width
    console.width = max(own_width, Console(width=1000).measure(table).maximum)
    console.print(table)
    console.width = own_width


def rows_table(results: Sequence[RowResult]) -> Table:
    """Return one line per row of a transfer."""
    return table_of(_COLUMNS, results)


def table_of(known: Sequence[Column[R]], results: Sequence[R]) -> Table:
    """Return one line per row."""
    columns = [
        column for column in known if column.varies is None or len({column.varies(result) for result in results}) > 1
    ]
    gap = 2 if len(columns) <= _COLUMNS_AIRY else 1
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column.title, justify="left" if column.left else "right", no_wrap=True, overflow="crop")
    before: list[str | Text] = [""] * len(columns)
    for result in results:
        cells = [column.cell(result) for column in columns]
        shown = []
        fresh = False
        for column, cell, above in zip(columns, cells, before, strict=True):
            fresh = fresh or (column.grouped and cell != above)
            shown.append(cell if fresh or not column.grouped else "")
        if fresh:
            table.add_row()
        table.add_row(*shown)
        before = cells
    return table


def notes(results: Sequence[RowResult]) -> RenderableType:
    """Return what the columns mean, and what verification complained about."""
    parts: list[RenderableType] = [Text(_legend(results), style="dim")]
    if rails := _rails(results):
        parts.append(Text(f"rails: {rails}"))
    parts.extend(Text(f"no limit: {text}", style="yellow") for text in _once(result.no_limit for result in results))
    complaints = [(work_text(result.work), text) for result in results for text in result.complaints]
    parts.extend(Text(f"NOT VERIFIED: {where}: {text}", style="bold red") for where, text in complaints)
    return Group(*parts)


def _once(texts: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(text for text in texts if text is not None))


def _rails(results: Sequence[RowResult]) -> str:
    """What each RDMA rail of this side carried, over all rows."""
    moved: Counter[str] = Counter()
    for result in results:
        moved.update(result.rail_bytes or {})
    whole = moved.total() or 1
    return " · ".join(f"{rail} {_moved(count)} ({count / whole:.0%})" for rail, count in moved.items())


def _moved(count: int) -> str:
    return f"{digits(count / 1e9)} GB" if count >= 1e9 else f"{digits(count / 1e6)} MB"


def work_text(work: Work) -> str:
    """Return which row it is."""
    text = f"{work.transport} {work.op} {format_bytes(work.block_bytes)} × {work.batch}"
    if work.depth > 1:
        text += f" × {work.depth} under way"
    if work.memory != "registered":
        text += f" {work.memory}"
    return text if work.order == "sequential" else f"{text} {work.order}"


def _legend(results: Sequence[RowResult]) -> str:
    limits = {result.limit: result for result in results if result.limit is not None}
    said = [_LIMITS[name].format(width=result.limit_width) for name, result in limits.items()]
    text = "GB = 10^9 bytes; op = one block; times in µs, of one transfer (a whole batch); CPU here + in the target."
    if said:
        text += f"\nlimit: GB/s and p50 of {'; of '.join(said)}."
        text += "\nratio: engine / limit, in turn over the same blocks. Every figure is the median over the rounds."
    if any(limit in _PERFTEST for limit in limits):
        text += "\nperftest moves memory of its own."
    if "cuMemcpyAsync" in limits:
        text += "\ncuMemcpyAsync moves memory of its own."
    if any(result.verified for result in results):
        text += "\nok: every byte was checked after every window, on both sides."
    return text


_LIMITS: Final = {
    "sockets-acked": "raw sockets in C, up to {width} connections, one answer per batch",
    "sockets-stream": "raw sockets in C, up to {width} connections, one answer at the end",
    "memcpy": "memcpy in C, up to {width} threads",
    "process_vm": "process_vm_readv and process_vm_writev in C, up to {width} threads",
    "cuMemcpyAsync": "one cuMemcpyAsync for each batch, between a GPU and pinned memory, for shm within a GPU",
    "ib_write_bw": "ib_write_bw, as many blocks under way, one rail",
    "ib_read_bw": "ib_read_bw, as many blocks under way, one rail",
    "ib_write_lat": "ib_write_lat, one block at a time, half of a round trip",
    "ib_read_lat": "ib_read_lat, one block at a time",
}
_PERFTEST: Final = frozenset(name for name in _LIMITS if name.startswith("ib_"))


# ---------------------------------------------------------------- cells


def digits(value: float | None) -> str:
    """Three significant digits, as far as they are in front of the point or just behind it."""
    if value is None:
        return _NONE
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def rate(value: float | None) -> str:
    """As `digits`, with k and M."""
    if value is None:
        return _NONE
    for factor, unit in ((1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{digits(value / factor)}{unit}"
    return digits(value)


def time_text(latency: Percentiles | None, name: str) -> str:
    """Return one of the percentiles."""
    return digits(getattr(latency, name) if latency is not None else None)


def _cpu(result: RowResult) -> str:
    cost = result.cpu_s_per_gb
    if cost is None:
        return _NONE
    ours, theirs = cost
    return digits(ours) if theirs == 0 else f"{digits(ours)}+{digits(theirs)}"


def _number(value: int | None) -> str:
    return _NONE if value is None else str(value)


def _bytes(value: int | None) -> str:
    return _NONE if value is None else format_bytes(value)


def ratio_text(ratio: float | None) -> Text:
    """Return a ratio in the colour that says how good it is."""
    if ratio is None:
        return Text(_NONE)
    # Two digits that say something, also where next to nothing is left of the limit.
    text = f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"
    return Text(text, style="green" if ratio >= _GOOD else "yellow" if ratio >= _FAIR else "red")


def verified_text(verified: bool) -> Text:
    """Return ok or BAD."""
    return Text("ok", style="green") if verified else Text("BAD", style="bold red")


def _via(result: RowResult) -> str:
    """What was asked for, and the path that was taken where that is another."""
    asked = result.work.transport
    return asked if result.path in (None, asked) else f"{asked}: {result.path}"


ORDER_TEXTS: Final = {"sequential": "seq", "random": "random"}

_COLUMNS: Final[tuple[Column[RowResult], ...]] = (
    Column("via", _via, left=True, grouped=True),
    Column("memory", lambda row: row.work.memory, varies=lambda row: row.work.memory, left=True, grouped=True),
    Column("op", lambda row: row.work.op, left=True, grouped=True),
    Column("lanes", lambda row: str(row.lanes or _NONE), varies=lambda row: row.work.lanes),
    Column("QPs", lambda row: _number(row.work.tuning.queue_pairs), varies=lambda row: row.work.tuning.queue_pairs),
    Column("slice", lambda row: _bytes(row.work.tuning.slice_bytes), varies=lambda row: row.work.tuning.slice_bytes),
    Column("inl", lambda row: _bytes(row.work.tuning.inline_bytes), varies=lambda row: row.work.tuning.inline_bytes),
    Column("spin", lambda row: _number(row.work.tuning.spin_us), varies=lambda row: row.work.tuning.spin_us),
    Column("thr", lambda row: str(row.work.threads), varies=lambda row: row.work.threads),
    Column("order", lambda row: ORDER_TEXTS[row.work.order], varies=lambda row: row.work.order, left=True),
    Column("block", lambda row: format_bytes(row.work.block_bytes)),
    Column("batch", lambda row: str(row.work.batch)),
    Column("depth", lambda row: str(row.work.depth), varies=lambda row: row.work.depth),
    Column("GB/s", lambda row: digits(row.gbytes_per_s)),
    Column("ops/s", lambda row: rate(row.ops_per_s)),
    Column("p50", lambda row: time_text(row.latency, "p50_us")),
    Column("p99", lambda row: time_text(row.latency, "p99_us")),
    Column("p99.9", lambda row: time_text(row.latency, "p999_us")),
    Column("CPU s/GB", _cpu),
    Column("limit", lambda row: digits(row.limit_gbytes_per_s)),
    Column("p50", lambda row: time_text(row.limit_latency, "p50_us")),
    Column("ratio", lambda row: ratio_text(row.ratio)),
    Column("", lambda row: verified_text(row.verified)),
)


# ---------------------------------------------------------------- doctor

_STYLES: Final = {"OK": "green", "degraded": "yellow", "missing": "red"}


def doctor_table(findings: Sequence[Finding]) -> RenderableType:
    """Return the findings, each with its fix below it."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for finding in findings:
        # What is optional and not there is no alarm.
        style = _STYLES[finding.status] if finding.needed or finding.status != "missing" else "dim"
        text = Text(finding.found)
        if finding.fix:
            text.append(f"\nfix: {finding.fix}", style="cyan")
        table.add_row(Text(finding.status, style=style), finding.name, text)
    return table
