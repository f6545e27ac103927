# SPDX-License-Identifier: Apache-2.0
"""What a replay needs of a pool, and what a pool needs of an eviction policy.

A native index replaces `SimulatedPool` by another `Pool`; a policy has the operations that the index has for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

__all__ = ["Policy", "Pool", "SimulatedPool"]


class Pool(ABC):
    """Something that has at most so many blocks when a request is over."""

    @abstractmethod
    def request(self, blocks: Sequence[int]) -> int:
        """Serve one request: every block of it is used, or put if it is not there, from the first to the last.

        Args:
            blocks: their numbers in the trace.

        Returns:
            How many blocks were hits: those that were there, up to the first that was not.
        """


class Policy(ABC):
    """Which chunk goes next. A slot is a small number that is one chunk's while the chunk is there."""

    @abstractmethod
    def on_insert(self, slot: int, parent: int | None) -> None:
        """A chunk was put; `parent` is the slot of the chunk before it, which is there, or None for a first one."""

    @abstractmethod
    def on_touch(self, slot: int) -> None:
        """A chunk was used. The chunks before it were used just before, or it is no use of a prefix."""

    @abstractmethod
    def on_remove(self, slot: int) -> None:
        """A chunk is gone, evicted or not."""

    @abstractmethod
    def victim(self) -> int | None:
        """Return the slot of the chunk to evict, or None where there is none. The caller removes it."""


class SimulatedPool(Pool):
    """A pool that holds nothing but knows what it would hold.

    Args:
        policy: of its own, which no other pool has.
        capacity: in blocks, at least 1. It is enforced when a request is over, however long that was.
        blocks: how many different ones there are.
    """

    def __init__(self, policy: Policy, capacity: int, blocks: int) -> None:
        self._policy = policy
        self._free = capacity
        self._there = bytearray(blocks)

    def request(self, blocks: Sequence[int]) -> int:
        """Serve one request; a block's number is its slot."""
        there, policy = self._there, self._policy
        hits = 0
        for block in blocks:
            if not there[block]:
                break
            hits += 1
        parent = None
        for block in blocks:
            if there[block]:
                policy.on_touch(block)
            else:
                there[block] = 1
                self._free -= 1
                policy.on_insert(block, parent)
            parent = block
        while self._free < 0:
            victim = policy.victim()
            if victim is None:
                raise AssertionError("nothing is pinned in a replay, and yet nothing can be evicted")
            there[victim] = 0
            self._free += 1
            policy.on_remove(victim)
        return hits
