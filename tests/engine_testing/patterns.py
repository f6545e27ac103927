# SPDX-License-Identifier: Apache-2.0
"""Bytes that tell where they belong."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

_BLOCK = 1 << 16


def _hash(places: np.ndarray) -> np.ndarray:
    # The top byte of a multiplicative hash: neighbours get unrelated values.
    return (places.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(56)).astype(np.uint8)


@lru_cache(maxsize=32)
def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Return bytes in which a shift, a swap or a repetition shows."""
    blocks = -(-nbytes // _BLOCK)
    inside = _hash(np.arange(1, _BLOCK + 1) + seed * 1_000_003)
    which = _hash(np.arange(blocks) * 7 + seed)
    return (inside[np.newaxis, :] ^ which[:, np.newaxis]).tobytes()[:nbytes]


def fill(memory: Any, seed: int = 0) -> None:
    """Write the pattern into writable memory."""
    view = memoryview(memory).cast("B")
    view[:] = pattern(view.nbytes, seed)
