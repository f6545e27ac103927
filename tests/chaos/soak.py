# SPDX-License-Identifier: Apache-2.0
"""`make soak`: rounds of traffic and faults for minutes or hours, and what the processes hold of the system meanwhile.

Exits with 1 after the first violation, or when sockets, threads, mappings or memory of the process that is never killed
keep growing.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import statistics
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from chaos.cluster import Cluster
from chaos.faults import Faults
from chaos.rounds import Round, run_round

ROUND_SECONDS = 15.0
#: What the last third of a run may hold beyond the middle third, by the median. Rounds differ by arenas of malloc.
GROWTH_MAX = {"descriptors": 8, "sockets": 0, "threads": 0, "mappings": 24, "rss_bytes": 24 << 20}
# Transfers that began, were completed and stayed unsettled; what the keys of GROWTH_MAX count.
_COLUMNS = ("round", "begun", "done", "unsettled", "GiB", "faults", "fds", "sockets", "threads", "maps", "RSS MiB")
#: Fewer rounds say nothing about growth.
ROUNDS_TO_JUDGE = 9


def growth(values: list[int]) -> float:
    """Return by how much the median of the last third exceeds that of the middle third."""
    third = len(values) // 3
    return statistics.median(values[-third:]) - statistics.median(values[-2 * third : -third])


def grown(rounds: list[Round]) -> list[str]:
    """Name what keeps growing in the process that is never killed."""
    if len(rounds) < ROUNDS_TO_JUDGE:
        return []
    measured = {key: [happened.usage[0][key] for happened in rounds] for key in GROWTH_MAX}
    return [
        f"{key} grew by {growth(values):.0f} from the middle third of the run to the last: {values}"
        for key, values in measured.items()
        if growth(values) > GROWTH_MAX[key]
    ]


def table(rounds: list[Round]) -> Table:
    """Show a line per round, within 80 columns. What processes hold is that of the one that is never killed."""
    shown = Table(*_COLUMNS, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for number, happened in enumerate(rounds):
        counts = happened.counts
        held = dict(happened.usage[0])
        shown.add_row(
            str(number), *(f"{counts[key]}" for key in ("begun", "completed", "unsettled")),
            f"{counts['bytes'] / 2**30:.2f}", str(sum(happened.faults.values())),
            *(f"{held[key] / 2**20:.0f}" if key == "rss_bytes" else str(held[key]) for key in GROWTH_MAX),
        )  # fmt: skip
    return shown


def soak(arguments: argparse.Namespace, console: Console) -> tuple[list[Round], list[str]]:
    """Run rounds until the time is over or something is violated."""
    rounds: list[Round] = []
    chance = random.Random(arguments.seed)
    end = time.monotonic() + arguments.seconds
    with Cluster(arguments.processes, arguments.seed, arguments.transports) as cluster:
        killable = list(range(1, arguments.processes))
        while not rounds or time.monotonic() < end:
            seconds = min(ROUND_SECONDS, max(1.0, end - time.monotonic()))
            rounds.append(run_round(cluster, Faults(cluster, chance, killable), seconds))
            last = rounds[-1]
            faults = ", ".join(f"{count} {name}" for name, count in sorted(last.faults.items()))
            console.print(f"round {len(rounds) - 1}: {last.counts['begun']} transfers; {faults}", soft_wrap=True)
            if last.violations:
                return rounds, last.violations
    return rounds, grown(rounds)


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000), help="repeats the choices of a run")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--transports", default="tcp", help="setting of the engines")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what happened there too")
    arguments = parser.parse_args()
    console = Console()
    console.print(f"soak: {arguments.seconds:.0f} s, {arguments.processes} processes, seed {arguments.seed}")
    rounds, wrong = soak(arguments, console)
    console.print(table(rounds))
    if arguments.json is not None:
        options = {key: value for key, value in vars(arguments).items() if key != "json"}
        report = {**options, "rounds": [vars(happened) for happened in rounds], "wrong": wrong}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for what in wrong:
        console.print(what, markup=False)
    console.print(f"seed {arguments.seed}: {'FAILED' if wrong else 'nothing wrong'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
