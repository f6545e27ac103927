# SPDX-License-Identifier: Apache-2.0
"""What stands between the connector of this process and the pool: it can be held up, slowed down, and listened to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from moonpool.store_client import Outcome, StoreClient
from moonpool.store_client.arguments import packed_hashes

__all__ = ["Gate", "Puts"]

#: No test holds anything up for longer, so that a mistake in one ends.
HELD_MAX = 60.0


class Gate:
    """Holds up calls of a method of every store client of this process.

    Args:
        patch: of the test, at whose end it is gone.
        method: such as ``"get_into"``.
        seconds: how long each call is held up at least.

    Attributes:
        arrived: a call is or was there.
        calls: how many came.
    """

    def __init__(self, patch: pytest.MonkeyPatch, method: str, *, seconds: float = 0.0) -> None:
        self.arrived = threading.Event()
        self.calls = 0
        self._open = threading.Event()
        self._open.set()
        real = getattr(StoreClient, method)

        def call(client: StoreClient, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self.arrived.set()
            time.sleep(seconds)
            assert self._open.wait(HELD_MAX)
            return real(client, *args, **kwargs)

        patch.setattr(StoreClient, method, call)

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Hold up every call that comes meanwhile."""
        self.arrived.clear()
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()


class Puts:
    """Listens to what the store clients of this process put.

    Attributes:
        chunks: (namespace, key, shard) of everything that is in the pool since.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.chunks: set[tuple[str, bytes, int]] = set()
        real = StoreClient.put

        def put(client: StoreClient, namespace: str, hashes: Any, *args: Any, **kwargs: Any) -> Any:
            results = real(client, namespace, hashes, *args, **kwargs)
            packed = packed_hashes(hashes)
            for index, outcome in enumerate(results.outcomes):
                if outcome in (Outcome.OK, Outcome.ALREADY):
                    key = packed[32 * index : 32 * index + 32]
                    self.chunks.add((namespace, key, int(kwargs.get("shard", 0))))
            return results

        patch.setattr(StoreClient, "put", put)
