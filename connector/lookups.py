# SPDX-License-Identifier: Apache-2.0
"""What the pool has of a prompt: asked on a thread of its own, since an engine waits for nobody."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import Final

from moonpool.connector.pool import PoolLink
from moonpool.errors import MoonpoolError
from moonpool.store_client.packing import HASH_BYTES

__all__ = ["Lookup", "Lookups"]

_log = logging.getLogger(__name__)
# What is left of a lease must do for beginning the load, which asks again.
_LEASE_LEFT: Final = 0.5
_ANSWER_MIN: Final = 0.25


class Lookup:
    """One question, and its answer as soon as there is one.

    Written by the thread and read by the engine's, without a lock: `answer` is set last.

    Attributes:
        hashes: the keys that were asked for, a chain from its beginning.
        tail: whether the last one is the key of a tail.
        asked: when, by the monotonic clock; what was learned later is newer than the answer.
        answer: how many of the first keys are in the pool; None: not known yet.
        until: when the answer is too old.
        problem: why there is no real answer: ``away``, ``full``, ``failed``; else "".
        abandoned: nobody waits for it any more.
    """

    __slots__ = ("abandoned", "answer", "asked", "hashes", "problem", "tail", "until")

    def __init__(self, hashes: bytes, *, tail: bool = False) -> None:
        self.hashes = hashes
        self.tail = tail
        self.asked = time.monotonic()
        self.answer: int | None = None
        self.until = 0.0
        self.problem = ""
        self.abandoned = False

    @property
    def chunks(self) -> int:
        """How many keys were asked for."""
        return len(self.hashes) // HASH_BYTES

    def end(self, answer: int, until: float, problem: str = "") -> None:
        """Give the answer."""
        self.until, self.problem, self.answer = until, problem, answer


class Lookups:
    """Asks the pool, one question after the other, on its own thread.

    Args:
        link: to the pool.
        namespace: of the engine.
        lease: seconds for which what is found is not given up.
        timeout: seconds that a request waits for its answer.
        most: questions that may wait; further ones are answered with nothing.
        retry: seconds for which an answer of a pool that is away holds.
    """

    def __init__(
        self, link: PoolLink, namespace: str, *, lease: float, timeout: float, most: int, retry: float
    ) -> None:
        self._link = link
        self._namespace = namespace
        self._lease = lease
        self._timeout = max(timeout, _ANSWER_MIN)
        self._most = most
        self._retry = retry
        self._queue: queue.SimpleQueue[Lookup | None] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="moonpool-lookups", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many questions wait."""
        return self._queue.qsize()

    def ask(self, hashes: bytes, *, tail: bool = False) -> Lookup:
        """Ask how many of the first keys are in the pool. Never waits."""
        lookup = Lookup(hashes, tail=tail)
        if self._link.client is None:
            self._refuse(lookup, "away")
        elif self._queue.qsize() >= self._most:
            self._refuse(lookup, "full")
        else:
            self._queue.put(lookup)
        return lookup

    def close(self) -> None:
        """End the thread. What waits is not answered. Again: nothing."""
        self._closing = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (lookup := self._queue.get()) is not None:
            if lookup.abandoned or self._closing:
                continue
            try:
                self._answer(lookup)
            except Exception:  # noqa: BLE001 - a fault of ours must not end the look-ups of all requests to come
                _log.exception("moonpool: a look-up failed")
                self._refuse(lookup, "failed")

    def _answer(self, lookup: Lookup) -> None:
        client = self._link.client
        if client is None:
            self._refuse(lookup, "away")
            return
        sent = time.monotonic()
        try:
            found = client.match_prefix(self._namespace, lookup.hashes, lease=self._lease, timeout=self._timeout)
        except MoonpoolError as error:
            self._link.failed(error)
            self._refuse(lookup, "failed")
        else:
            self._link.answered()
            lookup.end(found, sent + self._lease * _LEASE_LEFT)

    def _refuse(self, lookup: Lookup, problem: str) -> None:
        # It holds for a while, so that a request that is asked for again and again does not wait each time.
        lookup.end(0, time.monotonic() + self._retry, problem)
