# SPDX-License-Identifier: Apache-2.0
"""Measures rows: in every round one window of the engine and one of its limit, each verified on both sides."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from moonpool.bench.backends import IN_PROCESS, SAME_HOST, InitiatorSide, Place, RowSide, backend_of, perftest
from moonpool.bench.backends.mapped import copying_threads
from moonpool.bench.errors import AGAIN, NO_LIMIT, BenchError
from moonpool.bench.initiating import steady
from moonpool.bench.measure import Window
from moonpool.bench.results import RowResult
from moonpool.bench.session import Backends
from moonpool.bench.targets import InProcessTarget, RemoteTarget, SpawnedTarget, Target
from moonpool.bench.verify import Pattern, Verdict
from moonpool.bench.work import Layout, Work, has_gpu

if TYPE_CHECKING:
    from typing_extensions import Self

    from moonpool.address import Address

__all__ = ["Observer", "OpenRow", "Options", "Runner"]

# Filling and checking: far slower than any machine does it, so that only a stuck one is given up.
_SLOWEST_BYTES_PER_S: Final = 50e6
_STEP_S: Final = 30.0
# Runs of a limit that may fail for no reason that lasts.
_ATTEMPTS: Final = 4
# Longest wait for a transfer that was asked to end.
_STOP_S: Final = 15.0


@dataclass(frozen=True)
class Options:
    """How every row is measured.

    Attributes:
        rounds: windows of each kind.
        duration: seconds of one window.
        warmup: seconds ahead of each window.
        mode: what a socket limit waits for: ``acked`` or ``stream``.
        only: measure the engine or the limit alone.
        target: where another benchmark listens; None starts a process on this host.
        secret: with `target`: what both sides must know.
        copy_threads: threads of a limit that copies; None: one for each core.
        budget: seconds for all rows together: a row that is late gets fewer rounds, but at least one. None: no bound.
    """

    rounds: int = 5
    duration: float = 1.0
    warmup: float = 0.2
    mode: str = "acked"
    only: Literal["engine", "limit"] | None = None
    target: Address | None = None
    secret: bytes | None = None
    copy_threads: int | None = None
    budget: float | None = None

    @property
    def kinds(self) -> list[str]:
        """What each round measures."""
        return ["engine", "limit"] if self.only is None else [self.only]


class Observer:
    """Is told while rows are measured. This one does not listen."""

    def row_begins(self, number: int, count: int, work: Work) -> None:
        """Row `number` of `count` begins; the first is 1."""

    def round_begins(self, number: int) -> None:
        """Round `number` of the row begins; the first is 1."""

    def row_ends(self, result: RowResult) -> None:
        """A row is complete, or as complete as it will be."""


class OpenRow:
    """A row whose two sides are connected.

    Attributes:
        sides: the initiating side of each kind.
        kinds: what each round measures: ``engine``, ``limit``.
    """

    def __init__(
        self,
        result: RowResult,
        sides: Mapping[str, InitiatorSide],
        kinds: Sequence[str],
        measure: Callable[[str], Window],
    ) -> None:
        self.sides = sides
        self.kinds = kinds
        self._result = result
        self._measure = measure

    def measure(self, kind: str) -> Window:
        """Fill, warm up, take one window and compare every byte of both sides; add it to the result of the row."""
        window, result, side = self._measure(kind), self._result, self.sides[kind]
        (result.engine if kind == "engine" else result.limits).append(window)
        if kind == "engine":
            result.path = side.path
            result.rail_bytes = side.rail_bytes
        return window


class Runner:
    """Holds the processes, engines and memory of one run. A context manager."""

    def __init__(self, options: Options, observer: Observer | None = None) -> None:
        self._options = options
        self._observer = observer or Observer()
        self._targets: dict[bool, Target] = {}
        self._backends: dict[bool, Backends] = {}
        self._window = 0
        self._row_end = math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        for backends in self._backends.values():
            backends.close()
        try:
            if kind is None:
                for target in self._targets.values():
                    target.goodbye()
        finally:
            for target in self._targets.values():
                target.close()

    def describe_target(self) -> dict[str, Any] | None:
        """Return the environment of the target where it is another host."""
        if self._options.target is None:
            return None
        description: dict[str, Any] = self._target(in_process=False).call("describe")
        return description

    def run(self, works: Sequence[Work]) -> None:
        """Measure every row, and tell the observer.

        A row that is interrupted or fails is told as well when at least one of its rounds is complete.
        """
        begin = time.monotonic()
        for number, work in enumerate(works, 1):
            if self._options.budget is not None:
                self._row_end = begin + self._options.budget * number / len(works)
            self._observer.row_begins(number, len(works), work)
            result = RowResult(work, backend_of(self._options.kinds[0], work).name)
            try:
                self._row(result)
            finally:
                if result.rounds:
                    self._observer.row_ends(result)

    # ---------------------------------------------------------------- one row

    def _row(self, result: RowResult) -> None:
        with self.opened(result) as row:
            for number in range(1, self._options.rounds + 1):
                if number > 1 and time.monotonic() > self._row_end:
                    break
                self._observer.round_begins(number)
                # Taking turns at being first: neither always finds the caches as the other left them.
                for kind in row.kinds[:: 1 if number % 2 else -1]:
                    row.measure(kind)

    @contextmanager
    def opened(self, result: RowResult) -> Iterator[OpenRow]:
        """Connect the two sides of a row. What is measured goes into `result`."""
        work = result.work
        in_process = work.transport in IN_PROCESS
        target = self._target(in_process)
        patience = _STEP_S + work.footprint_bytes / _SLOWEST_BYTES_PER_S
        self._window += 1
        owner = "engine" if self._needs_engine(work) else "limit"
        opening = target.start("open", patience, work=work.to_json(), window=self._window, kind=owner)
        memory, gpu = self._backends[in_process].memory(owner, work), self._backends[in_process].gpu(work)
        layouts = Layout(work, target=False), Layout(work, target=True)
        pattern = Pattern(memory, layouts[0], gpu)
        if work.op == "read":
            pattern.fill(self._window)
        opening()
        row = RowSide(work, *layouts, memory, self._options.mode, 0, gpu)
        sides: dict[str, InitiatorSide] = {}
        try:
            if self._needs_engine(work):
                sides["engine"] = self._side("engine", row, target)
                result.lanes = sides["engine"].width
            row = replace(row, width=self._limit_width(work, result.lanes))
            if "limit" in self._options.kinds:
                self._add_limit(sides, row, target, result)
            kinds = [kind for kind in self._options.kinds if kind in sides]

            def measure(kind: str) -> Window:
                return self._measure(kind, sides[kind], pattern, target, result, patience)

            yield OpenRow(result, sides, kinds, measure)
        finally:
            for side in sides.values():
                side.close()
        target.call("close_row")

    def _measure(
        self, kind: str, side: InitiatorSide, pattern: Pattern, target: Target, result: RowResult, patience: float
    ) -> Window:
        work = result.work
        self._window += 1
        filling = target.start("fill", patience, window=self._window)
        if work.op == "write":
            pattern.fill(self._window)
        filling()
        first = list(side.next_batch)
        with steady():
            for seconds in (self._options.warmup, self._options.duration):
                window = self._window_of(kind, side, target, seconds, patience)
        done = list(zip(first, side.next_batch, strict=True))
        checking = target.start("check", patience, window=self._window, done=done)
        if work.op == "read":
            pattern.expect(self._window, done)
        verdicts = {"initiator": pattern.check(), "target": Verdict.from_json(checking())}
        for where, verdict in verdicts.items():
            if not verdict.ok:
                result.complaints.append(
                    f"{kind}, round {len(result.engine if kind == 'engine' else result.limits) + 1}, {where}: "
                    f"{verdict.blocks_bad} of {work.blocks} blocks are wrong; {verdict.detail}"
                )
        return window

    def _window_of(
        self, kind: str, side: InitiatorSide, target: Target, seconds: float, patience: float, attempts: int = _ATTEMPTS
    ) -> Window:
        target.call("arm", kind=kind, order=side.order(seconds))
        theirs, ours = target.call("mark"), time.process_time()
        try:
            window = _run(side, seconds)
        except BenchError as error:
            if error.code != AGAIN or attempts == 1:
                raise
            target.call("finish", patience, kind=kind)
            return self._window_of(kind, side, target, seconds, patience, attempts - 1)
        ours = time.process_time() - ours
        theirs = target.call("mark") - theirs
        target.call("finish", patience, kind=kind)
        return replace(window, cpu_s=(ours, 0.0 if isinstance(target, InProcessTarget) else theirs))

    # ---------------------------------------------------------------- the two sides

    def _target(self, in_process: bool) -> Target:
        if in_process not in self._targets:
            target: Target
            if in_process:
                place = Place()
                target = InProcessTarget(place)
            elif self._options.target is not None:
                place = Place(self._options.target.host, secret=self._options.secret)
                target = RemoteTarget(self._options.target, place)
            else:
                target = SpawnedTarget()
                place = target.place
            self._targets[in_process] = target
            self._backends[in_process] = Backends(place, target=False)
        return self._targets[in_process]

    def _side(self, kind: str, row: RowSide, target: Target) -> InitiatorSide:
        backend = self._backends[row.work.transport in IN_PROCESS].get(kind, row.work)
        offer = target.call("offer", kind=kind, mode=row.mode, width=row.width)
        return backend.initiator(row, offer)

    def _add_limit(self, sides: dict[str, InitiatorSide], row: RowSide, target: Target, result: RowResult) -> None:
        try:
            sides["limit"] = self._side("limit", row, target)
        except BenchError as error:
            if error.code != NO_LIMIT or "engine" not in sides:
                raise
            # What the target says has its hint in it.
            result.no_limit = f"{error.message}. Try: {error.hint}" if error.hint else error.message
            return
        result.limit_width = sides["limit"].width
        result.limit = self._limit_name(row.work)

    def _needs_engine(self, work: Work) -> bool:
        # Without a number given, sockets are as many as the engine would have.
        return "engine" in self._options.kinds or (work.lanes is None and work.transport == "tcp")

    def _limit_width(self, work: Work, lanes: int | None) -> int:
        if work.transport in SAME_HOST:
            return max(self._options.copy_threads or copying_threads(work), work.threads)
        return max(work.lanes or lanes or 1, work.threads)

    def _limit_name(self, work: Work) -> str:
        if work.transport == "rdma" and not has_gpu(work.memory):
            return perftest.tool_of(work)
        name = backend_of("limit", work).name
        alone = work.transport in SAME_HOST or has_gpu(work.memory)
        return name if alone else f"{name}-{self._options.mode}"


def _run(side: InitiatorSide, seconds: float) -> Window:
    """Run `side` in a thread of its own, so that Ctrl-C is seen at once."""
    outcome: list[Window | BaseException] = []

    def work() -> None:
        try:
            outcome.append(side.run(seconds))
        except BaseException as error:  # noqa: BLE001 - raised again below
            outcome.append(error)

    worker = threading.Thread(target=work, name="mooncake-bench-window", daemon=True)
    worker.start()
    try:
        worker.join()
    except KeyboardInterrupt:
        # The window is lost either way. What cannot be aborted ends after the transfer that is under way.
        side.stop[0] = 1
        side.abort()
        worker.join(_STOP_S)
        raise
    result = outcome[0]
    if isinstance(result, BaseException):
        raise result
    return result
