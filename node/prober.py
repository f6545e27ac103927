# SPDX-License-Identifier: Apache-2.0
"""Finds out for the master whether a segment can be read, on a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from moonpool.errors import MoonpoolError
from moonpool.proto import pool_pb2 as pb
from moonpool.transfer_engine import TransferEngine

__all__ = ["Prober"]

_log = logging.getLogger("moonpool.node")
# Beyond so many that wait, the master gets no answer, and asks somebody else.
_WAITING_MAX: Final = 64
_BYTES: Final = 4096


class Prober:
    """Connects anew and reads, since a connection that is there already may outlive what it stands for.

    That proves, from this host: the address leads to an engine with this incarnation, which answers, has the secret and
    the region, and bytes come from there over the path that clients would take. It proves nothing about writes.

    Args:
        engine: of the node; the owner closes it after this.
    """

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._into = engine.allocate(_BYTES)
        self._waiting: queue.Queue[tuple[pb.Probe, float, Callable[[pb.ProbeDone], None]] | None] = queue.Queue(
            _WAITING_MAX
        )
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moonpool-prober", daemon=True)
        self._thread.start()

    def ask(self, probe: pb.Probe, answer: Callable[[pb.ProbeDone], None]) -> None:
        """Carry out a probe, and call `answer` on another thread. Returns at once."""
        try:
            self._waiting.put_nowait((probe, time.monotonic() + probe.timeout_ms / 1000, answer))
        except queue.Full:
            _log.warning("%d probes wait already: one of %s is not made", _WAITING_MAX, probe.address)

    def close(self) -> None:
        """End the thread, after the probe that it is at; it has a deadline."""
        self._closing.set()
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (asked := self._waiting.get()) is not None:
            if self._closing.is_set():
                continue
            probe, deadline, answer = asked
            done = pb.ProbeDone(probe=probe.probe, works=True)
            try:
                self._read(probe, deadline)
            except MoonpoolError as error:
                done.works, done.cause = False, str(error)[:500]
            answer(done)

    def _read(self, probe: pb.Probe, deadline: float) -> None:
        with self._engine.connect(probe.address, timeout=_left(deadline)) as peer:
            if peer.incarnation != probe.incarnation.hex():
                raise MoonpoolError("another engine listens there", peer=probe.address)
            region = peer.regions.wait(probe.region, _left(deadline))
            length = min(_BYTES, region.nbytes)
            self._engine.read(peer, self._into, region, 0, 0, length, deadline=_left(deadline)).wait()


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
