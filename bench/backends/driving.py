# SPDX-License-Identifier: Apache-2.0
"""Runs the transfers of a backend that is driven from Python: one thread each, from a common start."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from moonpool.bench.measure import SAMPLES_MAX, Percentiles, Samples, Window, drive

if TYPE_CHECKING:
    from collections.abc import Callable

    from moonpool.bench.backends.base import InitiatorSide

__all__ = ["run_threads"]


def run_threads(
    side: InitiatorSide, transfers: list[Callable[[int], object]], batch_bytes: int, seconds: float
) -> Window:
    """Run one thread per entry of `transfers` from a common start and add up what they did."""
    threads = len(transfers)
    samples = [Samples(SAMPLES_MAX // threads) for _ in transfers]
    outcomes: list[tuple[int, int, int]] = [(0, 0, 0)] * threads
    failures: list[BaseException] = []
    start = threading.Barrier(threads)

    def work(thread: int) -> None:
        try:
            start.wait(timeout=10.0)
            outcomes[thread] = drive(
                transfers[thread], side.next_batch[thread], int(seconds * 1e9), side.stop, samples[thread]
            )
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
    done = sum(end - first for first, (_, _, end) in zip(side.next_batch, outcomes, strict=True))
    for thread, (_, _, end) in enumerate(outcomes):
        side.next_batch[thread] = end
    return Window(
        seconds=(max(end for _, end, _ in outcomes) - min(begin for begin, _, _ in outcomes)) / 1e9,
        transfers=done,
        payload_bytes=done * batch_bytes,
        latency=Percentiles.of(np.concatenate([part.kept for part in samples])),
    )
