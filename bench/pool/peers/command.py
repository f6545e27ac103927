# SPDX-License-Identifier: Apache-2.0
"""``mooncake-bench store --backends`` and ``mooncake-bench master --backends``: from rows to what the user sees."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

from moonpool.bench.compare import REFERENCE, CompareOptions, Comparison
from moonpool.bench.compare_progress import CompareProgress
from moonpool.bench.environment import describe_run
from moonpool.bench.errors import ExitStatus, UsageError
from moonpool.bench.perform import Ending, StatusLine, fixed, report_console, say, write_json
from moonpool.bench.pool.peers import report
from moonpool.bench.pool.peers.base import PeerOptions
from moonpool.bench.pool.peers.contender import PoolContender
from moonpool.bench.pool.work import dram_needed_by
from moonpool.bench.work import Work
from moonpool.errors import MoonpoolError
from moonpool.units import format_bytes

__all__ = ["compare_pools"]

_MASTER_DRAM: Final = 1 << 30


def compare_pools(
    works: Sequence[Work],
    names: Sequence[str],
    timing: tuple[int, float, float],
    *,
    dram: int | None,
    metadata: str,
    json_file: str | None,
) -> ExitStatus:
    """Measure rows through several pools in turn, and show what was found, also after Ctrl-C or a failure.

    Args:
        works: the rows.
        names: of the pools.
        timing: rounds, and seconds of a window and of its warm-up.
        dram: bytes that the node of each lends; None: what the rows need.
        metadata: where the master of this project keeps metadata.
        json_file: where the JSON form goes.

    Returns:
        The exit status.

    Raises:
        UsageError: a pool is named twice.
    """
    if len(set(names)) < len(names):
        raise UsageError("a pool is named more than once", hint="each once in --backends")
    lent = dram or max(_MASTER_DRAM if works[0].transport == "master" else 0, dram_needed_by(works))
    peers = PeerOptions(
        lent, metadata, max(work.footprint_bytes for work in works), max(work.threads for work in works)
    )  # fmt: skip
    options = CompareOptions(names, "auto", *timing)
    try:
        environment = describe_run(_parameters(works, options, peers))
    except MoonpoolError as error:
        say(str(error))
        return ExitStatus.FAILED
    logging.getLogger("moonpool.store_client").setLevel(logging.ERROR)
    ending = Ending()
    with StatusLine() as line:
        progress = _Progress(line, options.rounds, report.text_of)
        comparison = Comparison(options, progress, lambda name, *_: PoolContender(name, peers))
        with ending, comparison:
            comparison.run(works)
    environment["versions"] = {name: version for name, version in comparison.versions.items() if version}
    rows = progress.rows
    if json_file != "-" and rows:
        report.print_report(report_console(), environment, rows, comparison.skipped)
    if json_file is not None:
        write_json(report.document(environment, rows, comparison.skipped, interrupted=ending.interrupted), json_file)
    ending.say()
    # Wrong bytes of another store are a finding about that store.
    ours = [entry for row in rows for name, entry in row.entries.items() if name == REFERENCE]
    return ending.status(verified=all(entry.result.verified for entry in ours))


class _Progress(CompareProgress):
    """Says, too, that a row is got ready: pools are started, and filled."""

    def row_begins(self, number: int, count: int, work: Work) -> None:
        super().row_begins(number, count, work)
        self._line.show(f"{self._where}, preparing")


def _parameters(works: Sequence[Work], options: CompareOptions, peers: PeerOptions) -> dict[str, Any]:
    values: dict[str, list[Any]] = {
        "threads": [work.threads for work in works],
        "footprint": [format_bytes(work.footprint_bytes) for work in works],
        "dram": [format_bytes(peers.dram)],
        "store": [peers.metadata],
    }
    return {
        "rounds": options.rounds,
        "duration": options.duration,
        "warmup": options.warmup,
        "backends": list(options.backends),
        "dram": peers.dram,
        "store": peers.metadata,
        "fixed": fixed(values),
    }
