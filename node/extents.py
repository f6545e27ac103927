# SPDX-License-Identifier: Apache-2.0
"""One extent at a time: what a copy names, how much room it takes, and whether the bytes are those that it should have.

On the threads that read a disk this is most of what Python does, so there is little of it, and no arrays of one item.
"""

from __future__ import annotations

import functools
import struct
from typing import Any, Final, NamedTuple

import numpy as np

from moonpool.store_client.packing import HEADER_BYTES
from moonpool.transfer_engine import LEAF_BYTES, combine_batch, copy_batch, digest_batch

__all__ = ["EXTENT_BYTES", "Extent", "extents_of", "is_right", "size_of"]

# Of a Copy and of an extent: see ``proto/pool.proto`` and docs/decisions/0006-pool.md.
_EXTENT: Final = struct.Struct("<QQQQII32s")
#: Of one extent of a Copy.
EXTENT_BYTES: Final = _EXTENT.size
_HEADER: Final = struct.Struct("<4sIQQQ32s")
_MAGIC: Final = b"MPC2"
_DIGEST_BYTES: Final = 8


class Extent(NamedTuple):
    """One of a copy; `length` is that of the payload."""

    generation: int
    there: int
    here: int
    length: int
    shard: int
    zero: int
    hash: bytes


def extents_of(packed: bytes) -> list[Extent]:
    """Return what a copy names.

    Raises:
        struct.error: it is no whole number of extents.
    """
    return [Extent(*fields) for fields in _EXTENT.iter_unpack(packed)]


def size_of(length: int) -> int:
    """Return what an extent takes: header, payload, and the digests of its leaves where it has several."""
    leaves = -(-length // LEAF_BYTES)
    return HEADER_BYTES + length + (_DIGEST_BYTES * leaves if leaves > 1 else 0)


def is_right(memory: Any, at: int, extent: Extent) -> bool:
    """Return whether header, payload and digests of an extent are what they should be.

    Args:
        memory: a buffer.
        at: where the extent begins in it.
        extent: what it should be.
    """
    header = bytearray(HEADER_BYTES)
    copy_batch(header, 0, memory, at, HEADER_BYTES)
    magic, shard, generation, length, digest, hash_ = _HEADER.unpack(header)
    if (magic, shard, generation, length, hash_) != (
        _MAGIC,
        extent.shard,
        extent.generation,
        extent.length,
        extent.hash,
    ):
        return False
    payload = at + HEADER_BYTES
    own = digest.to_bytes(_DIGEST_BYTES, "little")
    starts, lengths = _leaves(length)
    if len(starts) == 1:
        return bool(digest_batch(memory, payload, length) == own)
    table = bytearray(_DIGEST_BYTES * len(starts))
    copy_batch(table, 0, memory, payload + length, len(table))
    return bool(combine_batch(table, 0, len(table)) == own and digest_batch(memory, payload + starts, lengths) == table)


@functools.lru_cache(maxsize=64)
def _leaves(length: int) -> tuple[Any, Any]:
    """Return where the leaves of a payload begin, and how long they are. A pool has chunks of few different lengths."""
    starts = np.arange(0, length, LEAF_BYTES)
    return starts, np.minimum(length - starts, LEAF_BYTES)
