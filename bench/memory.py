# SPDX-License-Identifier: Apache-2.0
"""The memory of one side, the same for every backend of a row."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moonpool.bench.errors import BenchError
from moonpool.units import format_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["allocate", "available_bytes"]

# What is left for everything else on the machine.
_SHARE_OF_AVAILABLE = 0.8


def allocate(nbytes: int) -> NDArray[np.uint8]:
    """Return page-aligned zeroed memory.

    Raises:
        BenchError: the machine does not have that much to spare.
    """
    spare = available_bytes()
    if spare is not None and nbytes > spare * _SHARE_OF_AVAILABLE:
        raise BenchError(
            f"{format_bytes(nbytes)} of memory on this side is more than this machine can spare "
            f"({format_bytes(spare)} available)",
            hint="a smaller --footprint",
        )
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the memory that can be used without swapping, or None where the system does not say."""
    try:
        text = meminfo.read_text(encoding="ascii")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
