# SPDX-License-Identifier: Apache-2.0
"""The registered memory through which goes what is not registered itself: bounded, and shared by all calls."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from moonpool.store_client.errors import ClientClosedError, StagingFullError
from moonpool.transfer_engine import TransferEngine
from moonpool.units import format_bytes

if TYPE_CHECKING:
    import numpy.typing as npt

    from moonpool.store_client.core import Job

__all__ = ["Slice", "StagingArea"]

ALIGN: Final = 64
# How often what may have come free without a word is looked at while somebody waits for room.
_LOOK: Final = 0.05


class Slice:
    """A part of the staging area, owned by whoever has this object until it is given back.

    Attributes:
        jobs: whose transfers may touch it.
    """

    __slots__ = ("__weakref__", "jobs", "nbytes", "offset")

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.jobs: list[Job] = []


class _Taken:
    # What the area knows of a slice, without owning it.

    def __init__(self, slice_: Slice) -> None:
        self.begin = slice_.offset
        self.end = slice_.offset + slice_.nbytes
        self.jobs = slice_.jobs
        self.owner: Callable[[], Slice | None] = weakref.ref(slice_)

    @property
    def in_use(self) -> bool:
        return self.owner() is not None or not all(job.settled for job in self.jobs)


class StagingArea:
    """One region, from which slices are taken first fit. Thread-safe.

    A slice that a transfer may still write or read when it is given back is used again when the transfer has settled.
    So is one that nobody has any more: Ctrl-C may come between any two steps of Python, also before or while its owner
    gives it back. For the same reason there is one list of what is taken, which changes in one step.
    """

    def __init__(self, engine: TransferEngine, nbytes: int) -> None:
        self.region = engine.allocate(nbytes)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(memoryview(self.region), dtype=np.uint8)
        #: The same as numbers, for what lies at multiples of 8.
        self.words: npt.NDArray[np.uint64] = self.bytes[: nbytes // 8 * 8].view("<u8")
        self.nbytes = nbytes
        self._taken: list[_Taken] = []
        # Taken by itself: a condition takes its lock in steps.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
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
        with self._lock:
            while True:
                if self._closed:
                    raise ClientClosedError("the client is closed")
                self._collect()
                offset = self._first_fit(nbytes)
                if offset is not None:
                    slice_ = Slice(offset, nbytes)
                    self._taken.append(_Taken(slice_))
                    return slice_
                remaining = deadline - time.monotonic()
                if remaining <= 0 or nbytes > self.nbytes:
                    raise StagingFullError(
                        f"no {format_bytes(nbytes)} of the {format_bytes(self.nbytes)} of staging came free in time",
                        retryable=True,
                        hint="fewer calls at once, a larger staging_bytes, or registered memory",
                    )
                self._changed.wait(min(remaining, _LOOK))

    def give_back(self, slice_: Slice) -> None:
        """The owner needs it no more. Again: nothing."""
        with self._lock:
            for one in self._taken:
                if one.owner() is slice_:
                    one.owner = _nobody
            self._changed.notify_all()

    @property
    def free_bytes(self) -> int:
        """How much is not in use."""
        with self._lock:
            self._collect()
            return self.nbytes - sum(one.end - one.begin for one in self._taken)

    def close(self) -> None:
        """Wake and refuse everybody who waits. The memory goes with the engine."""
        with self._lock:
            self._closed = True
            self._taken.clear()
            self._changed.notify_all()

    def _first_fit(self, nbytes: int) -> int | None:
        free = 0
        for one in sorted(self._taken, key=lambda one: one.begin):
            if one.begin - free >= nbytes:
                return free
            free = one.end
        return free if self.nbytes - free >= nbytes else None

    def _collect(self) -> None:
        self._taken = [one for one in self._taken if one.in_use]


def _nobody() -> None:
    return None
