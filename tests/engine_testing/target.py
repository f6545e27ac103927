# SPDX-License-Identifier: Apache-2.0
"""The program that `engine_testing.processes.Target` runs: an engine that obeys one JSON line at a time.

The first line it writes says that it is ready. It ends when its standard input does.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from engine_testing.patterns import fill, pattern
from moonpool.transfer_engine import Peer, Region, TransferEngine


class Commands:
    """One method per command; the keyword arguments and the result are JSON."""

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        self.regions: dict[str, Region] = {}
        self.peers: list[Peer] = []

    def allocate(self, name: str, nbytes: int) -> None:
        self.regions[name] = self.engine.allocate(nbytes, name)
        fill(self.regions[name])

    def register(self, name: str, nbytes: int, writable: bool) -> None:
        memory = bytearray(nbytes)
        fill(memory)
        self.regions[name] = self.engine.register(memory if writable else bytes(memory), name, writable=writable)

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

    def check_announced(self, name: str, count: int, timeout: float) -> list[bool]:
        """Take `count` notifications "<offset> <length> <byte>" and say of each whether that byte stands there."""
        view = memoryview(self.regions[name])
        deadline = time.monotonic() + timeout
        matched: list[bool] = []
        while len(matched) < count and time.monotonic() < deadline:
            for notification in self.engine.notifications(0.5):
                offset, length, byte = map(int, notification.payload.split())
                matched.append(bytes(view[offset : offset + length]) == bytes([byte]) * length)
        return matched

    def stats(self) -> dict[str, Any]:
        return self.engine.stats()

    def cpu_seconds(self) -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    def connect_many(self, address: str, count: int, name: str) -> int:
        """Open `count` engines that connect to `address` and read a region each; return how many got its bytes."""
        good = 0
        engines = [
            TransferEngine(f"client-{index}", listen=None, transports="tcp", io_threads=1, lanes=1)
            for index in range(count)
        ]
        try:
            for engine in engines:
                peer = engine.connect(address, timeout=60.0)
                remote = peer.regions[name]
                local = engine.allocate(remote.nbytes)
                engine.read(peer, local, remote).wait()
                good += bytes(local) == pattern(remote.nbytes)
        finally:
            for engine in engines:
                engine.close()
        return good


def main() -> None:
    setup = json.loads(sys.argv[1])
    with TransferEngine("target", **{"listen": "127.0.0.1:0", **setup["options"]}) as engine:
        commands = Commands(engine)
        for name, nbytes in setup["regions"].items():
            commands.allocate(name, nbytes)
        answer({"address": engine.address, "incarnation": engine.incarnation})
        for line in sys.stdin:
            message = json.loads(line)
            command: Callable[..., Any] = getattr(commands, message.pop("command"))
            try:
                answer(command(**message))
            except Exception as error:  # noqa: BLE001 - it is reported to the test
                answer({"failure": f"{type(error).__name__}: {error}"})


def answer(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
