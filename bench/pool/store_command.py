# SPDX-License-Identifier: Apache-2.0
"""``mooncake-bench store``: its options, and from rows to what the user sees."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any, Final

import click
from click.core import ParameterSource

from moonpool.bench.environment import describe_run
from moonpool.bench.errors import ExitStatus, UsageError, VerificationError
from moonpool.bench.measure import Window
from moonpool.bench.options import (
    ADDRESS,
    DURATION,
    SECRET,
    SIZE,
    THREADS_MAX,
    Choices,
    ListOf,
    Value,
    count,
    json_option,
)
from moonpool.bench.perform import Ending, StatusLine, fixed, report_console, say, write_json
from moonpool.bench.pool import store_report
from moonpool.bench.pool.moving import row_of
from moonpool.bench.pool.opening import pool_options
from moonpool.bench.pool.peers import BACKENDS
from moonpool.bench.pool.peers.base import moving_of
from moonpool.bench.pool.peers.command import compare_pools
from moonpool.bench.pool.place import PoolPlace
from moonpool.bench.pool.work import (
    LOCATED,
    MEMORIES,
    OPS,
    REPLICAS_MAX,
    StoreOptions,
    StoreResult,
    StoreSweep,
    StoreWork,
    dram_needed,
    store_kind,
)
from moonpool.errors import ConfigError, MoonpoolError
from moonpool.units import format_bytes

__all__ = ["store"]

_BATCH_MAX: Final = 1 << 16
_NODES_MAX: Final = 64

_EXAMPLES: Final = """\b
Examples:
  mooncake-bench store                                             put and get of 1 MiB, 16 at a time
  mooncake-bench store --block-size 4KiB,1MiB,16MiB --batch 1,32 --json result.json
  mooncake-bench store --op put --block-size 4KiB --batch 128 --store sqlite
  mooncake-bench store --nodes 2 --replicas 1,2 --memory registered,buffers
  mooncake-bench store --master master-0:7600 --secret @/etc/moonpool/secret
  mooncake-bench store --backends moonpool,mooncake,mooncake-dummy --store sqlite
