# SPDX-License-Identifier: Apache-2.0
"""What the target does for one run: hold memory, be read and written, and check its own bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from moonpool.bench.backends import ENGINES, LIMITS, Backend, Place, RowSide, TargetSide
from moonpool.bench.environment import describe_host
from moonpool.bench.errors import ControlError
from moonpool.bench.memory import allocate
from moonpool.bench.verify import Pattern
from moonpool.bench.work import Layout, Work

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Memory", "TargetSession"]

#: The two columns of a row: what is measured, and what it is compared with.
KINDS: Final[dict[str, Mapping[str, type[Backend]]]] = {"engine": ENGINES, "limit": LIMITS}


class Memory:
    """The memory of one side, kept while it is large enough for the next row."""

    def __init__(self) -> None:
        self._bytes: NDArray[np.uint8] | None = None

    def for_row(self, footprint_bytes: int) -> NDArray[np.uint8]:
        """Return at least that much, the same array as before where possible."""
        if self._bytes is None or len(self._bytes) < footprint_bytes:
            self._bytes = None
            self._bytes = allocate(footprint_bytes)
        return self._bytes


class TargetSession:
    """Answers the commands of the initiating process. Used by one thread.

    The commands are the public methods named in `COMMANDS`; arguments and results are JSON values, except `offer`
    within one process.
    """

    COMMANDS: Final = ("describe", "open", "offer", "fill", "arm", "mark", "finish", "check", "close_row")

    def __init__(self, place: Place) -> None:
        self._place = place
        self._memory = Memory()
        self._backends: dict[tuple[str, str], Backend] = {}
        self._sides: dict[str, TargetSide] = {}
        self._work: Work | None = None
        self._layouts: tuple[Layout, Layout] | None = None
        self._pattern: Pattern | None = None
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

    def describe(self) -> dict[str, Any]:
        """Return what is worth knowing about this host."""
        return describe_host()

    def open(self, work: Mapping[str, Any], window: int) -> None:
        """Begin a row; the memory that is to be written holds the content of `window`."""
        self.close_row()
        self._work = Work.from_json(work)
        memory = self._memory.for_row(self._work.footprint_bytes)
        self._layouts = Layout(self._work, target=True), Layout(self._work, target=False)
        self._pattern = Pattern(memory, self._layouts[0])
        self._pattern.fill(window)

    def offer(self, kind: str, mode: str, width: int) -> dict[str, Any]:
        """Make the target side of an engine or a limit, and return what the other side needs to know."""
        work, layouts, _ = self._row()
        name = (kind, work.transport)
        if name not in self._backends:
            self._backends[name] = KINDS[kind][work.transport](self._place)
        memory = self._memory.for_row(work.footprint_bytes)
        self._sides[kind] = self._backends[name].target(RowSide(work, *layouts, memory, mode, width))
        return self._sides[kind].offer

    def fill(self, window: int) -> None:
        """Write the content of `window` into the memory that is to be read."""
        work, _, pattern = self._row()
        if work.op == "read":
            pattern.fill(window)

    def arm(self, kind: str) -> None:
        """Get ready for one warm-up and one window."""
        self._sides[kind].arm()

    def mark(self) -> float:
        """Return the CPU seconds that this process has used."""
        return time.process_time()

    def finish(self, kind: str) -> None:
        """Return when nothing that `arm` started runs any more."""
        self._sides[kind].finish()

    def check(self, window: int, done: list[tuple[int, int]]) -> dict[str, Any]:
        """Compare every byte of this side after `window` moved the batches `done`."""
        work, _, pattern = self._row()
        if work.op == "write":
            pattern.expect(window, done)
        verdict = pattern.check()
        self.verified = self.verified and verdict.ok
        self.checks += 1
        return verdict.to_json()

    def close_row(self) -> None:
        """End a row. Engines and memory stay for the next one."""
        for side in self._sides.values():
            side.close()
        self._sides.clear()
        self._work = self._layouts = self._pattern = None

    def close(self) -> None:
        """Give back everything."""
        self.close_row()
        for backend in self._backends.values():
            backend.close()
        self._backends.clear()

    def _row(self) -> tuple[Work, tuple[Layout, Layout], Pattern]:
        if self._work is None or self._layouts is None or self._pattern is None:
            raise ControlError("no row is open", hint="one version of mooncake-bench on both sides")
        return self._work, self._layouts, self._pattern
