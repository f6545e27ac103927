# SPDX-License-Identifier: Apache-2.0
"""What a region of a peer must hold: the outcome of every write decides it, and every byte that is read is held to it.

Only one thread writes the bytes that a model stands for, and never two transfers at once the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chaos.words import Octets


@dataclass(frozen=True)
class _Doubt:
    """Bytes of a write that was not reported done: each of them may be there, or not."""

    start: int
    octets: Octets

    @property
    def end(self) -> int:
        return self.start + len(self.octets)


class Model:
    """Begins with zeros."""

    def __init__(self, nbytes: int) -> None:
        self._certain = np.zeros(nbytes, np.uint8)
        self._doubts: list[_Doubt] = []

    def written(self, start: int, octets: Octets) -> None:
        """A write was reported done."""
        end = start + len(octets)
        self._certain[start:end] = octets
        left: list[_Doubt] = []
        for doubt in self._doubts:
            if doubt.end <= start or end <= doubt.start:
                left.append(doubt)
                continue
            if doubt.start < start:
                left.append(_Doubt(doubt.start, doubt.octets[: start - doubt.start]))
            if end < doubt.end:
                left.append(_Doubt(end, doubt.octets[end - doubt.start :]))
        self._doubts = left

    def may_be_written(self, start: int, octets: Octets) -> None:
        """A write was begun, and not reported done."""
        self._doubts.append(_Doubt(start, octets.copy()))

    def wrong(self, start: int, octets: Octets) -> int | None:
        """Return the position of the first byte, counted from `start`, that no write can have left there, or None."""
        different = octets != self._certain[start : start + len(octets)]
        if not different.any():
            return None
        for doubt in self._doubts:
            low, high = max(doubt.start, start), min(doubt.end, start + len(octets))
            if low < high:
                expected = doubt.octets[low - doubt.start : high - doubt.start]
                different[low - start : high - start] &= octets[low - start : high - start] != expected
        places = np.flatnonzero(different)
        return int(places[0]) if len(places) else None

    def doubtful(self) -> list[tuple[int, int]]:
        """Return the ranges, start and end, that hold one of several things."""
        return [(doubt.start, doubt.end) for doubt in self._doubts]

    def certain(self) -> bytes:
        """Return what it holds when nothing is in doubt."""
        assert not self._doubts
        return self._certain.tobytes()
