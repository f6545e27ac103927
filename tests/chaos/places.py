# SPDX-License-Identifier: Apache-2.0
"""Where traffic goes: parts of regions of peers, and windows of memory of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from chaos.model import Model
from chaos.words import Octets
from moonpool.transfer_engine import Peer, Plan, Region, RemoteRegion

#: What each traffic thread may use of each region that a peer has made for its process.
AREA_BYTES = 1 << 20
#: Traffic threads of a process.
THREADS = 2
#: Regions that a process makes for each other one: allocated by the engine, and memory that was there.
KINDS = ("allocated", "registered")
WINDOW_BYTES = 1 << 20


def region_name(owner: int, generation: int, kind: str) -> str:
    """Name the region that process number `owner`, started for the `generation`-th time, writes at a peer."""
    return f"{owner}.{generation}.{kind}"


class Item(NamedTuple):
    """One piece of a transfer: bytes at `start` of the remote region, and at `local` of a window."""

    start: int
    local: int
    length: int


@dataclass
class Place:
    """A thread's area in one region of one peer, as long as that region exists."""

    target: int
    kind: str
    peer: Peer
    remote: RemoteRegion
    #: Of the area's first byte in the region.
    base: int
    model: Model
    busy: list[tuple[int, int]] = field(default_factory=list)
    plan: Plan | None = None
    plan_items: list[Item] = field(default_factory=list)

    def free(self, start: int, length: int) -> bool:
        """Whether no transfer is using any of these bytes, counted from the start of the region."""
        return all(start + length <= low or high <= start for low, high in self.busy)

    def choose(self, chance: random.Random, count: int, size_max: int) -> list[Item]:
        """Choose disjoint free pieces, at most `count` of them, packed into a window."""
        slot = 1 << (size_max - 1).bit_length()
        items: list[Item] = []
        local = 0
        for index in chance.sample(range(AREA_BYTES // slot), min(count, AREA_BYTES // slot)):
            length = chance.randint(1, size_max)
            start = self.base + index * slot + chance.randint(0, slot - length)
            local += chance.randint(0, 16)
            if local + length > WINDOW_BYTES:
                break
            if self.free(start, length):
                items.append(Item(start, local, length))
                local += length
        return items


class Window:
    """Local memory of one transfer at a time. While no transfer owns it, it holds one byte over and over."""

    def __init__(self, region: Region, offset: int, chance: random.Random) -> None:
        self.region = region
        self.offset = offset
        self._chance = chance
        self._octets: Octets = np.frombuffer(region, np.uint8)[offset : offset + WINDOW_BYTES]
        self._filler = 0

    def mark(self) -> None:
        """Fill it: what changes from here on, was changed by nobody who may."""
        self._filler = self._chance.randrange(1, 256)
        self._octets[:] = self._filler

    def stray(self, items: list[Item]) -> int | None:
        """Return the position of a byte outside `items` that is not what `mark` left, or None."""
        different = self._octets != self._filler
        if not different.any():
            return None
        for item in items:
            different[item.local : item.local + item.length] = False
        places = np.flatnonzero(different)
        return int(places[0]) if len(places) else None

    def octets(self, item: Item) -> Octets:
        """Return the memory of an item itself, not a copy."""
        return self._octets[item.local : item.local + item.length]
