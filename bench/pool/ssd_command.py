# SPDX-License-Identifier: Apache-2.0
"""``mooncake-bench ssd``: its options, and from measurements to what the user sees."""

from __future__ import annotations

import itertools
import logging
import statistics
import tempfile
from pathlib import Path
from typing import Any, Final

import click
from rich.text import Text

from moonpool.bench.environment import describe_run
from moonpool.bench.errors import ExitStatus
from moonpool.bench.jsonform import SCHEMA, rounded
from moonpool.bench.options import SIZE, ListOf, Value, count, json_option
from moonpool.bench.perform import Ending, StatusLine, fixed, report_console, say, write_json
from moonpool.bench.pool.ssd import SsdResult, SsdWork, measure
from moonpool.bench.report import Column, digits, fitted, header, ratio_text, table_of, verified_text
from moonpool.errors import MoonpoolError
from moonpool.units import format_bytes

__all__ = ["ssd"]

_DEPTH_MAX: Final = 256
_EXAMPLES: Final = """\b
Examples:
  mooncake-bench ssd --path /mnt/nvme                           chunks of 1 MiB, 8 at once
  mooncake-bench ssd --path /mnt/nvme --block-size 64KiB,1MiB,16MiB --depth 1,8,32 --json result.json
"""
_LEGEND: Final = """\
GB/s: payload of chunks that come from the disk into the memory of a node, each looked at; raw: reads of the same blocks
of the same file, as many at once, into buffers. ratio: tier / raw, in turn. Every figure is the median over the rounds.
ok: every byte came back as it was written."""
_COLUMNS: Final[tuple[Column[SsdResult], ...]] = (
    Column("chunk", lambda row: format_bytes(row.work.block_size), left=True),
    Column("depth", lambda row: str(row.work.depth)),
    Column("bytes", lambda row: format_bytes(row.work.footprint_bytes)),
    Column("GB/s", lambda row: digits(_gbytes(row.tier))),
    Column("raw", lambda row: digits(_gbytes(row.raw))),
    Column("ratio", lambda row: ratio_text(row.ratio)),
    Column("", lambda row: verified_text(not row.complaints)),
)


@click.command(epilog=_EXAMPLES)
@click.option(
    "--path",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder on the disk; a file of --footprint is made there and removed.  [default: that for temporary files]",
)
@click.option(
    "--block-size",
    type=ListOf("size", SIZE),
    default="1MiB",
    show_default=True,
    help="Bytes of one chunk: 64KiB, 1MiB.",
)
@click.option(
    "--depth",
    type=ListOf("n", count(_DEPTH_MAX)),
    default="8",
    show_default=True,
    help="Reads at once (`ssd_threads`).",
)
@click.option(
    "--footprint", type=Value("size", SIZE), default="256MiB", show_default=True, help="Payload of all chunks."
)
@click.option("--rounds", type=click.IntRange(1, 1000), default=9, show_default=True, help="Windows of each kind.")
@json_option
@click.pass_context
def ssd(ctx: click.Context, /, **given: Any) -> None:
    """Measure reads from the disk tier of a node, each beside raw reads of the same disk.

    A node's own code writes chunks into a slab, reads them back into memory and looks at each, without a master. The
    limit reads the same blocks of the same file with as many threads (past the page cache where the file system allows
    that, as the node does) and looks at nothing. Each round has a window of either, in turn; after every one of the
    tier all of its memory is compared with what was written.

    The exit status is that of transfer.
    """
    works = [
        SsdWork(size, depth, max(given["footprint"], size))
        for size, depth in itertools.product(given["block_size"], given["depth"])
    ]
    folder = given["path"] or Path(tempfile.gettempdir())
    parameters = {"rounds": given["rounds"], "path": str(folder), "fixed": fixed({"path": [str(folder)]})}
    try:
        environment = describe_run(parameters)
    except MoonpoolError as error:
        say(str(error))
        ctx.exit(ExitStatus.FAILED)
    # What a slab logs is in the errors, or in the column of the report.
    logging.getLogger("moonpool.node").setLevel(logging.ERROR)
    ending, results = Ending(), list[SsdResult]()
    with StatusLine() as line, ending:
        measure(folder, works, given["rounds"], results, line.show)
    results = [result for result in results if result.tier or result.complaints]
    ctx.exit(_told(environment, results, ending, given["json_file"]))


def _told(environment: dict[str, Any], results: list[SsdResult], ending: Ending, json_file: str | None) -> ExitStatus:
    complaints = [f"NOT VERIFIED: {result.work.text}: {text}" for result in results for text in result.complaints]
    if json_file is not None:
        write_json(_document(environment, results, interrupted=ending.interrupted), json_file)
    if json_file != "-" and results:
        console = report_console()
        console.print(header(environment), "", sep="\n")
        fitted(console, table_of(_COLUMNS, results))
        console.print("", Text(_LEGEND, style="dim"), sep="\n")
        if not all(result.direct for result in results):
            console.print(Text("Both go through the page cache: the file system allows nothing else.", style="yellow"))
    for complaint in complaints:
        say(complaint)
    ending.say()
    return ending.status(verified=not complaints)


def _gbytes(rates: list[float]) -> float | None:
    return statistics.median(rates) / 1e9 if rates else None


def _document(environment: dict[str, Any], results: list[SsdResult], *, interrupted: bool) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "environment": environment,
        "interrupted": interrupted,
        "rows": [
            {
                "op": "read",
                "block_size": result.work.block_size,
                "depth": result.work.depth,
                "footprint_bytes": result.work.footprint_bytes,
                "direct": result.direct,
                "gbytes_per_s": rounded(_gbytes(result.tier)),
                "limit": "raw reads",
                "limit_gbytes_per_s": rounded(_gbytes(result.raw)),
                "ratio": rounded(result.ratio),
                "ratios": [rounded(ratio) for ratio in result.ratios],
                "rounds": len(result.tier),
                "verified": not result.complaints,
                "complaints": result.complaints,
            }
            for result in results
        ],
    }
