# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a batch come from or go to: registered memory as it is, or anything else through staging."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moonpool.errors import MoonpoolError
from moonpool.store_client.arguments import checked_region, numbers
from moonpool.store_client.errors import ChunkRangeError, StoreArgumentError
from moonpool.store_client.leaves import table_bytes
from moonpool.store_client.moves import Place
from moonpool.store_client.packing import HEADER_BYTES, Int64s
from moonpool.store_client.spans import Spans, is_memory, on_device, spans_of
from moonpool.store_client.staging import ALIGN, Slice, StagingArea
from moonpool.transfer_engine import Region, TransferEngine, copy_batch

__all__ = ["Buffers", "Memory", "Piece", "Registered", "Scattered", "destinations_of", "header_room", "values_of"]


class Piece:
    """Chunks of a batch that are moved together.

    Attributes:
        items: which chunks of the batch, in order.
        place: where they lie, a row for each.
        slice_: of the staging area, with the headers and perhaps the payloads.
        region: registered for this piece alone, to be released after it; or None.
    """

    __slots__ = ("items", "place", "region", "slice_")

    def __init__(self, items: npt.NDArray[np.intp], place: Place, slice_: Slice, region: Region | None = None) -> None:
        self.items = items
        self.place = place
        self.slice_ = slice_
        self.region = region


class Memory:
    """What all forms have in common."""

    def __init__(self, count: int) -> None:
        self.count = count

    #: Bytes of each chunk: of a value, or what fits into a destination; -1: as many as there are.
    lengths: Int64s

    def pieces(
        self, items: npt.NDArray[np.intp], lengths: Int64s, chunks_max: int, bytes_max: int
    ) -> Iterator[npt.NDArray[np.intp]]:
        """Yield the positions in `items`, cut so that each piece has a bounded number of chunks and bytes."""
        cost = np.cumsum(self.cost(items, lengths))
        if 0 < len(items) <= chunks_max and cost[-1] <= bytes_max:
            yield np.arange(len(items))
            return
        start = 0
        while start < len(items):
            before = cost[start - 1] if start else 0
            stop = int(np.searchsorted(cost, before + bytes_max, side="right"))
            stop = min(max(stop, start + 1), start + chunks_max)
            yield np.arange(start, min(stop, len(items)))
            start = stop

    def cost(self, items: npt.NDArray[np.intp], lengths: Int64s) -> Int64s:
        """Return the bytes that count against `bytes_max` of `pieces`."""
        raise NotImplementedError

    def place(self, staging: StagingArea, items: npt.NDArray[np.intp], lengths: Int64s, deadline: float) -> Piece:
        """Find room for these chunks, and for what goes with them."""
        raise NotImplementedError

    def value(self, item: int) -> memoryview:
        """Return the bytes of one value."""
        raise NotImplementedError

    def wanted(self, items: npt.NDArray[np.intp], lengths: Int64s) -> Int64s:
        """Return how many bytes of chunks of these lengths are delivered: all of them."""
        return lengths

    def refused(
        self, staging: StagingArea, items: npt.NDArray[np.intp], lengths: Int64s
    ) -> Iterator[tuple[int, MoonpoolError]]:
        """Yield the rows of chunks of these lengths that cannot be delivered, and why."""
        room, sizes = self.lengths[items], self.wanted(items, lengths)
        if not (sizes > room).any():
            return
        for row in np.flatnonzero((room >= 0) & (sizes > room)).tolist():
            yield row, ChunkRangeError(f"{sizes[row]} bytes do not fit a destination of {room[row]}")

    @property
    def made(self) -> list[bytes | None] | None:
        """The bytes of each chunk, for a get that makes them."""
        return None

    def accept(self, items: npt.NDArray[np.intp], source: Region, offsets: Int64s, lengths: Int64s) -> None:
        """Take verified bytes, which lie in `source`, for some chunks."""
        raise NotImplementedError

    def load(self, staging: StagingArea, piece: Piece) -> None:
        """Bring the values to the place of the piece, if they are not there."""

    def deliver(self, staging: StagingArea, piece: Piece, rows: npt.NDArray[np.intp]) -> None:
        """Bring verified chunks from the place of the piece to where they are wanted, if they are not there."""


