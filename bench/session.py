# SPDX-License-Identifier: Apache-2.0
"""What one side does for a run: hold memory, move or be moved, and check its own bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from moonpool.bench.backends import Backend, Place, RowSide, TargetSide, backend_of
from moonpool.bench.environment import describe_host
from moonpool.bench.errors import ControlError
from moonpool.bench.gpu.memory import GpuMemory
from moonpool.bench.hardware.facts import examine
from moonpool.bench.memory import allocate
from moonpool.bench.verify import Pattern
from moonpool.bench.work import Layout, Work, gpu_of
from moonpool.transfer_engine import digest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Backends", "Commands", "Session", "TargetSession"]


class Backends:
    """The backends of one side, each made when it is first needed, and the memory they share."""

    def __init__(self, place: Place, *, target: bool) -> None:
        self._place = place
        self._target = target
        self._made: dict[type[Backend], Backend] = {}
        self._memory: NDArray[np.uint8] | None = None
        # Engines have them registered until they are closed, so all of them stay until then.
        self._gpus: list[GpuMemory] = []

    def get(self, kind: str, work: Work) -> Backend:
        """Return what is measured; see `backend_of`."""
        wanted = backend_of(kind, work)
        if wanted not in self._made:
            self._made[wanted] = wanted(self._place)
        return self._made[wanted]

    def memory(self, kind: str, work: Work) -> NDArray[np.uint8]:
        """Return this side's memory for a row, the same array as before where possible.

        Args:
            kind: whose memory it is where the row wants memory of an engine's own.
            work: the row.
        """
        if (gpu := self.gpu(work)) is not None:
            return gpu.image
        own = self.get(kind, work).memory(work, target=self._target)
        if own is not None:
            return own
        if self._memory is None or len(self._memory) < work.footprint_bytes:
            self._memory = None
            self._memory = allocate(work.footprint_bytes)
        return self._memory

    def gpu(self, work: Work) -> GpuMemory | None:
        """Return this side's memory of a GPU for a row, or None: it has memory of the host."""
        device = gpu_of(work.memory, target=self._target)
        if device is None:
            return None
        fitting = [one for one in self._gpus if one.device == device and len(one.image) >= work.footprint_bytes]
        if not fitting:
            fitting = [GpuMemory(device, work.footprint_bytes)]
            self._gpus += fitting
        return fitting[0]

    def close(self) -> None:
        """Close every backend, and then what they moved."""
        for backend in self._made.values():
            backend.close()
        self._made.clear()
        for gpu in self._gpus:
            gpu.close()
        self._gpus.clear()


class Commands:
    """Answers the commands of the process that leads the run. Used by one thread.

    The commands are the public methods named in `COMMANDS`; arguments and results are JSON values, except `offer`
    within one process.
    """

    COMMANDS: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        #: Whether every check so far found what it had to.
        self.verified = True
        #: Checks made so far.
        self.checks = 0

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Carry out one command."""
        if name not in self.COMMANDS:
            raise ControlError(f"unknown command {name!r}", hint="one version of mooncake-bench on both sides")
        command: Callable[..., Any] = getattr(self, name)
        return command(**arguments)

    def close(self) -> None:
        """Give back everything."""


class Session(Commands):
    """One side of rows that move bytes."""

    COMMANDS: ClassVar[tuple[str, ...]] = ("describe", "open", "fill", "mark", "check", "close_row")
    #: Whether this is the side that is read and written.
    IS_TARGET: ClassVar[bool]

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._backends = Backends(place, target=self.IS_TARGET)
        self._row_side: RowSide | None = None
        self._pattern: Pattern | None = None

    def describe(self) -> dict[str, Any]:
        """Return what is worth knowing about this host."""
        return describe_host()

    def open(self, work: Mapping[str, Any], window: int, kind: str = "engine", memory_bytes: int = 0) -> None:
        """Begin a row: the memory that is to be written holds the content of `window`.

        Args:
            work: the row.
            window: a number.
            kind: whose memory it is; see `Backends.memory`.
            memory_bytes: at least so much, where later rows need more.
        """
        self.close_row()
        row = Work.from_json(work)
        largest = replace(row, footprint_bytes=max(row.footprint_bytes, memory_bytes))
        memory, gpu = self._backends.memory(kind, largest), self._backends.gpu(largest)
        layouts = Layout(row, target=self.IS_TARGET), Layout(row, target=not self.IS_TARGET)
        self._pattern = Pattern(memory, layouts[0], gpu)
        self._pattern.fill(window)
        self._row_side = RowSide(row, *layouts, memory, "", 0, gpu)

    def fill(self, window: int) -> None:
        """Write the content of `window` into the memory of the side that it comes from."""
        row, pattern = self._row()
        if (row.work.op == "read") == self.IS_TARGET:
            pattern.fill(window)

    def mark(self) -> float:
        """Return the CPU seconds that this process has used."""
        return time.process_time()

    def check(self, window: int, done: list[tuple[int, int]]) -> dict[str, Any]:
        """Compare every byte of this side after `window` moved the batches `done`."""
        row, pattern = self._row()
        if (row.work.op == "write") == self.IS_TARGET:
            pattern.expect(window, done)
        verdict = pattern.check()
        self.verified = self.verified and verdict.ok
        self.checks += 1
        return verdict.to_json()

    def close_row(self) -> None:
        """End a row. Engines and memory stay for the next one."""
        self._row_side = self._pattern = None

    def close(self) -> None:
        """Give back everything."""
        self.close_row()
        self._backends.close()

    def _row(self) -> tuple[RowSide, Pattern]:
        if self._row_side is None or self._pattern is None:
            raise ControlError("no row is open", hint="one version of mooncake-bench on both sides")
        return self._row_side, self._pattern


class TargetSession(Session):
    """The side that is read and written."""

    COMMANDS = (*Session.COMMANDS, "examine", "offer", "arm", "finish", "digest", "dismiss")
    IS_TARGET = True

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._sides: dict[str, TargetSide] = {}
        #: Whether the other side has said that no run follows this one.
        self.dismissed = False

    def examine(self, devices: str | None) -> dict[str, Any]:
        """Return what the hardware check wants to know of this host; an error where the devices cannot be used."""
        return examine(devices)

    def offer(self, kind: str, mode: str, width: int) -> dict[str, Any]:
        """Make the target side of an engine or a limit, and return what the other side needs to know."""
        row, _ = self._row()
        side = replace(row, mode=mode, width=width)
        self._sides[kind] = self._backends.get(kind, row.work).target(side)
        return self._sides[kind].offer

    def arm(self, kind: str, order: dict[str, Any]) -> None:
        """Get ready for one run of the initiating side."""
        self._sides[kind].arm(order)

    def finish(self, kind: str) -> None:
        """Return when nothing that `arm` started runs any more."""
        self._sides[kind].finish()

    def digest(self) -> int:
        """Return the digest of the memory of the row."""
        row, _ = self._row()
        return digest(row.memory[: row.work.footprint_bytes])

    def dismiss(self) -> None:
        """Serve no run after this one."""
        self.dismissed = True

    def close_row(self) -> None:
        """End a row. Engines and memory stay for the next one."""
        for side in self._sides.values():
            side.close()
        self._sides.clear()
        super().close_row()
