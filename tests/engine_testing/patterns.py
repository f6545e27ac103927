# SPDX-License-Identifier: Apache-2.0
"""Bytes that tell where they belong."""

from __future__ import annotations

from typing import Any

import numpy as np


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Return bytes in which a shift by any small distance shows: the upper part of a multiplicative hash of the place."""
    places = np.arange(nbytes, dtype=np.uint64) + np.uint64(seed * 1_000_003 + 1)
    return (places * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(56)).astype(np.uint8).tobytes()


def fill(memory: Any, seed: int = 0) -> None:
    """Write the pattern into writable memory."""
    view = memoryview(memory).cast("B")
    view[:] = pattern(view.nbytes, seed)
