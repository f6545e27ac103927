# SPDX-License-Identifier: Apache-2.0
"""One row of ``mooncake-bench store``: what is put or got, in which batches, through which pool."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from moonpool.bench.pool.opening import PoolOptions
from moonpool.bench.results import RowResult
from moonpool.bench.sweep import footprint_of
from moonpool.bench.work import Work
from moonpool.store_client.leaves import table_bytes
from moonpool.units import format_bytes

__all__ = [
    "LOCATED",
    "MEMORIES",
    "OPS",
    "REPLICAS_MAX",
    "STORES",
    "StoreOptions",
    "StoreResult",
    "StoreSweep",
    "StoreWork",
    "dram_needed",
    "dram_needed_by",
    "store_kind",
]

OPS: Final = ("put", "get")
#: ``registered``: a region of the client's engine and arrays; ``buffers``: a buffer for each chunk.
MEMORIES: Final = ("registered", "buffers")
#: How a get learns where chunks are: it asks the master each time, or an earlier one has asked under the same lease.
LOCATED: Final = ("asked", "known")
STORES: Final = ("memory", "sqlite")
REPLICAS_MAX: Final = 8


def store_kind(text: str) -> str:
    """Return where metadata is kept: one of `STORES`, or an etcd as the master's setting has it.

    Raises:
        ValueError: it is neither.
    """
    if text in STORES or text.startswith("etcd:"):
        return text
    raise ValueError(f"{text!r} is no store. One of {', '.join(STORES)}, etcd:HOST:PORT/PREFIX")


@dataclass(frozen=True)
class StoreWork:
    """What one row moves.

    Attributes:
        op: ``put`` or ``get``.
        block_bytes: payload of one chunk.
        batch: chunks of one call.
        replicas: copies of each chunk.
        threads: user threads of the one client, each with its own part of the chunks.
        memory: one of `MEMORIES`.
        located: one of `LOCATED`; of a put the first.
        footprint_bytes: payload of all chunks.
    """

    op: str
    block_bytes: int
    batch: int
    replicas: int
    threads: int
    memory: str
    located: str
    footprint_bytes: int

    @cached_property
    def moved(self) -> Work:
        """The same as the transfer that it comes down to."""
        way = "write" if self.op == "put" else "read"
        return Work("auto", way, self.block_bytes, self.batch, "sequential", self.threads, None, self.footprint_bytes)

    @property
    def text(self) -> str:
        """Which row it is."""
        text = f"{self.op} {format_bytes(self.block_bytes)} × {self.batch}"
        if self.replicas > 1:
            text += f", {self.replicas} replicas"
        if self.threads > 1:
            text += f", {self.threads} threads"
        if self.located != LOCATED[0]:
            text += f", {self.located}"
        return text if self.memory == "registered" else f"{text}, {self.memory}"


@dataclass
class StoreResult(RowResult):
    """The windows of one row of the store."""

    store: StoreWork = field(kw_only=True)


@dataclass(frozen=True)
class StoreOptions:
    """How it is measured, and where.

    Attributes:
        rounds: windows of each kind.
        duration: longest time of one window, in seconds.
        warmup: ahead of every window of gets, in seconds.
        pool: through which.
    """

    rounds: int
    duration: float
    warmup: float
    pool: PoolOptions


@dataclass(frozen=True)
class StoreSweep:
    """Every combination of these is a row; the last list varies fastest."""

    ops: Sequence[str]
    memories: Sequence[str]
    located: Sequence[str]
    replicas: Sequence[int]
    threads: Sequence[int]
    block_bytes: Sequence[int]
    batches: Sequence[int]
    footprint_bytes: int | None = None

    def works(self) -> list[StoreWork]:
        """Return the rows.

        Raises:
            UsageError: a combination is impossible.
        """
        return [
            self._work(*values)
            for values in itertools.product(
                self.ops, self.memories, self.located, self.replicas, self.threads, self.block_bytes, self.batches
            )
            if values[0] == "get" or values[2] == self.located[0]  # a put always asks
        ]

    def _work(
        self, op: str, memory: str, located: str, replicas: int, threads: int, block_bytes: int, batch: int
    ) -> StoreWork:
        footprint = footprint_of(self.footprint_bytes, block_bytes, batch, threads, "chunk")
        located = located if op == "get" else LOCATED[0]
        return StoreWork(op, block_bytes, batch, replicas, threads, memory, located, footprint)


#: Of the header of an extent, and of what is lost by rounding to a multiple of 64 bytes.
_PER_EXTENT: Final = 128
#: Chunks that were removed keep their room for as long as a lease, and no eviction may come into a window.
_ROOM: Final = 2.5
_SPARE_BYTES: Final = 64 << 20


def dram_needed(works: Sequence[StoreWork], nodes: int) -> int:
    """Return the bytes that each of `nodes` has to lend so that no row runs out of room."""
    return _lent(max(_taken(work.moved) * work.replicas for work in works), nodes)


def dram_needed_by(works: Sequence[Work]) -> int:
    """Return the bytes that the one node of a pool has to lend so that no row runs out of room."""
    return _lent(max(map(_taken, works)), 1)


def _taken(work: Work) -> int:
    table = int(table_bytes(np.array([work.block_bytes], dtype=np.int64))[0])
    return work.blocks * (work.block_bytes + table + _PER_EXTENT)


def _lent(most: int, nodes: int) -> int:
    return -(-(int(most * _ROOM) // nodes + _SPARE_BYTES) // (2 << 20)) * (2 << 20)
