# SPDX-License-Identifier: Apache-2.0
"""The client of one pool, in a process of its own, which also starts and ends the servers."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

from moonpool.bench.errors import ControlError
from moonpool.bench.initiating import steady
from moonpool.bench.pool.peers import backend_of
from moonpool.bench.pool.peers.base import PeerOptions, PoolBackend, PoolRow
from moonpool.bench.session import Commands
from moonpool.bench.work import Tuning, Work

__all__ = ["PoolSession"]


class PoolSession(Commands):
    """Runs the windows of one pool when it is told to."""

    COMMANDS = ("begin", "open", "measure", "close_row")

    def __init__(self) -> None:
        super().__init__()
        self._backend: PoolBackend | None = None
        self._row: PoolRow | None = None
        self._numbers = itertools.count(1)

    def begin(self, kind: str, options: dict[str, Any]) -> dict[str, Any]:
        """Start the pool, and connect to it."""
        self._backend = backend_of(kind)(PeerOptions(**options))
        return {"version": self._backend.version()}

    def open(self, work: dict[str, Any]) -> dict[str, Any]:
        """Get a row ready. Returns the processes that this one has started so far."""
        if self._backend is None:
            raise ControlError("no pool was started", hint="one version of mooncake-bench on both sides")
        fields = {**work, "tuning": Tuning.from_json(work["tuning"])}
        self._row = self._backend.row(Work(**fields), lambda: next(self._numbers))
        return {"processes": _children()}

    def measure(self, seconds: float, warmup: float) -> dict[str, Any]:
        """Run one window, and verify it."""
        if self._row is None:
            raise ControlError("no row is open", hint="one version of mooncake-bench on both sides")
        self._row.complaints.clear()
        with steady():
            window = self._row.engine_window(seconds, warmup)
        self.verified = self.verified and not self._row.complaints
        self.checks += 1
        return {
            "window": dataclasses.asdict(window),
            "complaints": list(self._row.complaints),
            "path": self._row.path,
        }

    def close_row(self) -> None:
        """End a row. The pool stays for the next one."""
        row, self._row = self._row, None
        if row is not None:
            row.close()

    def close(self) -> None:
        """End the row, the client and the pool."""
        backend, self._backend = self._backend, None
        if backend is not None:
            try:
                self.close_row()
            finally:
                backend.close()


def _children() -> list[int]:
    """Return the processes that this thread, which carries out every command, has started."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()]
