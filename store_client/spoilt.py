# SPDX-License-Identifier: Apache-2.0
"""Copies that were found spoilt here: they are read last for a while, and reported once in that time."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from moonpool.store_client.packing import Flags, Records

__all__ = ["SpoiltCopies"]

_SECONDS: Final = 60.0
# A report may be lost, and a master that has just begun to lead takes none.
_AGAIN: Final = 5.0
_MAX: Final = 4096


class SpoiltCopies:
    """A bounded table. An extent, with its generation, is one copy of one chunk and never another. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Packed extent -> until when; the last found at the end.
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, extents: Records) -> Flags:
        """Remember copies. Returns which of them are to be reported: for the first time, or again."""
        now = time.monotonic()
        new = np.zeros(len(extents), dtype=np.bool_)
        with self._lock:
            for row, extent in enumerate(extents):
                key = extent.tobytes()
                if self._until.get(key, now) > now + _SECONDS - _AGAIN:
                    continue
                new[row] = True
                self._until[key] = now + _SECONDS
                self._until.move_to_end(key)
            while len(self._until) > _MAX:
                self._until.popitem(last=False)
        return new

    def among(self, extents: Records) -> Flags:
        """Return which of these are known to be spoilt."""
        now = time.monotonic()
        flags = np.zeros(extents.shape, dtype=np.bool_)
        with self._lock:
            while self._until and next(iter(self._until.values())) <= now:
                self._until.popitem(last=False)
            if not self._until:
                return flags
            known = np.frombuffer(b"".join(self._until), dtype=extents.dtype)
            likely = np.argwhere(np.isin(extents["generation"], known["generation"]))
            for at in map(tuple, likely.tolist()):
                flags[at] = extents[at].tobytes() in self._until
        return flags
