# SPDX-License-Identifier: Apache-2.0
"""Windows of calls to the master and of the same bytes to an empty echo, so many in flight."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio

from moonpool.bench.measure import SAMPLES_MAX, Percentiles, Samples, Window, median
from moonpool.bench.pool.calls import CALLS, GROUPS, Call, Exhausted, Rpc
from moonpool.bench.pool.echo import SERVICE, setting
from moonpool.bench.pool.loading import Loader, batches_of
from moonpool.bench.pool.processes import EchoProcess, MasterProcess, Process
from moonpool.proto.auth import aio_channel
from moonpool.proto.errors import from_rpc_error

__all__ = ["RpcResult", "RpcWork", "measure_calls"]

_POOL: Final = "moonpool.v1.Pool"
#: A call that takes longer has failed.
_CALL_SECONDS: Final = 60.0


@dataclass(frozen=True)
class RpcWork:
    """One row.

    Attributes:
        call: a key of `CALLS`.
        hashes: of one call.
        in_flight: calls that are under way at the same time.
    """

    call: str
    hashes: int
    in_flight: int

    @property
    def text(self) -> str:
        """Which row it is."""
        return f"{CALLS[self.call].name} of {self.hashes}, {self.in_flight} in flight"


@dataclass
class RpcResult:
    """The windows of one row. Every figure is the median over its rounds."""

    work: RpcWork
    master: list[Window] = field(default_factory=list)
    echo: list[Window] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    @staticmethod
    def per_s(windows: Sequence[Window]) -> float | None:
        """Calls per second."""
        return median([window.transfers / window.seconds for window in windows]) if windows else None

    @staticmethod
    def time_us(windows: Sequence[Window], name: str) -> float | None:
        """One of the percentiles."""
        times = [getattr(window.latency, name) for window in windows if window.latency is not None]
        return median(times) if times else None

    @staticmethod
    def cpu_us(windows: Sequence[Window]) -> float | None:
        """CPU microseconds of the server for one call."""
        used = [window.cpu_s[1] / window.transfers * 1e6 for window in windows if window.cpu_s and window.transfers]
        return median(used) if used else None

    @property
    def ratios(self) -> list[float]:
        """Calls per second, master over echo, round by round."""
        return [
            (ours.transfers / ours.seconds) / (best.transfers / best.seconds)
            for ours, best in zip(self.master, self.echo, strict=True)
        ]

    @property
    def ratio(self) -> float | None:
        """The median of the ratios."""
        return median(self.ratios) if self.ratios else None

    @property
    def p50_ratio(self) -> float | None:
        """The median over the rounds of p50 of the master over p50 of the echo."""
        ratios = [
            ours.latency.p50_us / best.latency.p50_us
            for ours, best in zip(self.master, self.echo, strict=True)
            if ours.latency is not None and best.latency is not None
        ]
        return median(ratios) if ratios else None


class _Caller:
    """Calls one of the two servers with bytes."""

    def __init__(self, server: Process, service: str) -> None:
        self.server = server
        self._service = service
        self._channel = aio_channel(server.address, None)
        self._methods: dict[str, Any] = {}
        self.answers: dict[str, bytes] = {}

    async def __call__(self, name: str, request: bytes) -> bytes:
        method = self._methods.get(name)
        if method is None:
            method = self._methods[name] = self._channel.unary_unary(f"/{self._service}/{name}", None, None)
        answer: bytes = await method(request, timeout=_CALL_SECONDS)
        return answer

    async def noting(self, name: str, request: bytes) -> bytes:
        """Keep the answer too."""
        self.answers[name] = await self(name, request)
        return self.answers[name]

    async def close(self) -> None:
        await self._channel.close()


async def run_window(call: Call, rpc: Rpc, in_flight: int, seconds: float) -> Window:
    """Keep `in_flight` calls under way until the time is over; what has begun then is finished and counted."""
    numbers, clock = itertools.count(), time.monotonic_ns
    samples = Samples(SAMPLES_MAX)
    begin = clock()
    end = begin + int(seconds * 1e9)
    done = 0
    last = begin

    async def work() -> None:
        nonlocal done, last
        times = array("q")
        while True:
            before = clock()
            try:
                await call.once(rpc, next(numbers))
            except Exhausted:
                break
            last = clock()
            times.append(last - before)
            if last >= end:
                break
        done += len(times)
        samples.extend(times)

    tasks = [asyncio.ensure_future(work()) for _ in range(in_flight)]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return Window(max(last - begin, 1) / 1e9, done, 0, Percentiles.of(samples.kept))


class _Measuring:
    """Both servers, and the windows of every row."""

    def __init__(self, loader: Loader, master: Process, echo: Process, hashes: bytes) -> None:
        self._loader = loader
        self._hashes = hashes
        self._master = _Caller(master, _POOL)
        self._echo = _Caller(echo, SERVICE)

    async def close(self) -> None:
        await self._master.close()
        await self._echo.close()

    async def row(
        self, result: RpcResult, rounds: int, duration: float, warmup: float, say: Callable[[int], None]
    ) -> None:
        """Measure one row."""
        call = CALLS[result.work.call](self._loader, self._hashes, result.work.hashes)
        result.complaints = call.complaints
        await self._teach(call)
        for number in range(1, rounds + 1):
            say(number)
            windows: dict[bool, Window] = {}
            # They take turns at being first.
            for real in (True, False) if number % 2 else (False, True):
                call.real = real
                windows[real] = await self._window(call, result.work.in_flight, duration, warmup)
            result.master.append(windows[True])
            result.echo.append(windows[False])

    async def _window(self, call: Call, in_flight: int, duration: float, warmup: float) -> Window:
        rpc = self._master if call.real else self._echo
        call.prepare()
        try:
            if warmup and call.endless:
                await run_window(call, rpc, in_flight, warmup)
            ours, theirs = time.process_time(), rpc.server.cpu_s
            window = await run_window(call, rpc, in_flight, duration)
            after = rpc.server.cpu_s
            if theirs is None or after is None:
                return window
            return dataclasses.replace(window, cpu_s=(time.process_time() - ours, after - theirs))
        finally:
            call.finish()

    async def _teach(self, call: Call) -> None:
        """Make the call once, and have the echo answer what the master has answered."""
        call.real = True
        call.prepare()
        await call.once(self._master.noting, 0)
        call.finish()
        for name in call.methods:
            await self._echo("Set", setting(name, self._master.answers[name]))


def measure_calls(
    works: Sequence[RpcWork],
    store: str,
    timing: tuple[int, float, float],
    results: list[RpcResult],
    show: Callable[[str], None],
) -> None:
    """Measure calls of a master that is started, beside an echo.

    Args:
        works: the rows.
        store: of the master.
        timing: rounds, and seconds of a window and of its warm-up.
        results: gets one for each row, also when a later one fails.
        show: says what is measured.

    Raises:
        MoonpoolError: a process did not start, or a call failed.
    """
    rounds, duration, warmup = timing
    show("starting a master and an echo")
    with MasterProcess(store) as master, EchoProcess() as echo, Loader(master.address) as loader:
        longest = max(work.hashes for work in works)
        hashes = os.urandom(32 * GROUPS * longest)
        # Each chain of its own, as many as there are requests.
        for chain in batches_of(hashes, longest):
            loader.put(chain)

        async def measure() -> None:
            measuring = _Measuring(loader, master, echo, hashes)
            try:
                for number, work in enumerate(works, 1):
                    result = RpcResult(work)
                    results.append(result)
                    where = f"row {number} of {len(works)}: {work.text}"
                    await measuring.row(
                        result,
                        rounds,
                        duration,
                        warmup,
                        lambda at, where=where: show(f"{where}, round {at} of {rounds}"),  # type: ignore[misc]
                    )
            finally:
                await measuring.close()

        try:
            asyncio.run(measure())
        except grpc.RpcError as error:
            raise from_rpc_error(error, "a call failed", master.address) from error
