# SPDX-License-Identifier: Apache-2.0
"""Ranges of chunks. A digest covers a whole chunk, so all of it is read and verified, and the range handed out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from moonpool.errors import MoonpoolError
from moonpool.store_client.errors import ChunkRangeError, ChunkTooLargeError
from moonpool.store_client.values import Buffers, Memory
from moonpool.units import format_bytes

if TYPE_CHECKING:
    from moonpool.store_client.packing import Int64s
    from moonpool.store_client.staging import StagingArea
    from moonpool.store_client.values import Piece
    from moonpool.transfer_engine import TransferEngine

__all__ = ["Ranges"]


class Ranges(Memory):
    """A part of each chunk, for destinations of whatever form. Whole chunks go through the staging area.

    Args:
        engine: of this client.
        into: where the parts go.
        starts: where in each chunk its part begins.
        sizes: how long each part is.
    """

    def __init__(self, engine: TransferEngine, into: Memory, starts: Int64s, sizes: Int64s) -> None:
        super().__init__(into.count)
        self._into = into
        self._starts = starts
        self._sizes = sizes
        self._whole = Buffers(engine, [None] * into.count)
        self.lengths = into.lengths

    def wanted(self, items: npt.NDArray[np.intp], lengths: Int64s) -> Int64s:
        """See `Memory`."""
        return self._sizes[items]

    def refused(
        self, staging: StagingArea, items: npt.NDArray[np.intp], lengths: Int64s
    ) -> Iterator[tuple[int, MoonpoolError]]:
        """See `Memory`."""
        starts, sizes = self._starts[items], self._sizes[items]
        outside = (starts < 0) | (sizes < 1) | (starts > lengths - sizes)
        large = ~outside & (self.cost(lengths) > staging.nbytes)
        for row in np.flatnonzero(outside).tolist():
            yield row, ChunkRangeError(f"the range is not inside the {lengths[row]} bytes of the chunk")
        for row in np.flatnonzero(large).tolist():
            yield (
                row,
                ChunkTooLargeError(
                    f"a range cannot be had of a chunk of {lengths[row]} bytes, which is read as a whole: staging has "
                    f"{format_bytes(staging.nbytes)}",
                    hint="a larger staging_bytes, or a get of the whole chunk",
                ),
            )
        for row, error in super().refused(staging, items, lengths):
            if not outside[row] and not large[row]:
                yield row, error

    @property
    def made(self) -> list[bytes | None] | None:
        """See `Memory`."""
        return self._into.made

    def cost(self, lengths: Int64s) -> Int64s:
        """See `Memory`."""
        return self._whole.cost(lengths)

    def place(self, staging: StagingArea, items: npt.NDArray[np.intp], lengths: Int64s, deadline: float) -> Piece:
        """See `Memory`."""
        return self._whole.place(staging, items, lengths, deadline)

    def deliver(self, staging: StagingArea, piece: Piece, rows: npt.NDArray[np.intp]) -> None:
        """See `Memory`."""
        source = memoryview(piece.place.region).cast("B")
        items = piece.items[rows]
        begins = (piece.place.offsets[rows] + self._starts[items]).tolist()
        for item, begin, size in zip(items.tolist(), begins, self._sizes[items].tolist(), strict=True):
            self._into.accept(item, source[begin : begin + size])
