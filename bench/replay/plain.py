# SPDX-License-Identifier: Apache-2.0
"""Policies from the literature that know nothing of prefixes: what others are measured against."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from moonpool.bench.replay.pool import Policy

__all__ = ["Lru", "S3Fifo"]


class Lru(Policy):
    """Least recently used first. Within a request that is its beginning, without which the rest is of no use."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def on_insert(self, slot: int, parent: int | None) -> None:
        """Make it the most recent one."""
        self._order[slot] = None

    def on_touch(self, slot: int) -> None:
        """Make it the most recent one."""
        self._order.move_to_end(slot)

    def on_remove(self, slot: int) -> None:
        """Forget it."""
        del self._order[slot]

    def victim(self) -> int | None:
        """Return the least recent one."""
        return next(iter(self._order), None)


class S3Fifo(Policy):
    """S3-FIFO: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1.

    Newcomers go into a small queue of a tenth of the capacity. What was used more than once when it comes to the end
    goes on into the main queue; the names of the others are kept for a while, and who comes back goes into the main
    queue at once. The main queue gives every chunk that was used another round.

    Args:
        capacity: in blocks.
    """

    _USES_MAX: Final = 3

    def __init__(self, capacity: int) -> None:
        self._small_max = max(1, capacity // 10)
        self._ghosts_max = capacity - self._small_max
        self._small: OrderedDict[int, int] = OrderedDict()  # slot -> uses since it was put
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def on_insert(self, slot: int, parent: int | None) -> None:
        """Put it into the small queue, or the main one if its name is remembered."""
        if slot in self._ghosts:
            del self._ghosts[slot]
            self._main[slot] = 0
        else:
            self._small[slot] = 0

    def on_touch(self, slot: int) -> None:
        """Count the use."""
        queue = self._small if slot in self._small else self._main
        queue[slot] = min(self._USES_MAX, queue[slot] + 1)

    def on_remove(self, slot: int) -> None:
        """Forget it, or all but its name."""
        if self._main.pop(slot, None) is None:
            del self._small[slot]
            self._ghosts[slot] = None
            if len(self._ghosts) > self._ghosts_max:
                self._ghosts.popitem(last=False)

    def victim(self) -> int | None:
        """Return the first without uses, and move those before it on."""
        small, main = self._small, self._main
        while small or main:
            if small and (len(small) >= self._small_max or not main):
                slot, uses = next(iter(small.items()))
                if uses <= 1:
                    return slot
                del small[slot]
                main[slot] = 0
            else:
                slot, uses = next(iter(main.items()))
                if uses == 0:
                    return slot
                main[slot] = uses - 1
                main.move_to_end(slot)
        return None
