# SPDX-License-Identifier: Apache-2.0
"""The arguments of a client's calls: looked at before anything is asked, and refused with what is right."""

from __future__ import annotations

import math
import operator
from typing import Any, Final, TypeVar

import numpy as np

from moonpool.store_client.errors import StoreArgumentError
from moonpool.store_client.packing import HASH_BYTES, Hashes, Int64s
from moonpool.transfer_engine import Region, TransferEngine

__all__ = [
    "SHARDS_MAX",
    "checked_flag",
    "checked_lease",
    "checked_namespace",
    "checked_ranges",
    "checked_region",
    "checked_replicas",
    "checked_roster",
    "checked_segment",
    "checked_shard",
    "checked_shards",
    "checked_timeout",
    "numbers",
    "packed_hashes",
    "packed_parents",
]

T = TypeVar("T")

#: As the index of the master has them.
SHARDS_MAX: Final = 1024
_REPLICAS_MAX: Final = 8
_SEGMENT_MAX: Final = 0xFFFFFFFE
_NAME_MAX: Final = 255
# Of a roster; the master has the same bound.
_ENTRY_MAX: Final = 4096
# Milliseconds travel as whole numbers, and 0 would mean none.
_LEASE_MIN: Final = 0.001
_LEASE_MAX: Final = 3600.0
_TIMEOUT_MAX: Final = 86400.0
_INT64_MAX: Final = (1 << 63) - 1


def checked_namespace(namespace: Any) -> str:
    """Return a namespace.

    Raises:
        StoreArgumentError: it is not 1 to 255 bytes of text.
    """
    return _checked_name(namespace, "namespace")


def checked_roster(roster: Any) -> tuple[str, bytes] | None:
    """Return the name of a roster and an entry in it, or None.

    Raises:
        StoreArgumentError: it is something else.
    """
    if roster is None:
        return None
    hint = f"None, or a name and bytes, {_ENTRY_MAX} at most"
    if not isinstance(roster, tuple) or len(roster) != 2 or not isinstance(roster[1], bytes):
        raise StoreArgumentError(f"roster is a {type(roster).__name__}", hint=hint)
    if len(roster[1]) > _ENTRY_MAX:
        raise StoreArgumentError(f"the entry in the roster has {len(roster[1])} bytes", hint=hint)
    return _checked_name(roster[0], "roster"), roster[1]


def _checked_name(name: Any, what: str) -> str:
    hint = f"text of 1 to {_NAME_MAX} bytes of UTF-8"
    if not isinstance(name, str):
        raise StoreArgumentError(f"{what} is a {type(name).__name__}", hint=hint)
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise StoreArgumentError(f"{what} is no Unicode text", cause=str(error), hint=hint) from None
    if not 1 <= nbytes <= _NAME_MAX:
        raise StoreArgumentError(f"{what} has {nbytes} bytes", hint=hint)
    return name


def packed_hashes(hashes: Hashes) -> bytes:
    """Return the hashes as n x 32 bytes.

    Raises:
        StoreArgumentError: they are not 32 bytes each.
    """
    if isinstance(hashes, (list, tuple)):
        for index, one in enumerate(hashes):
            if not isinstance(one, (bytes, bytearray, memoryview)) or memoryview(one).nbytes != HASH_BYTES:
                raise StoreArgumentError(f"hash {index} is not {HASH_BYTES} bytes", hint="bytes of that length")
        return b"".join(hashes)
    packed = None
    if isinstance(hashes, np.ndarray):
        # An array of other numbers is a slip, although it has bytes.
        if hashes.dtype == np.uint8 or (hashes.dtype.kind in "SV" and hashes.dtype.itemsize == HASH_BYTES):
            packed = np.ascontiguousarray(hashes).tobytes()
    elif isinstance(hashes, (bytes, bytearray)) or (isinstance(hashes, memoryview) and hashes.itemsize == 1):
        packed = bytes(hashes)
    if packed is None or len(packed) % HASH_BYTES:
        raise StoreArgumentError(
            f"hashes is a {type(hashes).__name__} that is not n x {HASH_BYTES} bytes",
            hint=f"bytes of n x {HASH_BYTES}, a list of bytes, or an array of uint8",
        )
    return packed


def packed_parents(parents: Hashes | None, count: int) -> bytes:
    """Return parents as PutStart takes them: nothing, 32 bytes for a chain, or n x 32."""
    packed = b"" if parents is None else packed_hashes(parents)
    if len(packed) not in (0, HASH_BYTES, count * HASH_BYTES):
        raise StoreArgumentError(
            f"{len(packed) // HASH_BYTES} parents were given for {count} chunks",
            hint="one, of the first chunk of a chain, or one for each; ROOT for none",
        )
    return packed


