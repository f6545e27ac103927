# SPDX-License-Identifier: Apache-2.0
"""``mooncake-bench replay``: its options, and from a trace to what the user sees."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from rich.table import Table

from moonpool.bench.errors import ExitStatus, TraceError, UsageError
from moonpool.bench.jsonform import rounded
from moonpool.bench.options import (
    ADDRESS,
    SECRET,
    SIZE,
    THREADS_MAX,
    Choices,
    ListOf,
    Value,
    count,
    json_option,
    plot_option_of,
)
from moonpool.bench.perform import Ending, report_console, say, write_json
from moonpool.bench.plot import plot_replay
from moonpool.bench.pool.work import STORES
from moonpool.bench.replay.live_command import live_options, perform_live, requests_progress
from moonpool.bench.replay.simulate import POLICIES, Row
from moonpool.bench.replay.simulate import replay as rows_of
from moonpool.bench.replay.trace import BLOCK_TOKENS, Trace, read_trace

__all__ = ["replay"]

_CAPACITY_MAX: Final = 10**9
_CAPACITIES: Final = [1_000, 5_000, 10_000, 30_000, 50_000]
_POLICIES: Final = ["lru", "s3fifo", "prefix", "optimum"]
_SCHEMA: Final = 1
_SPEED_MIN: Final = 1e-3
_SPEED_MAX: Final = 1e9

_EXAMPLES: Final = """\b
Examples:
  mooncake-bench replay trace.jsonl.gz
  mooncake-bench replay trace.jsonl --capacity 10000 --json -
  mooncake-bench replay trace.jsonl --capacity 2000,4000,8000 --policy lru,prefix --plot replay.png
  mooncake-bench replay trace.jsonl --policy prefix,native-prefix     the policy, and the index that masters have
  mooncake-bench replay trace.jsonl.gz --speed 10                     through a live pool, ten times as fast
  mooncake-bench replay trace.jsonl.gz --speed 1 --master master-0:7600 --secret @/etc/moonpool/secret