class Registered(Memory):
    """Ranges of a registered region, or of spans: nothing is copied, headers alone are staged."""

    def __init__(self, region: Region | Spans, offsets: Int64s, lengths: Int64s) -> None:
        super().__init__(len(offsets))
        self.region = region
        self.offsets = offsets
        self.lengths = lengths

    def cost(self, items: npt.NDArray[np.intp], lengths: Int64s) -> Int64s:
        """See `Memory`."""
        return lengths

    def value(self, item: int) -> memoryview:
        """See `Memory`."""
        start, length = int(self.offsets[item]), int(self.lengths[item])
        if isinstance(self.region, Spans):
            return self.region.join(start, length)
        if on_device(self.region):
            copied = np.empty(length, dtype=np.uint8)
            copy_batch(copied, 0, self.region, start, length)
            return copied.data
        return memoryview(self.region).cast("B")[start : start + length]

    def accept(self, items: npt.NDArray[np.intp], source: Region, offsets: Int64s, lengths: Int64s) -> None:
        """See `Memory`."""
        if isinstance(self.region, Spans):
            self.region.fill(self.offsets[items], source, offsets, lengths)
        else:
            copy_batch(self.region, self.offsets[items], source, offsets, lengths)

    def place(self, staging: StagingArea, items: npt.NDArray[np.intp], lengths: Int64s, deadline: float) -> Piece:
        """See `Memory`."""
        rooms = header_room(lengths)
        slice_ = staging.take(int(rooms.sum()), deadline)
        headers = slice_.offset + np.cumsum(rooms) - rooms
        tables = headers + HEADER_BYTES
        place = Place(self.region, self.offsets[items], lengths, staging.region, headers, tables, lengths, joined=False)
        return Piece(items, place, slice_)


class Scattered(Registered):
    """Chunks that each lie in several spans in a row."""

    def __init__(self, spans: Spans, counts: Int64s, lengths: Int64s) -> None:
        super().__init__(spans, np.cumsum(lengths) - lengths, lengths)
        self._counts = counts

    def cost(self, items: npt.NDArray[np.intp], lengths: Int64s) -> Int64s:
        """See `Memory`. The items of a transfer take memory too, so small spans count for more than their bytes."""
        return np.maximum(lengths, _SPAN_COST * self._counts[items])


class Buffers(Memory):
    """A buffer for each chunk, with its value or to be filled. None: its bytes are made, see `taken`."""

    def __init__(
        self, engine: TransferEngine, views: list[memoryview | None], *, filled: bool, makes: bool = False
    ) -> None:
        super().__init__(len(views))
        self.filled = filled
        self.makes = makes
        self._engine = engine
        self.views = views
        self.lengths = np.fromiter((-1 if view is None else view.nbytes for view in views), np.int64, len(views))
        self.taken: list[bytes | None] = [None] * len(views)

    def cost(self, items: npt.NDArray[np.intp], lengths: Int64s) -> Int64s:
        """See `Memory`."""
        return _stride(lengths)

    def value(self, item: int) -> memoryview:
        """See `Memory`."""
        return self.views[item] or _EMPTY

    def place(self, staging: StagingArea, items: npt.NDArray[np.intp], lengths: Int64s, deadline: float) -> Piece:
        """See `Memory`."""
        strides = _stride(lengths)
        total = int(strides.sum())
        if total > staging.nbytes:
            return self._alone(staging, items, lengths, deadline)
        slice_ = staging.take(total, deadline)
        headers = slice_.offset + np.cumsum(strides) - strides
        payloads = headers + HEADER_BYTES
        tables = headers + strides - _aligned(table_bytes(lengths))
        place = Place(staging.region, payloads, lengths, staging.region, headers, tables, lengths, joined=True)
        return Piece(items, place, slice_)

    def load(self, staging: StagingArea, piece: Piece) -> None:
        """See `Memory`."""
        if piece.region is not None:
            return
        target = memoryview(staging.region).cast("B")
        offsets = piece.place.offsets.tolist()
        for item, offset in zip(piece.items.tolist(), offsets, strict=True):
            view = self.views[item]
            if view is not None:
                target[offset : offset + view.nbytes] = view

    def deliver(self, staging: StagingArea, piece: Piece, rows: npt.NDArray[np.intp]) -> None:
        """See `Memory`."""
        place = piece.place
        source = staging.region if piece.region is None else piece.region
        self.accept(piece.items[rows], source, place.offsets[rows], place.lengths[rows])

    @property
    def made(self) -> list[bytes | None] | None:
        """See `Memory`."""
        return self.taken if self.makes else None

    def accept(self, items: npt.NDArray[np.intp], source: Region, offsets: Int64s, lengths: Int64s) -> None:
        """See `Memory`."""
        found = memoryview(source).cast("B")
        for item, offset, length in zip(items.tolist(), offsets.tolist(), lengths.tolist(), strict=True):
            view = self.views[item]
            if view is None:
                self.taken[item] = bytes(found[offset : offset + length])
            else:
                view[:length] = found[offset : offset + length]

    def _alone(self, staging: StagingArea, items: npt.NDArray[np.intp], lengths: Int64s, deadline: float) -> Piece:
        # Larger than all of the staging area, so it is alone, with a region of its own for as long as it takes. A value
        # is registered where it is; a destination changes when what has come is verified, so that comes elsewhere.
        assert len(items) == 1
        if self.filled:
            region = self._engine.allocate(int(lengths[0]))
        else:
            region = self._engine.register(self.value(int(items[0])), writable=False)
        try:
            slice_ = staging.take(int(header_room(lengths).sum()), deadline)
            headers = np.array([slice_.offset], dtype=np.int64)
            nowhere = np.zeros(1, dtype=np.int64)
            tables = headers + HEADER_BYTES
            place = Place(region, nowhere, lengths, staging.region, headers, tables, lengths, joined=False)
            return Piece(items, place, slice_, region)
        except BaseException:
            region.release()
            raise


