# SPDX-License-Identifier: Apache-2.0
"""What the model of the index is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

HEADER_BYTES = 64
Key = tuple[int, bytes]  # namespace, hash


class Status(IntEnum):
    OK = 0
    ALREADY = 1
    NOT_FOUND = 2
    WRITING = 3
    NO_SPACE = 4
    CONFLICT = 5
    NOT_OWNER = 6
    CHUNKS_MAX = 7
    TOO_LARGE = 8
    INVALID = 9
    IN_USE = 10
    NOT_MOVED = 11
    SPOILT = 12
    LOADING = 13


@dataclass(frozen=True)
class Extent:
    segment: int
    offset: int
    size: int  # with the header, in whole units of 64 bytes


@dataclass
class Segment:
    number: int
    capacity: int
    host: int
    writable: bool = True
    readable: bool = True


@dataclass
class Shard:
    generation: int
    length: int
    extents: list[Extent]
    owner: int = 0
    deadline: int = 0
    commit: int = 0  # the number of the one that waits for its record
    committed: bool = False


@dataclass(eq=False)
class Chunk:
    key: Key
    slot: int
    count: int  # of shards
    shards: dict[int, Shard] = field(default_factory=dict)
    parent: Chunk | None = None
    children: list[Chunk] = field(default_factory=list)
    leased_until: int = 0
    pins: int = 0
    durable: bool = False
    removed: bool = False

    @property
    def written(self) -> bool:
        return any(not shard.committed for shard in self.shards.values())

    @property
    def complete(self) -> bool:
        return len(self.shards) == self.count and not self.written and not self.removed


@dataclass(frozen=True)
class Row:
    """A record of the metadata store."""

    key: Key
    parent: Key | None
    count: int
    shards: dict[int, Shard]


class Lru:
    """Leaves first: a parent that comes to the end is parked until its last child is gone."""

    def __init__(self) -> None:
        self.order: list[Chunk] = []  # oldest first
        self.parked: set[Chunk] = set()

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk in self.parked or chunk in self.order

    def insert(self, chunk: Chunk) -> None:
        self.order.append(chunk)

    def touch(self, chunk: Chunk) -> None:
        self.remove(chunk)
        self.insert(chunk)

    def remove(self, chunk: Chunk) -> None:
        self.parked.discard(chunk)
        if chunk in self.order:
            self.order.remove(chunk)

    def leaf(self, chunk: Chunk) -> None:
        if chunk in self.parked:
            self.parked.remove(chunk)
            self.order.insert(0, chunk)


def size_of(length: int) -> int:
    leaves = -(-length // (256 << 10))
    table = 8 * leaves if leaves > 1 else 0
    return (HEADER_BYTES + length + table + 63) // 64 * 64
