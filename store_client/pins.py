# SPDX-License-Identifier: Apache-2.0
"""Pins: chunks that are neither evicted nor removed while somebody holds them."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from moonpool.proto import pool_pb2 as pb
from moonpool.store_client.results import Outcome, Results

if TYPE_CHECKING:
    from typing_extensions import Self

    from moonpool.store_client.core import Core

__all__ = ["Pin"]


class Pin:
    """Holds chunks until it is released, closed as a context manager, or its client ends. Made by `StoreClient.pin`.

    It belongs to the session of its client, which names it to a master that was started anew. Thread-safe.

    Attributes:
        results: which chunks are held: OK, or MISS for those that are not there.
    """

    def __init__(self, core: Core, number: int, namespace: str, hashes: bytes, results: Results) -> None:
        self._core = core
        self._number = number
        self._lock = threading.Lock()
        self.results = results
        if number:
            matrix = [hashes[32 * index : 32 * index + 32] for index in results.where(Outcome.OK)]
            core.session.hold(number, namespace, b"".join(matrix))

    def __len__(self) -> int:
        return self.results.count(Outcome.OK)

    @property
    def released(self) -> bool:
        """Whether it holds nothing any more."""
        return self._number == 0

    @property
    def lost(self) -> bool:
        """Whether the master was started anew and had not all of the chunks any more. Those that are there are held."""
        return self._number != 0 and self._core.session.lost(self._number)

    def release(self, timeout: float | None = None) -> None:
        """Let go of the chunks. Calling it again does nothing.

        Raises:
            MasterUnavailableError: the master did not answer. The pin ends with the session then, at the latest.
        """
        with self._lock:
            number, self._number = self._number, 0
        if not number or not self._core.session.let_go(number):
            return
        seconds = self._core.settings.timeout if timeout is None else timeout
        request = pb.UnpinRequest(session=self._core.session.id, pin=number)
        self._core.call("Unpin", request, time.monotonic() + seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Pin of {len(self)} chunks{', released' if self.released else ', some are lost' if self.lost else ''}>"


def pin(core: Core, namespace: str, hashes: bytes, deadline: float) -> Pin:
    """Pin chunks. See `StoreClient.pin`."""
    request = pb.PinRequest(session=core.session.id, namespace=namespace, hashes=hashes)
    reply = core.call("Pin", request, deadline)
    outcomes = bytes(Outcome.OK if status == pb.OK else Outcome.MISS for status in reply.statuses)
    return Pin(core, reply.pin, namespace, hashes, Results(outcomes, {}))