"""
#: The rows of a comparison, where nothing is said: chunk and batch.
_COMPARED: Final = ((4 << 10, 128), (1 << 20, 32), (16 << 20, 1))


@click.command(epilog=_EXAMPLES)
@click.option("--op", type=Choices("name", OPS), default="put,get", show_default=True, help="put, get.")
@click.option(
    "--block-size", type=ListOf("size", SIZE), default="1MiB", show_default=True, help="Bytes of one chunk: 4KiB, 1MiB."
)
@click.option(
    "--batch", type=ListOf("n", count(_BATCH_MAX)), default="16", show_default=True, help="Chunks of one call."
)
@click.option(
    "--replicas",
    type=ListOf("n", count(REPLICAS_MAX)),
    default="1",
    show_default=True,
    help="Copies of each chunk, on different nodes.",
)
@click.option(
    "--threads",
    type=ListOf("n", count(THREADS_MAX)),
    default="1",
    show_default=True,
    help="User threads of the one client.",
)
@click.option(
    "--memory",
    type=Choices("name", MEMORIES),
    default="registered",
    show_default=True,
    help="A region of the client's engine, as KV caches are, or a buffer for each chunk, which is copied once more.",
)
@click.option(
    "--located",
    type=Choices("name", LOCATED),
    default="asked",
    show_default=True,
    help="How a get learns where chunks are: it has the master asked each time, or an earlier one has under its lease.",
)
@click.option(
    "--footprint",
    type=Value("size", SIZE),
    help="Payload of all chunks of a row.  [default: 256MiB, or one batch per thread]",
)
@click.option("--master", type=ADDRESS, help="A pool that runs.  [default: one is started on this host]")
@click.option("--secret", type=SECRET, metavar="TEXT|@FILE", help="Cluster secret of --master.")
@click.option("--nodes", type=click.IntRange(1, _NODES_MAX), help="Nodes of the pool that is started.  [default: 1]")
@click.option(
    "--dram", type=Value("size", SIZE), help="What each of them lends.  [default: 2.5 times what a row puts there]"
)
@click.option(
    "--store",
    type=Value("memory|sqlite|etcd:HOST:PORT", store_kind),
    help="Where the master that is started keeps metadata.  [default: memory]",
)
@click.option(
    "--backends",
    type=Choices("name", list(BACKENDS)),
    help="Compare pools, each started for it, round by round: moonpool, mooncake, mooncake-dummy.  "
    "[rows by default: 4KiB in batches of 128, 1MiB of 32, single 16MiB]",
)
@click.option("--duration", type=DURATION, default="1s", show_default=True, help="Longest time of one window.")
@click.option("--warmup", type=DURATION, default="200ms", show_default=True, help="Ahead of every window of gets.")
@click.option("--rounds", type=click.IntRange(1, 1000), default=5, show_default=True, help="Windows of each kind.")
@json_option
@click.pass_context
def store(ctx: click.Context, /, **given: Any) -> None:
    """Measure puts and gets of chunks through a pool, each beside the engine alone.

    Every combination of the options is a row. Each round has a window of the client and a window of the engine's own
    transfers of the same bytes between the same memory and the same places in the pool, in turn. Every byte is
    checked after every window: of gets where it has come, of puts where it lies in the nodes.

    Keys of puts are fresh, and the pool is emptied after each window. A window of puts ends when the footprint has
    been put once.

    With --backends the same rows go through several pools instead, each with its own servers and its client in a
    process of its own; one that is not installed is named and left out.

    The exit status is that of transfer; of several pools, only Moonpool decides it.
    """
    try:
        works, options = _plan(given)
        if given["backends"] is not None:
            asked = {"block_size", "batch"} & {
                name for name in given if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT
            }
            ctx.exit(_compare(works if asked else _compared(given), given))
    except (ConfigError, UsageError) as error:
        raise click.UsageError(str(error)) from error
    ctx.exit(_perform(works, options, given["json_file"]))


def _compared(given: dict[str, Any]) -> list[StoreWork]:
    return [
        work
        for op in given["op"]
        for size, batch in _COMPARED
        for work in StoreSweep(
            [op], ["registered"], ["asked"], [1], given["threads"], [size], [batch], given["footprint"]
        ).works()
    ]


def _compare(works: Sequence[StoreWork], given: dict[str, Any]) -> ExitStatus:
    if given["master"] is not None:
        raise UsageError("--backends starts pools: it does not go with --master")
    if (given["nodes"] or 1, given["replicas"], given["memory"], given["located"]) != (
        1,
        [1],
        ["registered"],
        ["asked"],
    ):
        raise UsageError(
            "--backends compares pools of one node, without replicas, with registered memory, whose gets ask the master"
        )
    return compare_pools(
        [moving_of(work.moved, work.op) for work in works],
        given["backends"],
        (given["rounds"], given["duration"], given["warmup"]),
        dram=given["dram"],
        metadata=given["store"] or "memory",
        json_file=given["json_file"],
    )


def _plan(given: dict[str, Any]) -> tuple[list[StoreWork], StoreOptions]:
    works = StoreSweep(
        given["op"],
        given["memory"],
        given["located"],
        given["replicas"],
        given["threads"],
        given["block_size"],
        given["batch"],
        given["footprint"],
    ).works()
    pool = pool_options(given, dram_needed(works, given["nodes"] or 1))
    if pool.master is None and max(given["replicas"]) > pool.nodes:
        raise UsageError(
            f"{max(given['replicas'])} replicas need as many nodes", hint=f"--nodes {max(given['replicas'])}"
        )
    return works, StoreOptions(given["rounds"], given["duration"], given["warmup"], pool)


def _perform(works: Sequence[StoreWork], options: StoreOptions, json_file: str | None) -> ExitStatus:
    """Measure the rows and show what was found, also after Ctrl-C or a failure; return the exit status."""
    try:
        environment = describe_run(_parameters(works, options))
    except MoonpoolError as error:
        say(str(error))
        return ExitStatus.FAILED
    # What a client logs of failures is in their errors, which are shown.
    logging.getLogger("moonpool.store_client").setLevel(logging.ERROR)
    ending = Ending()
    results: list[StoreResult] = []
    with StatusLine() as line, ending:
        master = options.pool.master
        line.show("starting the pool" if master is None else f"connecting to {master}")
        with PoolPlace(options.pool) as place:
            environment["pool"] = place.describe()
            _measure(place, works, options, results, line)
    results = [result for result in results if result.rounds or result.complaints]
    if json_file != "-" and results:
        store_report.print_report(report_console(), environment, results)
    if json_file is not None:
        write_json(store_report.document(environment, results, interrupted=ending.interrupted), json_file)
    ending.say()
    complaints = [f"NOT VERIFIED: {result.store.text}: {text}" for result in results for text in result.complaints]
    if json_file == "-":
        for complaint in complaints:
            say(complaint)
    return ending.status(verified=not complaints)


def _measure(
    place: PoolPlace, works: Sequence[StoreWork], options: StoreOptions, results: list[StoreResult], line: StatusLine
) -> None:
    numbers = itertools.count(1)
    for row_number, work in enumerate(works, 1):
        where = f"row {row_number} of {len(works)}: {work.text}"
        line.show(f"{where}, preparing")
        result = StoreResult(work.moved, "moonpool", "engine", store=work)
        results.append(result)
        row = row_of(place, work, lambda: next(numbers))
        result.complaints = row.complaints
        try:
            for number in range(1, options.rounds + 1):
                line.show(f"{where}, round {number} of {options.rounds}{_last(result)}")
                windows: dict[bool, Window] = {}
                # They take turns at being first.
                for ours in (True, False) if number % 2 else (False, True):
                    measure = row.engine_window if ours else row.limit_window
                    windows[ours] = measure(options.duration, options.warmup)
                result.engine.append(windows[True])
                result.limits.append(windows[False])
                result.path = row.path
        except VerificationError as error:
            # The client has found it; what it says is the finding.
            result.complaints.append(str(error))
        finally:
            line.show(f"{where}, emptying the pool")
            row.close()


def _last(result: StoreResult) -> str:
    if result.gbytes_per_s is None or result.ratio is None:
        return ""
    return f" (until now: {result.gbytes_per_s:.2f} GB/s, {result.ratio:.2f} of the engine)"


def _parameters(works: Sequence[StoreWork], options: StoreOptions) -> dict[str, Any]:
    values: dict[str, list[Any]] = {
        "memory": [work.memory for work in works],
        "located": [work.located for work in works if work.op == "get"] or ["asked"],
        "replicas": [work.replicas for work in works],
        "threads": [work.threads for work in works],
        "footprint": [format_bytes(work.footprint_bytes) for work in works],
    }
    pool = options.pool
    return {
        "rounds": options.rounds,
        "duration": options.duration,
        "warmup": options.warmup,
        "master": None if pool.master is None else str(pool.master),
        "nodes": pool.nodes if pool.master is None else None,
        "dram": pool.dram if pool.master is None else None,
        "store": pool.metadata if pool.master is None else None,
        "fixed": fixed(values),
    }
