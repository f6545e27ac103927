# SPDX-License-Identifier: Apache-2.0
"""Mooncake's transfer engine, through its Python interface, when it is installed.

Over TCP: the only transport between processes that its wheel without CUDA has on a host without RDMA devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from moonpool.bench.backends.base import Backend, InitiatorSide, PassiveTarget, Place, RowSide, TargetSide
from moonpool.bench.backends.driving import run_threads
from moonpool.bench.backends.installed import imported, version_of
from moonpool.bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from moonpool.bench.measure import Window

__all__ = ["Mooncake"]

_DISTRIBUTIONS = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")


class Mooncake(Backend):
    """Two engines that find each other by handshake, without a metadata server."""

    name: ClassVar[str] = "mooncake"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        module = imported("mooncake.engine", "mooncake")
        self._engine = module.TransferEngine()
        self._memory: NDArray[np.uint8] | None = None
        _check(self._engine.initialize(place.host, "P2PHANDSHAKE", "tcp", ""), "initialize")

    @classmethod
    def environment(cls, transport: str) -> dict[str, str]:
        """Keep connections, which is its default from 0.3.13 on, and log only what went wrong."""
        return {"MC_TCP_ENABLE_CONNECTION_POOL": "1", "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}

    def version(self) -> str | None:
        """Return the version of the wheel."""
        return version_of(*_DISTRIBUTIONS)

    def target(self, row: RowSide) -> TargetSide:
        """Register the memory, and tell its address."""
        self._register(row)
        return PassiveTarget(
            {"segment": f"{self.place.host}:{self._engine.get_rpc_port()}", "base": row.memory.ctypes.data}
        )

    def initiator(self, row: RowSide, offer: dict[str, Any]) -> InitiatorSide:
        """Read or write that memory from registered memory of this side."""
        self._register(row)
        return _Initiator(self._engine, row, offer)

    def close(self) -> None:
        """Give the memory back. The engine itself ends with the process: it has no call for that."""
        if self._memory is not None:
            _check(self._engine.unregister_memory(self._memory.ctypes.data), "unregister_memory")
            self._memory = None

    def _register(self, row: RowSide) -> None:
        if self._memory is not row.memory:
            self.close()
            _check(self._engine.register_memory(row.memory.ctypes.data, len(row.memory)), "register_memory")
            self._memory = row.memory


class _Initiator(InitiatorSide):
    def __init__(self, engine: Any, row: RowSide, offer: dict[str, Any]) -> None:
        super().__init__(row.work.threads)
        self._row = row
        work = row.work
        segment, ours, theirs = offer["segment"], row.memory.ctypes.data, int(offer["base"])
        single = engine.transfer_sync_read if work.op == "read" else engine.transfer_sync_write
        many = engine.batch_transfer_sync_read if work.op == "read" else engine.batch_transfer_sync_write
        lengths = [work.block_bytes] * work.batch

        # Its calls take lists of addresses: they are made before the window.
        self._transfers: list[Callable[[int], object]] = []
        for thread in range(work.threads):
            pairs = [
                ((row.local.offsets[blocks] + ours).tolist(), (row.remote.offsets[blocks] + theirs).tolist())
                for blocks in (row.local.batch(thread, index) for index in range(work.batches))
            ]

            def transfer(index: int, pairs: list[tuple[list[int], list[int]]] = pairs, count: int = len(pairs)) -> None:
                local, remote = pairs[index % count]
                if len(local) == 1:
                    _check(single(segment, local[0], remote[0], work.block_bytes), "a transfer")
                else:
                    _check(many(segment, local, remote, lengths), "a transfer")

            self._transfers.append(transfer)

    @property
    def path(self) -> str | None:
        return "tcp"

    def run(self, seconds: float) -> Window:
        return run_threads(self, self._transfers, self._row.work.batch_bytes, seconds)

    def close(self) -> None:
        self._transfers.clear()


def _check(status: int, what: str) -> None:
    if status != 0:
        raise BenchError(f"Mooncake: {what} returned {status}")
