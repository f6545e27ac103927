# SPDX-License-Identifier: Apache-2.0
"""From rows to what the user sees: progress, table, JSON, plot, exit status."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from moonpool.bench import jsonform
from moonpool.bench.environment import describe_run
from moonpool.bench.errors import ExitStatus, VerificationError
from moonpool.bench.plot import plot
from moonpool.bench.report import print_report, work_text
from moonpool.bench.results import RowResult
from moonpool.bench.runner import Observer, Options, Runner
from moonpool.bench.work import Work
from moonpool.errors import MoonpoolError
from moonpool.units import format_bytes

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Ending", "StatusLine", "fixed", "fixed_parameters", "perform", "report_console", "say", "write_json"]

#: Of a table, where standard output is no terminal.
_COLUMNS = 120


class StatusLine:
    """Says on standard error what is measured, when that is a terminal. A context manager.

    A line that is written over, and no animation: nothing of this process may run during a window but the transfers.
    """

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.show("")

    def show(self, text: str) -> None:
        """Write the line; an empty one takes it away."""
        if self._shown:
            columns = shutil.get_terminal_size().columns
            # To the first column, and clear to the end of the line: ECMA-48, as every terminal in use knows it.
            sys.stderr.write(f"\r{text[: columns - 1]}\x1b[K")
            sys.stderr.flush()


class _Progress(Observer):
    """Keeps the results, and says what is measured."""

    def __init__(self, line: StatusLine, rounds: int) -> None:
        self.results: list[RowResult] = []
        self._line = line
        self._rounds = rounds
        self._where = ""
        self._last = ""

    def row_begins(self, number: int, count: int, work: Work) -> None:
        """Show the row."""
        self._where = f"row {number} of {count}: {work_text(work)}"

    def round_begins(self, number: int) -> None:
        """Show the round."""
        self._line.show(f"{self._where}, round {number} of {self._rounds}{self._last}")

    def row_ends(self, result: RowResult) -> None:
        """Keep the result."""
        self.results.append(result)
        if result.gbytes_per_s is not None and result.ratio is not None:
            self._last = f" (last: {result.gbytes_per_s:.2f} GB/s, {result.ratio:.2f} of the limit)"


def perform(
    works: Sequence[Work], options: Options, *, json_file: str | None = None, plot_file: Path | None = None
) -> ExitStatus:
    """Measure the rows and show what was found, also after Ctrl-C or a failure; return the exit status."""
    try:
        environment = describe_run(_parameters(works, options))
    except MoonpoolError as error:
        # A setting of the engine that cannot be: no engine could be opened either.
        say(str(error))
        return ExitStatus.FAILED
    ending = Ending()
    with StatusLine() as line:
        progress = _Progress(line, options.rounds)
        with ending, Runner(options, progress) as runner:
            environment["target"] = runner.describe_target()
            runner.run(works)
    results = progress.results

    if json_file != "-" and results:
        print_report(report_console(), environment, results)
    if json_file is not None:
        write_json(jsonform.document(environment, results, interrupted=ending.interrupted), json_file)
    if plot_file is not None and results:
        plot(results, plot_file)
    ending.say()
    complaints = [f"NOT VERIFIED: {work_text(result.work)}: {text}" for result in results for text in result.complaints]
    if json_file == "-":
        for complaint in complaints:
            say(complaint)
    return ending.status(verified=not complaints)


class Ending:
    """How a run ended. A context manager that takes what ends a run early, so that what was measured is still shown.

    SIGTERM ends a run as Ctrl-C does: what it has put into a pool is removed. For the main thread.
    """

    def __init__(self) -> None:
        #: Whether it was Ctrl-C, or SIGTERM.
        self.interrupted = False
        self._failure: MoonpoolError | None = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        signal.signal(signal.SIGTERM, self._before)
        if isinstance(error, MoonpoolError):
            self._failure = error
        # What cleaning up met may have taken the place of Ctrl-C.
        first = error
        while first is not None and not self.interrupted:
            self.interrupted = isinstance(first, KeyboardInterrupt)
            first = first.__context__
        return isinstance(error, (KeyboardInterrupt, MoonpoolError))

    def say(self) -> None:
        """Say on standard error why it ended early, if it did."""
        if self._failure is not None:
            say(str(self._failure))
        if self.interrupted:
            say("interrupted; what was measured until then is shown")

    def status(self, *, verified: bool) -> ExitStatus:
        """Return the exit status: wrong bytes come before everything else."""
        if not verified or isinstance(self._failure, VerificationError):
            return ExitStatus.NOT_VERIFIED
        if self.interrupted:
            return ExitStatus.INTERRUPTED
        return ExitStatus.OK if self._failure is None else ExitStatus.FAILED


def report_console() -> Console:
    """Return the console of a report, which is on standard output."""
    return Console(width=None if sys.stdout.isatty() else _COLUMNS)


def say(text: str, style: str = "bold red") -> None:
    """Say something on standard error."""
    # Not wrapped: where it is not read by a person, it is searched.
    Console(stderr=True).print(f"mooncake-bench: {text}", style=style, markup=False, highlight=False, soft_wrap=True)


def _parameters(works: Sequence[Work], options: Options) -> dict[str, Any]:
    return {
        "rounds": options.rounds,
        "duration": options.duration,
        "warmup": options.warmup,
        "limit": options.mode,
        "only": options.only,
        "target": None if options.target is None else str(options.target),
        "fixed": fixed_parameters(works),
    }


def fixed_parameters(works: Sequence[Work]) -> dict[str, Any]:
    """Return what is the same in all rows, so that the table need not say it."""
    values: dict[str, list[Any]] = {
        "memory": [work.memory for work in works],
        "order": [work.order for work in works],
        "threads": [work.threads for work in works],
        "lanes": ["auto" if work.lanes is None else work.lanes for work in works],
        "footprint": [format_bytes(work.footprint_bytes) for work in works],
        "devices": [work.tuning.devices for work in works],
        "target devices": [work.tuning.target_devices for work in works],
        "queue pairs": [work.tuning.queue_pairs for work in works],
        "slice": [_bytes(work.tuning.slice_bytes) for work in works],
        "inline": [_bytes(work.tuning.inline_bytes) for work in works],
        "spin": [None if work.tuning.spin_us is None else f"{work.tuning.spin_us} µs" for work in works],
    }
    return fixed(values)


def fixed(values: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return what has one and the same value in all rows; `values` has one of each row. None is no value."""
    return {name: every[0] for name, every in values.items() if len(set(every)) == 1 and every[0] is not None}


def _bytes(value: int | None) -> str | None:
    return None if value is None else format_bytes(value)


def write_json(document: dict[str, Any], file: str) -> None:
    """Write the JSON form to a file, or to standard output for ``-``."""
    text = json.dumps(document, indent=2) + "\n"
    if file == "-":
        sys.stdout.write(text)
    else:
        Path(file).write_text(text, encoding="utf-8")
