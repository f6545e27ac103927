# SPDX-License-Identifier: Apache-2.0
"""The leaves of payloads. Behind a payload of several lie their digests, so that any of them can be proved alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from moonpool.store_client.packing import DIGEST_WORD, headers_match
from moonpool.store_client.spans import digests_of
from moonpool.transfer_engine import LEAF_BYTES, combine_batch

if TYPE_CHECKING:
    from moonpool.store_client.moves import Place
    from moonpool.store_client.packing import Headers, Int64s

    Digests: TypeAlias = "npt.NDArray[np.uint64]"

__all__ = ["DIGEST_BYTES", "Leaves", "leaves_of", "proved", "table_bytes"]

#: Of one leaf, in the table.
DIGEST_BYTES: Final = 8


def table_bytes(lengths: Int64s) -> Int64s:
    """Return how large the table behind a payload of each length is: 0 for one leaf, which the header speaks of."""
    leaves = -(-lengths // LEAF_BYTES)
    return np.where(leaves > 1, DIGEST_BYTES * leaves, 0)


@dataclass
class Leaves:
    """The leaves of several payloads in a row, or of parts of payloads that begin with a leaf.

    Attributes:
        counts: how many each has.
        firsts: the position in the row of the first one of each.
        owners: whose each leaf is.
        starts: where in its payload (or part) each leaf begins.
        lengths: bytes of each leaf.
    """

    counts: Int64s
    firsts: Int64s
    owners: npt.NDArray[np.intp]
    starts: Int64s
    lengths: Int64s

    def of(self, some: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return the positions of the leaves of some payloads, in the order of these."""
        counts = self.counts[some]
        ends = np.cumsum(counts)
        return np.repeat(self.firsts[some] - (ends - counts), counts) + np.arange(int(ends[-1]) if len(ends) else 0)

    def all_of_each(self, flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return for each payload whether the flags of all of its leaves are set."""
        return np.logical_and.reduceat(flags, self.firsts)


def leaves_of(lengths: Int64s) -> Leaves:
    """Return the leaves of payloads of these lengths, at least 1 each."""
    counts = -(-lengths // LEAF_BYTES)
    firsts = np.cumsum(counts) - counts
    owners = np.repeat(np.arange(len(lengths)), counts)
    starts = (np.arange(len(owners)) - firsts[owners]) * LEAF_BYTES
    return Leaves(counts, firsts, owners, starts, np.minimum(lengths[owners] - starts, LEAF_BYTES))


def proved(
    words: npt.NDArray[np.uint64],
    place: Place,
    rows: npt.NDArray[np.intp],
    wanted: Headers,
    found: Digests | None,
) -> npt.NDArray[np.bool_]:
    """Return for each of these rows of ranges whether header, table and leaves are those of the chunk.

    Args:
        words: memory that holds the tables.
        place: where headers and leaves lie, and where the tables lie in `words`.
        rows: which ranges.
        wanted: their headers but for the digests, which only those that have come can tell.
        found: the digests of the leaves that were read, if the engine has computed them.
    """
    headers = place.headers_at(rows)
    named = wanted[:, DIGEST_WORD] = headers[:, DIGEST_WORD]
    return headers_match(headers, wanted) & _leaves_match(words, place, rows, named, found)


def _leaves_match(
    words: npt.NDArray[np.uint64],
    place: Place,
    rows: npt.NDArray[np.intp],
    named: npt.NDArray[np.uint64],
    found: Digests | None,
) -> npt.NDArray[np.bool_]:
    """Return whether leaves and tables are those of chunks with the digests `named`."""
    assert place.starts is not None
    leaves = leaves_of(place.lengths[rows])
    own = leaves.owners
    if found is None:
        offsets = place.offsets[rows[own]] + leaves.starts
        found = digests_of(place.region, offsets, leaves.lengths)
    sizes, tables = table_bytes(place.sizes[rows]), place.table_offsets[rows]
    several = sizes > 0
    good = np.ones(len(rows), dtype=np.bool_)
    wanted = named[own]  # a single leaf is what the header speaks of
    if several.any():
        whole = np.frombuffer(combine_batch(words, tables[several], sizes[several]), dtype="<u8")
        good[several] = whole == named[several]
        entries = tables[own] // DIGEST_BYTES + (place.starts[rows[own]] + leaves.starts) // LEAF_BYTES
        which = several[own]
        wanted[which] = words[entries[which]]
    return good & leaves.all_of_each(found == wanted)
