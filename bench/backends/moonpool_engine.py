# SPDX-License-Identifier: Apache-2.0
"""Moonpool's own engine, through its public Python interface."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from moonpool.address import Address
from moonpool.bench.backends.base import Backend, InitiatorSide, Place, RowSide, TargetSide
from moonpool.bench.measure import SAMPLES_MAX, Percentiles, Samples, Window, drive
from moonpool.transfer_engine import TransferEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from moonpool.transfer_engine import Peer, Region
    from moonpool.transfer_engine.settings import EngineOptions

__all__ = ["MoonpoolLocal", "MoonpoolTcp"]

_REGION = "mooncake-bench"


class _Moonpool(Backend):
    """Keeps the engine, the region and the peer for as long as the rows are alike."""

    name: ClassVar[str] = "moonpool"
    transport: ClassVar[str]

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._engine: TransferEngine | None = None
        self._lanes: int | None = None
        self._memory: NDArray[np.uint8] | None = None
        self._region: Region | None = None
        self._peer: Peer | None = None

    def target(self, row: RowSide) -> TargetSide:
        """Listen, and offer the row's memory as a region."""
        engine = self._ready(row, str(Address(self.place.host, self.place.engine_port)))
        return _Target({"address": engine.address})

    def initiator(self, row: RowSide, offer: dict[str, Any]) -> InitiatorSide:
        """Connect, and read or write that region from one of its own."""
        engine = self._ready(row, None)
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

    def _ready(self, row: RowSide, listen: str | None) -> TransferEngine:
        # A region's key and length are known to the peer: other memory needs another region, hence another name or
        # engine. Rows that differ only in their blocks share everything.
        if self._engine is not None and (self._lanes != row.work.lanes or self._memory is not row.memory):
            self.close()
        if self._engine is None:
            self._lanes = row.work.lanes
            self._memory = row.memory
            options: EngineOptions = {
                "listen": listen,
                "transports": self.transport,
                "require": self.transport,
                "secret": self.place.secret,
                "insecure": self.place.insecure,
            }
            # Not given, the environment and the settings file decide.
            if row.work.lanes is not None:
                options["lanes"] = row.work.lanes
            self._engine = TransferEngine(_REGION, **options)
            self._region = self._engine.register(row.memory, name=_REGION)
        return self._engine


class MoonpoolTcp(_Moonpool):
    """Over TCP, to another process."""

    transport = "tcp"


class MoonpoolLocal(_Moonpool):
    """Between two engines of one process."""

    transport = "local"


class _Target(TargetSide):
    """The engine serves by itself."""

    def __init__(self, offer: dict[str, Any]) -> None:
        self.offer = offer

    def close(self) -> None:
        pass


class _Initiator(InitiatorSide):
    def __init__(self, engine: TransferEngine, peer: Peer, region: Region, row: RowSide) -> None:
        super().__init__(row.work.threads)
        self._row = row
        self._lanes = engine.stats()["lanes"] or None
        remote = peer.regions.wait(_REGION, 10.0)
        post = engine.read if row.work.op == "read" else engine.write
        length = row.work.block_bytes

        # Everything that a real caller has at hand is made before the window.
        self._transfers: list[Callable[[int], object]] = []
        for thread in range(row.work.threads):
            pairs = [
                (_offsets(row.local.offsets[blocks]), _offsets(row.remote.offsets[blocks]))
                for blocks in (row.local.batch(thread, index) for index in range(row.work.batches))
            ]

            def transfer(index: int, pairs: list[tuple[Any, Any]] = pairs, count: int = len(pairs)) -> None:
                local_offsets, remote_offsets = pairs[index % count]
                post(peer, region, remote, local_offsets, remote_offsets, length).wait()

            self._transfers.append(transfer)

    @property
    def width(self) -> int | None:
        return self._lanes

    def run(self, seconds: float) -> Window:
        return run_threads(self, self._transfers, self._row.work.batch_bytes, seconds)

    def close(self) -> None:
        self._transfers.clear()


def _offsets(offsets: NDArray[np.int64]) -> NDArray[np.int64] | int:
    return int(offsets[0]) if len(offsets) == 1 else offsets


def run_threads(
    side: InitiatorSide, transfers: list[Callable[[int], object]], batch_bytes: int, seconds: float
) -> Window:
    """Run one thread per entry of `transfers` from a common start and add up what they did."""
    threads = len(transfers)
    samples = [Samples(SAMPLES_MAX // threads) for _ in transfers]
    outcomes: list[tuple[int, int, int]] = [(0, 0, 0)] * threads
    failures: list[BaseException] = []
    start = threading.Barrier(threads)

    def work(thread: int) -> None:
        try:
            start.wait(timeout=10.0)
            outcomes[thread] = drive(
                transfers[thread], side.next_batch[thread], int(seconds * 1e9), side.stop, samples[thread]
            )
        except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
            failures.append(error)
            side.stop[0] = 1

    crew = [threading.Thread(target=partial(work, thread), daemon=True) for thread in range(threads)]
    for member in crew:
        member.start()
    for member in crew:
        member.join()
    if failures:
        raise failures[0]
    done = sum(end - first for first, (_, _, end) in zip(side.next_batch, outcomes, strict=True))
    for thread, (_, _, end) in enumerate(outcomes):
        side.next_batch[thread] = end
    return Window(
        seconds=(max(end for _, end, _ in outcomes) - min(begin for begin, _, _ in outcomes)) / 1e9,
        transfers=done,
        payload_bytes=done * batch_bytes,
        latency=Percentiles.of(np.concatenate([part.kept for part in samples])),
    )
