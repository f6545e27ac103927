# SPDX-License-Identifier: Apache-2.0
"""Closing an engine exactly once, from wherever: a call, a garbage collection, the end of the interpreter, a fork."""

from __future__ import annotations

import os
import threading
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moonpool.transfer_engine.errors import ClosedError

if TYPE_CHECKING:
    from moonpool import _native
    from moonpool.transfer_engine.regions import Region

__all__ = ["Lifetime", "Place"]


@dataclass(frozen=True)
class Place:
    """Where in the user's code an engine was made."""

    file: str
    line: int


class Lifetime:
    """What must be put away when an engine ends. Not the `TransferEngine`, so that that one can be collected."""

    def __init__(self, native: _native.Engine, name: str, place: Place) -> None:
        self.native = native
        #: Every region that was neither released nor closed, by id. It keeps registered memory alive.
        self.regions: dict[int, Region] = {}
        self.closed = False
        self._name = name
        self._place = place
        self._pid = os.getpid()
        # Reentrant: a signal handler, or a finalizer that the garbage collector runs, may close inside close.
        self._lock = threading.RLock()

    def adopt(self, region: Region) -> Region:
        """Keep `region` until it is released or the engine closed."""
        with self._lock:
            if self.closed:
                region._forget()
                raise ClosedError("the engine was closed meanwhile", hint="an engine that is open")
            region._registry = self.regions
            self.regions[region.id] = region
        return region

    def close(self) -> None:
        """End the engine and let go of all memory. Concurrent callers return when it is done."""
        if os.getpid() != self._pid:
            # A thread of the parent may have held the lock when it forked. The child has one thread.
            self.native.close()
            return
        with self._lock:
            if self.closed:
                return
            self.native.close()
            # Only now: until it returned, the core could still touch registered memory.
            self.closed = True
            for region in list(self.regions.values()):
                region._forget()
            self.regions.clear()

    def abandon(self) -> None:
        """Close an engine that nobody closed, and say so. Runs when it is collected, or when the interpreter ends."""
        if self.closed or os.getpid() != self._pid:
            return
        try:
            warnings.warn_explicit(
                f"transfer engine {self._name!r}, made at {self._place.file}:{self._place.line}, was never closed. "
                "Use it in a with statement, or call close()",
                ResourceWarning,
                self._place.file,
                self._place.line,
            )
        finally:
            self.close()