_EMPTY: Final = memoryview(b"")
# Bytes of `batch_bytes` that a span counts for at least: a quarter of a million of them at a time by default.
_SPAN_COST: Final = 1024


def values_of(engine: TransferEngine, values: Any, count: int) -> Memory:
    """Return the values of a put.

    Raises:
        StoreArgumentError: there is not one for each of `count` chunks, or one has no bytes.
    """
    memory = _memory_of(engine, values, count, writable=False, what="values")
    if count and int(memory.lengths.min()) < 1:
        raise StoreArgumentError("a value is empty", item=int(memory.lengths.argmin()), hint="at least 1 byte")
    return memory


def destinations_of(engine: TransferEngine, destinations: Any, count: int) -> Memory:
    """Return the destinations of a get; None: bytes are made."""
    if destinations is None:
        return Buffers(engine, [None] * count, filled=True, makes=True)
    return _memory_of(engine, destinations, count, writable=True, what="destinations")


def _memory_of(engine: TransferEngine, given: Any, count: int, *, writable: bool, what: str) -> Memory:
    if isinstance(given, tuple) and len(given) == 3 and isinstance(given[0], Region):
        region, offsets, lengths = given
        checked_region(engine, region, what, writable=writable)
        ranges = numbers(offsets, count, f"offsets of {what}"), numbers(lengths, count, f"lengths of {what}")
        if min(ranges[0].min(initial=0), ranges[1].min(initial=0)) < 0 or (ranges[0] > region.nbytes - ranges[1]).any():
            item = int(((ranges[0] < 0) | (ranges[1] < 0) | (ranges[0] > region.nbytes - ranges[1])).argmax())
            raise ChunkRangeError(f"{what}: a range is not inside the region of {region.nbytes} bytes", item=item)
        return Registered(region, *ranges)
    if isinstance(given, tuple) and len(given) == 4 and is_memory(given[0]) and not isinstance(given[1], Region):
        spans, counts, rooms = spans_of(engine, *given, count=count, writable=writable, what=what)
        return Scattered(spans, counts, rooms)
    try:
        buffers = list(given)
        views = [_view_of(one, writable, what, index) for index, one in enumerate(buffers)]
    except TypeError as cause:
        raise StoreArgumentError(
            f"{what} is a {type(given).__name__}",
            cause=str(cause),
            hint="a buffer for each chunk, (region, offsets, lengths), or (region, offsets, lengths, counts)",
        ) from cause
    if len(views) != count:
        raise StoreArgumentError(f"{len(views)} {what} were given for {count} chunks", hint="one for each")
    return Buffers(engine, list(views), filled=writable)


def _view_of(one: Any, writable: bool, what: str, index: int) -> memoryview:
    try:
        view = memoryview(one)
    except BufferError as error:
        raise StoreArgumentError(
            f"{what}: a buffer cannot be looked at",
            item=index,
            cause=str(error),
            hint="(region, offsets, lengths) for memory of a GPU",
        ) from error
    except TypeError:
        # numpy exports no buffer for some of its own types (bfloat16), but has the bytes.
        if not isinstance(one, np.ndarray) or not one.flags.c_contiguous:
            raise
        view = memoryview(one.reshape(-1).view(np.uint8).data)
    if writable and view.readonly:
        raise StoreArgumentError(f"{what}: a buffer is read-only", item=index, hint="a bytearray or an array")
    if not view.c_contiguous:
        raise StoreArgumentError(f"{what}: a buffer is not contiguous", item=index, hint="a contiguous copy")
    return view.cast("B") if view.nbytes else _EMPTY


def header_room(lengths: Int64s) -> Int64s:
    """Return what headers take in the staging area, with the tables of leaves behind them."""
    return _aligned(HEADER_BYTES + table_bytes(lengths))


def _stride(lengths: Int64s) -> Int64s:
    return _aligned(HEADER_BYTES + lengths) + _aligned(table_bytes(lengths))


def _aligned(sizes: Int64s) -> Int64s:
    return -(-sizes // ALIGN) * ALIGN
