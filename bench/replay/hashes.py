# SPDX-License-Identifier: Apache-2.0
"""The hashes of the chunks of a trace, and what is in them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moonpool.bench.work import mix

__all__ = ["content_of", "hashes_of"]


def hashes_of(names: Sequence[int]) -> NDArray[np.uint8]:
    """Return a row of 32 bytes for each name, always the same."""
    packed = b"".join(hashlib.blake2b(str(name).encode(), digest_size=32).digest() for name in names)
    return np.frombuffer(packed, dtype=np.uint8).reshape(len(names), 32)


def content_of(hashes: NDArray[np.uint8], nbytes: int) -> NDArray[np.uint8]:
    """Return the bytes of the chunks with these hashes, a row for each: no two have a word in the same place.

    Args:
        hashes: a row for each.
        nbytes: of a chunk, a multiple of 8.
    """
    sequence = mix(np.arange(nbytes // 8, dtype=np.uint64))
    keys = np.ascontiguousarray(hashes[:, :8]).view(np.uint64)
    return (sequence[None, :] ^ keys).view(np.uint8)
