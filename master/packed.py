# SPDX-License-Identifier: Apache-2.0
"""Packed batches: checks of their sizes, and parts of them. Nothing here is used per chunk on the usual path."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from moonpool._index import HASH_BYTES, extent_bytes
from moonpool.master.errors import InvalidRequestError

__all__ = ["HASH_BYTES", "count_of", "pairs", "per_item", "positions", "replace", "room_for", "sized", "take"]


def count_of(hashes: bytes, maximum: int) -> int:
    """Return how many hashes there are.

    Raises:
        InvalidRequestError: no whole number of them, or too many.
    """
    count, rest = divmod(len(hashes), HASH_BYTES)
    if rest:
        raise InvalidRequestError(f"hashes has {len(hashes)} bytes", hint="32 bytes each")
    if count > maximum:
        raise InvalidRequestError(
            f"a batch of {count} chunks", hint=f"at most {maximum} in one call: batch_max of the master"
        )
    return count


def sized(name: str, value: bytes, *allowed: int) -> bytes:
    """Return `value` if it has one of the sizes allowed.

    Raises:
        InvalidRequestError: it has not.
    """
    if len(value) not in allowed:
        raise InvalidRequestError(f"{name} has {len(value)} bytes", hint=" or ".join(map(str, sorted(set(allowed)))))
    return value


def positions(statuses: bytes | bytearray, status: int) -> list[int]:
    """Return where a status is."""
    found, place = [], statuses.find(status)
    while place >= 0:
        found.append(place)
        place = statuses.find(status, place + 1)
    return found


def take(packed: bytes | bytearray, width: int, which: Sequence[int]) -> bytes:
    """Return the items at some positions."""
    return b"".join([packed[place * width : (place + 1) * width] for place in which])


def replace(packed: bytearray, width: int, which: Sequence[int], items: bytes) -> None:
    """Put items at some positions."""
    for number, place in enumerate(which):
        packed[place * width : (place + 1) * width] = items[number * width : (number + 1) * width]


def per_item(parents: bytes, hashes: bytes) -> bytes:
    """Return the parent of each chunk, from the form that names only the first chunk's."""
    return parents if len(parents) in (0, len(hashes)) else parents + hashes[:-HASH_BYTES]


def room_for(lengths: bytes, which: Sequence[int]) -> int:
    """Return the bytes of extents for some lengths, with what is lost where they are rounded to multiples of 64."""
    each = struct.unpack(f"<{len(lengths) // 8}Q", lengths)
    if len(each) == 1:
        return (extent_bytes(each[0]) + 64) * len(which)
    return sum(extent_bytes(each[place]) + 64 for place in which)


def pairs(packed: bytes) -> Iterator[tuple[int, int]]:
    """Yield pairs of u32: owner and segment."""
    yield from struct.iter_unpack("<II", packed)
