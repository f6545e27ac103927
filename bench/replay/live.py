# SPDX-License-Identifier: Apache-2.0
"""A trace through a live pool: each request comes when its time has come, to whichever client is free."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moonpool.bench.pool.loading import batches_of
from moonpool.bench.pool.opening import PoolOptions, opened
from moonpool.bench.replay.hashes import hashes_of
from moonpool.bench.replay.serving import Patience, Serving, Totals
from moonpool.errors import MoonpoolError
from moonpool.store_client import StoreClient

if TYPE_CHECKING:
    from moonpool.bench.replay.trace import Trace

__all__ = ["LiveOptions", "replay_live"]

#: To remove what was put, from a pool that may be gone.
_REMOVE_SECONDS: Final = 5.0


@dataclass(frozen=True)
class LiveOptions:
    """What is replayed against, and how.

    Attributes:
        speed: how many times as fast as the trace.
        block_bytes: of a chunk, a multiple of 8.
        clients: requests that are served at the same time at most, each by a client of its own.
        pool: which one.
    """

    speed: float
    block_bytes: int
    clients: int
    pool: PoolOptions


class _Due:
    """Hands out the requests of a trace in order, each when its time has come."""

    def __init__(self, trace: Trace, speed: float) -> None:
        self._requests = trace.requests
        # The order of the lines is that of the requests: who comes later is not due earlier.
        times_ms = np.maximum.accumulate(trace.times_ms)
        self._due: list[float] = ((times_ms - times_ms[0]) / 1000 / speed).tolist()
        self._next = 0
        self._lock = threading.Lock()
        self.stop = threading.Event()
        self.began = time.monotonic()

    def next(self) -> tuple[float, Sequence[int]] | None:
        """Return when the next request is due, and its blocks; None: there is none, or `stop` was set. Waits for it."""
        with self._lock:
            number = self._next
            self._next += 1
        if number >= len(self._requests) or self.stop.wait(max(0.0, self._due_in(number))):
            return None
        return self._due[number], self._requests[number]

    def _due_in(self, number: int) -> float:
        return min(threading.TIMEOUT_MAX, self.began + self._due[number] - time.monotonic())


def replay_live(trace: Trace, options: LiveOptions, totals: Totals, advance: Callable[[int], None]) -> None:
    """Replay a trace. Returns when the last request is over, or raises when Ctrl-C was pressed; threads are joined.

    Args:
        trace: with times.
        options: see `LiveOptions`.
        totals: is filled, also when this ends early.
        advance: is told of each request that is over, from several threads.

    Raises:
        MoonpoolError: the pool did not start, does not answer, or is gone.
    """
    hashes = hashes_of(trace.names)
    namespace = f"mooncake-bench-replay-{os.urandom(8).hex()}"
    with _clients(options) as clients:
        totals.pool = _pool(clients[0], options)
        patience = Patience()
        serving = [Serving(client, namespace, hashes, options.block_bytes, totals, patience) for client in clients]
        due = _Due(trace, options.speed)

        def work(one: Serving) -> None:
            while (request := due.next()) is not None:
                late = max(0.0, time.monotonic() - due.began - request[0])
                one.serve(request[0], late, request[1])
                advance(1)

        try:
            _run(work, serving, due.stop)
        finally:
            totals.seconds = time.monotonic() - due.began
            if options.pool.master is not None:
                _empty(clients[0], namespace, hashes.tobytes(), totals)


def _run(work: Callable[[Serving], None], serving: Sequence[Serving], stop: threading.Event) -> None:
    failures: list[BaseException] = []

    def guarded(one: Serving) -> None:
        try:
            work(one)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            failures.append(error)
            stop.set()

    threads = [threading.Thread(target=guarded, args=(one,), name="moonpool-replay") for one in serving]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        stop.set()
        for thread in threads:
            thread.join()
        raise
    if failures:
        raise failures[0]


@contextlib.contextmanager
def _clients(options: LiveOptions) -> Iterator[list[StoreClient]]:
    with contextlib.ExitStack() as stack:
        address, fitting = stack.enter_context(opened(options.pool))
        yield [
            stack.enter_context(StoreClient(address, name=f"mooncake-bench {number}", **fitting))
            for number in range(options.clients)
        ]


def _pool(client: StoreClient, options: LiveOptions) -> dict[str, Any]:
    segments = client.segments()
    return {
        "started": options.pool.master is None,
        "nodes": len({segment.node for segment in segments}),
        "capacity_bytes": sum(segment.capacity_bytes for segment in segments),
        "store": client.master_stats()["store"]["kind"],
    }


def _empty(client: StoreClient, namespace: str, hashes: bytes, totals: Totals) -> None:
    """Leave nothing in a pool of others. A failure is noted: it must not take the place of what ended the replay."""
    try:
        for some in batches_of(hashes):
            client.remove(namespace, some, timeout=_REMOVE_SECONDS)
    except MoonpoolError as error:
        totals.left = f"what was put may still be in the pool: {error}"
