# SPDX-License-Identifier: Apache-2.0
"""One request against a live pool: it is asked for, what is there is got, the rest is put; and what came of it."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moonpool.bench.errors import BenchError
from moonpool.bench.replay.hashes import content_of
from moonpool.errors import MoonpoolError
from moonpool.store_client import Outcome, StoreClient
from moonpool.store_client.errors import MasterUnavailableError, NoSpaceError
from moonpool.store_client.packing import ROOT

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moonpool.store_client.results import Results

__all__ = ["Patience", "Served", "Serving", "Totals"]

#: What one call moves at most.
_PIECE_BYTES: Final = 32 << 20
_SHOWN_MAX: Final = 8
#: A pool is gone when nothing came of so many requests in a row, for so long. A master that starts anew takes less.
_GONE_REQUESTS: Final = 3
_GONE_SECONDS: Final = 30.0


@dataclass(frozen=True)
class Served:
    """What became of one request. Times in seconds.

    Attributes:
        due: when it had to begin, from the first request on.
        late: how much later it began.
        match: until it was known what is there.
        get: until that had come; 0.0 where there was nothing.
        put: until the rest was put; 0.0 where there was no rest.
        blocks: of the request.
        hits: those that were got, from the first on.
        put_blocks: those that were put, or were there meanwhile.
    """

    due: float
    late: float
    match: float
    get: float
    put: float
    blocks: int
    hits: int
    put_blocks: int

    @property
    def seconds(self) -> float:
        """From its beginning to its end, without the time in which bytes were compared."""
        return self.match + self.get + self.put


@dataclass
class Totals:
    """Everything that happened. Filled by several threads, under `lock`.

    Attributes:
        served: requests, in the order in which they ended.
        errors: how often, by code: of calls that failed as a whole, and of chunks.
        vanished: chunks that were there when it was asked and not when they were to be got: no error.
        dropped: chunks that were not put because there was no room: no error either.
        complaints: bytes that were wrong, the first few.
        wrong: chunks whose bytes were wrong.
        seconds: of the whole replay.
        left: why what was put may still be in the pool; empty: it is not.
        pool: what was replayed against, as JSON values.
    """

    served: list[Served] = field(default_factory=list)
    errors: collections.Counter[str] = field(default_factory=collections.Counter)
    vanished: int = 0
    dropped: int = 0
    complaints: list[str] = field(default_factory=list)
    wrong: int = 0
    seconds: float = 0.0
    left: str = ""
    pool: dict[str, Any] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def complain(self, what: str) -> None:
        """Note a chunk whose bytes are wrong."""
        with self.lock:
            self.wrong += 1
            if len(self.complaints) < _SHOWN_MAX:
                self.complaints.append(what)

    def fail(self, error: MoonpoolError) -> None:
        """Count an error."""
        with self.lock:
            self.errors[error.code] += 1


class Patience:
    """Ends the replay against a pool that is gone. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futile = 0
        self._since = 0.0

    def note(self, began: float, failure: MoonpoolError | None) -> None:
        """Take note of a request that is over.

        Args:
            began: when.
            failure: why nothing came of it; None: something did.

        Raises:
            BenchError: nothing has come of any for too long.
        """
        with self._lock:
            self._futile = 0 if failure is None else self._futile + 1
            if self._futile == 1:
                self._since = began
            futile, seconds = self._futile, time.monotonic() - self._since
        if futile >= _GONE_REQUESTS and seconds >= _GONE_SECONDS:
            raise BenchError(
                f"the pool is gone or of no use: nothing came of the last {futile} requests, for {seconds:.0f} s",
                cause=str(failure),
                hint="whether master and nodes run",
            )


