# SPDX-License-Identifier: Apache-2.0
"""A window counts what completed inside it, and nothing else."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
import pytest

from moonpool.bench import measure
from moonpool.bench.measure import Percentiles, Samples, Window, drive, drive_deep
from moonpool.bench.results import RowResult
from moonpool.bench.work import Work


class Clock:
    """Time that passes only when a transfer is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000
        monkeypatch.setattr(measure.time, "monotonic_ns", lambda: self.now)

    def transfer(self, ns: int) -> Callable[[int], None]:
        def work(index: int) -> None:
            self.now += ns

        return work


def test_the_window_ends_with_the_last_completion_that_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, samples = Clock(monkeypatch), Samples(100)
    begin, end, index = drive(clock.transfer(30), 7, 100, array("i", [0]), samples)
    # The fourth transfer was begun inside the window and ends after it: its time counts as well as its bytes.
    assert (begin, end, index) == (1_000, 1_120, 7 + 4)
    assert list(samples.kept) == [30] * 4


def test_at_least_one_transfer_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert drive(clock.transfer(10_000), 0, 1, array("i", [0]), Samples(1)) == (1_000, 11_000, 1)


def test_stop_ends_between_two_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stop = Clock(monkeypatch), array("i", [0])

    def work(index: int) -> None:
        clock.now += 1
        stop[0] = index == 2

    assert drive(work, 0, 10**12, stop, Samples(10))[2] == 3


def test_long_windows_lose_no_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_NOTED_AT_ONCE", 8)
    clock, seen, samples = Clock(monkeypatch), list[int](), Samples(100)

    def transfer(index: int) -> None:
        seen.append(index)
        clock.now += 10

    assert drive(transfer, 5, 300, array("i", [0]), samples) == (1_000, 1_300, 35)
    assert seen == list(range(5, 35))
    assert list(samples.kept) == [10] * 30


class Later:
    """A transfer that completes `ns` after the one before it."""

    def __init__(self, clock: Clock, ns: int, waited: list[int], index: int) -> None:
        self._clock, self._ns, self._waited, self._index = clock, ns, waited, index

    def wait(self) -> None:
        self._clock.now += self._ns
        self._waited.append(self._index)


def test_several_under_way_count_when_they_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, samples, waited = Clock(monkeypatch), Samples(100), list[int]()
    done = drive_deep(lambda index: Later(clock, 30, waited, index), 3, 7, 100, array("i", [0]), samples)
    # Four completed in the window; two were under way at its end, which is that of the last of them.
    assert done == (1_000, 1_180, 7 + 6)
    assert waited == list(range(7, 13))
    assert list(samples.kept) == [30, 60, 90, 90, 90, 90]


def test_several_under_way_end_between_two_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stop, waited = Clock(monkeypatch), array("i", [1]), list[int]()
    done = drive_deep(lambda index: Later(clock, 5, waited, index), 2, 0, 10**12, stop, Samples(10))
    assert done == (1_000, 1_005, 1)
    assert waited == [0]


def test_samples_stay_bounded_and_even() -> None:
    for at_once in (1, 7, 100):
        samples = Samples(8)
        for first in range(0, 100, at_once):
            samples.extend(array("q", range(first, min(first + at_once, 100))))
        assert list(samples.kept) == [0, 16, 32, 48, 64, 80, 96]


def test_percentiles_are_microseconds() -> None:
    times = Percentiles.of(np.arange(1, 1_001, dtype=np.int64) * 1_000)
    assert times is not None
    assert (times.p50_us, times.p99_us) == (pytest.approx(500.5), pytest.approx(990.01))
    assert Percentiles.of(np.empty(0, dtype=np.int64)) is None


def window(gigabytes: float, seconds: float = 1.0, cpu_s: tuple[float, float] | None = None) -> Window:
    return Window(seconds, 10, int(gigabytes * 1e9), Percentiles(gigabytes, 2.0, 3.0), cpu_s)


def test_figures_are_medians_over_rounds() -> None:
    row = RowResult(Work("tcp", "read", 1 << 20, 4, "sequential", 1, None, 1 << 24), "moonpool", "sockets-acked")
    row.engine = [window(1.0, cpu_s=(0.5, 0.1)), window(3.0, 1.5, cpu_s=(0.3, 0.3)), window(9.0, cpu_s=(9.0, 0.9))]
    row.limits = [window(2.0), window(2.0), window(3.0)]
    assert (row.gbytes_per_s, row.limit_gbytes_per_s) == (2.0, 2.0)
    assert row.ratios == [0.5, 1.0, 3.0]
    assert row.ratio == 1.0, "the median of the ratios, not the ratio of the medians"
    assert row.ops_per_s == pytest.approx(40.0)
    assert row.latency == Percentiles(3.0, 2.0, 3.0)
    assert row.cpu_s_per_gb == (0.5, 0.1)
    assert row.rounds == 3


def test_an_interrupted_round_is_not_a_round() -> None:
    row = RowResult(Work("tcp", "read", 1 << 20, 4, "sequential", 1, None, 1 << 24), "moonpool", "sockets-acked")
    assert (row.rounds, row.gbytes_per_s, row.ratio, row.latency, row.cpu_s_per_gb) == (0, None, None, None, None)
    row.engine = [window(1.0), window(1.0)]
    assert row.rounds == 2, "only the engine was asked for"
    row.limits = [window(2.0)]
    assert (row.rounds, row.ratios) == (1, [0.5])
