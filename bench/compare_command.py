# SPDX-License-Identifier: Apache-2.0
"""``mooncake-bench compare``: its options, and from rows to what the user sees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from moonpool.bench import jsonform
from moonpool.bench.backends import COMPARED
from moonpool.bench.compare import REFERENCE, CompareOptions, Comparison
from moonpool.bench.compare_progress import CompareProgress
from moonpool.bench.compare_report import print_comparison
from moonpool.bench.environment import describe_run
from moonpool.bench.errors import ExitStatus, UsageError
from moonpool.bench.options import (
    BATCH_MAX,
    DURATION,
    SIZE,
    THREADS_MAX,
    Choices,
    ListOf,
    Value,
    count,
    json_option,
    plot_option,
)
from moonpool.bench.perform import Ending, StatusLine, fixed_parameters, report_console, say, write_json
from moonpool.bench.plot import plot_comparison
from moonpool.bench.report import work_text
from moonpool.bench.sweep import Sweep
from moonpool.bench.work import MEMORIES, OPS, ORDERS, Work
from moonpool.errors import MoonpoolError

__all__ = ["compare"]

#: Memory of each side of each backend: the larger one only where a batch needs it.
_FOOTPRINT_BYTES: Final = 128 << 20
_FOOTPRINT_BYTES_MAX: Final = 512 << 20

#: What is not given on the command line.
_FULL: Final[dict[str, Any]] = {
    "block_size": [4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20],
    "batch": [1, 16, 128],
    "threads": [1, 2],
    "duration": 0.1,
    "warmup": 0.02,
    "rounds": 5,
}
_QUICK: Final[dict[str, Any]] = {
    "block_size": [4 << 10, 64 << 10, 1 << 20, 16 << 20],
    "batch": [1, 128],
    "threads": [1],
    "duration": 0.04,
    "warmup": 0.01,
    "rounds": 3,
}
_BACKENDS: Final = {
    "tcp": ["moonpool", "sockets", "mooncake", "nixl"],
    "auto": ["moonpool", "memcpy", "process_vm", "mooncake", "nixl"],
}

_EXAMPLES: Final = """\b
Examples:
  pip install 'moonpool[compare]'            the other engines
  mooncake-bench compare                     over TCP, in about seven minutes
  mooncake-bench compare --quick             the same in about two
  mooncake-bench compare --over auto         as each engine comes, on one host
  mooncake-bench compare --backends moonpool,nixl --block-size 4KiB --batch 1,128 --json result.json
"""


@click.command(epilog=_EXAMPLES)
@click.option(
    "--backends",
    type=Choices("name", list(COMPARED), {"socket": "sockets"}),
    help="moonpool, sockets, mooncake, nixl; with --over auto also memcpy and process_vm.  "
    "[default: all but sockets with --over auto]",
)
@click.option(
    "--over",
    type=click.Choice(["tcp", "auto"]),
    default="tcp",
    show_default=True,
    help="tcp: every engine is told to use TCP. auto: every engine chooses, as it comes.",
)
@click.option("--op", type=Choices("name", OPS), default="read,write", show_default=True, help="As in transfer.")
@click.option(
    "--block-size",
    type=ListOf("size", SIZE),
    help="Bytes of one descriptor.  [default: 4KiB,64KiB,256KiB,1MiB,4MiB,16MiB]",
)
@click.option("--batch", type=ListOf("n", count(BATCH_MAX)), help="Descriptors of one transfer.  [default: 1,16,128]")
@click.option(
    "--order",
    type=Choices("name", ORDERS),
    default="sequential,random",
    show_default=True,
    help="sequential: an engine may merge neighbours. random: there are none, on both sides.",
)
@click.option("--threads", type=ListOf("n", count(THREADS_MAX)), help="User threads.  [default: 1,2]")
@click.option(
    "--memory",
    type=Choices("name", MEMORIES),
    help="Moonpool's memory: registered, as the others have it, or allocated by the engine.  "
    "[default: registered; allocated with --over auto]",
)
@click.option(
    "--footprint",
    type=Value("size", SIZE),
    help="Memory of each side of each backend; larger batches are made smaller.  "
    "[default: 128MiB, up to 512MiB where a batch needs it]",
)
@click.option("--duration", type=DURATION, help="Length of one window.  [default: 100ms]")
@click.option("--warmup", type=DURATION, help="Ahead of every window.  [default: 20ms]")
@click.option("--rounds", type=click.IntRange(1, 1000), help="Windows of each backend.  [default: 5]")
@click.option("--quick", is_flag=True, help="Fewer rows, shorter windows and three rounds where nothing else is said.")
@json_option
@plot_option
@click.pass_context
def compare(ctx: click.Context, /, **given: Any) -> None:
    """Measure the same transfers through several engines, side by side.

    Each engine has two processes of its own. In every round each has one window over the same blocks, in turning order,
    while the others are stopped; every byte is checked on both sides after every window. The ratio is Moonpool's rate
    over the other's, round by round. An engine that is not installed, or fails, is named and left out.

    With every option left out it takes about seven minutes; --quick, fewer sizes or fewer backends make it shorter.

    The exit status is that of transfer; only Moonpool and the limits decide it.
    """
    try:
        works, options = _plan(given)
    except UsageError as error:
        raise click.UsageError(str(error)) from error
    ctx.exit(_perform(works, options, given["json_file"], given["plot_file"]))


def _plan(given: dict[str, Any]) -> tuple[list[Work], CompareOptions]:
    chosen = (_QUICK if given["quick"] else _FULL) | {name: value for name, value in given.items() if value is not None}
    over = given["over"]
    names = chosen.get("backends", _BACKENDS[over])
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{name} is given more than once", hint="each backend once in --backends")
        if over not in COMPARED[name]:
            raise UsageError(f"{name} stays on one host: it is no backend over {over}", hint="--over auto")
    sweep = Sweep(
        [over],
        chosen["op"],
        chosen["block_size"],
        chosen["batch"],
        chosen["order"],
        threads=chosen["threads"],
        memories=chosen.get("memory", ["allocated" if over == "auto" else "registered"]),
    )
    footprint = given["footprint"]
    works = sweep.works_within(footprint or _FOOTPRINT_BYTES, footprint or _FOOTPRINT_BYTES_MAX)
    return works, CompareOptions(names, over, chosen["rounds"], chosen["duration"], chosen["warmup"])


def _perform(
    works: Sequence[Work], options: CompareOptions, json_file: str | None, plot_file: Path | None
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
        progress = CompareProgress(line, options.rounds, work_text)
        comparison = Comparison(options, progress)
        with ending, comparison:
            comparison.run(works)
    environment["versions"] = {name: version for name, version in comparison.versions.items() if version}
    rows = progress.rows
    if json_file != "-" and rows:
        print_comparison(report_console(), environment, rows, comparison.skipped)
    if json_file is not None:
        write_json(
            jsonform.comparison(environment, rows, comparison.skipped, interrupted=ending.interrupted), json_file
        )
    if plot_file is not None and rows:
        plot_comparison(rows, plot_file)
    ending.say()
    # Wrong bytes of another engine are a finding about that engine.
    ours = {REFERENCE, "sockets", "memcpy", "process_vm"}
    entries = [entry for row in rows for name, entry in row.entries.items() if name in ours]
    return ending.status(verified=all(entry.result.verified for entry in entries))


def _parameters(works: Sequence[Work], options: CompareOptions) -> dict[str, Any]:
    return {
        "rounds": options.rounds,
        "duration": options.duration,
        "warmup": options.warmup,
        "over": options.transport,
        "backends": list(options.backends),
        "fixed": fixed_parameters(works),
    }
