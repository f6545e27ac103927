# SPDX-License-Identifier: Apache-2.0
"""Spans: chunks that lie in pieces of registered memory, such as the pages of a KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moonpool.store_client.arguments import checked_region, numbers
from moonpool.store_client.errors import ChunkRangeError, StoreArgumentError
from moonpool.store_client.packing import Int64s
from moonpool.transfer_engine import Region, TransferEngine, copy_batch, digest_batch, digest_joined

__all__ = ["Cut", "Spans", "digests_of", "is_memory", "on_device", "spans_of"]

#: Items of a transfer of the engine.
SPANS_MAX: Final = (1 << 32) - 1
# Of memory of GPUs, as much is brought to the host at once to be looked at, or one range.
_HOST_BYTES: Final = 16 << 20


@dataclass
class Cut:
    """Parts of spans that ranges of `Spans` are made of, in order.

    Attributes:
        counts: of each range, how many parts it has.
        owners: whose each part is.
        which: of the regions each part lies in.
        offsets: of each part in its region.
        lengths: bytes of each part.
        skips: where in its range each part begins.
    """

    counts: Int64s
    owners: npt.NDArray[np.intp]
    which: Int64s
    offsets: Int64s
    lengths: Int64s
    skips: Int64s


class Spans:
    """Ranges of registered regions, one after the other, as if they were one memory.

    Args:
        regions: in which the spans lie.
        which: of the regions, for each span.
        offsets: of each span in its region.
        lengths: bytes of each span, at least 1.
    """

    def __init__(self, regions: Sequence[Region], which: Int64s, offsets: Int64s, lengths: Int64s) -> None:
        self.regions = tuple(regions)
        self._which = which
        self._offsets = offsets
        self._lengths = lengths
        #: Where each span begins in the memory that they are together.
        self._starts = np.cumsum(lengths) - lengths

    @property
    def released(self) -> bool:
        """Whether a region was released."""
        return any(region.released for region in self.regions)

    def cut(self, offsets: Int64s, lengths: Int64s) -> Cut:
        """Return the parts of spans that these ranges are made of. A range is not empty and not beyond the end."""
        first = np.searchsorted(self._starts, offsets, side="right") - 1
        counts = np.searchsorted(self._starts, offsets + lengths, side="left") - first
        ends = np.cumsum(counts)
        owners = np.repeat(np.arange(len(counts)), counts)
        spans = np.arange(len(owners)) + (first - (ends - counts))[owners]
        starts = self._starts[spans]
        begins = np.maximum(starts, offsets[owners])
        sizes = np.minimum(starts + self._lengths[spans], (offsets + lengths)[owners]) - begins
        where = self._offsets[spans] + begins - starts
        return Cut(counts, owners, self._which[spans], where, sizes, begins - offsets[owners])

    def digests(self, offsets: Int64s, lengths: Int64s) -> npt.NDArray[np.uint64]:
        """Return the digest of each range."""
        cut = self.cut(offsets, lengths)
        return np.frombuffer(digest_joined(self.regions, cut.which, cut.offsets, cut.lengths, cut.counts), dtype="<u8")

    def fill(self, offsets: Int64s, source: Any, source_offsets: Int64s, lengths: Int64s) -> None:
        """Copy ranges of `source` into these ranges."""
        cut = self.cut(offsets, lengths)
        sources = source_offsets[cut.owners] + cut.skips
        for region, some in self._by_region(cut):
            copy_batch(region, cut.offsets[some], source, sources[some], cut.lengths[some])

    def join(self, offset: int, length: int) -> memoryview:
        """Return a copy of a range."""
        joined = np.empty(length, dtype=np.uint8)
        self.copy_to(joined, np.array([0]), np.array([offset]), np.array([length]))
        return joined.data

    def copy_to(self, target: Any, target_offsets: Int64s, offsets: Int64s, lengths: Int64s) -> None:
        """Copy these ranges into ranges of `target`."""
        cut = self.cut(offsets, lengths)
        targets = target_offsets[cut.owners] + cut.skips
        for region, some in self._by_region(cut):
            copy_batch(target, targets[some], region, cut.offsets[some], cut.lengths[some])

    def _by_region(self, cut: Cut) -> Iterator[tuple[Region, Any]]:
        """Yield the regions, each with what selects its parts."""
        if len(self.regions) == 1:
            yield self.regions[0], slice(None)
            return
        for number in np.unique(cut.which).tolist():
            yield self.regions[number], cut.which == number


def digests_of(memory: Region | Spans, offsets: Int64s, lengths: Int64s) -> npt.NDArray[np.uint64]:
    """Return the digest of each range of a region or of spans."""
    if on_device(memory):
        return _digests_through_host(memory, offsets, lengths)
    if isinstance(memory, Spans):
        return memory.digests(offsets, lengths)
    return np.frombuffer(digest_batch(memory, offsets, lengths), dtype="<u8")


def on_device(memory: Region | Spans) -> bool:
    """Whether some of it is memory of a GPU, whose bytes no processor can look at."""
    regions = memory.regions if isinstance(memory, Spans) else (memory,)
    return any(region.location.startswith("cuda") for region in regions)


def _digests_through_host(memory: Region | Spans, offsets: Int64s, lengths: Int64s) -> npt.NDArray[np.uint64]:
    digests = np.empty(len(lengths), dtype="<u8")
    ends = np.cumsum(lengths)
    start = 0
    while start < len(lengths):
        before = ends[start - 1] if start else 0
        stop = max(int(np.searchsorted(ends, before + _HOST_BYTES, side="right")), start + 1)
        some = slice(start, stop)
        room = np.empty(int(ends[stop - 1] - before), dtype=np.uint8)
        places = ends[some] - lengths[some] - before
        if isinstance(memory, Spans):
            memory.copy_to(room, places, offsets[some], lengths[some])
        else:
            copy_batch(room, places, memory, offsets[some], lengths[some])
        digests[some] = np.frombuffer(digest_batch(room, places, lengths[some]), dtype="<u8")
        start = stop
    return digests


def is_memory(given: Any) -> bool:
    """Whether this is a region, or several with which of them each span lies in."""
    return isinstance(given, Region) or (
        isinstance(given, tuple)
        and len(given) == 2
        and isinstance(given[0], (list, tuple))
        and len(given[0]) > 0
        and all(isinstance(region, Region) for region in given[0])
    )


def spans_of(
    engine: TransferEngine,
    memory: Any,
    offsets: Any,
    lengths: Any,
    counts: Any,
    *,
    count: int,
    writable: bool,
    what: str,
) -> tuple[Spans, Int64s, Int64s]:
    """Return the spans of `count` chunks, and of each chunk how many they are and how many bytes.

    Raises:
        StoreArgumentError: an argument is wrong, or they do not fit each other.
        ChunkRangeError: a span is empty, or not inside its region.
    """
    regions, which = ([memory], 0) if isinstance(memory, Region) else memory
    for region in regions:
        checked_region(engine, region, what, writable=writable)
    counts = numbers(counts, count, f"counts of {what}")
    if counts.min(initial=0) < 0 or counts.max(initial=0) > SPANS_MAX or counts.sum() > SPANS_MAX:
        raise StoreArgumentError(f"{what}: counts are negative or huge", hint=f"0 or more spans, {SPANS_MAX} in all")
    lasts = np.cumsum(counts)
    total = int(counts.sum())
    which = numbers(which, total, f"regions of {what}")
    offsets, lengths = numbers(offsets, total, f"offsets of {what}"), numbers(lengths, total, f"lengths of {what}")
    known = (which >= 0) & (which < len(regions))
    nbytes = np.array([region.nbytes for region in regions], dtype=np.int64)[np.where(known, which, 0)]
    good = known & (offsets >= 0) & (lengths > 0) & (offsets <= nbytes - lengths)
    if not good.all():
        span = int(good.argmin())
        raise ChunkRangeError(
            f"{what}: span {span} is empty, or not inside one of {len(regions)} regions",
            item=int(np.searchsorted(lasts, span, side="right")),
        )
    ends = np.concatenate([[0], np.cumsum(lengths)])
    return Spans(regions, which, offsets, lengths), counts, ends[lasts] - ends[lasts - counts]
