# SPDX-License-Identifier: Apache-2.0
"""Moonpool's own engine, through its public Python interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from moonpool.address import Address
from moonpool.bench.backends.base import Backend, InitiatorSide, PassiveTarget, Place, RowSide, TargetSide
from moonpool.bench.backends.driving import run_deep, run_threads
from moonpool.bench.rails import bytes_by_rail
from moonpool.transfer_engine import TransferEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from moonpool.bench.measure import Window
    from moonpool.bench.work import Tuning, Work
    from moonpool.transfer_engine import Peer, Region, Transfer
    from moonpool.transfer_engine.settings import EngineOptions

__all__ = [
    "MoonpoolAuto",
    "MoonpoolCudaIpc",
    "MoonpoolLocal",
    "MoonpoolNetwork",
    "MoonpoolRdma",
    "MoonpoolShm",
    "MoonpoolTcp",
]

_REGION = "mooncake-bench"


class _Moonpool(Backend):
    """Keeps the engine, the region and the peer for as long as the rows are alike."""

    name: ClassVar[str] = "moonpool"
    #: The transports that its engines may use, and the one that they must.
    transport: ClassVar[str]
    require: ClassVar[str | None] = None

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._engine: TransferEngine | None = None
        self._made_for: tuple[int | None, Tuning] | None = None
        self._memory: NDArray[np.uint8] | None = None
        self._region: Region | None = None
        self._peer: Peer | None = None

    def memory(self, work: Work, *, target: bool) -> NDArray[np.uint8] | None:
        """Return a region that the engine allocated, where the row wants that."""
        if work.memory != "allocated":
            return None
        memory = self._memory
        if memory is None or len(memory) < work.footprint_bytes or self._made_for != _made_for(work):
            del memory  # the engine cannot free what is still looked at
            self.close()
            engine = self._open(work, target=target)
            self._region = engine.allocate(work.footprint_bytes, name=_REGION)
            self._memory = np.asarray(self._region)
        return self._memory

    def target(self, row: RowSide) -> TargetSide:
        """Listen, and offer the row's memory as a region."""
        engine = self._ready(row, target=True)
        return PassiveTarget({"address": engine.address})

    def initiator(self, row: RowSide, offer: dict[str, Any]) -> InitiatorSide:
        """Connect, and read or write that region from one of its own."""
        engine = self._ready(row, target=False)
        assert self._region is not None
        address = self._reach(offer["address"])
        if self._peer is None or self._peer.address != address:
            # The target needed other memory, hence another engine.
            if self._peer is not None:
                self._peer.close()
            self._peer = engine.connect(address, timeout=self.place.timeout)
        return _Initiator(engine, self._peer, self._region, row)

    def close(self) -> None:
        """Close the engine."""
        self._peer = self._region = self._memory = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _reach(self, address: str) -> str:
        # The target knows its port; how its host is reached, the user has said.
        return str(Address(self.place.host, int(address.rpartition(":")[2])))

    def _ready(self, row: RowSide, *, target: bool) -> TransferEngine:
        # A region's key and length are known to the peer: other memory needs another region, hence another name or
        # engine. Rows that differ only in their blocks share everything.
        if self._engine is not None and (self._made_for != _made_for(row.work) or self._memory is not row.memory):
            self.close()
        if self._engine is None:
            self._memory = row.memory
            # As large as the image, which later rows may use more of.
            here = row.memory if row.gpu is None else (row.gpu.address, len(row.memory), f"cuda:{row.gpu.device}")
            self._region = self._open(row.work, target=target).register(here, name=_REGION)
            assert self._engine is not None
        return self._engine

    def _open(self, work: Work, *, target: bool) -> TransferEngine:
        options: EngineOptions = {
            "listen": str(Address(self.place.host, self.place.engine_port)) if target else None,
            "transports": self.transport,
            "secret": self.place.secret,
            "insecure": self.place.insecure,
        }
        if self.require is not None:
            options["require"] = self.require
        # Not given, the environment and the settings file decide.
        if work.lanes is not None:
            options["lanes"] = work.lanes
        options.update(work.tuning.settings(target=target))
        self._made_for = _made_for(work)
        self._engine = TransferEngine(_REGION, **options)
        return self._engine


def _made_for(work: Work) -> tuple[int | None, Tuning]:
    """What an engine is opened with: rows that differ in it need another one."""
    return work.lanes, work.tuning


class MoonpoolTcp(_Moonpool):
    """Over TCP, to another process."""

    transport = require = "tcp"


class MoonpoolRdma(_Moonpool):
    """Over RDMA verbs, to another process."""

    transport = require = "rdma"


class MoonpoolNetwork(_Moonpool):
    """Over RDMA verbs for as long as they carry, else over TCP, to another process."""

    transport = "rdma,tcp"


class MoonpoolShm(_Moonpool):
    """To another process of this host, through shared memory or by the kernel's copy between processes."""

    transport = require = "shm"


class MoonpoolCudaIpc(_Moonpool):
    """To a GPU of another process of this host, from GPU to GPU."""

    transport = require = "cuda_ipc"


class MoonpoolAuto(_Moonpool):
    """By whatever way the engine takes."""

    transport = "auto"


class MoonpoolLocal(_Moonpool):
    """Between two engines of one process."""

    transport = require = "local"


class _Initiator(InitiatorSide):
    def __init__(self, engine: TransferEngine, peer: Peer, region: Region, row: RowSide) -> None:
        super().__init__(row.work.threads)
        self._row = row
        self._peer = peer
        self._engine = engine
        self._lanes = engine.stats()["lanes"] or None
        self._rails_before = bytes_by_rail(engine)
        remote = peer.regions.wait(_REGION, 10.0)
        post = engine.read if row.work.op == "read" else engine.write
        length = row.work.block_bytes

        # Everything that a real caller has at hand is made before the window.
        self._begins: list[Callable[[int], Transfer]] = []
        for thread in range(row.work.threads):
            pairs = [
                (_offsets(row.local.offsets[blocks]), _offsets(row.remote.offsets[blocks]))
                for blocks in (row.local.batch(thread, index) for index in range(row.work.batches))
            ]

            def begin(index: int, pairs: list[tuple[Any, Any]] = pairs, count: int = len(pairs)) -> Transfer:
                local_offsets, remote_offsets = pairs[index % count]
                return post(peer, region, remote, local_offsets, remote_offsets, length)

            self._begins.append(begin)

    @property
    def width(self) -> int | None:
        return self._lanes

    @property
    def path(self) -> str | None:
        return self._peer.path or None

    @property
    def fallback(self) -> str:
        return self._peer.fallback

    @property
    def rail_bytes(self) -> dict[str, int] | None:
        if "rdma" not in self._row.work.transport:
            return None
        return {rail: moved - self._rails_before.get(rail, 0) for rail, moved in bytes_by_rail(self._engine).items()}

    def run(self, seconds: float) -> Window:
        work = self._row.work
        if work.depth > 1:
            return run_deep(self, self._begins, work.depth, work.batch_bytes, seconds)

        def waiting(begin: Callable[[int], Transfer]) -> Callable[[int], object]:
            return lambda index: begin(index).wait()

        return run_threads(self, [waiting(begin) for begin in self._begins], work.batch_bytes, seconds)

    def close(self) -> None:
        self._begins.clear()


def _offsets(offsets: NDArray[np.int64]) -> NDArray[np.int64] | int:
    return int(offsets[0]) if len(offsets) == 1 else offsets
