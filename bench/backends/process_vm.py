# SPDX-License-Identifier: Apache-2.0
"""process_vm_readv and process_vm_writev in C: the limit for memory of another process that cannot be mapped."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

from moonpool import _limits
from moonpool.bench.backends.base import Backend, InitiatorSide, PassiveTarget, RowSide, TargetSide
from moonpool.bench.backends.mapped import copying_threads
from moonpool.bench.backends.sockets import OPS, descriptors, limit_window

if TYPE_CHECKING:
    from moonpool.bench.measure import Window

__all__ = ["ProcessVm"]


class ProcessVm(Backend):
    """The kernel copies a batch in one call per 1,024 blocks; large batches are shared out over the cores."""

    name: ClassVar[str] = "process_vm"

    def target(self, row: RowSide) -> TargetSide:
        """Say which process it is, and where its memory lies."""
        return PassiveTarget({"pid": os.getpid(), "base": row.memory.ctypes.data, "length": len(row.memory)})

    def initiator(self, row: RowSide, offer: dict[str, Any]) -> InitiatorSide:
        """Copy between the two processes."""
        return _Initiator(row, offer)


class _Initiator(InitiatorSide):
    def __init__(self, row: RowSide, offer: dict[str, Any]) -> None:
        super().__init__(row.work.threads)
        self._op = OPS[row.work.op]
        self._pid = int(offer["pid"])
        self._own = descriptors(row, row.memory)
        self._other = _limits.Descriptors.of_process(
            int(offer["base"]), int(offer["length"]), row.remote.offsets, row.remote.lengths, row.work.batch,
            row.work.threads,
        )  # fmt: skip
        self._width = row.width or copying_threads(row.work)

    @property
    def width(self) -> int | None:
        return self._width

    @property
    def path(self) -> str | None:
        return "process_vm"

    def run(self, seconds: float) -> Window:
        return limit_window(
            lambda samples: _limits.process_run(
                self._pid, self._own, self._other, self._op, self._width, int(seconds * 1e9), self.stop,
                self.next_batch, samples,
            )
        )  # fmt: skip

    def close(self) -> None:
        pass
