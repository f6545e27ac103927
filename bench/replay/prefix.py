# SPDX-License-Identifier: Apache-2.0
"""The default policy: recency, a bonus for frequency, and shadows that say how large the bonus should be.

This is the reference of the algorithm in ``docs/decisions/0007-eviction.md``, which has the reasons and the notes for a
native one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from moonpool.bench.replay.pool import Policy

__all__ = ["Prefix"]

_COUNT_MAX: Final = 5
#: The class of a chunk that was used so many times; the first is never looked at.
_CLASS_OF: Final = (0, 0, 1, 2, 2, 3)
_CLASSES: Final = 4
#: How much a class is worth, in halves of the capacity. 0 is least recently used.
_STRENGTHS: Final = (0, 1, 4, 16)
#: Before anything is known: a little.
_FIRST_CHOICE: Final = 1
#: One chunk in so many is remembered after its eviction, and is counted by the shadows.
_SAMPLE: Final = 4
#: A larger bonus is taken if it had one in so many more hits.
_MARGIN: Final = 32
#: Insertions between two choices, at least.
_PERIOD_MIN: Final = 16
#: Buckets of scores for each capacity's worth of insertions, at most.
_BUCKETS: Final = 32
#: Buckets of a shadow: scores are at most 24 capacities above the clock, and the threshold at most 7 below it.
_RING: Final = 1024
_BEHIND_MAX: Final = 7 * _BUCKETS

_MASK: Final = (1 << 64) - 1


def _mix(name: int) -> int:
    """Return 64 bits that depend on all bits of `name`: the finalizer of SplitMix64 (Steele et al., OOPSLA 2014)."""
    name = (name + 0x9E3779B97F4A7C15) & _MASK
    name = ((name ^ (name >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    name = ((name ^ (name >> 27)) * 0x94D049BB133111EB) & _MASK
    return name ^ (name >> 31)


class _Shadow:
    """What the pool would hold of the sampled chunks, and would have hit, with one certain bonus.

    With a threshold that only rises, a chunk is held while its score lies above it, so it is enough to know how many
    chunks have which score.

    Args:
        capacity: of the pool, in chunks.
        strength: how much a class is worth, in halves of the capacity.
    """

    def __init__(self, capacity: int, strength: int) -> None:
        self.bonus = [rank * strength * capacity // 2 for rank in range(_CLASSES)]
        self.hits = 0
        self._width = -(-capacity // _BUCKETS)
        self._held_max = max(1, capacity // _SAMPLE)
        self._held = 0
        self._threshold = -1
        self._ring = [0] * _RING

    def use(self, clock: int, count: int) -> None:
        """A chunk with this clock and count is used: it is a hit, if it is held. Follow with `remove` and `add`."""
        if (clock + self.bonus[_CLASS_OF[count]]) // self._width > self._threshold:
            self.hits += 1

    def remove(self, clock: int, count: int) -> None:
        """A chunk with this clock and count has another one from now on, or is forgotten."""
        bucket = (clock + self.bonus[_CLASS_OF[count]]) // self._width
        if bucket > self._threshold:
            self._ring[bucket % _RING] -= 1
            self._held -= 1

    def add(self, clock: int, count: int, now: int) -> None:
        """A chunk has this clock and count from now on."""
        bucket = (clock + self.bonus[_CLASS_OF[count]]) // self._width
        if bucket > self._threshold:
            self._ring[bucket % _RING] += 1
            self._held += 1
        # The second condition keeps scores that are far apart out of the same bucket of the ring.
        while self._held > self._held_max or self._threshold < now // self._width - _BEHIND_MAX:
            self._threshold += 1
            self._held -= self._ring[self._threshold % _RING]
            self._ring[self._threshold % _RING] = 0


class Prefix(Policy):
    """Leaves first, by last use and frequency; how much frequency is worth is measured all the time.

    Args:
        capacity: in chunks, at least 1.
        names: of the chunks, by slot. Only names decide what is sampled, so a chunk that comes back is recognized.
    """

    def __init__(self, capacity: int, names: Sequence[int]) -> None:
        self._ghosts_max = capacity
        self._period = max(_PERIOD_MIN, capacity)
        self._next_choice = self._period
        self._shadows = [_Shadow(capacity, strength) for strength in _STRENGTHS]
        self._chosen = _FIRST_CHOICE
        self._now = 0  # insertions so far
        self._lists: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(_CLASSES)]
        self._ghosts: OrderedDict[int, tuple[int, int]] = OrderedDict()  # name -> clock, count
        self._names = names
        self._sampled = bytearray(_mix(name) % _SAMPLE == 0 for name in names)
        # Of each slot.
        self._clock = [0] * len(names)
        self._count = bytearray(len(names))
        self._children = [0] * len(names)
        self._parent: list[int | None] = [None] * len(names)
        self._parked = bytearray(len(names))

    def on_insert(self, slot: int, parent: int | None) -> None:
        """Put it last into the list of its class, which depends on how often it was used before it was evicted."""
        self._now += 1
        ghost = None
        count = 1
        if self._sampled[slot]:
            ghost = self._ghosts.pop(self._names[slot], None)
            if ghost is not None:
                count = min(_COUNT_MAX, ghost[1] + 1)
            for shadow in self._shadows:
                if ghost is not None:
                    shadow.use(*ghost)
                    shadow.remove(*ghost)
                shadow.add(self._now, count, self._now)
        self._clock[slot] = self._now
        self._count[slot] = count
        self._children[slot] = 0
        self._parent[slot] = parent
        self._lists[_CLASS_OF[count]][slot] = None
        if parent is not None:
            self._children[parent] += 1
        if ghost is not None:
            # Who knew this chunk knew those before it: they were used at least as often.
            while parent is not None and self._count[parent] < count:
                self._change(parent, self._clock[parent], count)
                parent = self._parent[parent]
        if self._now >= self._next_choice:
            self._choose()

    def on_touch(self, slot: int) -> None:
        """Put it last into the list of its class, which may be a higher one now."""
        if self._sampled[slot]:
            for shadow in self._shadows:
                shadow.use(self._clock[slot], self._count[slot])
        self._change(slot, self._now, min(_COUNT_MAX, self._count[slot] + 1))

    def on_remove(self, slot: int) -> None:
        """Remember its frequency if it is sampled; its parent may be a leaf now.

        Chunks that follow it are removed before it.
        """
        self._unlink(slot)
        clock = self._clock[slot]
        if self._sampled[slot]:
            self._ghosts[self._names[slot]] = clock, self._count[slot]
            if len(self._ghosts) > self._ghosts_max:
                _, forgotten = self._ghosts.popitem(last=False)
                for shadow in self._shadows:
                    shadow.remove(*forgotten)
        parent = self._parent[slot]
        if parent is None:
            return
        self._children[parent] -= 1
        if self._children[parent] == 0 and self._parked[parent]:
            # It was first of its list when it was parked, so it is that again: before all that were used since.
            if clock > self._clock[parent]:
                self._change(parent, clock, self._count[parent])
            else:
                self._parked[parent] = 0
                self._lists[_CLASS_OF[self._count[parent]]][parent] = None
            self._lists[_CLASS_OF[self._count[parent]]].move_to_end(parent, last=False)

    def victim(self) -> int | None:
        """Return the leaf with the lowest score; those with children that come before it are parked."""
        bonus = self._shadows[self._chosen].bonus
        while True:
            best, lowest = None, 0
            for rank, order in enumerate(self._lists):
                slot = next(iter(order), None)
                if slot is not None:
                    score = self._clock[slot] + bonus[rank]
                    if best is None or score < lowest:
                        best, lowest = slot, score
            if best is None or self._children[best] == 0:
                return best
            self._unlink(best)
            self._parked[best] = 1

    def _change(self, slot: int, clock: int, count: int) -> None:
        """Give a chunk another clock and count, and put it last into its list."""
        if self._sampled[slot]:
            for shadow in self._shadows:
                shadow.remove(self._clock[slot], self._count[slot])
                shadow.add(clock, count, self._now)
        self._unlink(slot)
        self._clock[slot] = clock
        self._count[slot] = count
        self._lists[_CLASS_OF[count]][slot] = None

    def _unlink(self, slot: int) -> None:
        if self._parked[slot]:
            self._parked[slot] = 0
        else:
            del self._lists[_CLASS_OF[self._count[slot]]][slot]

    def _choose(self) -> None:
        """Take the bonus with most hits lately; on a tie the one that is used, and then the smallest, is taken.

        A larger one than that in use must be clearly better, because too large a bonus costs more than too small a one:
        chunks that were used often fill the pool for long.
        """
        self._next_choice = self._now + self._period
        margin = self._shadows[self._chosen].hits // _MARGIN
        chosen, best = self._chosen, self._shadows[self._chosen].hits
        for index, shadow in enumerate(self._shadows):
            hits = shadow.hits - margin if index > self._chosen else shadow.hits
            if hits > best:
                best, chosen = hits, index
        self._chosen = chosen
        for shadow in self._shadows:
            shadow.hits //= 2
