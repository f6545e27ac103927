# SPDX-License-Identifier: Apache-2.0
"""Ranges of chunks: header, table and the leaves that are touched are read and verified, and the range handed out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from moonpool.errors import MoonpoolError
from moonpool.store_client.errors import ChunkRangeError, ChunkTooLargeError
from moonpool.store_client.moves import Place
from moonpool.store_client.packing import HEADER_BYTES
from moonpool.store_client.spans import Spans
from moonpool.store_client.values import Memory, Piece, Registered, header_room
from moonpool.transfer_engine import LEAF_BYTES, Region
from moonpool.units import format_bytes

if TYPE_CHECKING:
    from moonpool.store_client.packing import Int64s
    from moonpool.store_client.staging import StagingArea

__all__ = ["Ranges"]


class Ranges(Memory):
    """A part of each chunk, for destinations of whatever form.

    The leaves go through the staging area, unless all of a piece are whole ones for registered memory.

    Args:
        into: where the parts go.
        starts: where in each chunk its part begins.
        sizes: how long each part is.
    """

    def __init__(self, into: Memory, starts: Int64s, sizes: Int64s) -> None:
        super().__init__(into.count)
        self._into = into
        self._starts = starts
        self._sizes = sizes
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
        large = ~outside & (self.cost(items, lengths) > staging.nbytes)
        for row in np.flatnonzero(outside).tolist():
            yield row, ChunkRangeError(f"the range is not inside the {lengths[row]} bytes of the chunk")
        for row in np.flatnonzero(large).tolist():
            yield (
                row,
                ChunkTooLargeError(
                    f"a range of {sizes[row]} bytes does not fit the staging area of {format_bytes(staging.nbytes)}, "
                    f"with the whole leaves of {format_bytes(LEAF_BYTES)} that it touches",
                    hint="a larger staging_bytes, or several ranges",
                ),
            )
        for row, error in super().refused(staging, items, lengths):
            if not outside[row] and not large[row]:
                yield row, error

    @property
    def made(self) -> list[bytes | None] | None:
        """See `Memory`."""
        return self._into.made

    def cost(self, items: npt.NDArray[np.intp], lengths: Int64s) -> Int64s:
        """See `Memory`."""
        begins, ends = self._leaves(items, lengths)
        return header_room(lengths) + ends - begins

    def place(self, staging: StagingArea, items: npt.NDArray[np.intp], lengths: Int64s, deadline: float) -> Piece:
        """See `Memory`."""
        begins, ends = self._leaves(items, lengths)
        rooms, touched = header_room(lengths), ends - begins
        region: Region | Spans = staging.region
        offsets, taken = np.cumsum(touched) - touched, int(touched.sum())
        whole = (begins == self._starts[items]) & (touched == self._sizes[items])
        if isinstance(self._into, Registered) and whole.all():
            region, offsets, taken = self._into.region, self._into.offsets[items], 0
        # Headers first: the tables behind them are read as numbers, so they begin at multiples of 8.
        slice_ = staging.take(int(rooms.sum()) + taken, deadline)
        headers = slice_.offset + np.cumsum(rooms) - rooms
        if taken:
            offsets = offsets + slice_.offset + int(rooms.sum())
        tables = headers + HEADER_BYTES
        place = Place(region, offsets, touched, staging.region, headers, tables, lengths, joined=False, starts=begins)
        return Piece(items, place, slice_)

    def deliver(self, staging: StagingArea, piece: Piece, rows: npt.NDArray[np.intp]) -> None:
        """See `Memory`."""
        place, items = piece.place, piece.items[rows]
        if place.region is not staging.region:
            return
        begins, _ = self._leaves(items, place.sizes[rows])
        self._into.accept(items, staging.region, place.offsets[rows] + self._starts[items] - begins, self._sizes[items])

    def _leaves(self, items: npt.NDArray[np.intp], lengths: Int64s) -> tuple[Int64s, Int64s]:
        """Return where in their chunks the first leaves of the ranges begin, and where the last ones end."""
        starts = self._starts[items]
        begins = starts // LEAF_BYTES * LEAF_BYTES
        ends = -(-(starts + self._sizes[items]) // LEAF_BYTES) * LEAF_BYTES
        return begins, np.minimum(ends, lengths)
