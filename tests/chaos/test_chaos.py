# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to networks and processes: no wrong byte, no false success, and everything ends."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import pytest

from chaos.cluster import Cluster
from chaos.faults import Faults
from chaos.rounds import run_round
from moonpool.transfer_engine.testing import Corrupt, FaultProxy

if TYPE_CHECKING:
    from moonpool.transfer_engine.testing.rules import Direction

PROCESSES = 3
ROUNDS = 2
ROUND_SECONDS = 15.0


@pytest.mark.parametrize("transports", ["tcp", "auto"])
def test_nothing_breaks_the_engine(chaos_seed: int, transports: str) -> None:
    """The first process is never killed: it sees every peer go and come."""
    chance = random.Random(chaos_seed)
    killable = list(range(1, PROCESSES))
    with Cluster(PROCESSES, chaos_seed, transports) as cluster:
        for number in range(ROUNDS):
            happened = run_round(cluster, Faults(cluster, chance, killable), ROUND_SECONDS)
            assert not happened.violations, f"seed {chaos_seed}, round {number}\n" + "\n".join(happened.violations)
            assert happened.counts["completed"] > 0
            assert sum(happened.faults.values()) > 0


class CorruptLanes:
    """A network that changes bits behind TCP's back: what an engine that moves wrong bytes would look like."""

    def __init__(self, networks: Iterable[FaultProxy], direction: Direction) -> None:
        self.made = Counter({"corrupt": 1})
        self._networks = list(networks)
        self._direction = direction

    def run(self, seconds: float) -> None:
        for network in self._networks:
            network.apply(Corrupt(only="lane", after_bytes=(1 << 12, 1 << 20), direction=self._direction))
        time.sleep(seconds)  # how long there is traffic over such a network
        for network in self._networks:
            network.clear()


@pytest.mark.parametrize("direction", ["to_target", "from_target"])
def test_wrong_bytes_would_be_noticed(direction: Direction) -> None:
    with Cluster(2, seed=1) as cluster:
        violations: list[str] = []
        while not any("wrong bytes" in what or "is not what" in what for what in violations):
            violations += run_round(cluster, CorruptLanes(cluster.networks.values(), direction), 1.0).violations
