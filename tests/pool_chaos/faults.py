# SPDX-License-Identifier: Apache-2.0
"""Faults of a pool at random moments, several at once, but one at a time for each process."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path

from store_testing import key, locate, spoil
from store_testing.workload import KEYS, NAMESPACE

from moonpool.errors import MoonpoolError
from moonpool.node.slab import EXTENTS_AT
from moonpool.store_client import StoreClient
from pool_chaos.place import MASTERS, NODES, SSD, THREADS, Place

#: A fault that is on from its `yield` to what comes after it.
_Lasting = Iterator[None]
_Fault = Callable[[random.Random, int], _Lasting]
#: Shorter and longer than what masters, sessions and leases put up with.
_HOLDS = (0.1, 0.5, 1.0, 3.0, 6.0)
_SPOILT_AT_ONCE = 20


class Faults:
    """Makes faults for a while, and ends all of them.

    Args:
        place: where.
        chance: decides which ones, when and for how long.
        overseer: a client that drains, and finds what to spoil.

    Attributes:
        made: how many of each.
        failures: of processes that should have started or ended and did not.
    """

    def __init__(self, place: Place, chance: random.Random, overseer: StoreClient) -> None:
        self._place = place
        self._chance = chance
        self._overseer = overseer
        self._lasting: dict[str, Future[None]] = {}
        self.made: Counter[str] = Counter()
        self.failures: list[str] = []
        self._choices: dict[str, list[_Fault]] = {
            "etcd": [self._kill_member, self._stop_member, self._end_member, self._stop_etcd],
            "segment": [self._drain],
            "memory": [self._spoil_memory],
            "disk": [self._spoil_disk],
        }
        masters = [self._kill_master, self._stop_master, self._end_master]
        nodes = [self._kill_node, self._stop_node, self._end_node]
        self._choices |= {f"master {index}": masters for index in range(MASTERS)}
        self._choices |= {f"node {index}": nodes for index in range(NODES)}
        for index in range(len(place.clients)):
            # The first one shows what grows.
            some = [self._kill_client, self._stop_client, self._end_client]
            self._choices[f"client {index}"] = some if index else [self._stop_client]

    def run(self, seconds: float) -> None:
        """Make faults for so long; afterwards there is none, but processes may be down that did not come back."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._collect()
            if len(self._lasting) < THREADS:
                self._begin()
            # This is the pace of the faults, not a wait for anything.
            time.sleep(self._chance.uniform(0.05, 0.5))
        wait(self._lasting.values())
        self._collect()

    def _collect(self) -> None:
        for target in [target for target, future in self._lasting.items() if future.done()]:
            error = self._lasting.pop(target).exception()
            if error is not None:
                self.failures.append(f"{target}: {type(error).__name__}: {error}")

    def _begin(self) -> None:
        target = self._chance.choice([target for target in self._choices if target not in self._lasting])
        fault, hold = self._chance.choice(self._choices[target]), self._chance.choice(_HOLDS)
        # One of its own, so that what comes of one fault does not change the choices of another.
        chance = random.Random(self._chance.random())
        number = int(target.split()[1]) if " " in target else 0
        self.made[fault.__name__.strip("_").replace("_", " ")] += 1
        self._lasting[target] = self._place.threads.submit(self._make, fault, chance, number, hold)

    def _make(self, fault: _Fault, chance: random.Random, number: int, hold: float) -> None:
        with contextmanager(fault)(chance, number):
            time.sleep(hold)

    # ---------------------------------------------------------------- etcd

    def _kill_member(self, chance: random.Random, _: int) -> _Lasting:
        member = chance.choice(self._place.etcd.members)
        member.kill()
        yield
        member.start(self._place.etcd.members)

    def _end_member(self, chance: random.Random, _: int) -> _Lasting:
        member = chance.choice(self._place.etcd.members)
        member.leave()
        yield
        member.start(self._place.etcd.members)

    def _stop_member(self, chance: random.Random, _: int) -> _Lasting:
        member = chance.choice(self._place.etcd.members)
        member.stop()
        yield
        member.go_on()

    def _stop_etcd(self, _: random.Random, __: int) -> _Lasting:
        for member in self._place.etcd.members:
            member.stop()
        yield
        for member in self._place.etcd.members:
            member.go_on()

    # ---------------------------------------------------------------- masters, nodes, clients

    def _kill_master(self, _: random.Random, number: int) -> _Lasting:
        self._place.pool.kill_master(number)
        yield
        self._place.pool.start_master(number)

    def _end_master(self, _: random.Random, number: int) -> _Lasting:
        self._place.pool.stop_master(number)
        yield
        self._place.pool.start_master(number)

    def _stop_master(self, _: random.Random, number: int) -> _Lasting:
        self._place.pool.signal_master(number, signal.SIGSTOP)
        yield
        self._place.pool.signal_master(number, signal.SIGCONT)

    def _kill_node(self, _: random.Random, number: int) -> _Lasting:
        self._place.pool.kill_node(number)
        yield
        self._place.pool.start_node(number)

    def _end_node(self, _: random.Random, number: int) -> _Lasting:
        self._place.pool.stop_node(number)
        yield
        self._place.pool.start_node(number)

    def _stop_node(self, _: random.Random, number: int) -> _Lasting:
        self._place.pool.signal_node(number, signal.SIGSTOP)
        yield
        self._place.pool.signal_node(number, signal.SIGCONT)

    def _kill_client(self, _: random.Random, number: int) -> _Lasting:
        self._place.clients[number].kill()
        yield
        self._place.clients[number].start()

    def _end_client(self, _: random.Random, number: int) -> _Lasting:
        self._place.clients[number].leave()
        yield
        self._place.clients[number].start()

    def _stop_client(self, _: random.Random, number: int) -> _Lasting:
        self._place.clients[number].signal(signal.SIGSTOP)
        yield
        self._place.clients[number].signal(signal.SIGCONT)

    # ---------------------------------------------------------------- what is kept

    def _drain(self, chance: random.Random, _: int) -> _Lasting:
        """Somebody drains a segment, and takes it back. What comes in between may keep either from being heard."""
        number = None
        try:
            segments = self._overseer.segments()
            if segments:
                number = chance.choice(segments).segment
                self._overseer.drain(number)
        except MoonpoolError as error:
            self.made[f"drain: {type(error).__name__}"] += 1
        yield
        try:
            if number is not None:
                self._overseer.drain(number, undo=True)
        except MoonpoolError as error:
            self.made[f"drain: {type(error).__name__}"] += 1

    def _spoil_memory(self, chance: random.Random, _: int) -> _Lasting:
        """Change a byte of each of some extents, wherever: of the header, its digest, or the payload."""
        hashes = [key(number) for number in chance.sample(range(KEYS), _SPOILT_AT_ONCE)]
        try:
            for extent, *_rest in locate(self._overseer, NAMESPACE, hashes):
                if extent["generation"]:
                    spoil(self._overseer, extent, chance.randrange(64 + int(extent["length"])))
                    self.made["bytes spoilt in memory"] += 1
        except MoonpoolError as error:
            self.made[f"spoil: {type(error).__name__}"] += 1
        yield

    def _spoil_disk(self, chance: random.Random, _: int) -> _Lasting:
        """Change bytes of a slab, but not of its facts: without those it would be another one."""
        slab = chance.choice([self._place.pool.slab(index) for index in range(NODES)])
        for _attempt in range(_SPOILT_AT_ONCE):
            _flip(slab, EXTENTS_AT + chance.randrange(SSD))
            self.made["bytes spoilt on disks"] += 1
        yield


def _flip(path: Path, at: int) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        (byte,) = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([byte ^ 0xFF]), at)
        os.fdatasync(fd)
    finally:
        os.close(fd)