def numbers(value: Any, count: int, what: str) -> Int64s:
    """Return `value`, an int or one for each of `count`, as an array of int64.

    Raises:
        StoreArgumentError: it is something else, or does not fit 64 bits.
    """
    if type(value) is np.ndarray and value.dtype == np.int64 and value.shape == (count,) and value.flags.c_contiguous:
        return value
    hint = "an int, or an array of int64"
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise StoreArgumentError(f"{what} is no array", cause=str(error), hint=hint) from None
    if not count and array.shape == (0,):
        return np.zeros(0, dtype=np.int64)  # of [] numpy makes floats
    if array.dtype.kind not in "iu" or array.ndim > 1 or (array.ndim == 1 and len(array) != count):
        raise StoreArgumentError(f"{what} is not an int or {count} of them", hint=hint)
    if array.dtype.kind == "u" and array.size and int(array.max()) > _INT64_MAX:
        raise StoreArgumentError(f"{what} has a number beyond 2^63 - 1", hint=hint)
    if array.ndim == 0:
        return np.full(count, operator.index(array.item()), dtype=np.int64)
    return np.ascontiguousarray(array, dtype=np.int64)


def checked_ranges(ranges: Any, count: int) -> tuple[Int64s, Int64s]:
    """Return the offsets and the lengths of a range of each chunk. Whether a chunk is so long is seen later."""
    if not isinstance(ranges, (tuple, list)) or len(ranges) != 2:
        raise StoreArgumentError(
            "ranges is not a pair", hint="(offsets, lengths), each an int or one for each chunk, or None"
        )
    return numbers(ranges[0], count, "offsets of ranges"), numbers(ranges[1], count, "lengths of ranges")


def checked_shards(shards: Any) -> int:
    """Return a number of shards."""
    return _whole(shards, "shards", 1, SHARDS_MAX)


def checked_shard(shard: Any, shards: int = SHARDS_MAX) -> int:
    """Return which of `shards` this is."""
    return _whole(shard, "shard", 0, shards - 1)


def checked_replicas(replicas: Any) -> int:
    """Return a number of replicas."""
    return _whole(replicas, "replicas", 1, _REPLICAS_MAX)


def checked_segment(segment: Any) -> int:
    """Return the number of a segment."""
    return _whole(segment, "segment", 0, _SEGMENT_MAX)


def checked_lease(lease: Any, *, none: bool = False) -> float:
    """Return a lease, in seconds; with `none` it may be 0."""
    if none and not isinstance(lease, bool) and lease == 0:
        return 0.0
    return _seconds(lease, "lease", _LEASE_MIN, _LEASE_MAX)


def checked_timeout(timeout: Any) -> float:
    """Return a timeout, in seconds."""
    return _seconds(timeout, "timeout", 0.0, _TIMEOUT_MAX)


def checked_flag(value: Any, what: str) -> bool:
    """Return what is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise StoreArgumentError(f"{what} is {_shown(value)}", hint="True or False")
    return bool(value)


def checked_region(engine: TransferEngine, region: Region, what: str, *, writable: bool) -> Region:
    """Return a region that transfers of `engine` may use.

    Raises:
        StoreArgumentError: they may not.
    """
    if region.released:
        raise StoreArgumentError(f"the region of {what} was released", hint="register the memory again")
    if not engine.owns(region):
        raise StoreArgumentError(
            f"the region of {what} is of another engine",
            hint="StoreClient(engine=...) with that one, or client.allocate",
        )
    if writable and not (region.writable or region.allocated):
        raise StoreArgumentError(f"the region of {what} is read-only", hint="register it as writable")
    return region


def _whole(value: Any, what: str, least: int, most: int) -> int:
    hint = f"a whole number from {least} to {most}"
    if isinstance(value, (bool, np.bool_)):
        raise StoreArgumentError(f"{what} is {value}", hint=hint)
    try:
        number = operator.index(value)
    except TypeError:
        raise StoreArgumentError(f"{what} is {_shown(value)}", hint=hint) from None
    if not least <= number <= most:
        raise StoreArgumentError(f"{what} is {_shown(number)}", hint=hint)
    return number


def _seconds(value: Any, what: str, least: float, most: float) -> float:
    hint = f"seconds from {least:g} to {most:g}, such as 2.5"
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise StoreArgumentError(f"{what} is {_shown(value)}", hint=hint)
    # Of ints beyond every float too; and NaN compares false with everything.
    if not least <= value <= most:
        raise StoreArgumentError(f"{what} is {_shown(value)}", hint=hint)
    return float(value)


def _shown(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return "a huge number"
    if value is None or isinstance(value, (int, float, np.number)):
        return "not a number" if isinstance(value, float) and math.isnan(value) else str(value)
    return f"a {type(value).__name__}"
