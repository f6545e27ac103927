# SPDX-License-Identifier: Apache-2.0
"""The same rows through several engines: in every round one window of each, in turning order, each verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from moonpool.bench.contender import Contender, Contending
from moonpool.bench.errors import BenchError
from moonpool.bench.measure import Window, median
from moonpool.bench.results import RowResult
from moonpool.bench.work import Work

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["REFERENCE", "CompareObserver", "CompareOptions", "CompareRow", "Comparison", "Entry"]

#: What the others are compared with.
REFERENCE: Final = "moonpool"
#: A backend that failed so often is not started again.
_FAILURES_MAX: Final = 3


@dataclass
class Entry:
    """What one backend did in one row.

    Attributes:
        result: its figures. Only complete windows count.
        windows: the window of each round, by its number.
        failure: why it has none, or not all; ``""``.
    """

    result: RowResult
    windows: dict[int, Window] = field(default_factory=dict)
    failure: str = ""

    def ratios(self, reference: Entry | None) -> list[float]:
        """Return the reference's rate over this backend's, for every round that has both."""
        if reference is None or reference is self:
            return []
        return [
            reference.windows[number].gbytes_per_s / window.gbytes_per_s
            for number, window in self.windows.items()
            if number in reference.windows
        ]


@dataclass
class CompareRow:
    """One row of the table: one work, several backends."""

    work: Work
    entries: dict[str, Entry] = field(default_factory=dict)

    @property
    def reference(self) -> Entry | None:
        """What the others are compared with, where it was measured."""
        return self.entries.get(REFERENCE)

    def ratio(self, name: str) -> float | None:
        """Return the median of the rounds' ratios of the reference to a backend."""
        entry = self.entries.get(name)
        ratios = entry.ratios(self.reference) if entry is not None else []
        return median(ratios) if ratios else None


@dataclass(frozen=True)
class CompareOptions:
    """How every row is measured; as in `moonpool.bench.runner.Options`."""

    backends: Sequence[str]
    transport: str
    rounds: int
    duration: float
    warmup: float


class CompareObserver:
    """Is told while rows are measured. This one does not listen."""

    def row_begins(self, number: int, count: int, work: Work) -> None:
        """Row `number` of `count` begins; the first is 1."""

    def window_begins(self, number: int, name: str) -> None:
        """In round `number` it is the turn of backend `name`."""

    def row_ends(self, row: CompareRow) -> None:
        """A row is complete, or as complete as it will be."""

    def skipped(self, name: str, reason: str) -> None:
        """A backend takes no part from here on."""


class Comparison:
    """Holds the contenders of one run. A context manager.

    Args:
        options: of the run.
        observer: is told.
        start: makes a contender from its name, what the comparison goes over, and the bytes of memory on each side.
    """

    def __init__(
        self,
        options: CompareOptions,
        observer: CompareObserver | None = None,
        start: Callable[[str, str, int], Contending] = Contender,
    ) -> None:
        self._options = options
        self._observer = observer or CompareObserver()
        self._start = start
        self._contenders: dict[str, Contending] = {}
        self._failures: dict[str, int] = dict.fromkeys(options.backends, 0)
        self._window = 0
        self._memory_bytes = 0
        #: Versions of the other engines that were measured.
        self.versions: dict[str, str] = {}
        #: Backends that take no part any more, and why.
        self.skipped: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        for contender in self._contenders.values():
            if kind is None:
                contender.close()
            else:
                contender.kill()

    def run(self, works: Sequence[Work]) -> None:
        """Measure every row, and tell the observer.

        Raises:
            BenchError: there is nothing left to measure, or the engine that the others are compared with failed.
        """
        self._memory_bytes = max(work.footprint_bytes for work in works)
        for number, work in enumerate(works, 1):
            self._observer.row_begins(number, len(works), work)
            row = CompareRow(work)
            try:
                self._row(row)
            finally:
                if any(entry.windows for entry in row.entries.values()):
                    self._observer.row_ends(row)
            if len(self.skipped) == len(self._options.backends):
                raise BenchError(
                    "nothing can be measured: "
                    + "; ".join(f"{name}: {reason}" for name, reason in self.skipped.items())
                )

    # ---------------------------------------------------------------- one row

    def _row(self, row: CompareRow) -> None:
        names = [name for name in self._options.backends if name not in self.skipped]
        for name in names:
            row.entries[name] = Entry(RowResult(row.work, name))
            self._guarded(row, name, lambda contender, _: self._open(contender, row.work))
        for number in range(1, self._options.rounds + 1):
            # Everyone is first as often as the others: nobody always finds the caches as one other left them.
            first = (number - 1) % len(names) if names else 0
            for name in names[first:] + names[:first]:
                if not row.entries[name].failure:
                    self._observer.window_begins(number, name)
                    self._guarded(row, name, partial(self._measure, number=number))
        for name in names:
            if not row.entries[name].failure:
                self._guarded(row, name, lambda contender, _: contender.close_row())

    def _guarded(self, row: CompareRow, name: str, step: Callable[[Contending, Entry], None]) -> None:
        """Do something with a contender that may fail: then it is named, and the others go on."""
        entry = row.entries[name]
        try:
            if name not in self._contenders:
                self._contenders[name] = self._start(name, self._options.transport, self._memory_bytes)
            step(self._contenders[name], entry)
        except BenchError as error:
            self._contenders.pop(name, None)
            if name == REFERENCE:
                raise
            entry.failure = str(error)
            self._failures[name] += 1
            never_measured = name not in self.versions
            if never_measured or self._failures[name] >= _FAILURES_MAX:
                self.skipped[name] = entry.failure
                self._observer.skipped(name, entry.failure)

    def _open(self, contender: Contending, work: Work) -> None:
        self._window += 1
        contender.open(work, self._window)

    def _measure(self, contender: Contending, entry: Entry, *, number: int) -> None:
        self._window += 1
        measured = contender.measure(self._window, self._options.warmup, self._options.duration)
        self.versions[contender.name] = contender.version or ""
        entry.windows[number] = measured.window
        result = entry.result
        result.engine.append(measured.window)
        result.lanes, result.path = measured.lanes, measured.path
        result.complaints.extend(f"round {number}, {text}" for text in measured.complaints)
