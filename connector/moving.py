# SPDX-License-Identifier: Apache-2.0
"""What loads and saves have in common: where the chunks are, and the staging memory of each thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from moonpool.errors import ConfigError

if TYPE_CHECKING:
    from moonpool.connector.layout import Int64s
    from moonpool.connector.pool import PoolLink
    from moonpool.transfer_engine import Region, TransferEngine

__all__ = ["Area", "Pool", "make_areas", "window_chunks"]

#: What goes together: so little that a cancelled load ends soon, so much that calls cost nothing beside it.
_WINDOW_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class Pool:
    """Which chunks of which pool a worker moves.

    Attributes:
        link: the way to it.
        namespace: of the chunks.
        shard: the part of each that this worker has.
        shards: how many parts there are.
    """

    link: PoolLink
    namespace: str
    shard: int
    shards: int


@dataclass(frozen=True, slots=True)
class Area:
    """Staging memory of one thread, so that none waits for another one's.

    Attributes:
        region: registered memory.
        offsets: where in it chunks have room that go together, at least one.
    """

    region: Region
    offsets: Int64s


def window_chunks(chunk_bytes: int) -> int:
    """Return how many chunks go together at most."""
    return max(1, _WINDOW_BYTES // chunk_bytes)


def make_areas(engine: TransferEngine, nbytes: int, chunk_bytes: int, chunks_max: int, threads: int) -> list[Area]:
    """Allocate an area for each thread, with room for up to `chunks_max` chunks, all together at most `nbytes`.

    Raises:
        ConfigError: there is no room for one chunk in each.
        OutOfMemoryError: there is no such memory.
    """
    chunks = min(nbytes // threads // chunk_bytes, chunks_max)
    if not chunks:
        raise ConfigError(
            f"staging_bytes is {nbytes}: {threads} threads need room for a chunk of {chunk_bytes} bytes each",
            hint=f"staging_bytes of {threads * chunk_bytes} or more, fewer chunk_tokens, or fewer threads",
        )
    region = engine.allocate(threads * chunks * chunk_bytes)
    offsets = np.arange(threads * chunks, dtype=np.int64).reshape(threads, chunks) * chunk_bytes
    return [Area(region, own) for own in offsets]
