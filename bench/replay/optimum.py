# SPDX-License-Identifier: Apache-2.0
"""What a pool could have had if it had known the future."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from moonpool.bench.replay.pool import Pool
from moonpool.bench.replay.trace import Trace

__all__ = ["Optimum"]


class Optimum(Pool):
    """Evicts the block that is used again last: Belady, "A study of replacement algorithms", IBM Systems Journal 1966.

    Blocks that are used again by the same request are equal to it. Which of them goes is up to `leaves_first`: the one
    that comes last in its request; or the one that comes first, as in programs that know blocks but no prefixes.

    With `leaves_first` no pool of this size can have more hits, where a block always has the same blocks before it and
    is in a request once: what stays is always a prefix. Of other traces it is no bound.

    Args:
        trace: its requests have to come in order, from the first on.
        capacity: in blocks, at least 1.
        leaves_first: see above.
    """

    def __init__(self, trace: Trace, capacity: int, *, leaves_first: bool) -> None:
        self._capacity = capacity
        self._leaves_first = leaves_first
        self._next_use = iter(_next_uses(trace))
        self._blocks = len(trace.names)
        self._depths = max(map(len, trace.requests))
        self._there: dict[int, int] = {}  # block -> its key
        self._heap: list[int] = []

    def request(self, blocks: Sequence[int]) -> int:
        """Serve the next request of the trace."""
        there = self._there
        hits = 0
        for block in blocks:
            if block not in there:
                break
            hits += 1
        for depth, block in enumerate(blocks):
            tie = self._depths - 1 - depth if self._leaves_first else depth
            # One number is compared faster than a tuple: the last next use, then the tie, then anything.
            key = (tie - next(self._next_use) * self._depths) * self._blocks + block
            there[block] = key
            heapq.heappush(self._heap, key)
        while len(there) > self._capacity:
            key = heapq.heappop(self._heap)
            block = key % self._blocks
            # Keys of uses that are not the last one are still there.
            if there.get(block) == key:
                del there[block]
        return hits


def _next_uses(trace: Trace) -> list[int]:
    """Return for each reference the number of the request that uses the block next, or that of none: the count."""
    never = len(trace.requests)
    coming = [never] * len(trace.names)
    backwards: list[int] = []
    for number in range(never - 1, -1, -1):
        blocks = trace.requests[number]
        backwards.extend(coming[block] for block in reversed(blocks))
        for block in blocks:
            coming[block] = number
    backwards.reverse()
    return backwards
