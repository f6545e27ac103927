# SPDX-License-Identifier: Apache-2.0
"""Pins: chunks that are neither evicted nor removed while somebody holds them."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from moonpool.errors import MoonpoolError
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client.arguments import checked_timeout
from moonpool.store_client.packing import some_hashes
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

    def __init__(self, core: Core, numbers: list[int], results: Results) -> None:
        self._core = core
        #: Of the pins that the master gave, one for each of its calls.
        self._numbers = numbers
        self._lock = threading.Lock()
        self.results = results

    def __len__(self) -> int:
        return self.results.count(Outcome.OK)

    @property
    def released(self) -> bool:
        """Whether it holds nothing any more."""
        return not self._numbers

    @property
    def lost(self) -> bool:
        """Whether the master was started anew and had not all of the chunks any more. Those that are there are held."""
        return any(self._core.session.lost(number) for number in self._numbers)

    def release(self, timeout: float | None = None) -> None:
        """Let go of the chunks. Calling it again does nothing.

        Raises:
            MasterUnavailableError: the master did not answer. The pin ends with the session then, at the latest.
        """
        if self._core.forked:
            self._core.check()  # the pin is that of the parent
        seconds = self._core.settings.timeout if timeout is None else checked_timeout(timeout)
        with self._lock:
            numbers, self._numbers = self._numbers, []
        held = [number for number in numbers if self._core.session.let_go(number)]
        if not held:
            return
        self._core.check()
        deadline = time.monotonic() + seconds
        for number in held:
            self._core.call("Unpin", pb.UnpinRequest(session=self._core.session.id, pin=number), deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Pin of {len(self)} chunks{', released' if self.released else ', some are lost' if self.lost else ''}>"


def pin(core: Core, namespace: str, batches: list[bytes], deadline: float) -> Pin:
    """Pin chunks, a batch in each call to the master. See `StoreClient.pin`."""
    numbers: list[int] = []
    outcomes = b""
    try:
        for hashes in batches:
            number, some = _pin_batch(core, namespace, hashes, deadline)
            numbers += [number] if number else []
            outcomes += some
    except BaseException:
        with contextlib.suppress(MoonpoolError):  # the first error counts; what stays pinned ends with the session
            Pin(core, numbers, Results(outcomes, {})).release()
        raise
    return Pin(core, numbers, Results(outcomes, {}))


def _pin_batch(core: Core, namespace: str, hashes: bytes, deadline: float) -> tuple[int, bytes]:
    request = pb.PinRequest(session=core.session.id, namespace=namespace, hashes=hashes)
    reply = core.call("Pin", request, deadline)
    held = np.frombuffer(reply.statuses, dtype=np.uint8) == pb.OK
    if reply.pin:
        core.session.hold(reply.pin, namespace, some_hashes(hashes, held))
    return reply.pin, np.where(held, Outcome.OK, Outcome.MISS).astype(np.uint8).tobytes()
