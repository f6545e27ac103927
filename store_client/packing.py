# SPDX-License-Identifier: Apache-2.0
"""The packed forms of ``proto/pool.proto`` and of the header of an extent, as numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from moonpool.store_client.errors import StoreArgumentError

__all__ = [
    "EXTENT",
    "HASH_BYTES",
    "HEADER",
    "HEADER_BYTES",
    "NO_SEGMENT",
    "ROOT",
    "Hashes",
    "Int64s",
    "Records",
    "digests_in",
    "extents_of",
    "hash_matrix",
    "header_bytes",
    "headers_match",
]

Int64s: TypeAlias = "npt.NDArray[np.int64]"
Records: TypeAlias = "npt.NDArray[np.void]"
Flags: TypeAlias = "npt.NDArray[np.bool_]"
Bytes: TypeAlias = "npt.NDArray[np.uint8]"
#: n x 32 bytes, or 32 bytes each.
Hashes: TypeAlias = "bytes | bytearray | memoryview | Sequence[bytes] | npt.NDArray[Any]"

HASH_BYTES: Final = 32
HEADER_BYTES: Final = 64
NO_SEGMENT: Final = 0xFFFFFFFF
#: As a parent: none.
ROOT: Final = bytes(HASH_BYTES)

MAGIC: Final = int.from_bytes(b"MPC1", "little")
HEADER: Final = np.dtype(
    [
        ("magic", "<u4"),
        ("shard", "<u4"),
        ("generation", "<u8"),
        ("length", "<u8"),
        ("digest", "<u8"),
        ("hash", "<u8", (4,)),
    ]
)
EXTENT: Final = np.dtype(
    [("generation", "<u8"), ("offset", "<u8"), ("length", "<u8"), ("segment", "<u4"), ("zero", "<u4")]
)
assert HEADER.itemsize == HEADER_BYTES


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


def header_bytes(extents: Records, digests: npt.NDArray[np.uint64], hashes: bytes, shard: int) -> Bytes:
    """Return the headers for these extents, a row of 64 bytes each."""
    headers = np.empty(len(extents), dtype=HEADER)
    headers["magic"] = MAGIC
    headers["shard"] = shard
    headers["generation"] = extents["generation"]
    headers["length"] = extents["length"]
    headers["digest"] = digests
    headers["hash"] = hash_matrix(hashes)
    return headers.view(np.uint8).reshape(-1, HEADER_BYTES)


def headers_match(
    headers: Bytes, extents: Records, hashes: npt.NDArray[np.uint64], shard: int | npt.NDArray[np.uint32]
) -> Flags:
    """Return for each row of 64 bytes whether it is what the master said of the extent, its chunk and its shard."""
    found = np.ascontiguousarray(headers).view(HEADER).reshape(-1)
    same: Flags = (
        (found["magic"] == MAGIC)
        & (found["shard"] == shard)
        & (found["generation"] == extents["generation"])
        & (found["length"] == extents["length"])
        & (found["hash"] == hashes).all(axis=1)
    )
    return same


def digests_in(headers: Bytes) -> npt.NDArray[np.uint64]:
    """Return the digest that each header names."""
    found: npt.NDArray[np.uint64] = np.ascontiguousarray(headers).view(HEADER).reshape(-1)["digest"]
    return found
