# SPDX-License-Identifier: Apache-2.0
"""The program that `engine_testing.processes.Target` runs: an engine that does what it is told."""

from __future__ import annotations

import json
import mmap
import os
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engine_testing.fixtures import PATIENT
from engine_testing.obeying import obey
from engine_testing.patterns import fill, pattern
from engine_testing.places import enter
from moonpool.transfer_engine import MoonpoolError, Peer, Region, Transfer, TransferEngine


class Commands:
    """One method per command; the keyword arguments and the result are JSON."""

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        self.regions: dict[str, Region] = {}
        self.peers: list[Peer] = []
        self.transfer: Transfer | None = None

    def allocate(self, name: str, nbytes: int) -> None:
        self.regions[name] = self.engine.allocate(nbytes, name)
        fill(self.regions[name])

    def register(self, name: str, nbytes: int, writable: bool) -> None:
        memory = bytearray(nbytes)
        fill(memory)
        self.regions[name] = self.engine.register(memory if writable else bytes(memory), name, writable=writable)

    def register_file(self, name: str, path: str, nbytes: int) -> None:
        """A region over a shared file, whose bytes can be looked at after this process was killed."""
        with open(path, "r+b") as file:  # noqa: PTH123 - only its descriptor is of interest
            self.regions[name] = self.engine.register(mmap.mmap(file.fileno(), nbytes), name)

    def release(self, name: str) -> None:
        self.regions[name].release()

    def intact(self, name: str) -> bool:
        """Whether the region holds the bytes it was filled with."""
        region = self.regions[name]
        return bytes(region) == pattern(region.nbytes)

    def content(self, name: str, offset: int, length: int) -> str:
        return bytes(memoryview(self.regions[name])[offset : offset + length]).hex()

    def notifications(self, timeout: float) -> list[str]:
        return [notification.payload.hex() for notification in self.engine.notifications(timeout)]

    def check_announced(self, name: str, slot: int, timeout: float) -> list[tuple[int, bool]]:
        """Take the notifications "<offset> <length> <byte>" that are there; say of which slot, and if it holds that."""
        view = memoryview(self.regions[name])
        checked = []
        for notification in self.engine.notifications(timeout):
            offset, length, byte = map(int, notification.payload.split())
            checked.append((offset // slot, bytes(view[offset : offset + length]) == bytes([byte]) * length))
        return checked

    def become_another_program(self) -> None:
        """Go on as a program that has this process's number and nothing else of it; it answers once."""
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-c", "import sys; print('null', flush=True); sys.stdin.read()"])

    def stats(self) -> dict[str, Any]:
        return self.engine.stats()

    def cpu_seconds(self) -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    def connect(self, address: str) -> dict[str, str]:
        """Connect to another engine. The other commands use the peer that was connected last."""
        peer = self.engine.connect(address)
        self.peers.append(peer)
        return {"path": peer.path, "fallback": peer.fallback}

    def disconnect(self) -> None:
        self.peers.pop().close()

    def read(self, name: str) -> dict[str, Any]:
        """Read a whole region of the peer; say whether it is what it was filled with, and which path moved it."""
        peer = self.peers[-1]
        remote = peer.regions.wait(name, 90.0)
        local = self.engine.allocate(remote.nbytes)
        before = self._moved()
        self.engine.read(peer, local, remote).wait()
        paths = [path for path, nbytes in self._moved().items() if nbytes > before[path]]
        return {"intact": bytes(local) == pattern(local.nbytes), "paths": paths}

    def _moved(self) -> dict[str, int]:
        return {path: counters["read_bytes"] for path, counters in self.engine.stats()["paths"].items()}

    def begin_write(self, name: str, block: int) -> None:
        """Begin to fill a region of the peer with the pattern of seed 1, in blocks that have a status of their own."""
        peer = self.peers[-1]
        remote = peer.regions.wait(name, 90.0)
        local = self.engine.allocate(remote.nbytes)
        fill(local, seed=1)
        blocks = [(local, at, remote, at, block) for at in range(0, remote.nbytes, block)]
        self.transfer = self.engine.write(peer, blocks)

    def end_write(self) -> dict[str, Any]:
        """Wait for it, and give back its state and the status of each block."""
        assert self.transfer is not None
        error = ""
        try:
            self.transfer.wait()
        except MoonpoolError as caught:
            error = f"{type(caught).__name__}: {caught}"
        return {"state": self.transfer.state.name, "statuses": list(self.transfer.statuses), "error": error}

    def touch(self, name: str) -> None:
        """Read a byte of a region of the peer, so that it is mapped."""
        peer = self.peers[-1]
        self.engine.read(peer, self.engine.allocate(1), peer.regions.wait(name, 90.0), 0, 0, 1).wait()

    def connect_many(self, address: str, count: int, name: str, transports: str = "tcp") -> int:
        """Connect `count` engines to `address` at once; return how many then read the right bytes, all together."""
        engines = [
            TransferEngine(f"client-{index}", listen=None, transports=transports, io_threads=1, lanes=1, **PATIENT)
            for index in range(count)
        ]
        good = 0
        try:
            with ThreadPoolExecutor(count) as pool:
                peers = list(pool.map(lambda engine: engine.connect(address), engines))
            # Every one of them is connected now, and stays so while all read.
            transfers = []
            for engine, peer in zip(engines, peers, strict=True):
                local = engine.allocate(peer.regions[name].nbytes)
                transfers.append((local, engine.read(peer, local, peer.regions[name])))
            for local, transfer in transfers:
                transfer.wait()
                good += bytes(local) == pattern(local.nbytes)
        finally:
            for engine in engines:
                engine.close()
        return good


def main() -> None:
    setup = json.loads(sys.argv[1])

    def open_engine() -> TransferEngine:
        return TransferEngine("target", **{"listen": "127.0.0.1:0", **PATIENT, **setup["options"]})

    with enter(open_engine, **setup["place"]) as engine:
        commands = Commands(engine)
        for name, nbytes in setup["regions"].items():
            commands.allocate(name, nbytes)
        obey(commands, {"address": engine.address, "incarnation": engine.incarnation})


if __name__ == "__main__":
    main()
