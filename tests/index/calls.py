# SPDX-License-Identifier: Apache-2.0
"""The calls of the index in a form that tests can be read with."""

from __future__ import annotations

from index.model_parts import Status
from index.packing import (
    hash_of,
    statuses_of,
    u64s,
    unpack_extents,
    unpack_records,
    unpack_u32s,
)

from moonpool._index import ChunkIndex

POLICIES = ["prefix", "s3fifo", "lru"]
OWNER, OTHER = 1, 2
SPACE = 7
MIB = 1 << 20


def names(count: int, what: str = "chunk") -> bytes:
    return b"".join(hash_of((what, number)) for number in range(count))


def start(
    index: ChunkIndex,
    hashes: bytes,
    *,
    owner: int = OWNER,
    length: int = 1000,
    shard: int = 0,
    shards: int = 1,
    replicas: int = 1,
    parents: bytes = b"",
    avoid: tuple[int, ...] = (),
    host: int = 0,
    now: int = 0,
    deadline: int = 100,
) -> tuple[list[Status], list[list[tuple[int, int, int, int]]]]:
    statuses, extents = index.start(
        owner, SPACE, hashes, parents, u64s([length]), shard, shards, replicas, avoid, host, now, deadline
    )
    return statuses_of(statuses), unpack_extents(extents, replicas)


def generations(extents: list[list[tuple[int, int, int, int]]]) -> bytes:
    return u64s(item[0][0] for item in extents)


def put(index: ChunkIndex, hashes: bytes, **how: object) -> dict[int, bytes]:
    """All the way; returns the rows of the store."""
    statuses, extents = start(index, hashes, **how)  # type: ignore[arg-type]
    assert set(statuses) == {Status.OK}
    shard = how.get("shard", 0)
    assert isinstance(shard, int)
    answer, slots, records = index.commit(OWNER, SPACE, hashes, generations(extents), shard, b"")
    assert not any(answer)
    index.publish(slots)
    return dict(zip(unpack_u32s(slots), unpack_records(records), strict=True))


def exist(index: ChunkIndex, hashes: bytes) -> list[bool]:
    return [status is Status.OK for status in statuses_of(index.exists(SPACE, hashes))]


def free_bytes(index: ChunkIndex) -> int:
    free = index.stats()["free_bytes"]
    assert isinstance(free, int)
    return free
