# SPDX-License-Identifier: Apache-2.0
"""Copies of the CUDA driver: the limit for everything that begins or ends in memory of a GPU.

One copy of the bytes of a batch, which lie in a row, between the GPU and pinned memory of the host. Between two GPUs of
one host it stays within one of them: what a program does without another process. The bytes are its own.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

from moonpool.bench.backends.base import Backend, InitiatorSide, PassiveTarget, RowSide, TargetSide
from moonpool.bench.errors import NO_LIMIT, BenchError
from moonpool.bench.gpu.driver import Driver, DriverError
from moonpool.bench.measure import SAMPLES_MAX, Percentiles, Samples, Window, drive
from moonpool.bench.work import gpu_of

__all__ = ["CudaCopy"]


class CudaCopy(Backend):
    """One ``cuMemcpyAsync`` for each batch, and a wait for its stream."""

    name: ClassVar[str] = "cuMemcpyAsync"

    def target(self, row: RowSide) -> TargetSide:
        """Do nothing: the initiating side copies memory of its own."""
        return PassiveTarget({})

    def initiator(self, row: RowSide, offer: dict[str, Any]) -> InitiatorSide:
        """Copy on the GPU of this side, or on that of the same number as the target's."""
        return _Initiator(row)


class _Initiator(InitiatorSide):
    def __init__(self, row: RowSide) -> None:
        super().__init__(row.work.threads)
        work = row.work
        here, there = (gpu_of(work.memory, target=target) for target in (False, True))
        self._nbytes = work.batch_bytes
        self._stack = ExitStack()
        try:
            self._driver = Driver(here if here is not None else there or 0)
            self._stack.callback(self._close_driver)
            gpu = self._stack.enter_context(self._driver.memory(self._nbytes))
            if work.transport == "shm":
                self._to, self._from = self._stack.enter_context(self._driver.memory(self._nbytes)), gpu
            else:
                pinned = self._stack.enter_context(self._driver.pinned(self._nbytes))
                # Where both sides are GPUs the bytes go through the host on either of them; this is the first half.
                source = there if work.op == "read" else here
                self._to, self._from = (pinned, gpu) if source is not None else (gpu, pinned)
        except DriverError as error:
            self._stack.close()
            raise BenchError(str(error), code=NO_LIMIT) from error

    def run(self, seconds: float) -> Window:
        self._driver.enter()
        samples = Samples(SAMPLES_MAX)
        begin, end, count = drive(self._copy, 0, int(seconds * 1e9), self.stop, samples)
        return Window((end - begin) / 1e9, count, count * self._nbytes, Percentiles.of(samples.kept))

    def _copy(self, _: int) -> None:
        self._driver.copies(self._to, self._from, self._nbytes, 1)

    def close(self) -> None:
        self._driver.enter()
        self._stack.close()

    def _close_driver(self) -> None:
        self._driver.close()
