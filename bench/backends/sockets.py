# SPDX-License-Identifier: Apache-2.0
"""Plain sockets in C: the limit for everything that crosses the network."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from array import array
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from moonpool import _limits
from moonpool.bench.backends.base import Backend, InitiatorSide, RowSide, TargetSide
from moonpool.bench.errors import BenchError, ControlError
from moonpool.bench.measure import SAMPLES_MAX, Percentiles, Window

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OPS", "RawSockets", "descriptors", "limit_window"]

OPS = {"read": _limits.READ, "write": _limits.WRITE}
_MODES = {"acked": _limits.ACKED, "stream": _limits.STREAM}


def descriptors(
    row: RowSide, memory: np.ndarray[Any, np.dtype[np.uint8]], *, remote: bool = False
) -> _limits.Descriptors:
    """Return the descriptor list of the row for `memory`, whose places are those of this or of the remote side."""
    layout = row.remote if remote else row.local
    return _limits.Descriptors(memory, layout.offsets, layout.lengths, row.work.batch, row.work.threads)


def limit_window(run: Callable[[array[int]], tuple[int, int, int, int]]) -> Window:
    """Call `run` with room for samples, and make a window of what it returns."""
    samples = array("q", bytes(8 * SAMPLES_MAX))
    try:
        window_ns, batches, payload_bytes, kept = run(samples)
    except _limits.LimitError as error:
        raise limit_error(error) from error
    latency = Percentiles.of(np.frombuffer(samples, dtype=np.int64)[:kept])
    return Window(window_ns / 1e9, batches, payload_bytes, latency)


def limit_error(error: _limits.LimitError) -> BenchError:
    """Return the error of the benchmark for one of the native part."""
    return BenchError(f"the limit could not be measured: {error}", code=f"BENCH_LIMIT_{error.code}", path="limit")


def _width(row: RowSide) -> int:
    # Not said, as many as the engine has by itself.
    lanes = 4 if len(os.sched_getaffinity(0)) >= 8 else 2
    return row.width or max(lanes, row.work.threads)


class RawSockets(Backend):
    """One thread per connection and side, blocking sockets, `sendmsg` and `recvmsg` from and into the same memory."""

    name: ClassVar[str] = "sockets"

    def target(self, row: RowSide) -> TargetSide:
        """Listen for the connections of this row."""
        return _Target(self, row)

    def initiator(self, row: RowSide, offer: dict[str, Any]) -> InitiatorSide:
        """Connect when the first window begins."""
        return _Initiator(self, row, offer)

    def numeric(self, port: int) -> str:
        """Return the numeric address of the target's host."""
        try:
            found = socket.getaddrinfo(self.place.host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ControlError(f"cannot resolve {self.place.host}: {error}", hint="a numeric address") from error
        return str(found[0][4][0])


class _Target(TargetSide):
    def __init__(self, backend: RawSockets, row: RowSide) -> None:
        self._row = row
        self._timeout_ms = int(backend.place.timeout * 1000)
        self._token = secrets.token_bytes(_limits.TOKEN_BYTES)
        self._next: array[int] = array("Q", [0] * row.work.threads)
        self._descriptors = descriptors(row, row.memory)
        self._link: _limits.Link | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        try:
            port = backend.place.limit_port
            self._listener = _limits.Listener(backend.numeric(port), port)
        except _limits.LimitError as error:
            raise limit_error(error) from error
        self.offer = {"port": self._listener.port, "token": self._token.hex()}

    def arm(self, order: dict[str, Any]) -> None:
        self._failure = None
        self._thread = threading.Thread(target=self._serve, name="mooncake-bench-limit", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._listener.close()
        if self._link is not None:
            self._link.close()
        if self._thread is not None:
            self._thread.join()

    def _serve(self) -> None:
        try:
            if self._link is None:
                self._link = self._listener.accept(self._token, _width(self._row), self._timeout_ms)
            work = self._row.work
            self._link.server_run(self._descriptors, OPS[work.op], _MODES[self._row.mode], 1, self._next)
        except _limits.LimitError as error:
            self._failure = limit_error(error)


class _Initiator(InitiatorSide):
    def __init__(self, backend: RawSockets, row: RowSide, offer: dict[str, Any]) -> None:
        super().__init__(row.work.threads)
        self._row = row
        self._backend = backend
        self._offer = offer
        self._descriptors = descriptors(row, row.memory)
        self._link: _limits.Link | None = None

    @property
    def width(self) -> int | None:
        return _width(self._row)

    @property
    def path(self) -> str | None:
        return "tcp"

    def run(self, seconds: float) -> Window:
        if self._link is None:
            # Here and not earlier: the target accepts once it is armed. Still outside of every timed window.
            self._link = self._connect()
        link = self._link
        work = self._row.work
        return limit_window(
            lambda samples: link.client_run(
                self._descriptors,
                OPS[work.op],
                _MODES[self._row.mode],
                int(seconds * 1e9),
                self.stop,
                self.next_batch,
                samples,
            )
        )

    def abort(self) -> None:
        if self._link is not None:
            self._link.abort()

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    def _connect(self) -> _limits.Link:
        port = int(self._offer["port"])
        token = bytes.fromhex(self._offer["token"])
        timeout_ms = int(self._backend.place.timeout * 1000)
        try:
            return _limits.connect(self._backend.numeric(port), port, token, _width(self._row), timeout_ms)
        except _limits.LimitError as error:
            raise limit_error(error) from error
