# SPDX-License-Identifier: Apache-2.0
"""memcpy in C: the limit for everything that stays in one process."""

from __future__ import annotations

from typing import Any, ClassVar

from moonpool import _limits
from moonpool.bench.backends.base import Backend, InitiatorSide, RowSide, TargetSide
from moonpool.bench.backends.sockets import descriptors, limit_window
from moonpool.bench.measure import Window

__all__ = ["Memcpy"]


class Memcpy(Backend):
    """Copies each block where it belongs; large batches are shared out over the cores."""

    name: ClassVar[str] = "memcpy"

    def target(self, row: RowSide) -> TargetSide:
        """Offer the memory itself."""
        return _Target(row)

    def initiator(self, row: RowSide, offer: dict[str, Any]) -> InitiatorSide:
        """Copy between the two."""
        return _Initiator(row, offer["descriptors"])


class _Target(TargetSide):
    def __init__(self, row: RowSide) -> None:
        self.offer = {"descriptors": descriptors(row, row.memory)}

    def close(self) -> None:
        self.offer = {}


class _Initiator(InitiatorSide):
    def __init__(self, row: RowSide, other: _limits.Descriptors) -> None:
        super().__init__(row.work.threads)
        own = descriptors(row, row.memory)
        self._width = row.width
        self._to, self._from = (own, other) if row.work.op == "read" else (other, own)

    @property
    def width(self) -> int | None:
        return self._width

    def run(self, seconds: float) -> Window:
        return limit_window(
            lambda samples: _limits.copy_run(
                self._to, self._from, self._width, int(seconds * 1e9), self.stop, self.next_batch, samples
            )
        )

    def close(self) -> None:
        pass
