# SPDX-License-Identifier: Apache-2.0
"""Which part of a chunk a worker has."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ShardPlan"]


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The part of one worker.

    A chunk is there when all its shards are, so a hit is one for every worker.

    Attributes:
        shard: of the chunks, what this worker loads and saves.
        shards: how many a chunk has.
        writes: whether this worker saves its shard. Of workers with the same bytes (MLA, replicated heads) one does.
    """

    shard: int
    shards: int
    writes: bool
