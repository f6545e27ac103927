# SPDX-License-Identifier: Apache-2.0
"""The calls of the master that are measured, each with requests that are ready and a check of every answer."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np

from moonpool.bench.pool.loading import CHUNK_BYTES, NAMESPACE, Loader, batches_of
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client.packing import EXTENT, ROOT

__all__ = ["CALLS", "CALL_NAMES", "GROUPS", "Call", "Exhausted", "Rpc"]

#: From the name of a call and the bytes of its request to the bytes of its answer.
Rpc: TypeAlias = Callable[[str, bytes], Awaitable[bytes]]

#: Different requests of a row, so that not the same few chunks are asked for again and again.
GROUPS: Final = 64
_LEASE_MS: Final = 1000
#: What is put for one window of removals.
_STOCK_CALLS: Final = 2000
_STOCK_CALLS_MIN: Final = 100
_STOCK_CHUNKS: Final = 100_000


class Exhausted(Exception):  # noqa: N818 - not a failure
    """There is nothing left to do it to: the window ends."""


class Call(ABC):
    """One kind of call with a number of hashes.

    Args:
        loader: of the master.
        hashes: chunks that are there: `GROUPS` chains of the same length.
        count: hashes of one call.

    Attributes:
        real: whether the master is asked, and not the echo. Set before each window.
        complaints: answers that were wrong.
    """

    name: ClassVar[str]
    #: Whether it can be made as often as one likes.
    endless: ClassVar[bool] = True
    #: The calls that one of them consists of.
    methods: ClassVar[tuple[str, ...]]

    def __init__(self, loader: Loader, hashes: bytes, count: int) -> None:
        self._loader = loader
        self._count = count
        self.real = True
        self._good = bytes([pb.OK]) * count
        self._chains = [chain[: 32 * count] for chain in batches_of(hashes, len(hashes) // 32 // GROUPS)]
        self.complaints: list[str] = []

    def prepare(self) -> None:  # noqa: B027 - most need nothing
        """Get ready for one window."""

    @abstractmethod
    async def once(self, rpc: Rpc, index: int) -> None:
        """Make it once, and look at the answer.

        Raises:
            Exhausted: it cannot be made any more in this window.
        """

    def finish(self) -> None:  # noqa: B027
        """Undo what the window left."""

    def _wrong(self, what: str) -> None:
        # Enough to see what it is.
        if len(self.complaints) < 8:
            self.complaints.append(f"{self.name}: {what}")

    def _expect(self, statuses: bytes) -> None:
        if statuses != self._good:
            self._wrong(f"statuses {sorted(set(statuses))} and not {len(self._good)} times OK")


class _Read(Call):
    """A call whose answer to the same request is the same bytes every time, which is cheap to compare."""

    def __init__(self, loader: Loader, hashes: bytes, count: int) -> None:
        super().__init__(loader, hashes, count)
        self._requests: list[bytes] = []
        self._answers: list[bytes] = []
        for chain in self._chains:
            request = self.request(chain)
            reply = loader.call(self.name, request)
            self.check(reply)
            self._requests.append(request.SerializeToString())
            self._answers.append(reply.SerializeToString())

    @abstractmethod
    def request(self, hashes: bytes) -> Any:
        """Return the message."""

    def check(self, reply: Any) -> None:
        """Look at the answer that the others are compared with."""
        self._expect(reply.statuses)

    async def once(self, rpc: Rpc, index: int) -> None:
        place = index % len(self._requests)
        answer = await rpc(self.name, self._requests[place])
        # The echo gives one answer to all, which has as many bytes.
        if answer != self._answers[place if self.real else 0]:
            self._wrong(f"{len(answer)} bytes that differ from the first answer to the same request")


class Exists(_Read):
    """Whether chunks are there."""

    name, methods = "Exists", ("Exists",)

    def request(self, hashes: bytes) -> Any:
        return pb.ExistsRequest(namespace=NAMESPACE, hashes=hashes)


class MatchPrefix(_Read):
    """How many of the first chunks of a chain are there."""

    name, methods = "MatchPrefix", ("MatchPrefix",)

    def request(self, hashes: bytes) -> Any:
        return pb.MatchPrefixRequest(namespace=NAMESPACE, hashes=hashes, lease_ms=_LEASE_MS)

    def check(self, reply: Any) -> None:
        if reply.matched != self._count:
            self._wrong(f"{reply.matched} of {self._count} chunks matched")


class Locate(_Read):
    """Where chunks are, with a lease."""

    name, methods = "Locate", ("Locate",)

    def request(self, hashes: bytes) -> Any:
        return pb.LocateRequest(namespace=NAMESPACE, hashes=hashes, lease_ms=_LEASE_MS)

    def check(self, reply: Any) -> None:
        super().check(reply)
        extents = np.frombuffer(reply.extents, dtype=EXTENT)
        if len(extents) != self._count or set(extents["length"].tolist()) != {CHUNK_BYTES}:
            self._wrong("extents of another length than was put")


class Put(Call):
    """Room for chunks, and then the word that they are written: PutStart and PutCommit, one after the other."""

    name, methods = "PutStart+PutCommit", ("PutStart", "PutCommit")

    def __init__(self, loader: Loader, hashes: bytes, count: int) -> None:
        super().__init__(loader, hashes, count)
        self._put: list[bytes] = []

    async def once(self, rpc: Rpc, index: int) -> None:
        del index
        hashes = os.urandom(32 * self._count)
        start = pb.PutStartRequest(
            session=self._loader.session,
            namespace=NAMESPACE,
            hashes=hashes,
            parents=ROOT,
            lengths=CHUNK_BYTES.to_bytes(8, "little"),
        )
        given = pb.PutStartReply.FromString(await rpc("PutStart", start.SerializeToString()))
        self._expect(given.statuses)
        generations = np.frombuffer(given.extents, dtype=EXTENT)["generation"].tobytes()
        commit = pb.PutCommitRequest(
            session=self._loader.session, namespace=NAMESPACE, hashes=hashes, generations=generations
        )
        done = pb.ItemsReply.FromString(await rpc("PutCommit", commit.SerializeToString()))
        self._expect(done.statuses)
        self._put.append(hashes)

    def finish(self) -> None:
        put, self._put = b"".join(self._put), []
        if self.real and (there := self._loader.remove(put)) != len(put) // 32:
            self._wrong(f"{there} of {len(put) // 32} chunks that were committed were there")


class Remove(Call):
    """Removal, of a stock that is put ahead of the window."""

    name, methods = "Remove", ("Remove",)
    endless = False

    def prepare(self) -> None:
        calls = min(_STOCK_CALLS, max(_STOCK_CALLS_MIN, _STOCK_CHUNKS // self._count))
        self._stock = os.urandom(32 * self._count * calls)
        if self.real:
            self._loader.put(self._stock)
        self._requests = [
            pb.RemoveRequest(namespace=NAMESPACE, hashes=some).SerializeToString()
            for some in batches_of(self._stock, self._count)
        ]

    async def once(self, rpc: Rpc, index: int) -> None:
        if index >= len(self._requests):
            raise Exhausted
        reply = pb.ItemsReply.FromString(await rpc("Remove", self._requests[index]))
        self._expect(reply.statuses)

    def finish(self) -> None:
        if self.real:
            self._loader.remove(self._stock)


class Pin(Call):
    """A pin and its release: Pin and Unpin, one after the other."""

    name, methods = "Pin+Unpin", ("Pin", "Unpin")

    def __init__(self, loader: Loader, hashes: bytes, count: int) -> None:
        super().__init__(loader, hashes, count)
        self._requests = [
            pb.PinRequest(session=loader.session, namespace=NAMESPACE, hashes=chain).SerializeToString()
            for chain in self._chains
        ]

    async def once(self, rpc: Rpc, index: int) -> None:
        pinned = pb.PinReply.FromString(await rpc("Pin", self._requests[index % len(self._requests)]))
        self._expect(pinned.statuses)
        request = pb.UnpinRequest(session=self._loader.session, pin=pinned.pin)
        unpinned = pb.UnpinReply.FromString(await rpc("Unpin", request.SerializeToString()))
        if unpinned.unpinned != self._count:
            self._wrong(f"{unpinned.unpinned} of {self._count} chunks were unpinned")


CALLS: Final[dict[str, type[Call]]] = {
    "exists": Exists,
    "match": MatchPrefix,
    "locate": Locate,
    "put": Put,
    "remove": Remove,
    "pin": Pin,
}
CALL_NAMES: Final = tuple(CALLS)
