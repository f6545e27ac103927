# SPDX-License-Identifier: Apache-2.0
"""Batches as the index takes them and gives them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from index.model_parts import Status

from moonpool._index import EXTENT_BYTES, MOVE_BYTES, NO_SEGMENT

Moved: TypeAlias = tuple[int, int, int, int, int, int, int, int, bytes]


def hash_of(name: object) -> bytes:
    return hashlib.sha256(repr(name).encode()).digest()


def u64s(values: Iterable[int]) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


def u32s(values: Iterable[int]) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


def unpack_u32s(packed: bytes) -> list[int]:
    return [value for (value,) in struct.iter_unpack("<I", packed)]


def unpack_pairs(packed: bytes) -> set[tuple[int, int]]:
    pairs = list(struct.iter_unpack("<II", packed))
    assert len(set(pairs)) == len(pairs)
    return set(pairs)


def unpack_keys(packed: bytes) -> list[tuple[int, bytes]]:
    return list(struct.iter_unpack("<I32s", packed))


def unpack_records(packed: bytes) -> list[bytes]:
    records = []
    while packed:
        size = int.from_bytes(packed[:4], "little")
        records.append(packed[4 : 4 + size])
        assert len(records[-1]) == size
        packed = packed[4 + size :]
    return records


def pack_records(records: Sequence[bytes]) -> bytes:
    return b"".join(len(record).to_bytes(4, "little") + record for record in records)


def statuses_of(packed: bytes) -> list[Status]:
    return [Status(value) for value in packed]


def unpack_moves(packed: bytes) -> list[Moved]:
    """(number, segment it leaves, segment it goes to, generation, offset there, offset here, length, shard, hash)."""
    assert all(source == move[1] for move, source, _ in unpack_mends(packed))
    return [move for move, _, _ in unpack_mends(packed)]


def unpack_mends(packed: bytes) -> list[tuple[Moved, int, int]]:
    """The same, with the segment that is read, which is not the one that it leaves, and the namespace."""
    moves = list(struct.iter_unpack("<QIIIIQQQQII32s", packed))
    assert struct.calcsize("<QIIIIQQQQII32s") == MOVE_BYTES
    assert all(move[10] == 0 for move in moves)
    return [((*move[:3], *move[5:10], move[11]), move[3], move[4]) for move in moves]


def unpack_extents(packed: bytes, replicas: int) -> list[list[tuple[int, int, int, int]]]:
    """For each item its extents that are there: (generation, offset, length, segment)."""
    everything = list(struct.iter_unpack("<QQQII", packed))
    assert len(packed) % (EXTENT_BYTES * replicas) == 0
    items = []
    for at in range(0, len(everything), replicas):
        item = everything[at : at + replicas]
        assert all(extent[4] == 0 for extent in item)
        there = [extent[:4] for extent in item if extent[3] != NO_SEGMENT]
        assert there == [extent[:4] for extent in item[: len(there)]], "those that are there come first"
        items.append(there)
    return items
