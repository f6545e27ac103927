# SPDX-License-Identifier: Apache-2.0
"""A trace through pools of several sizes and policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from moonpool.bench.replay.native import NativePool
from moonpool.bench.replay.optimum import Optimum
from moonpool.bench.replay.plain import Lru, S3Fifo
from moonpool.bench.replay.pool import Pool, SimulatedPool
from moonpool.bench.replay.prefix import Prefix
from moonpool.bench.replay.trace import Trace

__all__ = ["POLICIES", "Row", "replay"]

#: What can be replayed, and how a pool with this policy is made.
POLICIES: Final[dict[str, Callable[[Trace, int], Pool]]] = {
    "lru": lambda trace, capacity: SimulatedPool(Lru(), capacity, len(trace.names)),
    "s3fifo": lambda trace, capacity: SimulatedPool(S3Fifo(capacity), capacity, len(trace.names)),
    "prefix": lambda trace, capacity: SimulatedPool(Prefix(capacity, trace.names), capacity, len(trace.names)),
    "optimum": lambda trace, capacity: Optimum(trace, capacity, leaves_first=False),
    "bound": lambda trace, capacity: Optimum(trace, capacity, leaves_first=True),
    "native-lru": lambda trace, capacity: NativePool("lru", capacity, trace.names),
    "native-s3fifo": lambda trace, capacity: NativePool("s3fifo", capacity, trace.names),
    "native-prefix": lambda trace, capacity: NativePool("prefix", capacity, trace.names),
}

#: Requests between two reports of progress.
_STEP: Final = 256


@dataclass(frozen=True)
class Row:
    """What one pool would have had.

    Attributes:
        capacity_blocks: its size.
        hit_ratio: hits of all blocks of all requests; a block is a hit if it and all before it were there.
    """

    policy: str
    capacity_blocks: int
    hit_ratio: float


def replay(
    trace: Trace, policies: Sequence[str], capacities: Sequence[int], advance: Callable[[int], None]
) -> Iterator[Row]:
    """Yield a row for each capacity and policy, policies varying fastest.

    Args:
        trace: the requests.
        policies: names of `POLICIES`.
        capacities: in blocks.
        advance: is told how many requests were served since the last call.
    """
    for capacity in capacities:
        for policy in policies:
            pool = POLICIES[policy](trace, capacity)
            hits = 0
            for first in range(0, len(trace.requests), _STEP):
                some = trace.requests[first : first + _STEP]
                hits += sum(map(pool.request, some))
                advance(len(some))
            yield Row(policy, capacity, hits / trace.references)
