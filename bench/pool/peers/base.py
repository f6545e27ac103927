# SPDX-License-Identifier: Apache-2.0
"""What a pool has to offer to be compared."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from moonpool.bench.pool.windows import CallSide
from moonpool.bench.work import Work

if TYPE_CHECKING:
    from moonpool.bench.measure import Window

__all__ = [
    "ASKED",
    "ASKED_BYTES",
    "GROUPS",
    "AskRow",
    "FreshRow",
    "LookRow",
    "PeerOptions",
    "PoolBackend",
    "PoolRow",
    "asking_of",
    "moving_of",
]

#: Calls of a master that its peers have too.
ASKED: Final = ("exists", "match", "put")
#: Different requests of a row of look-ups.
GROUPS: Final = 16
#: Of the chunks that the calls of a master are about. Nobody moves their bytes.
ASKED_BYTES: Final = 4096


@dataclass(frozen=True)
class PeerOptions:
    """What pool to start.

    Attributes:
        dram: bytes that its one node lends.
        metadata: where the master keeps metadata, where there is a choice: ``memory`` or ``sqlite``.
        memory_bytes: of the client, enough for every row.
        calls: most calls that are under way at a time.
    """

    dram: int
    metadata: str
    memory_bytes: int
    calls: int


class PoolRow(Protocol):
    """One row. Used by one thread."""

    complaints: list[str]
    path: str | None

    def engine_window(self, seconds: float, warmup: float) -> Window:
        """Run a window, and verify it."""

    def close(self) -> None:
        """Leave nothing of the row in the pool."""


class PoolBackend(ABC):
    """A pool that is started when this is made, and a client of it. Used by one thread.

    Args:
        options: what pool to start.

    Raises:
        BenchError: it is not installed, or did not come up.
    """

    @classmethod
    def environment(cls) -> dict[str, str]:
        """Return the environment variables that the client and its servers need."""
        return {}

    @abstractmethod
    def __init__(self, options: PeerOptions) -> None: ...

    def version(self) -> str | None:
        """Return the version of what is measured where it is not part of this project."""
        return None

    @abstractmethod
    def row(self, work: Work, number: Callable[[], int]) -> PoolRow:
        """Get a row ready: ``put`` and ``get`` move bytes, those in `ASKED` are asked of the master only.

        Args:
            work: made by `moving_of` or `asking_of`.
            number: gives a new number to each window.
        """

    @abstractmethod
    def close(self) -> None:
        """End the client and the pool."""


def moving_of(work: Work, op: str) -> Work:
    """Return the work of chunks that are put or got."""
    return dataclasses.replace(work, transport="pool", op=op)


def asking_of(call: str, hashes: int, in_flight: int) -> Work:
    """Return the work of calls of a master; the footprint is that of the chunks that they are about."""
    batches = max(GROUPS, in_flight)  # each thread puts one at least
    return Work("master", call, ASKED_BYTES, hashes, "sequential", in_flight, None, batches * hashes * ASKED_BYTES)


class AskRow(ABC):
    """Calls of a master from so many threads, each call of which is looked at."""

    def __init__(self, work: Work) -> None:
        self.complaints: list[str] = []
        self.path: str | None = None
        self._work = work

    @abstractmethod
    def engine_window(self, seconds: float, warmup: float) -> Window:
        """See `PoolRow`."""

    def _window(self, calls: Sequence[Callable[[int], object]], seconds: float, *, batches: int = 0) -> Window:
        """Run a window; with `batches`, it ends when a thread has made so many calls. Keys are counted as 32 bytes."""
        side = CallSide(list(calls), batches, 32 * self._work.batch, once=batches > 0)
        try:
            return side.run(seconds)
        finally:
            side.close()

    def _complain(self, what: str) -> None:
        # Enough to see what it is.
        if len(self.complaints) < 8:
            self.complaints.append(what)


class FreshRow(AskRow):
    """Puts of fresh chunks, without their bytes.

    There is no warm-up: every chunk that it put would have to be removed again. A window ends, at the latest, when a
    thread has put all of its batches.
    """

    @abstractmethod
    def _fresh(self) -> Sequence[Any]:
        """Return the batches of one thread: what `_put` takes."""

    @abstractmethod
    def _put(self, batch: Any) -> None:
        """Put one batch."""

    @abstractmethod
    def _settle(self, put: Sequence[Any]) -> None:
        """See whether what was put is there, complain if not, and remove it."""

    def engine_window(self, seconds: float, warmup: float) -> Window:
        """See `PoolRow`."""
        del warmup
        batches = [self._fresh() for _ in range(self._work.threads)]
        done = [0] * self._work.threads

        def put(index: int, thread: int) -> None:
            self._put(batches[thread][index])
            done[thread] = index + 1

        calls = [functools.partial(put, thread=thread) for thread in range(self._work.threads)]
        window = self._window(calls, seconds, batches=self._work.batches)
        self._settle([batch for some, end in zip(batches, done, strict=True) for batch in some[:end]])
        return window

    def close(self) -> None:
        """Nothing is left."""


class LookRow(AskRow):
    """Look-ups of chunks that are there: `look` says whether the answer was right."""

    def __init__(
        self, work: Work, look: Callable[[Any], bool], groups: Sequence[Any], clear: Callable[[], object]
    ) -> None:
        super().__init__(work)
        self._look = look
        self._groups = groups
        self._clear = clear

    def engine_window(self, seconds: float, warmup: float) -> Window:
        """See `PoolRow`."""
        calls = [functools.partial(self._call, thread) for thread in range(self._work.threads)]
        if warmup:
            self._window(calls, warmup)
        return self._window(calls, seconds)

    def _call(self, thread: int, index: int) -> None:
        if not self._look(self._groups[(thread + index * self._work.threads) % len(self._groups)]):
            self._complain("a chunk that was put was not there")

    def close(self) -> None:
        """See `PoolRow`."""
        self._clear()
