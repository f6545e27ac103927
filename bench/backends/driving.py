# SPDX-License-Identifier: Apache-2.0
"""Runs the transfers of a backend that is driven from Python: one thread each, from a common start."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from moonpool.bench.measure import SAMPLES_MAX, Percentiles, Samples, Waitable, Window, drive, drive_deep

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

    from moonpool.bench.backends.base import InitiatorSide

__all__ = ["run_deep", "run_threads"]

#: Drives one thread: (first batch, nanoseconds, stop, samples) to (begin, end, next batch).
_Driver: TypeAlias = "Callable[[int, int, array[int], Samples], tuple[int, int, int]]"


def run_threads(
    side: InitiatorSide, transfers: list[Callable[[int], object]], batch_bytes: int, seconds: float
) -> Window:
    """Run one thread per entry of `transfers` from a common start and add up what they did."""
    return _run(side, [partial(drive, transfer) for transfer in transfers], batch_bytes, seconds)


def run_deep(
    side: InitiatorSide, begins: Sequence[Callable[[int], Waitable]], depth: int, batch_bytes: int, seconds: float
) -> Window:
    """Do so with several transfers of each thread under way, which entries of `begins` start and do not wait for."""
    return _run(side, [partial(drive_deep, begin, depth) for begin in begins], batch_bytes, seconds)


def _run(side: InitiatorSide, drivers: list[_Driver], batch_bytes: int, seconds: float) -> Window:
    threads = len(drivers)
    samples = [Samples(SAMPLES_MAX // threads) for _ in drivers]
    outcomes: list[tuple[int, int, int]] = [(0, 0, 0)] * threads
    failures: list[BaseException] = []
    start = threading.Barrier(threads)

    def work(thread: int) -> None:
        try:
            start.wait(timeout=10.0)
            outcomes[thread] = drivers[thread](side.next_batch[thread], int(seconds * 1e9), side.stop, samples[thread])
        except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
            failures.append(error)
            side.stop[0] = 1

    crew = [threading.Thread(target=partial(work, thread), daemon=True) for thread in range(threads)]
    for member in crew:
        member.start()
    for member in crew:
        member.join()
    if failures:
        raise failures[0]
    done = sum(following for *_, following in outcomes) - sum(side.next_batch)
    for thread, (*_, following) in enumerate(outcomes):
        side.next_batch[thread] = following
    return Window(
        seconds=(max(end for _, end, _ in outcomes) - min(begin for begin, *_ in outcomes)) / 1e9,
        transfers=done,
        payload_bytes=done * batch_bytes,
        latency=Percentiles.of(np.concatenate([part.kept for part in samples])),
    )
