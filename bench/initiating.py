# SPDX-License-Identifier: Apache-2.0
"""The initiating side in a process of its own, as a comparison needs it: one for each engine."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from moonpool.bench.backends import InitiatorSide, Place
from moonpool.bench.errors import ControlError
from moonpool.bench.measure import Percentiles, Window
from moonpool.bench.session import Session

__all__ = ["InitiatorSession", "steady", "window_from_json"]


class InitiatorSession(Session):
    """Runs the transfers of one backend when it is told to."""

    COMMANDS = (*Session.COMMANDS, "connect", "order", "run")
    IS_TARGET = False

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._side: InitiatorSide | None = None

    def connect(self, kind: str, offer: dict[str, Any], mode: str, width: int) -> dict[str, Any]:
        """Make the initiating side, connected to the target side that made `offer`."""
        row, _ = self._row()
        backend = self._backends.get(kind, row.work)
        self._side = backend.initiator(replace(row, mode=mode, width=width), offer)
        return {"version": backend.version()}

    def order(self, seconds: float) -> dict[str, Any]:
        """Return what the target has to know ahead of a run."""
        return self._connected().order(seconds)

    def run(self, seconds: float) -> dict[str, Any]:
        """Run transfers for so long; return what completed, and which batches of each thread those were."""
        side = self._connected()
        first = list(side.next_batch)
        with steady():
            cpu_s = time.process_time()
            window = side.run(seconds)
            cpu_s = time.process_time() - cpu_s
        return {
            "window": dataclasses.asdict(window),
            "cpu_s": cpu_s,
            "done": list(zip(first, side.next_batch, strict=True)),
            "lanes": side.width,
            "path": side.path,
        }

    def _connected(self) -> InitiatorSide:
        if self._side is None:
            raise ControlError("no row is connected", hint="one version of mooncake-bench on both sides")
        return self._side

    def close_row(self) -> None:
        """End a row. Engines and memory stay for the next one."""
        if self._side is not None:
            self._side.close()
            self._side = None
        super().close_row()


def window_from_json(fields: dict[str, Any]) -> Window:
    """Return the window that `InitiatorSession.run` made JSON of."""
    latency = fields["latency"]
    return Window(**{**fields, "latency": None if latency is None else Percentiles(**latency)})


@contextmanager
def steady() -> Iterator[None]:
    """Keep the garbage collector out of a window."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
