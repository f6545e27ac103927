# SPDX-License-Identifier: Apache-2.0
"""What the windows of every pool have in common: threads that make calls, and bytes that are known and checked."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from moonpool.bench.backends.base import InitiatorSide
from moonpool.bench.backends.driving import run_threads
from moonpool.bench.verify import Pattern
from moonpool.bench.work import Layout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from moonpool.bench.measure import Window
    from moonpool.bench.work import Work

__all__ = ["CallSide", "Checked"]


class CallSide(InitiatorSide):
    """Runs one callable per thread. With `once`, a window ends when a thread has been through its batches."""

    def __init__(self, calls: list[Callable[[int], object]], batches: int, batch_bytes: int, *, once: bool) -> None:
        super().__init__(len(calls))
        self._batch_bytes = batch_bytes
        self._calls = [self._ending(call, batches) for call in calls] if once else calls

    def _ending(self, call: Callable[[int], object], batches: int) -> Callable[[int], object]:
        def run(index: int) -> None:
            call(index)
            if index + 1 >= batches:
                self.stop[0] = 1

        return run

    def run(self, seconds: float) -> Window:
        """Run a window. Ctrl-C ends it between two calls, for which it waits: room is given back afterwards."""
        self.stop[0] = 0
        with ThreadPoolExecutor(1) as executor:
            window = executor.submit(run_threads, self, self._calls, self._batch_bytes, seconds)
            try:
                return window.result()
            except BaseException:
                self.stop[0] = 1
                raise

    def close(self) -> None:
        """Let go of the callables."""
        self._calls = []


class Checked:
    """The memory of one client, whose every byte is known.

    Args:
        work: what is moved.
        memory: of the client, at least the footprint.
        number: gives a new number to each window.

    Attributes:
        complaints: what verification found.
    """

    def __init__(self, work: Work, memory: NDArray[np.uint8], number: Callable[[], int]) -> None:
        self.complaints: list[str] = []
        self._number = number
        self._layout = Layout(work, target=False)
        self._pattern = Pattern(memory, self._layout)

    def _complain(self, who: str, what: str) -> None:
        self.complaints.append(f"{who}: {what}")

    def _check_own(self, who: str) -> None:
        verdict = self._pattern.check()
        if not verdict.ok:
            self._complain(who, f"{verdict.blocks_bad} chunks differ here: {verdict.detail}")

    def _got(self, who: str, side: CallSide, content: int, seconds: float, warmup: float) -> Window:
        """Run a window of gets of what the window `content` has put, and look at every byte of the memory."""
        # What is there before differs from what has to come in every byte's word.
        self._pattern.fill(self._number())
        before = [int(index) for index in side.next_batch]
        if warmup:
            side.run(warmup)
            warm = [int(index) for index in side.next_batch]
            self._pattern.expect(content, list(zip(before, warm, strict=True)))
            self._check_own(f"{who}, warm-up")
            before = warm
            self._pattern.fill(self._number())
        window = side.run(seconds)
        self._pattern.expect(content, [(first, int(end)) for first, end in zip(before, side.next_batch, strict=True)])
        self._check_own(who)
        return window
