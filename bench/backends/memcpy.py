# SPDX-License-Identifier: Apache-2.0
"""memcpy in C: the limit for everything that stays in one process."""

from __future__ import annotations

from typing import Any, ClassVar

from moonpool import _limits
from moonpool.bench.backends.base import Backend, InitiatorSide, PassiveTarget, RowSide, TargetSide
from moonpool.bench.backends.sockets import descriptors, limit_window
from moonpool.bench.measure import Window

__all__ = ["Copying", "Memcpy"]


class Memcpy(Backend):
    """Copies each block where it belongs; large batches are shared out over the cores."""

    name: ClassVar[str] = "memcpy"

    def target(self, row: RowSide) -> TargetSide:
        """Offer the memory itself."""
        return PassiveTarget({"descriptors": descriptors(row, row.memory)})

    def initiator(self, row: RowSide, offer: dict[str, Any]) -> InitiatorSide:
        """Copy between the two."""
        return Copying(row, offer["descriptors"], row.width)


class Copying(InitiatorSide):
    """Copies with `width` threads between this side's memory and `other`, which lies in this process too."""

    def __init__(self, row: RowSide, other: _limits.Descriptors, width: int, path: str | None = None) -> None:
        super().__init__(row.work.threads)
        own = descriptors(row, row.memory)
        self._width = width
        self._path = path
        self._to, self._from = (own, other) if row.work.op == "read" else (other, own)

    @property
    def width(self) -> int | None:
        """Return the threads that copy."""
        return self._width

    @property
    def path(self) -> str | None:
        """Return the path, if it was given one."""
        return self._path

    def run(self, seconds: float) -> Window:
        """Copy for so long."""
        return limit_window(
            lambda samples: _limits.copy_run(
                self._to, self._from, self._width, int(seconds * 1e9), self.stop, self.next_batch, samples
            )
        )

    def close(self) -> None:
        """Do nothing: it holds nothing of its own."""
