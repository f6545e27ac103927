# SPDX-License-Identifier: Apache-2.0
"""Two engines of this process with a cable or two between them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np

from moonpool.transfer_engine import Peer, RemoteRegion, TransferEngine

MIB = 1 << 20
WAIT = 45.0


def devices(cables: str, end: int) -> str:
    """Return the devices at one end of these cables: "ab", 0 is "rxea0,rxeb0"."""
    return ",".join(f"rxe{cable}{end}" for cable in cables)


class Pair:
    """A client whose devices are one end of each cable, and a server at the other ends."""

    def __init__(self, cables: str, *, nbytes: int = 8 * MIB, require: str | None = "rdma", **options: Any) -> None:
        self._stack = ExitStack()
        shared: dict[str, Any] = {"transports": "rdma,tcp", "connect_timeout": 20.0, **options}
        try:
            self.server = self._stack.enter_context(TransferEngine("server", rdma_devices=devices(cables, 1), **shared))
            self.client = self._stack.enter_context(
                TransferEngine("client", rdma_devices=devices(cables, 0), require=require, **shared)
            )
            self.remote_memory = np.zeros(nbytes, np.uint8)
            self.local_memory = np.random.default_rng(7).integers(0, 256, nbytes, np.uint8)
            self.server_region = self.server.register(self.remote_memory, name="kv")
            self.local = self.client.register(self.local_memory)
            assert self.server.address is not None
            self.peer: Peer = self.client.connect(self.server.address, timeout=WAIT)
            self.remote: RemoteRegion = self.peer.regions["kv"]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._stack.close()

    def rails(self) -> dict[str, dict[str, Any]]:
        """Return the client's rails by their names, such as "rxea0:1"."""
        return {rail["rail"]: rail for rail in self.client.stats()["rails"]}

    def moved(self) -> int:
        return sum(rail["written_bytes"] + rail["read_bytes"] for rail in self.rails().values())
