# SPDX-License-Identifier: Apache-2.0
"""A round: traffic under faults, then calm, then the verdict on everything that happened."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

from chaos.cluster import Cluster


class FaultMaker(Protocol):
    """What makes the faults of a round: `chaos.faults.Faults`."""

    #: How many of each.
    made: Counter[str]

    def run(self, seconds: float) -> None:
        """Make faults for so long; afterwards there is none."""


@dataclass
class Round:
    """What happened in a round.

    Attributes:
        counts: of transfers: begun, completed, failed by code, unsettled; bytes moved.
        faults: how many of each.
        usage: of each process, after it: descriptors, sockets, threads, mappings, rss_bytes.
        violations: what must never happen, in words.
    """

    counts: Counter[str]
    faults: Counter[str]
    usage: list[dict[str, int]]
    violations: list[str]


def run_round(cluster: Cluster, faults: FaultMaker, seconds: float) -> Round:
    """Run one round of so many seconds of faults."""
    cluster.start_traffic()
    faults.run(seconds)
    cluster.calm()
    cluster.settle()
    reports: list[dict[str, Any]] = cluster.all(lambda program: program.ask("report"))
    counts: Counter[str] = Counter()
    violations: list[str] = []
    for report in reports:
        for traffic in report["traffic"]:
            counts.update(traffic["counts"])
            violations += traffic["violations"]
        violations += report["inbox"]["violations"]
    sockets_max = cluster.sockets_max()
    usage = cluster.all(lambda program: program.ask("usage", sockets_max=sockets_max))
    violations += _memory(reports) + _notifications(reports)
    violations += [
        f"process {number} has {held['sockets']} sockets, more than {sockets_max}"
        for number, held in enumerate(usage)
        if held["sockets"] > sockets_max
    ]
    return Round(counts, faults.made, usage, violations)


def _memory(reports: list[dict[str, Any]]) -> list[str]:
    """Every region holds what its writers say, by the look of the process that owns the memory."""
    found = {key: value for report in reports for key, value in report["found"].items()}
    return [
        f"an area of process {number} at its peer is not what the reported writes make it: {key}"
        for number, report in enumerate(reports)
        for key, value in report["expected"].items()
        if found.get(key) != value
    ]


def _notifications(reports: list[dict[str, Any]]) -> list[str]:
    """Delivered once when the transfer completed, and never when bytes were missing."""
    inboxes = {report["incarnation"]: report["inbox"]["received"] for report in reports}
    wrong = []
    for number, report in enumerate(reports):
        for thread, traffic in enumerate(report["traffic"]):
            for incarnation, ledger in traffic["ledgers"].items():
                # Those of a process that was killed went with it.
                if incarnation not in inboxes:
                    continue
                received = set(inboxes[incarnation].get(f"{number}.{report['generation']}.{thread}", []))
                who = f"of {number}.{thread}"
                missing, unwanted = set(ledger["must"]) - received, set(ledger["must_not"]) & received
                wrong += [f"transfer {sequence} {who} completed without its notification" for sequence in missing]
                wrong += [f"transfer {sequence} {who} failed, and its notification came" for sequence in unwanted]
    for received in inboxes.values():
        for sender, sequences in received.items():
            twice = [sequence for sequence, count in Counter(sequences).items() if count > 1]
            wrong += [f"notification {sequence} of {sender} came twice" for sequence in twice]
    return wrong
