# SPDX-License-Identifier: Apache-2.0
"""The program of the other process: an engine with memory of a GPU that does what it is told."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

from engine_testing.fixtures import PATIENT
from engine_testing.obeying import obey
from engine_testing.patterns import pattern
from engine_testing.processes import Program
from fake_cuda import DeviceMemory, FakeCuda, library

from cuda_testing.virtual import PART_BYTES, VirtualMemory
from moonpool.transfer_engine import Peer, Region, Transfer, TransferEngine

__all__ = ["Owner"]


class Owner(Program):
    """An engine with memory of GPUs in another process, with the commands of `Commands`.

    Args:
        before: a command that starts it, such as unshare(1).
        cuda: settings of the stand-in there.
        options: keyword arguments of its `TransferEngine`.
    """

    def __init__(self, cuda: str = "devices=2", *, before: tuple[str, ...] = (), **options: Any) -> None:
        # Where the engine there finds the driver.
        os.environ["MOONPOOL_CUDA_LIBRARY"] = str(library())
        super().__init__("cuda_testing.owner", {"cuda": cuda, "options": options}, before=before)


class Commands:
    """One method per command; the keyword arguments and the result are JSON."""

    def __init__(self, cuda: FakeCuda, engine: TransferEngine) -> None:
        self.cuda = cuda
        self.engine = engine
        self.memory: dict[str, DeviceMemory | VirtualMemory] = {}
        self.regions: dict[str, Region] = {}
        self.peer: Peer | None = None
        self.transfer: Transfer | None = None

    def add(
        self,
        name: str,
        nbytes: int,
        seed: int = 0,
        offset: int = 0,
        parts: int = 0,
        writable: bool = True,
        shareable: bool = True,
    ) -> int:
        """Register `nbytes` from `offset` on of memory of their own, filled with the pattern; return the address."""
        memory: DeviceMemory | VirtualMemory
        if parts:
            assert parts * PART_BYTES >= offset + nbytes
            memory = VirtualMemory(self.cuda, parts, shareable=shareable)
        else:
            memory = DeviceMemory(self.cuda.alloc(offset + nbytes), offset + nbytes)
        self.cuda.poke(memory.address + offset, pattern(nbytes, seed))
        self.memory[name] = memory
        place = (memory.address + offset, nbytes, "cuda")
        self.regions[name] = self.engine.register(place, name, writable=writable)
        return memory.address + offset

    def add_many(self, count: int, nbytes: int) -> None:
        """Regions "0", "1", ... of one allocation, filled with the pattern as a whole."""
        address = self.cuda.alloc(count * nbytes)
        self.cuda.poke(address, pattern(count * nbytes))
        for index in range(count):
            place = (address + index * nbytes, nbytes, "cuda")
            self.regions[str(index)] = self.engine.register(place, str(index))

    def add_on(self, name: str, nbytes: int, seed: int, device: int) -> None:
        """The same on another device."""
        self.cuda.start(device)
        self.add(name, nbytes, seed)

    def release(self, name: str) -> None:
        self.regions.pop(name).release()

    def free(self, name: str) -> None:
        memory = self.memory.pop(name)
        assert isinstance(memory, DeviceMemory)
        self.cuda.free(memory.address)

    def digest(self, name: str) -> str:
        region = self.regions[name]
        return hashlib.blake2b(self.cuda.peek(region.address, region.nbytes)).hexdigest()

    def alive(self, kind: str) -> int:
        return self.cuda.alive(kind)

    def hold(self, on: bool) -> None:
        """Keep the streams of this process from their work, or let them go on."""
        self.cuda.lib.fakeCudaHold(int(on))

    def stats(self) -> dict[str, Any]:
        return self.engine.stats()

    def connect(self, address: str) -> None:
        self.peer = self.engine.connect(address)

    def write(self, remote: str, nbytes: int, wait: bool = True) -> None:
        """Write the first bytes of the region "here" to a region of the peer."""
        assert self.peer is not None
        there = self.peer.regions.wait(remote, 60.0)
        self.transfer = self.engine.write(self.peer, self.regions["here"], there, lengths=nbytes)
        if wait:
            self.transfer.wait()


def main() -> None:
    setup = json.loads(sys.argv[1])
    cuda = FakeCuda(library())
    cuda.set(setup["cuda"])
    cuda.start()
    with TransferEngine("owner", **{**PATIENT, **setup["options"]}) as engine:
        obey(Commands(cuda, engine), {"address": engine.address, "incarnation": engine.incarnation})


if __name__ == "__main__":
    main()
