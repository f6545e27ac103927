# SPDX-License-Identifier: Apache-2.0
"""What a timed replay shows, and its JSON form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moonpool.bench.jsonform import rounded
from moonpool.bench.replay.live import LiveOptions
from moonpool.bench.replay.serving import Served, Totals
from moonpool.bench.report import digits
from moonpool.units import format_bytes

__all__ = ["Slice", "document", "print_report", "timeline"]

_SCHEMA: Final = 1
#: Of a timeline, at most.
_SLICES: Final = 60
_STEPS: Final[tuple[tuple[str, Callable[[Served], float]], ...]] = (
    ("late", lambda one: one.late),
    ("match", lambda one: one.match),
    ("get", lambda one: one.get),
    ("put", lambda one: one.put),
    ("request", lambda one: one.seconds),
)


@dataclass(frozen=True)
class Slice:
    """What was due in some part of the replay.

    Attributes:
        begin_s: when that part begins, in seconds of the replay.
        requests: that were due in it.
        blocks: of those.
        hits: of those.
    """

    begin_s: float
    requests: int
    blocks: int
    hits: int

    @property
    def hit_ratio(self) -> float | None:
        """Hits of all blocks."""
        return self.hits / self.blocks if self.blocks else None


def timeline(totals: Totals) -> list[Slice]:
    """Cut the replay into equal parts."""
    if not totals.served:
        return []
    due = np.array([one.due for one in totals.served])
    width = max(float(due.max()) / _SLICES, 1e-9)
    places = np.minimum((due / width).astype(np.int64), _SLICES - 1)
    figures = [
        np.bincount(places, weights=weights, minlength=_SLICES).astype(np.int64).tolist()
        for weights in (None, [one.blocks for one in totals.served], [one.hits for one in totals.served])
    ]
    return [Slice(number * width, *values) for number, values in enumerate(zip(*figures, strict=True))]


def _times(served: Sequence[Served], of: Callable[[Served], float]) -> dict[str, float | None]:
    """Return percentiles in microseconds; a step that did not take place has no time."""
    seconds = [value for one in served if (value := of(one)) > 0.0 or of is _STEPS[0][1]]
    if not seconds:
        return dict.fromkeys(("p50", "p99", "p999", "max"))
    p50, p99, p999, most = (float(value) * 1e6 for value in np.percentile(seconds, [50, 99, 99.9, 100]))
    return {"p50": p50, "p99": p99, "p999": p999, "max": most}


def _sum(totals: Totals, of: Callable[[Served], int]) -> int:
    return sum(map(of, totals.served))


def _ratio(totals: Totals) -> float | None:
    blocks = _sum(totals, lambda one: one.blocks)
    return _sum(totals, lambda one: one.hits) / blocks if blocks else None


def print_report(console: Console, trace: str, options: LiveOptions, totals: Totals) -> None:
    """Print what was replayed, the times of the requests, and what came of their blocks."""
    pool, served = totals.pool, totals.served
    started = "started for this" if pool["started"] else f"running at {options.pool.master}"
    console.print(trace, soft_wrap=True)
    console.print(
        f"pool: {started}, {pool['nodes']} node{'' if pool['nodes'] == 1 else 's'}, "
        f"{format_bytes(pool['capacity_bytes'])}, metadata in {pool['store']}; blocks of "
        f"{format_bytes(options.block_bytes)}; {options.speed:g} times as fast, up to {options.clients} at a time",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("µs", "p50", "p99", "p99.9", "most"):
        table.add_column(name, justify="left" if name == "µs" else "right")
    for name, of in _STEPS:
        table.add_row(name, *(digits(value) for value in _times(served, of).values()))
    console.print("", table, "", sep="\n")
    blocks, hits = _sum(totals, lambda one: one.blocks), _sum(totals, lambda one: one.hits)
    put = _sum(totals, lambda one: one.put_blocks)
    ratio = _ratio(totals)
    console.print(
        f"{len(served):,} requests in {totals.seconds:.1f} s; {hits:,} of {blocks:,} blocks were hits"
        f"{'' if ratio is None else f' ({ratio:.4f})'}, {put:,} were put; "
        f"{hits * options.block_bytes / 1e9:.3g} GB got, {put * options.block_bytes / 1e9:.3g} GB put",
        soft_wrap=True,
    )
    if totals.vanished:
        console.print(f"{totals.vanished:,} blocks were evicted between the question and the get", soft_wrap=True)
    if totals.dropped:
        console.print(f"{totals.dropped:,} blocks found no room", soft_wrap=True)
    for code, count in sorted(totals.errors.items()):
        console.print(Text(f"failed: {code}: {count:,} times", style="yellow"), soft_wrap=True)
    if totals.wrong:
        console.print(Text(f"NOT VERIFIED: {totals.wrong:,} chunks", style="bold red"))
    for complaint in totals.complaints:
        console.print(Text(f"NOT VERIFIED: {complaint}", style="bold red"), soft_wrap=True)


def document(
    environment: dict[str, Any], trace: dict[str, Any], options: LiveOptions, totals: Totals, *, interrupted: bool
) -> dict[str, Any]:
    """Return the whole replay."""
    blocks, hits = _sum(totals, lambda one: one.blocks), _sum(totals, lambda one: one.hits)
    put = _sum(totals, lambda one: one.put_blocks)
    times = {
        f"{name}_us": {key: rounded(value) for key, value in _times(totals.served, of).items()} for name, of in _STEPS
    }
    return {
        "schema": _SCHEMA,
        "environment": {**environment, "pool": totals.pool},
        "trace": trace,
        "interrupted": interrupted,
        "speed": options.speed,
        "clients": options.clients,
        "block_bytes": options.block_bytes,
        "seconds": rounded(totals.seconds),
        "requests": len(totals.served),
        "blocks": blocks,
        "hits": hits,
        "hit_ratio": rounded(_ratio(totals)),
        "put_blocks": put,
        "vanished_blocks": totals.vanished,
        "dropped_blocks": totals.dropped,
        "bytes_got": hits * options.block_bytes,
        "bytes_put": put * options.block_bytes,
        **times,
        "errors": dict(sorted(totals.errors.items())),
        "verified": not totals.wrong,
        "complaints": totals.complaints,
        "timeline": [
            {
                "begin_s": rounded(one.begin_s),
                "requests": one.requests,
                "blocks": one.blocks,
                "hits": one.hits,
                "hit_ratio": rounded(one.hit_ratio),
            }
            for one in timeline(totals)
        ],
    }
