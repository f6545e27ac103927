# SPDX-License-Identifier: Apache-2.0
"""Faults at random moments: of the networks, several at once; of the processes, one at a time."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from chaos.cluster import Cluster
from moonpool.transfer_engine.testing import Cut, Delay, FaultProxy, Refuse, Reorder

#: Starts a fault, and returns what ends it.
_Fault = Callable[[], "_End | None"]
_End = Callable[[], None]
_NETWORK_FAULTS_MAX = 2


class _Lasting(NamedTuple):
    """A fault that is on, until a moment."""

    until: float
    end: _End
    what: FaultProxy | Cluster


class Faults:
    """Makes faults for a while, and ends all of them.

    Args:
        cluster: where.
        chance: decides which ones, when and for how long.
        killable: numbers of the processes that may be killed and restarted.

    Attributes:
        made: how many of each.
    """

    def __init__(self, cluster: Cluster, chance: random.Random, killable: list[int]) -> None:
        self._cluster = cluster
        self._chance = chance
        self._killable = killable
        self._lasting: list[_Lasting] = []
        self.made: Counter[str] = Counter()

    def run(self, seconds: float) -> None:
        """Make faults for so long; afterwards there is none."""
        end = time.monotonic() + seconds
        try:
            while (now := time.monotonic()) < end:
                for fault in [fault for fault in self._lasting if fault.until <= now]:
                    self._lasting.remove(fault)
                    fault.end()
                self._make_one()
                # This is the pace of the faults, not a wait for anything.
                time.sleep(self._chance.uniform(0.02, 0.3))
        finally:
            for fault in self._lasting:
                fault.end()
            self._lasting.clear()

    def _make_one(self) -> None:
        if self._chance.random() < 0.25:
            if not any(fault.what is self._cluster for fault in self._lasting):
                choices = [self._stop_process, self._renew_regions]
                self._begin(
                    self._cluster, self._chance.choice(choices + [self._kill, self._leave] * bool(self._killable))
                )
            return
        network = self._chance.choice(list(self._cluster.networks.values()))
        busy = {id(fault.what) for fault in self._lasting if fault.what is not self._cluster}
        if id(network) not in busy and len(busy) < _NETWORK_FAULTS_MAX:
            make = self._chance.choice(
                [self._stall, self._cut, self._cut_later, self._delay, self._refuse, self._reorder]
            )
            self._begin(network, lambda: make(network))

    def _begin(self, what: FaultProxy | Cluster, fault: _Fault) -> None:
        # A lane counts as broken after a second without progress: shorter and longer than that.
        until = time.monotonic() + self._chance.choice([0.05, 0.3, 1.0, 2.5])
        end = fault()
        if end is not None:
            self._lasting.append(_Lasting(until, end, what))

    # ---------------------------------------------------------------- networks

    def _some(self) -> dict[str, object]:
        """Of which connections: everything, one kind, or a single one of a kind."""
        only = self._chance.choice([None, "lane", "lane", "control"])
        return {"only": only, "count": self._chance.choice([None, 1]) if only else None}

    def _stall(self, network: FaultProxy) -> _End:
        some = self._some()
        self.made[f"stall {some['only'] or 'all'}"] += 1
        network.stall(**some)  # type: ignore[arg-type]
        return network.resume

    def _cut(self, network: FaultProxy) -> None:
        some, reset = self._some(), self._chance.random() < 0.5
        self.made[f"{'reset' if reset else 'end'} {some['only'] or 'all'}"] += 1
        network.cut(reset=reset, **some)  # type: ignore[arg-type]

    def _cut_later(self, network: FaultProxy) -> _End:
        self.made["cut in the middle"] += 1
        reset = self._chance.random() < 0.5
        network.apply(Cut(only="lane", after_bytes=(0, 1 << 20), reset=reset, probability=0.5))
        return network.clear

    def _delay(self, network: FaultProxy) -> _End:
        self.made["delay"] += 1
        # Single lanes; the others overtake them.
        network.apply(Delay(only=self._chance.choice(["lane", None]), seconds=(0.0, 0.02), probability=0.5))
        return network.clear

    def _refuse(self, network: FaultProxy) -> _End:
        self.made["refuse"] += 1
        network.apply(Refuse(only=self._chance.choice(["lane", "control", None]), probability=0.7))
        network.cut(only="lane")
        return network.clear

    def _reorder(self, network: FaultProxy) -> _End:
        self.made["reorder accepts"] += 1
        network.apply(Reorder(hold=8, seconds=(0.0, 0.1)))
        network.cut()
        return network.clear

    # ---------------------------------------------------------------- processes

    def _stop_process(self) -> _End:
        number = self._chance.randrange(self._cluster.size)
        self.made["SIGSTOP"] += 1
        self._cluster.pause(number)
        return lambda: self._cluster.resume(number)

    def _kill(self) -> _End:
        number = self._chance.choice(self._killable)
        self.made["SIGKILL"] += 1
        self._cluster.kill(number)
        return lambda: self._cluster.restart(number)

    def _leave(self) -> _End:
        number = self._chance.choice(self._killable)
        self.made["leave"] += 1
        self._cluster.leave(number)
        return lambda: self._cluster.restart(number)

    def _renew_regions(self) -> None:
        number, owner = self._chance.sample(range(self._cluster.size), 2)
        self.made["regions released"] += 1
        self._cluster.renew(number, owner)
