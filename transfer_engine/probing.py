# SPDX-License-Identifier: Apache-2.0
"""What this build and this host can do, without an engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from moonpool import _native

__all__ = ["TransportInfo", "digest", "digest_batch", "probe"]


@dataclass(frozen=True)
class TransportInfo:
    """One transport of this build.

    Attributes:
        name: what ``transports=`` and ``require=`` call it.
        available: whether this host can use it.
        reason: why not, or what is special about it; perhaps empty.
    """

    name: str
    available: bool
    reason: str


def probe() -> list[TransportInfo]:
    """Return every transport of this build, and whether this host offers what it needs."""
    return [
        TransportInfo(entry["transport"], entry["available"], entry["reason"])
        for entry in json.loads(_native.probe_json())
    ]


def digest(data: Any) -> int:
    """Return the digest that ``digest=True`` computes for the same bytes, as an unsigned 64-bit number.

    It is XXH3-64 of the little-endian XXH3-64 values of the leaves of 256 KiB; one leaf is its own digest. It detects
    damage, not an attacker.

    Args:
        data: anything with a contiguous buffer: bytes, a numpy array, a region, a memoryview.

    Raises:
        ArgumentTypeError: `data` has no buffer.
        InvalidArgumentError: its buffer is not contiguous.
    """
    return _native.digest(data)


def digest_batch(memory: Any, offsets: Any, lengths: Any) -> bytes:
    """Return the `digest` of many ranges of `memory`, in one native call without the GIL.

    Args:
        memory: anything with a contiguous buffer, such as a region.
        offsets: bytes from its start, for each range: as in `TransferEngine.read`.
        lengths: bytes of each range, likewise; 0 is allowed.

    Returns:
        8 little-endian bytes for each range: ``numpy.frombuffer(digests, dtype="<u8")``.

    Raises:
        ArgumentTypeError: `memory` has no buffer, or the numbers are none.
        InvalidArgumentError: the buffer is not contiguous, or the arrays differ in length.
        OutOfRangeError: a range is not inside; nothing was computed.
    """
    return _native.digest_batch(memory, offsets, lengths)