"""

T = TypeVar("T")


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    # False for what is no number, too.
    if not _SPEED_MIN <= speed <= _SPEED_MAX:
        raise ValueError(f"{text!r} is not a number from {_SPEED_MIN:g} to {_SPEED_MAX:g}")
    return speed


@click.command(epilog=_EXAMPLES)
@click.argument("trace_file", metavar="TRACE", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--capacity",
    "capacities",
    type=ListOf("blocks", count(_CAPACITY_MAX)),
    multiple=True,
    help="Blocks that the pool can hold; may be given several times.  [default: 1000,5000,10000,30000,50000]",
)
@click.option(
    "--policy",
    "policies",
    type=Choices("name", list(POLICIES)),
    multiple=True,
    help="lru, s3fifo, prefix, optimum, bound (where no request has a block twice), and native-lru, native-s3fifo, "
    "native-prefix through the index of the master; may be given several times.  [default: the first four]",
)
@click.option("--requests", type=click.IntRange(1), metavar="N", help="Only the first N of the trace.")
@click.option(
    "--speed",
    type=Value("number", _speed),
    help="Replay it in time, so many times as fast, against a live pool. What follows belongs to this.",
)
@click.option("--master", type=ADDRESS, help="A pool that runs.  [default: one is started on this host]")
@click.option("--secret", type=SECRET, metavar="TEXT|@FILE", help="Cluster secret of --master.")
@click.option("--nodes", type=click.IntRange(1, 64), help="Nodes of the pool that is started.  [default: 1]")
@click.option("--dram", type=Value("size", SIZE), help="What each of them lends.  [default: 256MiB]")
@click.option("--store", type=click.Choice(STORES), help="Where its master keeps metadata.  [default: memory]")
@click.option("--block-size", type=Value("size", SIZE), help="Bytes of one block, a multiple of 8.  [default: 16KiB]")
@click.option(
    "--clients",
    type=click.IntRange(1, THREADS_MAX),
    help="Requests at the same time at most, each by a client of its own.  [default: 4]",
)
@json_option
@plot_option_of("hit ratios over the capacity, or with --speed over time")
@click.pass_context
def replay(ctx: click.Context, /, **given: Any) -> None:
    """Say which part of the blocks of a trace a pool would have had, by its size and eviction policy.

    TRACE has a JSON object for each request and line, possibly compressed with gzip, with the keys timestamp (ms),
    input_length and output_length (tokens) and hash_ids: the blocks of the prompt, where equal numbers are equal
    blocks behind equal prefixes. Nothing is transferred, and time plays no part but for the order of the requests.

    A block is a hit if it and all blocks before it in its request were there. Then every block of the request is put
    or used, and the pool is cut to its size.

    With --speed each request comes at its time instead, and a live pool is asked what is there, which is got and
    compared, and the rest is put. Where nothing came of any request for 30 seconds the pool is gone, which ends it.

    The exit status is 0, 1 for bytes that differ, 2 for a command line that makes no sense, 3 for a trace that cannot
    be read or a live pool that fails, and 130 after Ctrl-C or SIGTERM, which still show what is complete.
    """
    capacities, policies = _flat(given["capacities"]), _flat(given["policies"])
    try:
        options = live_options(given, simulated=bool(capacities or policies))
    except UsageError as error:
        raise click.UsageError(str(error)) from error
    file, outputs = given["trace_file"], (given["json_file"], given["plot_file"])
    try:
        trace = read_trace(file).first(given["requests"])
    except TraceError as error:
        say(str(error))
        ctx.exit(ExitStatus.FAILED)
    if options is None:
        ctx.exit(_perform(file, trace, capacities or _CAPACITIES, policies or _POLICIES, *outputs))
    ctx.exit(perform_live(_header(file, trace), _facts(file, trace), trace, options, *outputs))


def _flat(lists: Sequence[list[T]]) -> list[T]:
    """Return every value once, in the order in which they were given."""
    return list(dict.fromkeys(itertools.chain.from_iterable(lists)))


def _perform(
    file: Path,
    trace: Trace,
    capacities: Sequence[int],
    policies: Sequence[str],
    json_file: str | None,
    plot_file: Path | None,
) -> ExitStatus:
    rows: list[Row] = []
    ending = Ending()
    with ending, requests_progress() as progress:
        task = progress.add_task("", total=len(trace.requests) * len(capacities) * len(policies))
        rows.extend(rows_of(trace, policies, capacities, lambda served: progress.advance(task, served)))
    if json_file != "-":
        console = report_console()
        console.print(_header(file, trace), soft_wrap=True)
        console.print("", _table(rows, capacities, policies), sep="\n")
    if json_file is not None:
        write_json(_document(file, trace, rows, interrupted=ending.interrupted), json_file)
    if plot_file is not None and rows:
        plot_replay(rows, plot_file)
    ending.say()
    return ending.status(verified=True)


def _header(file: Path, trace: Trace) -> str:
    return (
        f"{file.name}: {len(trace.requests):,} requests, {trace.references:,} blocks of {BLOCK_TOKENS} tokens, "
        f"{len(trace.names):,} different"
    )


def _facts(file: Path, trace: Trace) -> dict[str, Any]:
    return {
        "file": file.name,
        "requests": len(trace.requests),
        "references": trace.references,
        "distinct": len(trace.names),
    }


def _table(rows: Sequence[Row], capacities: Sequence[int], policies: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("capacity", *policies):
        table.add_column(name, justify="right")
    ratios = {(row.capacity_blocks, row.policy): f"{row.hit_ratio:.4f}" for row in rows}
    for capacity in capacities:
        table.add_row(f"{capacity:,}", *(ratios.get((capacity, policy), "–") for policy in policies))
    return table


def _document(file: Path, trace: Trace, rows: Sequence[Row], *, interrupted: bool) -> dict[str, Any]:
    return {
        "schema": _SCHEMA,
        "trace": _facts(file, trace),
        "interrupted": interrupted,
        "rows": [
            {
                "policy": row.policy,
                "capacity_blocks": row.capacity_blocks,
                "hit_ratio": rounded(row.hit_ratio),
            }
            for row in rows
        ],
    }
