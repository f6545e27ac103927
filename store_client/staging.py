# SPDX-License-Identifier: Apache-2.0
"""The registered memory through which goes what is not registered itself: bounded, and shared by all calls."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

import numpy as np

from moonpool.store_client.errors import ClientClosedError, StagingFullError
from moonpool.transfer_engine import TransferEngine
from moonpool.units import format_bytes

if TYPE_CHECKING:
    import numpy.typing as npt

    from moonpool.transfer_engine import Transfer

__all__ = ["Slice", "StagingArea"]

ALIGN: Final = 64
# How often memory of transfers that had not settled is looked at while somebody waits for room.
_LOOK: Final = 0.05


class Slice:
    """A part of the staging area, owned by one call until it is given back."""

    __slots__ = ("nbytes", "offset")

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset = offset
        self.nbytes = nbytes


class StagingArea:
    """One region, from which slices are taken first fit. Thread-safe.

    A slice that a transfer may still write or read when its call has ended is given back with `give_back_later`, and
    is used again when the transfer has settled.
    """

    def __init__(self, engine: TransferEngine, nbytes: int) -> None:
        self.region = engine.allocate(nbytes)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(memoryview(self.region), dtype=np.uint8)
        #: The same as numbers, for what lies at multiples of 8.
        self.words: npt.NDArray[np.uint64] = self.bytes[: nbytes // 8 * 8].view("<u8")
        self.nbytes = nbytes
        self._free = [(0, nbytes)]  # (offset, nbytes), by offset; neighbours are merged
        self._late: list[tuple[Slice, list[Transfer]]] = []
        self._changed = threading.Condition()
        self._closed = False

    def take(self, nbytes: int, deadline: float) -> Slice:
        """Return a slice of at least `nbytes`, waiting until there is one.

        Args:
            nbytes: at most `self.nbytes`.
            deadline: of `time.monotonic`.

        Raises:
            StagingFullError: there was none in time.
            ClientClosedError: the client was closed.
        """
        nbytes = max(ALIGN, -(-nbytes // ALIGN) * ALIGN)
        with self._changed:
            while True:
                if self._closed:
                    raise ClientClosedError("the client is closed")
                self._collect()
                slice_ = self._first_fit(nbytes)
                if slice_ is not None:
                    return slice_
                remaining = deadline - time.monotonic()
                if remaining <= 0 or nbytes > self.nbytes:
                    raise StagingFullError(
                        f"no {format_bytes(nbytes)} of the {format_bytes(self.nbytes)} of staging came free in time",
                        retryable=True,
                        hint="fewer calls at once, a larger staging_bytes, or registered memory",
                    )
                self._changed.wait(min(remaining, _LOOK) if self._late else remaining)

    def give_back(self, slice_: Slice) -> None:
        """Nothing uses the slice any more."""
        with self._changed:
            self._insert(slice_)
            self._changed.notify_all()

    def give_back_later(self, slice_: Slice, transfers: list[Transfer]) -> None:
        """Use the slice again when none of these transfers can touch it any more."""
        with self._changed:
            self._late.append((slice_, transfers))
            self._changed.notify_all()

    @property
    def free_bytes(self) -> int:
        """How much is not in use."""
        with self._changed:
            self._collect()
            return sum(nbytes for _, nbytes in self._free)

    def close(self) -> None:
        """Wake and refuse everybody who waits. The memory goes with the engine."""
        with self._changed:
            self._closed = True
            self._late.clear()
            self._changed.notify_all()

    def _first_fit(self, nbytes: int) -> Slice | None:
        for index, (offset, room) in enumerate(self._free):
            if room >= nbytes:
                rest = [(offset + nbytes, room - nbytes)] if room > nbytes else []
                self._free[index : index + 1] = rest
                return Slice(offset, nbytes)
        return None

    def _insert(self, slice_: Slice) -> None:
        pieces = sorted([*self._free, (slice_.offset, slice_.nbytes)])
        merged: list[tuple[int, int]] = []
        for offset, nbytes in pieces:
            if merged and merged[-1][0] + merged[-1][1] == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + nbytes)
            else:
                merged.append((offset, nbytes))
        self._free = merged

    def _collect(self) -> None:
        waiting = []
        for slice_, transfers in self._late:
            if all(transfer.settled for transfer in transfers):
                self._insert(slice_)
            else:
                waiting.append((slice_, transfers))
        self._late = waiting