class Serving:
    """One client, used by one thread."""

    def __init__(
        self,
        client: StoreClient,
        namespace: str,
        hashes: NDArray[np.uint8],
        block_bytes: int,
        totals: Totals,
        patience: Patience,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._hashes = hashes
        self._block_bytes = block_bytes
        self._totals = totals
        self._patience = patience
        #: The last of the request.
        self._failure: MoonpoolError | None = None
        self._at_once = max(1, _PIECE_BYTES // block_bytes)
        self._region = client.allocate(self._at_once * block_bytes)
        self._memory = np.asarray(self._region)[: self._at_once * block_bytes].reshape(self._at_once, block_bytes)
        self._offsets = np.arange(self._at_once, dtype=np.int64) * block_bytes
        self._lengths = np.full(self._at_once, block_bytes, dtype=np.int64)

    def serve(self, due: float, late: float, blocks: Sequence[int]) -> None:
        """Ask, get what is there, put the rest; note it. A master that does not answer is asked nothing more.

        Raises:
            BenchError: the pool is gone.
        """
        self._failure = None
        hashes = self._hashes[list(blocks)]
        began = time.monotonic()
        matched = self._matched(hashes)
        asked = time.monotonic()
        hits, getting = self._get(hashes[:matched])
        put_blocks, putting = 0, 0.0
        if not isinstance(self._failure, MasterUnavailableError):
            put_blocks, putting = self._put(hashes, hits)
        done = Served(due, late, asked - began, getting, putting, len(blocks), hits, put_blocks)
        with self._totals.lock:
            self._totals.served.append(done)
        if blocks:
            self._patience.note(began, None if hits or put_blocks else self._failure)

    def _fail(self, error: MoonpoolError) -> None:
        self._failure = error
        self._totals.fail(error)

    def _matched(self, hashes: NDArray[np.uint8]) -> int:
        if not len(hashes):
            return 0
        try:
            return self._client.match_prefix(self._namespace, hashes.tobytes(), lease=1.0)
        except MoonpoolError as error:
            self._fail(error)
            return 0

    def _get(self, hashes: NDArray[np.uint8]) -> tuple[int, float]:
        """Return how many of the first were got, and the seconds that this took."""
        hits, seconds = 0, 0.0
        for begin in range(0, len(hashes), self._at_once):
            some = hashes[begin : begin + self._at_once]
            began = time.monotonic()
            results = self._tried(self._client.get_into, some)
            seconds += time.monotonic() - began
            good = self._checked(some, results)
            hits += good
            if good < len(some):
                break
        return hits, seconds

    def _checked(self, hashes: NDArray[np.uint8], results: Results | None) -> int:
        """Compare what has come; return how many of the first are there and right."""
        if results is None:
            return 0
        there = np.frombuffer(results.outcomes, dtype=np.uint8) == Outcome.OK
        right = (self._memory[: len(hashes)] == content_of(hashes, self._block_bytes)).all(axis=1)
        for index in np.flatnonzero(there & ~right).tolist():
            self._totals.complain(f"chunk {hashes[index].tobytes().hex()[:16]}... has other bytes than were put")
        for index in results.where(Outcome.CORRUPT):
            self._totals.complain(str(results.errors[index]))
        with self._totals.lock:
            self._totals.vanished += results.count(Outcome.MISS)
        good = there & right
        return len(good) if good.all() else int(np.argmin(good))

    def _put(self, hashes: NDArray[np.uint8], first: int) -> tuple[int, float]:
        """Put the chunks from `first` on; return how many, and the seconds that this took."""
        put, seconds = 0, 0.0
        for begin in range(first, len(hashes), self._at_once):
            some = hashes[begin : begin + self._at_once]
            self._memory[: len(some)] = content_of(some, self._block_bytes)
            parent = hashes[begin - 1].tobytes() if begin else ROOT
            began = time.monotonic()
            results = self._tried(self._client.put, some, parents=parent)
            seconds += time.monotonic() - began
            if results is None:
                break
            done = results.count(Outcome.OK) + results.count(Outcome.ALREADY)
            put += done
            if done < len(some):
                break  # what follows could not be matched
        return put, seconds

    def _tried(self, call: Callable[..., Results], hashes: NDArray[np.uint8], **options: Any) -> Results | None:
        """Make a call with the first places of the memory; count what went wrong, for all of it or single chunks."""
        count = len(hashes)
        values = self._region, self._offsets[:count], self._lengths[:count]
        try:
            results = call(self._namespace, hashes.tobytes(), values, **options)
        except MoonpoolError as error:
            self._fail(error)
            return None
        for index in results.where(Outcome.FAILED):
            failed = results.errors[index]
            if isinstance(failed, NoSpaceError):
                # What happens in a pool that is full, or has just got a new master.
                self._failure = failed
                with self._totals.lock:
                    self._totals.dropped += 1
            else:
                self._fail(failed)
        return results
