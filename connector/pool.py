# SPDX-License-Identifier: Apache-2.0
"""The way to the pool, which may be there or not: an engine never waits for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from moonpool.errors import MoonpoolError
from moonpool.store_client import StoreClient

__all__ = ["PoolLink"]

_log = logging.getLogger(__name__)


class PoolLink:
    """A store client that is made in the background, as soon as there is a master. Thread-safe.

    After a call that the pool did not answer it counts as away for a while, so that requests are not each made to wait
    for it.

    Args:
        make: makes the client. It raises `MoonpoolError` when there is no master.
        retry: seconds between two attempts, and for which a pool that did not answer is not asked.
    """

    def __init__(self, make: Callable[[], StoreClient], retry: float) -> None:
        self._make = make
        self._retry = retry
        self._client: StoreClient | None = None
        self._away_until = 0.0
        self._closing = threading.Event()
        self._made = threading.Event()
        self._said = False
        self._thread = threading.Thread(target=self._connect, name="moonpool-pool-link", daemon=True)
        self._thread.start()

    @property
    def client(self) -> StoreClient | None:
        """The client; None while the pool is away."""
        return None if time.monotonic() < self._away_until else self._client

    def wait(self, seconds: float) -> StoreClient | None:
        """Wait until there is a client, and return it; None: there is none by then."""
        self._made.wait(seconds)
        return self.client

    def failed(self, error: MoonpoolError) -> None:
        """A call was not answered: the pool is away for `retry` seconds."""
        self._away_until = time.monotonic() + self._retry
        if not self._said:
            self._said = True
            _log.warning("moonpool: the pool cannot be reached, requests are computed meanwhile: %s", error)

    def answered(self) -> None:
        """A call was answered."""
        if self._said:
            self._said = False
            _log.warning("moonpool: the pool can be reached again")

    def close(self) -> None:
        """Close the client, and make none any more. Again: nothing."""
        self._closing.set()
        self._thread.join()
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connect(self) -> None:
        while not self._closing.is_set() and not self._try():
            self._closing.wait(self._retry)

    def _try(self) -> bool:
        try:
            self._client = self._make()
            self._made.set()
        except MoonpoolError as error:
            self.failed(error)
            return False
        self.answered()
        return True
