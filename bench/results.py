# SPDX-License-Identifier: Apache-2.0
"""What a run found, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from moonpool.bench.measure import Percentiles, Window, median
from moonpool.bench.work import Work

__all__ = ["RowResult"]


@dataclass
class RowResult:
    """The windows of one row. Every figure is the median over its rounds.

    Attributes:
        work: what was moved.
        backend: the name of the engine measured, or of the limit when that alone was asked for.
        limit: what it was compared with, such as ``sockets-acked``, or None.
        path: the way the bytes took, or None where the engine does not tell.
        lanes: connections the engine used, or None where there are none.
        limit_width: connections or copying threads of the limit.
        engine: one window per round, unless only the limit was asked for.
        limits: one window per round, unless only the engine was asked for.
        complaints: what verification found.
        no_limit: why there is no limit though it was asked for, and what to install.
        rail_bytes: what each RDMA rail of the initiating side carried, warm-ups included.
    """

    work: Work
    backend: str
    limit: str | None = None
    lanes: int | None = None
    limit_width: int | None = None
    engine: list[Window] = field(default_factory=list)
    limits: list[Window] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    path: str | None = None
    no_limit: str | None = None
    rail_bytes: dict[str, int] | None = None

    @property
    def rounds(self) -> int:
        """Complete rounds."""
        counts = [len(windows) for windows in (self.engine, self.limits) if windows]
        return min(counts) if counts else 0

    @property
    def verified(self) -> bool:
        """Whether every byte of every window was right, on both sides."""
        return not self.complaints

    @property
    def gbytes_per_s(self) -> float | None:
        """10^9 bytes per second."""
        return _over(self.engine, lambda window: window.gbytes_per_s)

    @property
    def ops_per_s(self) -> float | None:
        """Blocks per second."""
        return _over(self.engine, lambda window: window.transfers * self.work.batch / window.seconds)

    @property
    def latency(self) -> Percentiles | None:
        """Times from submitting one transfer to its completion."""
        return _latency(self.engine)

    @property
    def cpu_s_per_gb(self) -> tuple[float, float] | None:
        """CPU seconds per 10^9 bytes, of the initiating and of the target process."""
        costs = [
            tuple(seconds / (window.payload_bytes / 1e9) for seconds in window.cpu_s)
            for window in self.engine
            if window.cpu_s is not None
        ]
        if not costs:
            return None
        return median([cost[0] for cost in costs]), median([cost[1] for cost in costs])

    @property
    def limit_gbytes_per_s(self) -> float | None:
        """The limit's 10^9 bytes per second."""
        return _over(self.limits, lambda window: window.gbytes_per_s)

    @property
    def limit_latency(self) -> Percentiles | None:
        """The limit's times."""
        return _latency(self.limits)

    @property
    def ratios(self) -> list[float]:
        """Engine over limit, round by round."""
        return [ours.gbytes_per_s / best.gbytes_per_s for ours, best in zip(self.engine, self.limits, strict=False)]

    @property
    def ratio(self) -> float | None:
        """The median of the ratios. Rounds drift less against each other than over time."""
        return median(self.ratios) if self.ratios else None


def _over(windows: list[Window], figure: Callable[[Window], float]) -> float | None:
    return median([figure(window) for window in windows]) if windows else None


def _latency(windows: list[Window]) -> Percentiles | None:
    measured = [window.latency for window in windows if window.latency is not None]
    if not measured:
        return None
    return Percentiles(
        median([times.p50_us for times in measured]),
        median([times.p99_us for times in measured]),
        median([times.p999_us for times in measured]),
    )
