# SPDX-License-Identifier: Apache-2.0
"""Numbers of one window, and the medians over rounds."""

from __future__ import annotations

import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SAMPLES_MAX", "Percentiles", "Samples", "Waitable", "Window", "drive", "drive_deep", "median"]

#: Times kept of one window, over all threads; of more transfers, every 2nd, 4th, ... is kept.
SAMPLES_MAX: Final = 1 << 18
_NOTED_AT_ONCE: Final = 1 << 14


@dataclass(frozen=True)
class Percentiles:
    """Microseconds from submitting a transfer to its completion."""

    p50_us: float
    p99_us: float
    p999_us: float

    @classmethod
    def of(cls, samples_ns: NDArray[np.int64]) -> Percentiles | None:
        """Return None for an empty selection: an un-acknowledged stream has no latencies."""
        if len(samples_ns) == 0:
            return None
        return cls(*(float(value) / 1e3 for value in np.percentile(samples_ns, [50, 99, 99.9])))


@dataclass(frozen=True)
class Window:
    """What completed inside one timed window.

    Attributes:
        seconds: from the common start to the last completion that is counted.
        transfers: batches completed.
        payload_bytes: bytes completed.
        latency: times of single batches, or None.
        cpu_s: CPU seconds of the initiating and of the target process during the window, or None where not measured.
            A target in the same process has none of its own: 0.
    """

    seconds: float
    transfers: int
    payload_bytes: int
    latency: Percentiles | None
    cpu_s: tuple[float, float] | None = None

    @property
    def gbytes_per_s(self) -> float:
        """10^9 bytes per second."""
        return self.payload_bytes / self.seconds / 1e9


class Samples:
    """A bounded and even selection of times: every one while there is room, then every 2nd, 4th, ..."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._seen = 0
        self._stride = 1
        self.kept: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def extend(self, times_ns: array[int]) -> None:
        """Note times in the order in which they were taken."""
        due = np.frombuffer(times_ns, dtype=np.int64)[-self._seen % self._stride :: self._stride]
        self._seen += len(times_ns)
        self.kept = np.concatenate([self.kept, due])
        while len(self.kept) > self._capacity:
            self.kept = self.kept[::2].copy()
            self._stride *= 2


def drive(
    transfer: Callable[[int], object], first: int, duration_ns: int, stop: array[int], samples: Samples
) -> tuple[int, int, int]:
    """Run transfers one after the other until the time is over or `stop` is set; at least one.

    Args:
        transfer: does the transfer with the given number and returns when its bytes are in place.
        first: the number of the first.
        duration_ns: how long to go on.
        stop: one number, not 0 to end early.
        samples: gets the time of each.

    Returns:
        When it began and when the last transfer completed (monotonic nanoseconds), and the number after the last one.
    """
    clock = time.monotonic_ns
    times = array("q")
    note = times.append
    begin = before = clock()
    end = begin + duration_ns
    while True:
        # As little as possible between two transfers: what is done with their times is done once in a while.
        for index in range(first, first + _NOTED_AT_ONCE):
            transfer(index)
            now = clock()
            note(now - before)
            before = now
            if now >= end or stop[0]:
                samples.extend(times)
                return begin, now, index + 1
        samples.extend(times)
        first += _NOTED_AT_ONCE
        times = array("q")
        note = times.append
        before = clock()


class Waitable(Protocol):
    """A transfer that was begun."""

    def wait(self) -> object:
        """Return when its bytes are in place."""


def drive_deep(
    begin: Callable[[int], Waitable],
    depth: int,
    first: int,
    duration_ns: int,
    stop: array[int],
    samples: Samples,
) -> tuple[int, int, int]:
    """Keep `depth` transfers under way until the time is over or `stop` is set, and wait for those that are left.

    The arguments and the result are those of `drive`, but that `begin` does not wait. All that was begun counts, until
    its end: a window that is not long against `depth` transfers would lose as many otherwise.
    """
    clock = time.monotonic_ns
    times = array("q")
    begun = clock()
    end = begun + duration_ns
    under_way: deque[tuple[Waitable, int]] = deque()
    index, now = first, begun
    while under_way or not times:
        while len(under_way) < depth and (index == first or (now < end and not stop[0])):
            submitted = clock()
            under_way.append((begin(index), submitted))
            index += 1
        transfer, submitted = under_way.popleft()
        transfer.wait()
        now = clock()
        times.append(now - submitted)
    samples.extend(times)
    return begun, now, index


def median(values: Iterable[float]) -> float:
    """Return the median of at least one value."""
    return statistics.median(_listed(values))


def _listed(values: Iterable[float]) -> Sequence[float]:
    return values if isinstance(values, Sequence) else list(values)
