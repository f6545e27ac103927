# SPDX-License-Identifier: Apache-2.0
"""One backend of a comparison, in two processes that nothing else runs in.

Engines keep threads, and some of those spin while there is nothing to do: whoever's turn it is not is stopped.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar

from moonpool.bench.backends import COMPARED
from moonpool.bench.errors import BenchError
from moonpool.bench.initiating import window_from_json
from moonpool.bench.targets import SpawnedTarget
from moonpool.bench.verify import Verdict
from moonpool.errors import MoonpoolError

if TYPE_CHECKING:
    from moonpool.bench.measure import Window
    from moonpool.bench.work import Work

__all__ = ["Contender", "Contending", "Measured", "last_words"]

T = TypeVar("T")

_SLOWEST_BYTES_PER_S: Final = 20e6
_STEP_S: Final = 60.0
# Lines of an engine's own log that are shown when it failed.
_LOG_LINES: Final = 3
_LOG_BYTES: Final = 4096
_END_S: Final = 1.0


@dataclass(frozen=True)
class Measured:
    """One window of one contender.

    Attributes:
        window: what completed, with the CPU seconds of both processes.
        complaints: what verification found on either side.
        lanes: connections in use, or None.
        path: the way the bytes took, or None where the backend does not tell.
    """

    window: Window
    complaints: list[str] = field(default_factory=list)
    lanes: int | None = None
    path: str | None = None


class Contending(ABC):
    """Whoever takes part in a comparison.

    Attributes:
        name: what the comparison calls it.
        version: of another project, once a row is open.
    """

    name: str
    version: str | None

    @abstractmethod
    def open(self, work: Work, window: int) -> None:
        """Begin a row; `window` is a number that no window has.

        Raises:
            BenchError: this backend cannot do it; it is closed.
        """

    @abstractmethod
    def measure(self, window: int, warmup: float, duration: float) -> Measured:
        """Warm up, take a window, and verify it.

        Raises:
            BenchError: something failed; this contender is closed.
        """

    @abstractmethod
    def close_row(self) -> None:
        """End a row; what serves all rows stays.

        Raises:
            BenchError: a process failed; this contender is closed.
        """

    @abstractmethod
    def close(self) -> None:
        """End every process in good order, or, where that does not work, at once. Idempotent."""

    @abstractmethod
    def kill(self) -> None:
        """End every process at once. Idempotent."""


class Contender(Contending):
    """The two processes of one backend. Between `open`, `measure` and `close_row` they are stopped.

    Args:
        name: a name in `COMPARED`.
        transport: what the comparison goes over.
        memory_bytes: memory of each side, enough for every row: it is registered once.

    Raises:
        BenchError: a process did not come up.
    """

    def __init__(self, name: str, transport: str, memory_bytes: int) -> None:
        self.name = name
        #: Of the other engine, once a row is open.
        self.version: str | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this contender
        self._memory_bytes = memory_bytes
        # Longer than any machine takes to fill, move or check the memory: only a stuck one is given up.
        self._patience = _STEP_S + memory_bytes / _SLOWEST_BYTES_PER_S
        self._sides: list[SpawnedTarget] = []
        secret = secrets.token_bytes(32)
        environ = COMPARED[name][transport].environment(transport)
        try:
            for role in ("target", "initiator"):
                self._sides.append(SpawnedTarget(role, secret, environ, self._log, stoppable=True))
        except MoonpoolError as error:
            raise self._failure(error) from error
        except BaseException:
            self.kill()
            raise
        self._stop()

    def open(self, work: Work, window: int) -> None:
        """See `Contending`: fill the memory of both sides, and connect them."""

        def steps(target: SpawnedTarget, initiator: SpawnedTarget) -> None:
            self._both("open", work=work.to_json(), window=window, kind=self.name, memory_bytes=self._memory_bytes)
            offer = self._call(target, "offer", kind=self.name, mode="acked", width=0)
            made = self._call(initiator, "connect", kind=self.name, offer=offer, mode="acked", width=0)
            self.version = made["version"]

        self._turn(steps)

    def measure(self, window: int, warmup: float, duration: float) -> Measured:
        """See `Contending`: every byte of both sides is compared."""

        def run(target: SpawnedTarget, initiator: SpawnedTarget, seconds: float) -> tuple[dict[str, Any], float]:
            self._call(target, "arm", kind=self.name, order=self._call(initiator, "order", seconds=seconds))
            begin = self._call(target, "mark")
            result = self._call(initiator, "run", seconds=seconds)
            cpu_s = self._call(target, "mark") - begin
            self._call(target, "finish", kind=self.name)
            return result, cpu_s

        def steps(target: SpawnedTarget, initiator: SpawnedTarget) -> Measured:
            self._both("fill", window=window)
            first, _ = run(target, initiator, warmup)
            result, theirs = run(target, initiator, duration)
            done = [(start, end) for (start, _), (_, end) in zip(first["done"], result["done"], strict=True)]
            found = self._both("check", window=window, done=done)
            return Measured(
                replace(window_from_json(result["window"]), cpu_s=(result["cpu_s"], theirs)),
                [
                    f"{where}: {verdict.blocks_bad} blocks are wrong; {verdict.detail}"
                    for where, verdict in zip(("target", "initiator"), map(Verdict.from_json, found), strict=True)
                    if not verdict.ok
                ],
                result["lanes"],
                result["path"],
            )

        return self._turn(steps)

    def close_row(self) -> None:
        """See `Contending`: engines and memory stay."""
        # The initiating side first: it may hold what the target is about to give back.
        self._turn(lambda target, initiator: [self._call(side, "close_row") for side in (initiator, target)])

    def close(self) -> None:
        """See `Contending`."""
        for side in self._sides:
            side.send_signal(signal.SIGCONT)
        # What was measured stands: how another engine ends is not part of it.
        with contextlib.suppress(MoonpoolError):
            for side in reversed(self._sides):
                side.goodbye()
        self.kill()

    def kill(self) -> None:
        """See `Contending`."""
        for side in self._sides:
            side.kill()
            side.close()
        self._sides.clear()
        self._log.close()

    def _turn(self, steps: Callable[[SpawnedTarget, SpawnedTarget], T]) -> T:
        try:
            for side in self._sides:
                side.send_signal(signal.SIGCONT)
            result = steps(*self._sides)
            self._stop()
        except MoonpoolError as error:
            raise self._failure(error) from error
        return result

    def _stop(self) -> None:
        for side in self._sides:
            side.send_signal(signal.SIGSTOP)

    def _call(self, side: SpawnedTarget, name: str, **arguments: Any) -> Any:
        return side.call(name, self._patience, **arguments)

    def _both(self, name: str, **arguments: Any) -> list[Any]:
        answers = [side.start(name, self._patience, **arguments) for side in self._sides]
        return [answer() for answer in answers]

    def _failure(self, error: MoonpoolError) -> BenchError:
        """Say what happened; close."""
        message = last_words(error, self._sides, self._log)
        self.kill()
        return BenchError(message, hint=error.hint)


def last_words(error: MoonpoolError, sides: Sequence[SpawnedTarget], log: IO[bytes]) -> str:
    """Return what happened, with the last lines of the log where a process died."""
    message = error.message.removeprefix("on the target: ")
    for side in sides:
        status = side.ended(_END_S) if error.code == "BENCH_CONTROL" else None
        if status is not None and status < 0:
            message = f"a process died of {signal.Signals(-status).name}"
    if error.code == "BENCH_CONTROL":
        log.seek(max(0, log.seek(0, 2) - _LOG_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
        message = "; ".join([message, *(line.strip() for line in lines[-_LOG_LINES:])])
    return message
