# SPDX-License-Identifier: Apache-2.0
"""The packed forms of ``proto/pool.proto`` and of the header of an extent, as numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from moonpool.store_client.errors import StoreArgumentError

__all__ = [
    "DIGEST_WORD",
    "EXTENT",
    "HASH_BYTES",
    "HEADER_BYTES",
    "NO_RANGES",
    "NO_SEGMENT",
    "ROOT",
    "Hashes",
    "Headers",
    "Int64s",
    "Records",
    "extents_of",
    "hash_matrix",
    "headers_match",
    "headers_of",
    "ranges_with",
]

Int64s: TypeAlias = "npt.NDArray[np.int64]"
Records: TypeAlias = "npt.NDArray[np.void]"
Flags: TypeAlias = "npt.NDArray[np.bool_]"
Headers: TypeAlias = "npt.NDArray[np.uint64]"
#: n x 32 bytes, or 32 bytes each.
Hashes: TypeAlias = "bytes | bytearray | memoryview | Sequence[bytes] | npt.NDArray[Any]"

HASH_BYTES: Final = 32
HEADER_BYTES: Final = 64
NO_SEGMENT: Final = 0xFFFFFFFF
#: As a parent: none.
ROOT: Final = bytes(HASH_BYTES)
#: Of generations, as `ranges_with` returns them.
NO_RANGES: Final = np.empty((0, 2), dtype="<u8")
#: Most of them in one PutStart.
RANGES_MAX: Final = 4096

MAGIC: Final = int.from_bytes(b"MPC2", "little")
#: Which of the 8 words of a header is the digest.
DIGEST_WORD: Final = 3
EXTENT: Final = np.dtype(
    [("generation", "<u8"), ("offset", "<u8"), ("length", "<u8"), ("segment", "<u4"), ("zero", "<u4")]
)


def some_hashes(packed: bytes, which: npt.NDArray[Any]) -> bytes:
    """Return the hashes at these positions, or where these flags are set, packed again."""
    some: bytes = np.frombuffer(packed, dtype=np.uint8).reshape(-1, HASH_BYTES)[which].tobytes()
    return some


def hash_matrix(packed: bytes) -> npt.NDArray[np.uint64]:
    """Return hashes as rows of four numbers, to compare many at once."""
    return np.frombuffer(packed, dtype="<u8").reshape(-1, 4)


def extents_of(packed: bytes, count: int, replicas: int) -> Records:
    """Return extents as an array of `EXTENT` with a row for each chunk.

    Raises:
        StoreArgumentError: the master sent something else.
    """
    if len(packed) != count * replicas * EXTENT.itemsize:
        raise StoreArgumentError(
            f"the master sent {len(packed)} bytes of extents for {count} chunks with {replicas} replicas",
            hint="master and client of the same version",
        )
    return np.frombuffer(packed, dtype=EXTENT).reshape(count, replicas)


def headers_of(extents: Records, hashes: npt.NDArray[np.uint64], shard: int | npt.NDArray[np.uint64]) -> Headers:
    """Return the headers for these extents, a row of 8 words each. The digests are the caller's to fill in."""
    headers = np.empty((len(extents), HEADER_BYTES // 8), dtype="<u8")
    headers[:, 0] = MAGIC | shard << 32
    headers[:, 1] = extents["generation"]
    headers[:, 2] = extents["length"]
    headers[:, 4:] = hashes
    return headers


def headers_match(found: Headers, wanted: Headers) -> Flags:
    """Return which headers are the same."""
    same: Flags = (found == wanted).all(axis=1)
    return same


def ranges_with(ranges: npt.NDArray[np.uint64], generations: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return ranges, rows of first and last in their order, with these generations in them as well.

    Those of one call to the master follow each other, so there are few. Beyond `RANGES_MAX` the nearest become one.
    """
    if not len(generations):
        return ranges
    points = np.unique(generations)
    every = np.concatenate([ranges, np.stack([points, points], axis=1)])
    every = every[np.argsort(every[:, 0], kind="stable")]
    firsts, lasts = every[:, 0], np.maximum.accumulate(every[:, 1])
    gaps = firsts[1:] - np.minimum(lasts[:-1], firsts[1:])
    widest = np.sort(np.argsort(gaps)[::-1][: RANGES_MAX - 1])
    ends = widest[gaps[widest] > 1]
    return np.stack([firsts[np.append(0, ends + 1)], lasts[np.append(ends, len(lasts) - 1)]], axis=1)
