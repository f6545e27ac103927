# SPDX-License-Identifier: Apache-2.0
"""A picture of a run: rate over block size, each line beside its limit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonpool.bench.errors import UsageError
from moonpool.bench.results import RowResult
from moonpool.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from moonpool.bench.compare import CompareRow
    from moonpool.bench.replay.live_report import Slice
    from moonpool.bench.replay.simulate import Row
    from moonpool.bench.serve.summary import Summary

__all__ = ["plot", "plot_comparison", "plot_live", "plot_replay", "plot_serve", "require_matplotlib"]


def require_matplotlib(file: Path) -> None:
    """Say before anything is measured that the picture cannot be drawn.

    Raises:
        UsageError: matplotlib is not installed, or knows no pictures with the suffix of `file`.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise UsageError("matplotlib is not installed", hint="pip install 'moonpool[plot]'") from error
    known = FigureCanvasBase.get_supported_filetypes()
    if file.suffix.lstrip(".").lower() not in known:
        raise UsageError(f"{file.name!r} does not say which kind of picture", hint="a name that ends in .png or .svg")


def plot(results: Sequence[RowResult], file: Path) -> None:
    """Draw `results` into `file`; its suffix says how (``.png``, ``.svg``, ``.pdf``)."""
    panels: dict[str, list[RowResult]] = {}
    for result in sorted(results, key=lambda result: (result.work.transport, result.work.op), reverse=True):
        panels.setdefault(f"{result.work.transport} {result.work.op}", []).append(result)
    _draw({title: _lines(results) for title, results in panels.items()}, file)


def plot_comparison(rows: Sequence[CompareRow], file: Path) -> None:
    """Draw a comparison into `file`: a panel for each operation, batch, order and number of threads."""
    panels: dict[str, dict[str, list[RowResult]]] = {}
    for row in rows:
        work = row.work
        threads = "1 thread" if work.threads == 1 else f"{work.threads} threads"
        title = f"{work.transport} {work.op}, {work.memory} memory, batch {work.batch}, {work.order}, {threads}"
        lines = panels.setdefault(title, {})
        for name, entry in row.entries.items():
            if entry.windows:
                lines.setdefault(name, []).append(entry.result)
    _draw(panels, file)


def plot_replay(rows: Sequence[Row], file: Path) -> None:
    """Draw hit ratios over the capacity into `file`, a line for each policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.add_subplot()
    capacities = sorted({row.capacity_blocks for row in rows})
    for policy in dict.fromkeys(row.policy for row in rows):
        line = sorted((row.capacity_blocks, row.hit_ratio) for row in rows if row.policy == policy)
        # What no pool can have is no competitor of what pools have.
        style = "--" if policy in ("optimum", "bound") else "-"
        axes.plot(*zip(*line, strict=True), marker="o", linestyle=style, label=policy)
    axes.set_xscale("log")
    axes.set_xticks(capacities, [f"{capacity:,}" for capacity in capacities])
    axes.minorticks_off()
    _finish(axes, "capacity (blocks)", "hits / blocks requested")
    figure.savefig(file, dpi=120)


def plot_live(slices: Sequence[Slice], file: Path) -> None:
    """Draw hit ratios over the time of a replay into `file`: of each part, and of everything until then."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.add_subplot()
    parts = [(part.begin_s, part.hit_ratio) for part in slices if part.hit_ratio is not None]
    hits = itertools.accumulate(part.hits for part in slices)
    blocks = itertools.accumulate(part.blocks for part in slices)
    whole = [(part.begin_s, got / of) for part, got, of in zip(slices, hits, blocks, strict=True) if of]
    axes.plot(*zip(*parts, strict=True), marker=".", linestyle=":", label="each part")
    axes.plot(*zip(*whole, strict=True), label="from the beginning on")
    _finish(axes, "seconds of the replay", "hits / blocks requested")
    figure.savefig(file, dpi=120)


def plot_serve(summaries: Sequence[Summary], times: Mapping[str, Sequence[float]], file: Path) -> None:
    """Draw times to the first token into `file`: of all requests, and by turn where there are several.

    Args:
        summaries: of the servers.
        times: seconds to the first token of each server's requests.
        file: is written.
    """
    from matplotlib.figure import Figure

    turns = max(len(one.turns) for one in summaries)
    figure = Figure(figsize=(6.5 * (1 + (turns > 1)), 4.6), layout="constrained")
    axes = figure.add_subplot(1, 1 + (turns > 1), 1)
    for name, seconds in times.items():
        if seconds:
            parts = [(index + 1) / len(seconds) for index in range(len(seconds))]
            axes.step([value * 1e3 for value in sorted(seconds)], parts, where="post", label=name)
    axes.set_xscale("log", subs=[2, 5])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    _finish(axes, "time to first token (ms)", "part of the requests")
    if turns > 1:
        axes = figure.add_subplot(1, 2, 2)
        for one in summaries:
            medians = [(number, turn.ttft["p50"]) for number, turn in enumerate(one.turns, 1)]
            line = [(number, value * 1e3) for number, value in medians if value is not None]
            axes.plot([number for number, _ in line], [value for _, value in line], marker="o", label=one.name)
        axes.set_xticks(range(1, turns + 1))
        _finish(axes, "turn", "time to first token, p50 (ms)")
    figure.savefig(file, dpi=120)


def _draw(panels: Mapping[str, Mapping[str, list[RowResult]]], file: Path) -> None:
    # The object-oriented interface: it needs no display and no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * min(2, len(panels)), 4.2 * ((len(panels) + 1) // 2)), layout="constrained")
    for index, (title, lines) in enumerate(panels.items()):
        axes = figure.add_subplot((len(panels) + 1) // 2, min(2, len(panels)), index + 1)
        sizes = sorted({result.work.block_bytes for line in lines.values() for result in line})
        for label, line in lines.items():
            line.sort(key=lambda result: result.work.block_bytes)
            colour = _line(axes, line, [result.gbytes_per_s for result in line], marker="o", label=label)
            _line(
                axes,
                line,
                [result.limit_gbytes_per_s for result in line],
                marker=".",
                linestyle="--",
                color=colour,
                label=f"limit, {label}",
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [format_bytes(size) for size in sizes])
        axes.set_title(title)
        _finish(axes, "block", "GB/s (10^9 bytes)")
    figure.savefig(file, dpi=120)


def _finish(axes: Axes, x: str, y: str) -> None:
    """Say what is on the axes of a panel, when its lines are drawn."""
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _lines(rows: Sequence[RowResult]) -> dict[str, list[RowResult]]:
    """One line for everything but the block size."""
    named: list[tuple[str, Callable[[RowResult], object]]] = [
        ("memory", lambda row: row.work.memory),
        ("order", lambda row: row.work.order),
        ("lanes", lambda row: row.lanes),
        ("threads", lambda row: row.work.threads),
    ]
    varying = [(name, of) for name, of in named if len({of(row) for row in rows}) > 1]
    lines: dict[str, list[RowResult]] = {}
    for row in rows:
        label = ", ".join([f"batch {row.work.batch}", *(f"{name} {of(row)}" for name, of in varying)])
        lines.setdefault(label, []).append(row)
    return lines


def _line(axes: Axes, rows: Sequence[RowResult], rates: Sequence[float | None], **style: Any) -> Any:
    points = [(row.work.block_bytes, rate) for row, rate in zip(rows, rates, strict=True) if rate is not None]
    if not points:
        return None
    (drawn,) = axes.plot([size for size, _ in points], [rate for _, rate in points], **style)
    return drawn.get_color()
