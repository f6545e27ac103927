# SPDX-License-Identifier: Apache-2.0
"""memcpy in C between this process's memory and the target's, which is mapped: the limit of shared memory."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

from moonpool.bench.backends.base import Backend, InitiatorSide, PassiveTarget, Place, RowSide, TargetSide
from moonpool.bench.backends.memcpy import Copying
from moonpool.bench.backends.sockets import descriptors
from moonpool.bench.memory import SharedFile, allocate_shared, file_of, map_file

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from moonpool.bench.work import Work

__all__ = ["MappedCopy", "copying_threads"]


def copying_threads(work: Work) -> int:
    """Return how many threads a copy of this process may use: one for each core, at least one for each user thread."""
    return max(len(os.sched_getaffinity(0)), work.threads)


class MappedCopy(Backend):
    """Copies each block where it belongs; large batches are shared out over the cores."""

    name: ClassVar[str] = "memcpy"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._memory: NDArray[np.uint8] | None = None
        self._mapped: tuple[dict[str, Any], NDArray[np.uint8]] | None = None

    def memory(self, work: Work, *, target: bool) -> NDArray[np.uint8] | None:
        """Return shared memory: on this side too, as an engine that allocates has it."""
        if self._memory is None or len(self._memory) < work.footprint_bytes:
            self._memory = allocate_shared(work.footprint_bytes)
        return self._memory

    def target(self, row: RowSide) -> TargetSide:
        """Say where the memory can be mapped."""
        return PassiveTarget({"file": asdict(file_of(row.memory)), "length": len(row.memory)})

    def initiator(self, row: RowSide, offer: dict[str, Any]) -> InitiatorSide:
        """Map it, once for all rows, and copy."""
        if self._mapped is None or self._mapped[0] != offer:
            self._mapped = offer, map_file(SharedFile(**offer["file"]), int(offer["length"]))
        other = descriptors(row, self._mapped[1], remote=True)
        return Copying(row, other, row.width or copying_threads(row.work), "shm")

    def close(self) -> None:
        """Give back the memory and the mapping."""
        self._memory = self._mapped = None
