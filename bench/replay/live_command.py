# SPDX-License-Identifier: Apache-2.0
"""``mooncake-bench replay --speed``: from the options to what the user sees."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moonpool.bench.environment import describe_run
from moonpool.bench.errors import ExitStatus, UsageError
from moonpool.bench.perform import Ending, report_console, say, write_json
from moonpool.bench.plot import plot_live
from moonpool.bench.pool.opening import pool_options
from moonpool.bench.replay import live_report
from moonpool.bench.replay.live import LiveOptions, replay_live
from moonpool.bench.replay.serving import Totals
from moonpool.bench.replay.trace import Trace
from moonpool.bench.verify import WORD_BYTES
from moonpool.errors import MoonpoolError
from moonpool.units import format_bytes

__all__ = ["live_options", "perform_live", "requests_progress"]

#: Options of a live pool.
_LIVE: Final = ("master", "secret", "nodes", "dram", "store", "block_size", "clients")
_DRAM: Final = 256 << 20
_BLOCK_BYTES: Final = 16 << 10
_CLIENTS: Final = 4


def live_options(given: dict[str, Any], *, simulated: bool) -> LiveOptions | None:
    """Return what a live pool is to be asked, or None where there is none.

    Args:
        given: the options of the command.
        simulated: an option was given that belongs to simulated pools.

    Raises:
        UsageError: they do not fit together.
    """
    if given["speed"] is None:
        if useless := [name for name in _LIVE if given[name] is not None]:
            raise UsageError(f"--{useless[0].replace('_', '-')} belongs to --speed", hint="--speed 1")
        return None
    if simulated:
        raise UsageError("--capacity and --policy belong to simulated pools: a live one has its own", hint="--dram")
    pool = pool_options(given, _DRAM)
    block_bytes = given["block_size"] or _BLOCK_BYTES
    if block_bytes % WORD_BYTES:
        raise UsageError(f"--block-size {format_bytes(block_bytes)} is not a multiple of {WORD_BYTES} bytes")
    return LiveOptions(given["speed"], block_bytes, given["clients"] or _CLIENTS, pool)


def perform_live(
    header: str,
    facts: dict[str, Any],
    trace: Trace,
    options: LiveOptions,
    json_file: str | None,
    plot_file: Path | None,
) -> ExitStatus:
    """Replay in time, and show what was found, also after Ctrl-C or a failure; return the exit status."""
    try:
        environment = describe_run({"speed": options.speed, "clients": options.clients})
    except MoonpoolError as error:
        say(str(error))
        return ExitStatus.FAILED
    # What a client logs of failures is in their errors, which are counted.
    logging.getLogger("moonpool.store_client").setLevel(logging.ERROR)
    ending, totals = Ending(), Totals()
    with ending, requests_progress() as progress:
        task = progress.add_task("", total=len(trace.requests))
        replay_live(trace, options, totals, lambda served: progress.advance(task, served))
    if json_file != "-" and totals.served:
        live_report.print_report(report_console(), header, options, totals)
    if json_file is not None:
        write_json(
            live_report.document(environment, facts, options, totals, interrupted=ending.interrupted), json_file
        )  # fmt: skip
    if plot_file is not None and totals.served:
        plot_live(live_report.timeline(totals), plot_file)
    ending.say()
    if totals.left:
        say(totals.left)
    if json_file == "-":
        for complaint in totals.complaints:
            say(f"NOT VERIFIED: {complaint}")
    status = ending.status(verified=not totals.wrong)
    return ExitStatus.FAILED if status is ExitStatus.OK and (totals.errors or totals.left) else status


def requests_progress() -> Progress:
    """Return a bar on standard error, when that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
