# SPDX-License-Identifier: Apache-2.0
"""``mooncake-bench master``: its options, and from measurements to what the user sees."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any, Final

import click
from click.core import ParameterSource

from moonpool.bench.environment import describe_run
from moonpool.bench.errors import ExitStatus, UsageError
from moonpool.bench.options import DURATION, Choices, ListOf, count, json_option
from moonpool.bench.perform import Ending, StatusLine, report_console, say, write_json
from moonpool.bench.pool import master_report
from moonpool.bench.pool.calls import CALL_NAMES
from moonpool.bench.pool.master_report import MasterFindings
from moonpool.bench.pool.peers import BACKENDS
from moonpool.bench.pool.peers.base import ASKED, asking_of
from moonpool.bench.pool.peers.command import compare_pools
from moonpool.bench.pool.processes import store_in
from moonpool.bench.pool.rpc import RpcWork, measure_calls
from moonpool.bench.pool.whole import measure_memory, measure_recovery
from moonpool.bench.pool.work import STORES
from moonpool.errors import MoonpoolError

__all__ = ["master"]

_MEASURES: Final = ("rpc", "memory", "recovery")
_HASHES_MAX: Final = 16_384
_IN_FLIGHT_MAX: Final = 1024
_CHUNKS_MAX: Final = 16_000_000
_COMPARED_HASHES: Final = (1000,)
_COMPARED_THREADS: Final = (8,)

_EXAMPLES: Final = """\b
Examples:
  mooncake-bench master                                         every call, memory and recovery
  mooncake-bench master --measure rpc --call exists,match --hashes 1000 --in-flight 8
  mooncake-bench master --measure memory,recovery --chunks 1000000 --json -
  mooncake-bench master --backends moonpool,mooncake,mooncake-dummy
"""


@click.command(epilog=_EXAMPLES)
@click.option(
    "--measure",
    type=Choices("name", _MEASURES),
    default="rpc,memory,recovery",
    show_default=True,
    help="rpc: calls in a second; memory: bytes per chunk; recovery: kill -9 and a new start.",
)
@click.option(
    "--call",
    type=Choices("name", CALL_NAMES),
    default=",".join(CALL_NAMES),
    show_default=True,
    help="put is PutStart and PutCommit, pin is Pin and Unpin.",
)
@click.option(
    "--hashes", type=ListOf("n", count(_HASHES_MAX)), default="1,1000", show_default=True, help="Chunks of one call."
)
@click.option(
    "--in-flight",
    type=ListOf("n", count(_IN_FLIGHT_MAX)),
    default="1,8,64",
    show_default=True,
    help="Calls under way at the same time.",
)
@click.option(
    "--store",
    type=click.Choice(STORES),
    default="sqlite",
    show_default=True,
    help="Where the master keeps metadata. Recovery is always from SQLite.",
)
@click.option(
    "--chunks",
    type=click.IntRange(1000, _CHUNKS_MAX),
    default=1_000_000,
    show_default=True,
    help="Of memory and recovery.",
)
@click.option(
    "--backends",
    type=Choices("name", list(BACKENDS)),
    help="Compare masters through their own clients, round by round: moonpool, mooncake, mooncake-dummy.  "
    "[rows by default: exists, match and put of 1000, 8 threads]",
)
@click.option("--duration", type=DURATION, default="500ms", show_default=True, help="Length of one window.")
@click.option("--warmup", type=DURATION, default="100ms", show_default=True, help="Ahead of every window.")
@click.option("--rounds", type=click.IntRange(1, 1000), default=5, show_default=True, help="Windows of each kind.")
@json_option
@click.pass_context
def master(ctx: click.Context, /, **given: Any) -> None:
    """Measure the calls of a master, each beside an empty gRPC echo that carries the same bytes.

    Master and echo are processes of their own with the same kind of server, called by the same code of this process in
    turn. The master has chunks but no nodes: it never touches their bytes. Every answer is looked at.

    Memory is what the master grows by from empty to --chunks, and recovery the time from its start after kill -9 until
    every one of them is a hit again, at the same place as before.

    With --backends the calls that others have too (exists, match, put) go to several masters instead, through their
    own clients, from as many threads as calls are to be in flight; one that is not installed is named and left out.

    The exit status is that of transfer; of several masters, only Moonpool's decides it.
    """
    if given["backends"] is not None:
        asked = {name: given[name] for name in given if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT}
        try:
            ctx.exit(_compare(asked, given))
        except UsageError as error:
            raise click.UsageError(str(error)) from error
    works = [RpcWork(*values) for values in itertools.product(given["call"], given["hashes"], given["in_flight"])]
    ctx.exit(_perform(works if "rpc" in given["measure"] else [], given))


def _compare(asked: dict[str, Any], given: dict[str, Any]) -> ExitStatus:
    """Compare masters; `asked` are the options that were given, and the others of a comparison are its own."""
    if others := set(asked.get("call", ())) - set(ASKED):
        raise UsageError(f"{others.pop()} is no call that others have too", hint=f"--call {','.join(ASKED)}")
    if asked.get("measure", ["rpc"]) != ["rpc"]:
        raise UsageError("--backends compares calls", hint="--measure rpc")
    works = [
        asking_of(*values)
        for values in itertools.product(
            asked.get("call", ASKED), asked.get("hashes", _COMPARED_HASHES), asked.get("in_flight", _COMPARED_THREADS)
        )
    ]
    timing = (given["rounds"], given["duration"], given["warmup"])
    return compare_pools(
        works, given["backends"], timing, dram=None, metadata=given["store"], json_file=given["json_file"]
    )


def _perform(works: Sequence[RpcWork], given: dict[str, Any]) -> ExitStatus:
    """Measure, and show what was found, also after Ctrl-C or a failure; return the exit status."""
    try:
        environment = describe_run(_parameters(given))
    except MoonpoolError as error:
        say(str(error))
        return ExitStatus.FAILED
    # What a client logs of failures is in their errors, which are shown.
    logging.getLogger("moonpool.store_client").setLevel(logging.ERROR)
    ending = Ending()
    findings = MasterFindings()
    with StatusLine() as line, ending:
        if works:
            timing = (given["rounds"], given["duration"], given["warmup"])
            with TemporaryDirectory(prefix="mooncake-bench-") as folder:
                measure_calls(works, store_in(given["store"], folder), timing, findings.rows, line.show)
        if "memory" in given["measure"]:
            with TemporaryDirectory(prefix="mooncake-bench-") as folder:
                findings.memory = measure_memory(
                    store_in(given["store"], folder), given["chunks"], lambda text: line.show(f"memory: {text}")
                )
        if "recovery" in given["measure"]:
            findings.recovery = measure_recovery(given["chunks"], lambda text: line.show(f"recovery: {text}"))
    if json_file := given["json_file"]:
        write_json(master_report.document(environment, findings, interrupted=ending.interrupted), json_file)
    if json_file != "-" and findings:
        master_report.print_report(report_console(), environment, findings)
    ending.say()
    complaints = findings.complaints
    if json_file == "-":
        for complaint in complaints:
            say(f"NOT VERIFIED: {complaint}")
    return ending.status(verified=not complaints)


def _parameters(given: dict[str, Any]) -> dict[str, Any]:
    return {
        "rounds": given["rounds"],
        "duration": given["duration"],
        "warmup": given["warmup"],
        "measure": given["measure"],
        "chunks": given["chunks"],
        "store": given["store"],
        "fixed": {"store": given["store"]},
    }
