# SPDX-License-Identifier: Apache-2.0
"""Rates beside perftest: one rail here, one there, and how near the engine has to come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from moonpool.bench import jsonform
from moonpool.bench.environment import describe_run
from moonpool.bench.hardware.steps import Check, Step
from moonpool.bench.report import work_text
from moonpool.bench.results import RowResult
from moonpool.bench.runner import Observer, Options, Runner
from moonpool.bench.work import OPS, Tuning, Work
from moonpool.errors import MoonpoolError

__all__ = ["FULL", "QUICK", "Bars", "sweep"]

_KIB: Final = 1 << 10
_MIB: Final = 1 << 20


@dataclass(frozen=True)
class Bars:
    """What is measured, and how.

    Attributes:
        rows: bytes of a block, blocks of a transfer, and the ratio that the row has to reach.
        shared: bytes of a block and blocks of a transfer of the rows over all rails, or None.
        judged: whether windows are long enough for a ratio to mean something.
        ops: directions.
        footprint_bytes: memory on each side.
        options: of the run.
    """

    rows: tuple[tuple[int, int, float], ...]
    shared: tuple[int, int] | None
    judged: bool
    ops: tuple[str, ...]
    footprint_bytes: int
    options: Options


FULL: Final = Bars(
    ((64 * _KIB, 1, 0.90), (_MIB, 1, 0.90), (64 * _KIB, 64, 0.85), (4 * _KIB, 1024, 0.85)),
    (_MIB, 64),
    True,
    OPS,
    256 * _MIB,
    Options(rounds=7, duration=1.0, warmup=0.2),
)
QUICK: Final = Bars(
    ((64 * _KIB, 1, 0.90), (64 * _KIB, 16, 0.85)),
    None,
    False,
    ("write",),
    2 * _MIB,
    Options(rounds=1, duration=0.05, warmup=0.02),
)


class _Noting(Observer):
    def __init__(self, note: Callable[[RowResult], None]) -> None:
        self._note = note

    def row_ends(self, result: RowResult) -> None:
        self._note(result)


def sweep(options: Options, bars: Bars, tuning: Tuning, rail: str, rails: int, note: Callable[[Step], None]) -> Step:
    """Measure every row.

    Args:
        options: where the target is.
        bars: what is measured, and how.
        tuning: the devices.
        rail: the one of this side that is compared, since perftest measures one.
        rails: how many this side has.
        note: is given what is known so far.
    """
    options = replace(bars.options, target=options.target, secret=options.secret)
    results: list[RowResult] = []
    failure: list[Check] = []
    one = replace(tuning, devices=rail)
    limits = {
        Work("rdma", op, block, batch, "sequential", 1, None, bars.footprint_bytes, "registered", one): bar
        for op in bars.ops
        for block, batch, bar in bars.rows
    }
    parameters: dict[str, Any] = {
        "rounds": options.rounds, "duration": options.duration, "warmup": options.warmup, "limit": options.mode,
        "only": None, "target": str(options.target), "fixed": {},
    }  # fmt: skip
    environment = describe_run(parameters)

    def step() -> Step:
        checks = [_line(result, limits.get(result.work), judged=bars.judged) for result in results]
        return Step([*checks, *failure], jsonform.document(environment, results))

    def keep(result: RowResult) -> None:
        results.append(result)
        note(step())

    together = [
        Work("rdma", op, *bars.shared, "sequential", 1, None, bars.footprint_bytes, "registered", tuning)
        for op in bars.ops
        if bars.shared is not None and rails > 1
    ]
    try:
        with Runner(options, _Noting(keep)) as runner:
            environment["target"] = runner.describe_target()
            runner.run([*limits, *together])
    except MoonpoolError as error:
        failure.append(
            Check("sweep", "failed", f"{len(results)} of {len(limits) + len(together)} rows", "", str(error))
        )
    return step()


def _line(result: RowResult, bar: float | None, *, judged: bool) -> Check:
    name = f"sweep: {work_text(result.work)}" + ("" if bar is not None else ", all rails")
    figure = f"{result.gbytes_per_s:.2f} GB/s" if result.gbytes_per_s is not None else ""
    limit = "" if bar is None or not judged else f"{bar:.2f}"
    if not result.verified:
        return Check(name, "failed", figure, limit, result.complaints[0])
    ratio = result.ratio
    if ratio is None:
        return Check(name, "skipped", figure, limit, f"nothing to compare with: {result.no_limit}")
    figure += f", {ratio:.2f} of {result.limit}'s {result.limit_gbytes_per_s:.2f} GB/s"
    if len(result.ratios) > 1:
        figure += f" ({min(result.ratios):.2f} to {max(result.ratios):.2f} in {len(result.ratios)} rounds)"
    if bar is None or not judged:
        return Check(name, "shown", figure)
    return Check(name, "passed" if ratio >= bar else "failed", figure, limit)
