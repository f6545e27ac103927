# SPDX-License-Identifier: Apache-2.0
"""`make soak` of the pool: rounds of faults under a checked workload, for minutes or hours.

Every get is a miss, a typed error or exactly the bytes that were put, and every call ends in its time. Exits with 1
after the first round in which something was not as it must be, or when at the end a gauge does not return to 0.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from chaos.soak import ROUNDS_TO_JUDGE, growth
from rich.console import Console

from moonpool.store_client import StoreClient
from pool_chaos.faults import Faults
from pool_chaos.place import CLIENTS, Place
from pool_chaos.verdict import nothing_left, too_much, usage_of, well_again

ROUND_SECONDS = 30.0
#: What the client that is never killed may hold more in the last third of a run than in the middle third, by the
#: median. It opens a client after the other, so that rounds find it with more connections or with fewer.
GROWTH_MAX = {"descriptors": 24, "sockets": 16, "threads": 12, "mappings": 64, "rss_bytes": 32 << 20}


@dataclass
class Happened:
    """What came of a run.

    Attributes:
        faults: how many of each.
        seen: outcomes and errors of calls.
        usage: of each process by name, after each round.
        wrong: what must never happen, in words.
    """

    faults: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    usage: list[dict[str, dict[str, int]]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def grown(usage: list[dict[str, dict[str, int]]]) -> list[str]:
    """Name what keeps growing in the client that is never killed."""
    if len(usage) < ROUNDS_TO_JUDGE:
        return []
    measured = {what: [held["client 0"][what] for held in usage] for what in GROWTH_MAX}
    return [
        f"{what} of client 0 grew: {values}" for what, values in measured.items() if growth(values) > GROWTH_MAX[what]
    ]


def soak(seconds: float, seed: int, say: Callable[[str], None], clients: int = CLIENTS) -> Happened:
    """Run rounds until the time is over or something is wrong, and then look whether anything stays."""
    happened = Happened()
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="moonpool-soak-") as folder, Place(Path(folder), seed, clients) as place:
        end = time.monotonic() + seconds
        with place.pool.client(timeout=10.0) as overseer:
            number = 0
            while not happened.wrong and (number == 0 or time.monotonic() < end):
                _round(place, chance, overseer, min(ROUND_SECONDS, max(5.0, end - time.monotonic())), happened, say)
                number += 1
            _end(place, overseer, happened)
    happened.wrong += grown(happened.usage)
    return happened


def _round(
    place: Place,
    chance: random.Random,
    overseer: StoreClient,
    seconds: float,
    happened: Happened,
    say: Callable[[str], None],
) -> None:
    faults = Faults(place, chance, overseer)
    faults.run(seconds)
    gone = place.heal()
    if gone:
        happened.wrong += faults.failures + gone
        return
    usage = {name: usage_of(pid) for name, pid in place.pids().items()}
    happened.faults += faults.made
    happened.usage.append(usage)
    reports = [client.found() for client in place.clients]
    happened.seen = sum((seen for seen, _ in reports), Counter())
    happened.wrong += [what for _, wrong in reports for what in wrong]
    happened.wrong += faults.failures + well_again(overseer) + too_much(usage)
    made = ", ".join(f"{count} {name}" for name, count in sorted(faults.made.items()))
    say(f"round {len(happened.usage) - 1}: {happened.seen.total()} outcomes so far; {made}")


def _end(place: Place, overseer: StoreClient, happened: Happened) -> None:
    for client in place.clients:
        client.leave()
    reports = [client.found() for client in place.clients]
    happened.seen = sum((seen for seen, _ in reports), Counter())
    # What the last round has told already is told again.
    told = [what for _, wrong in reports for what in wrong] + nothing_left(overseer)
    happened.wrong += [what for what in told if what not in happened.wrong]


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000), help="repeats the choices of a run")
    parser.add_argument("--clients", type=int, default=CLIENTS, help="client processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what happened there too")
    arguments = parser.parse_args()
    console = Console()
    console.print(f"soak of the pool: {arguments.seconds:.0f} s, seed {arguments.seed}")

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    happened = soak(arguments.seconds, arguments.seed, say, arguments.clients)
    if arguments.json is not None:
        options = {name: value for name, value in vars(arguments).items() if name != "json"}
        arguments.json.write_text(json.dumps({**options, **vars(happened)}, indent=1) + "\n", encoding="utf-8")
    say(f"faults: {dict(sorted(happened.faults.items()))}")
    say(f"outcomes: {dict(sorted(happened.seen.items()))}")
    for what in happened.wrong:
        say(what)
    say(f"seed {arguments.seed}: {'FAILED' if happened.wrong else 'nothing wrong'}")
    return 1 if happened.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
