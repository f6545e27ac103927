# SPDX-License-Identifier: Apache-2.0
"""What this build and this host can do, without an engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from moonpool import _native

__all__ = [
    "LEAF_BYTES",
    "TransportInfo",
    "combine_batch",
    "copy_batch",
    "digest",
    "digest_batch",
    "digest_joined",
    "probe",
]

#: Of the leaves of a `digest`.
LEAF_BYTES: Final = _native.LEAF_BYTES


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


def combine_batch(memory: Any, offsets: Any, lengths: Any) -> bytes:
    """Return the `digest` of many wholes, from the digests of their leaves of `LEAF_BYTES`.

    So who has the digests of all leaves can prove some of them with the digest of the whole, and read no others.

    Args:
        memory: anything with a contiguous buffer, with digests of leaves in order, 8 little-endian bytes each.
        offsets: bytes from its start to the first leaf, for each whole: as in `TransferEngine.read`.
        lengths: bytes of the digests of its leaves, likewise: 8, 16, 24, ...

    Returns and raises what `digest_batch` does; InvalidArgumentError also for another length.
    """
    return _native.combine_batch(memory, offsets, lengths)


def digest_joined(memories: Sequence[Any], which: Any, offsets: Any, lengths: Any, counts: Any) -> bytes:
    """Return the `digest` of many wholes that lie in pieces, in one native call without the GIL.

    Much is computed on several threads, which end with the call.

    Args:
        memories: things with a contiguous buffer, such as regions.
        which: of the memories each range lies in: as in `TransferEngine.read`.
        offsets: bytes from the start of that memory, for each range, likewise.
        lengths: bytes of each range, likewise; 0 is allowed.
        counts: of each whole, how many of the ranges in a row it is made of: an array; 0 is an empty whole.

    Returns:
        8 little-endian bytes for each whole, as `digest_batch`.

    Raises:
        ArgumentTypeError: a memory has no buffer, or the numbers are none.
        InvalidArgumentError: a buffer is not contiguous, the arrays differ in length, or `counts` do not add up.
        OutOfRangeError: a range is not inside its memory; nothing was computed.
    """
    return _native.digest_joined(memories, which, offsets, lengths, counts)


def copy_batch(target: Any, target_offsets: Any, source: Any, source_offsets: Any, lengths: Any) -> None:
    """Copy many ranges of one memory of this process into another, in one native call without the GIL.

    Much is copied on several threads, which end with the call; within one memory one range goes after the other. Of two
    ranges of another memory that overlap it is undefined whose bytes stay there.

    Args:
        target: anything with a contiguous writable buffer, such as a region; or a region of a GPU, which has no buffer.
        target_offsets: bytes from its start, for each range: as in `TransferEngine.read`.
        source: anything with a contiguous buffer, or a region of a GPU.
        source_offsets: likewise.
        lengths: bytes of each range, likewise; 0 is allowed.

    Raises:
        ArgumentTypeError: one has no buffer, or the numbers are none.
        InvalidArgumentError: a buffer is not contiguous, `target` is read-only, or the arrays differ in length.
        OutOfRangeError: a range is not inside both; nothing was copied.
        CudaError: a call of the CUDA driver failed. Some of it may be there.
    """
    _native.copy_batch(target, target_offsets, source, source_offsets, lengths)
