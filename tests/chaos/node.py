# SPDX-License-Identifier: Apache-2.0
"""A process of the cluster: an engine that serves regions to the others, and threads of traffic to them.

`engine_testing.processes` starts it; it obeys one JSON line at a time, as `engine_testing.target` does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
from engine_testing.leaks import descriptors, eventually, sockets, threads
from engine_testing.obeying import obey

from chaos.places import AREA_BYTES, KINDS, THREADS, region_name
from chaos.traffic import Traffic
from chaos.words import Octets, older_than
from moonpool.transfer_engine import ClosedError, Region, TransferEngine, digest
from moonpool.transfer_engine.testing import Faults, FaultyEngine

#: Of every process's own transfers. Shared memory has no network that could be broken, so its transfers break here.
FAULTS = Faults(delay=0.1, delay_seconds=(0.0, 0.05), drop=0.01, error=0.02, partial=0.03)


class Inbox:
    """Takes notifications as they come, and looks whether the bytes of that write, or of later ones, are in place."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._memory: dict[int, Octets] = {}
        self._received: dict[str, list[int]] = {}
        self._violations: list[str] = []
        self._found_empty = 0
        self._thread = threading.Thread(target=self._run, name="inbox")
        self._thread.start()

    def announce(self, region: Region) -> None:
        """Know the memory of a region by its key."""
        with self._lock:
            self._memory[region.key] = np.frombuffer(region, np.uint8)

    def forget(self, region: Region) -> None:
        """The region is going to be released."""
        with self._lock:
            self._memory.pop(region.key, None)

    def report(self) -> dict[str, Any]:
        """Return what was received from each sender, and the violations; and begin anew."""
        # When the queue was found empty for the second time, everything before this call has been checked.
        empty = self._found_empty
        eventually(lambda: self._found_empty >= empty + 2)
        with self._lock:
            report = {"received": self._received, "violations": self._violations}
            self._received, self._violations = {}, []
        return report

    def join(self) -> None:
        """Return once the thread has ended, after the engine was closed."""
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                taken = self._engine.notifications(0.05)
            except ClosedError:
                return
            with self._lock:
                self._found_empty += not taken
                for notification in taken:
                    self._check(notification.payload)

    def _check(self, payload: bytes) -> None:
        sender, sequence, key, ranges = json.loads(payload)
        self._received.setdefault(sender, []).append(sequence)
        memory = self._memory.get(key)
        if memory is None:
            return
        for start, length in ranges:
            # A copy: later writes may go on meanwhile.
            wrong = older_than(sequence, start, memory[start : start + length].copy())
            if wrong is not None:
                self._violations.append(
                    f"notified of write {sequence} of {sender} before byte {start + wrong} of region {key} was there"
                )


class Commands:
    """One method per command; the keyword arguments and the result are JSON."""

    def __init__(self, engine: FaultyEngine, setup: dict[str, Any]) -> None:
        self._engine = engine
        self._inbox = Inbox(engine)
        self._generation: int = setup["generation"]
        self._seed: int = setup["seed"]
        # By owner: the generation of its process, and its regions by name.
        self._served: dict[int, tuple[int, dict[str, Region]]] = {}
        self._traffic = [
            Traffic(engine, setup["number"], setup["generation"], thread, setup["seed"]) for thread in range(THREADS)
        ]

    def serve(self, owner: int, generation: int) -> None:
        """Make the regions that process `owner` uses; those of its former generation go, whoever still uses them."""
        self._drop(owner)
        regions = {}
        for kind in KINDS:
            name, nbytes = region_name(owner, generation, kind), THREADS * AREA_BYTES
            regions[name] = (
                self._engine.allocate(nbytes, name)
                if kind == "allocated"
                else self._engine.register(bytearray(nbytes), name)
            )
            self._inbox.announce(regions[name])
        self._served[owner] = generation, regions

    def renew(self, owner: int) -> None:
        """Release the regions of `owner` under its hands, and make new ones of the same names."""
        self.serve(owner, self._served[owner][0])

    def start(self, targets: dict[str, str]) -> None:
        self._engine.set_faults(dataclasses.replace(FAULTS, seed=self._seed))
        for traffic in self._traffic:
            traffic.start({int(number): address for number, address in targets.items()})

    def stop(self) -> None:
        for traffic in self._traffic:
            traffic.stop()

    def settle(self) -> None:
        self._engine.set_faults(Faults())
        for traffic in self._traffic:
            traffic.settle()

    def report(self) -> dict[str, Any]:
        """What this process did to others, and what it saw of what they did."""
        return {
            "traffic": [traffic.report() for traffic in self._traffic],
            "expected": {key: value for traffic in self._traffic for key, value in traffic.expected().items()},
            "inbox": self._inbox.report(),
            "found": self._found(),
            "incarnation": self._engine.incarnation,
            "generation": self._generation,
        }

    def usage(self, sockets_max: int) -> dict[str, int]:
        """What this process holds of the system, once it has closed all sockets but so many."""
        eventually(lambda: sockets() <= sockets_max)
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
            "descriptors": len(descriptors()),
            "sockets": sockets(),
            "threads": len(threads()),
            "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
            "rss_bytes": resident_pages * os.sysconf("SC_PAGE_SIZE"),
        }

    def stats(self) -> dict[str, Any]:
        return self._engine.stats()

    def close(self) -> None:
        self.stop()
        self._engine.close()
        self._inbox.join()

    def _drop(self, owner: int) -> None:
        for region in self._served.pop(owner, (0, {}))[1].values():
            self._inbox.forget(region)
            region.release()

    def _found(self) -> dict[str, int]:
        """Return the digest of each area of each region that is served here, in the terms of `Traffic.expected`."""
        found = {}
        for _, regions in self._served.values():
            for region in regions.values():
                view = memoryview(region)
                for base in range(0, region.nbytes, AREA_BYTES):
                    key = f"{self._engine.incarnation} {region.key} {base}"
                    found[key] = digest(view[base : base + AREA_BYTES])
        return found


def left_behind(before: tuple[set[str], dict[str, str]]) -> list[str]:
    """Name the threads and descriptors that were not there before."""
    new = {fd: target for fd, target in descriptors().items() if before[1].get(fd) != target}
    return [*sorted(threads() - before[0]), *(f"descriptor {fd}: {target}" for fd, target in new.items())]


def main(setup: dict[str, Any]) -> None:
    before = threads(), descriptors()
    engine = FaultyEngine(FAULTS, f"node-{setup['number']}", **setup["options"])
    commands = Commands(engine, setup)
    try:
        obey(commands, {"address": engine.address, "incarnation": engine.incarnation})
    finally:
        commands.close()
    # The kernel takes a moment to remove a thread that was joined.
    if not eventually(lambda: not left_behind(before), timeout=5.0):
        raise SystemExit(f"left behind: {left_behind(before)}")


if __name__ == "__main__":
    import sys

    main(json.loads(sys.argv[1]))
