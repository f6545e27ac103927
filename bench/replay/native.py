# SPDX-License-Identifier: Apache-2.0
"""The index that masters have, in a replay: what is measured is what is shipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from moonpool._index import EXTENT_BYTES, HASH_BYTES, HEADER_BYTES, ChunkIndex
from moonpool.bench.replay.hashes import hashes_of
from moonpool.bench.replay.pool import Pool
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client.packing import ROOT

__all__ = ["NativePool"]

_OWNER: Final = 1
_NAMESPACE: Final = 1
_SEGMENT: Final = 1
#: Of a chunk; with its header a multiple of what extents are rounded up to.
_LENGTH: Final = 64
_EXTENT: Final = -(-(HEADER_BYTES + _LENGTH) // 64) * 64
_FAR: Final = 1 << 40


class NativePool(Pool):
    """A `ChunkIndex` with one segment that has room for exactly so many chunks, used as a master uses it.

    What of a request is there up to the first gap is matched, the rest is put. Where there is no room, so much is
    evicted as is missing, while a `SimulatedPool` is cut when the request is over: the figures differ a little.

    Args:
        policy: of the index.
        capacity: in blocks, at least 1.
        names: of the blocks.
    """

    def __init__(self, policy: str, capacity: int, names: Sequence[int]) -> None:
        self._hashes = hashes_of(names)
        # What was evicted needs its slot until it is reclaimed.
        self._index = ChunkIndex(policy=policy, chunks_max=2 * capacity + 1024)
        self._index.add_segment(_SEGMENT, capacity * _EXTENT, 1, 0, 0)
        self._now = 0

    def request(self, blocks: Sequence[int]) -> int:
        """Serve one request."""
        self._now += 1
        hashes = self._hashes[list(blocks)].tobytes()
        matched = self._index.match_prefix(_NAMESPACE, hashes, self._now, 0)
        self._put(hashes, matched)
        return matched

    def _put(self, hashes: bytes, first: int) -> None:
        """Put the chunks from `first` on, as far as there is room for them beside what may not be evicted."""
        rest = np.arange(first, len(hashes) // HASH_BYTES)
        chain = np.frombuffer(ROOT + hashes, dtype=np.uint8).reshape(-1, HASH_BYTES)
        while len(rest):
            names, parents = chain[rest + 1].tobytes(), chain[rest].tobytes()
            statuses, extents = self._index.start(
                _OWNER, _NAMESPACE, names, parents, _LENGTH.to_bytes(8, "little"), 0, 1, 1, (), 0, self._now, _FAR
            )
            answered = np.frombuffer(statuses, dtype=np.uint8)
            self._commit(names, extents, np.flatnonzero(answered == pb.OK))
            rest = rest[answered == pb.NO_SPACE]
            if len(rest) and not self._evict(len(rest)):
                break

    def _commit(self, names: bytes, extents: bytes, given: np.ndarray[tuple[int], np.dtype[np.intp]]) -> None:
        hashes = np.frombuffer(names, dtype=np.uint8).reshape(-1, HASH_BYTES)[given].tobytes()
        generations = np.frombuffer(extents, dtype=np.uint8).reshape(-1, EXTENT_BYTES)[given, :8].tobytes()
        _, slots, _ = self._index.commit(_OWNER, _NAMESPACE, hashes, generations, 0, b"")
        self._index.publish(slots)

    def _evict(self, chunks: int) -> int:
        """Make room for so many chunks; return for how many there is some now."""
        slots, *_ = self._index.evict(chunks * _EXTENT, self._now)
        return self._index.reclaim(slots, self._now) // _EXTENT
