# SPDX-License-Identifier: Apache-2.0
"""One pool of a comparison: its client in a process of its own, and its servers, which end with it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import tempfile
import time
from typing import TYPE_CHECKING, Any, Final

from moonpool.bench.contender import Contending, Measured, last_words
from moonpool.bench.errors import BenchError, VerificationError
from moonpool.bench.initiating import window_from_json
from moonpool.bench.pool.peers import backend_of
from moonpool.bench.targets import SpawnedTarget
from moonpool.errors import MoonpoolError

if TYPE_CHECKING:
    from moonpool.bench.pool.peers.base import PeerOptions
    from moonpool.bench.work import Work

__all__ = ["PoolContender"]

_STEP_S: Final = 120.0
_SLOWEST_BYTES_PER_S: Final = 10e6
#: A server that was not told to end does so by itself within this time, or is ended.
_END_S: Final = 5.0


class PoolContender(Contending):
    """See `Contending`. Whoever's turn it is not is not stopped: its servers would lose its client.

    Args:
        name: a name in `BACKENDS`.
        options: what pool to start.

    Raises:
        BenchError: it did not come up.
    """

    def __init__(self, name: str, options: PeerOptions) -> None:
        self.name = name
        self.version: str | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this contender
        self._patience = _STEP_S + (options.memory_bytes + options.dram) / _SLOWEST_BYTES_PER_S
        self._servers: dict[int, int] = {}  # process -> a descriptor of it
        self._client: SpawnedTarget | None = None
        try:
            self._client = SpawnedTarget("pool", None, backend_of(name).environment(), self._log, stoppable=True)
            begun = self._call("begin", kind=name, options=dataclasses.asdict(options))
            self.version = begun["version"]
        except BaseException:
            self.kill()
            raise

    def open(self, work: Work, window: int) -> None:
        """See `Contending`."""
        del window
        for process in self._call("open", work=work.to_json())["processes"]:
            if process not in self._servers:
                with contextlib.suppress(ProcessLookupError):
                    self._servers[process] = os.pidfd_open(process)

    def measure(self, window: int, warmup: float, duration: float) -> Measured:
        """See `Contending`."""
        del window
        done = self._call("measure", seconds=duration, warmup=warmup)
        return Measured(window_from_json(done["window"]), done["complaints"], None, done["path"])

    def close_row(self) -> None:
        """See `Contending`."""
        self._call("close_row")

    def close(self) -> None:
        """See `Contending`."""
        if self._client is not None:
            # What was measured stands: how another store ends is not part of it.
            with contextlib.suppress(MoonpoolError):
                self._client.goodbye()
        self.kill()

    def kill(self) -> None:
        """See `Contending`."""
        if self._client is not None:
            self._client.kill()
            self._client.close()
            self._client = None
        deadline = time.monotonic() + _END_S
        for descriptor in self._servers.values():
            ended, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ended:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
        self._servers.clear()
        self._log.close()

    def _call(self, name: str, **arguments: Any) -> Any:
        assert self._client is not None
        try:
            return self._client.call(name, self._patience, **arguments)
        except MoonpoolError as error:
            # What a client itself calls damage is wrong bytes, like those that the benchmark finds.
            kind = VerificationError if error.code == VerificationError.default_code else BenchError
            failure = kind(last_words(error, [self._client], self._log), hint=error.hint)
            self.kill()
            raise failure from error
