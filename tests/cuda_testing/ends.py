# SPDX-License-Identifier: Apache-2.0
"""Two engines that are connected, with memory of a GPU or of the host at each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from fake_cuda import DeviceMemory, FakeCuda

from moonpool.transfer_engine import Peer, Region, RemoteRegion, TransferEngine

__all__ = ["SIZE", "Connect", "Ends", "OpenEngine", "Side", "connected", "content", "wait_until"]

OpenEngine = Callable[..., TransferEngine]
Bytes = npt.NDArray[np.uint8]
#: Several pieces, and a last one that is not whole.
SIZE: Final = 5 * (1 << 20) + 4321


def content(seed: int, nbytes: int = SIZE) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@dataclass
class Side:
    """Memory of one side of a transfer, wherever it is."""

    cuda: FakeCuda
    memory: Any
    region: Region

    def peek(self) -> bytes:
        """Return what is there."""
        if isinstance(self.memory, DeviceMemory):
            return self.cuda.peek(self.memory.address, self.memory.nbytes)
        return bytes(self.memory)

    def poke(self, value: Bytes) -> None:
        """Change all of it."""
        if isinstance(self.memory, DeviceMemory):
            self.cuda.poke(self.memory.address, value.tobytes())
        else:
            self.memory[:] = value


@dataclass
class Ends:
    """Two engines that are connected, with memory at each."""

    engine: TransferEngine
    server: TransferEngine
    peer: Peer
    here: Side
    there: Side
    remote: RemoteRegion


Connect = Callable[..., Ends]


def connected(cuda: FakeCuda, open_engine: OpenEngine) -> Iterator[Connect]:
    """Yield what opens engines with the sides named, such as "dh": a device here, the host there."""
    addresses: list[int] = []

    def side(engine: TransferEngine, kind: str, seed: int, nbytes: int) -> Side:
        memory: Any = content(seed, nbytes)
        if kind == "d":
            memory = cuda.memory(memory.tobytes())
            addresses.append(memory.address)
        return Side(cuda, memory, engine.register(memory, f"kv-{seed}"))

    def connect_them(sides: str, transports: str = "tcp", nbytes: int = SIZE, **options: Any) -> Ends:
        engine = open_engine("here", transports=transports, **options)
        server = open_engine("there", transports=transports, **options)
        here, there = side(engine, sides[0], 1, nbytes), side(server, sides[1], 2, nbytes)
        assert server.address is not None
        peer = engine.connect(server.address)
        return Ends(engine, server, peer, here, there, peer.regions["kv-2"])

    yield connect_them
    for address in addresses:
        cuda.free(address)


def wait_until(condition: Callable[[], bool]) -> None:
    event = threading.Event()
    for _ in range(2000):
        if condition():
            return
        event.wait(0.005)
    raise AssertionError("it did not happen within 10 seconds")
