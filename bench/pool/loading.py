# SPDX-License-Identifier: Apache-2.0
"""Fills a master with chunks that lie nowhere: a node in name only, and batches of 1,000."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moonpool.bench.errors import BenchError
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client.packing import ROOT, extents_of
from moonpool.store_client.rpc import MasterLink
from moonpool.store_client.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from typing_extensions import Self

__all__ = ["AT_ONCE", "CHUNK_BYTES", "NAMESPACE", "Loader", "batches_of"]

NAMESPACE: Final = "mooncake-bench"
#: Chunks of one message.
AT_ONCE: Final = 1000
CHUNK_BYTES: Final = 4096
#: The master never touches the memory of a node, so it may be as large as one likes.
_CAPACITY_BYTES: Final = 1 << 42
_SECONDS: Final = 30.0
_WAYS: Final = 4


def batches_of(hashes: bytes, size: int = AT_ONCE) -> list[bytes]:
    """Cut packed hashes into batches."""
    return [hashes[begin : begin + 32 * size] for begin in range(0, len(hashes), 32 * size)]


class Loader:
    """A node and a client of one master, for what is not measured. A context manager. Used by one thread.

    Args:
        address: of the master.

    Raises:
        MasterUnavailableError: it does not answer.
    """

    def __init__(self, address: str) -> None:
        self._link = MasterLink(address, None)
        self._mount = pb.MountSegmentRequest(
            address="127.0.0.1:1", region="pool", incarnation=os.urandom(16), capacity_bytes=_CAPACITY_BYTES
        )
        self._sessions: list[Session] = []
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        incarnation = self._mount.incarnation.hex()
        self._node = Session(
            self._link, pb.NODE, "no memory", "none", incarnation, on_welcome=self._welcomed, on_fence=lambda _: None
        )
        self._sessions.append(self._node)
        self._client = Session(self._link, pb.CLIENT, "mooncake-bench", "", os.urandom(16).hex())
        self._sessions.append(self._client)
        for session in self._sessions:
            session.wait(_SECONDS)

    def _welcomed(self, session: Session) -> None:
        self._mount.session = session.id
        self._mount.segment = self.call("MountSegment", self._mount).segment

    @property
    def session(self) -> bytes:
        """The id of the client's session."""
        return self._client.id

    def call(self, method: str, request: Any) -> Any:
        """Call the master, which may be starting."""
        return self._link.call(method, request, time.monotonic() + _SECONDS)

    def put(self, hashes: bytes) -> None:
        """Put chunks, each batch of 1,000 a chain of its own.

        Raises:
            BenchError: one was not taken.
        """
        self._each(self.put_batch, batches_of(hashes))

    def remove(self, hashes: bytes) -> int:
        """Remove chunks. Returns how many were there."""
        request = [pb.RemoveRequest(namespace=NAMESPACE, hashes=some) for some in batches_of(hashes)]
        return sum(self._each(lambda one: self.call("Remove", one).statuses.count(pb.OK), request))

    def hits(self, hashes: bytes) -> int:
        """Return how many chunks are there."""
        request = [pb.ExistsRequest(namespace=NAMESPACE, hashes=some) for some in batches_of(hashes)]
        return sum(self._each(lambda one: self.call("Exists", one).statuses.count(pb.OK), request))

    def extents(self, hashes: bytes) -> list[bytes]:
        """Return the packed extents of each batch of 1,000 chunks. They are not leased."""
        request = [pb.LocateRequest(namespace=NAMESPACE, hashes=some) for some in batches_of(hashes)]
        found: list[bytes] = self._each(lambda one: self.call("Locate", one).extents, request)
        return found

    def put_batch(self, hashes: bytes) -> None:
        """Put up to 1,000 chunks, one chain, with one PutStart and one PutCommit. Thread-safe.

        Raises:
            BenchError: one was not taken.
        """
        count = len(hashes) // 32
        started = self.call(
            "PutStart",
            pb.PutStartRequest(
                session=self.session,
                namespace=NAMESPACE,
                hashes=hashes,
                parents=ROOT,
                lengths=CHUNK_BYTES.to_bytes(8, "little"),
                wait_ms=1000,
            ),
        )
        _taken("PutStart", started.statuses)
        given = extents_of(started.extents, count, started.replicas)
        generations = np.ascontiguousarray(given["generation"][:, 0]).tobytes()
        committed = self.call(
            "PutCommit",
            pb.PutCommitRequest(session=self.session, namespace=NAMESPACE, hashes=hashes, generations=generations),
        )
        _taken("PutCommit", committed.statuses)

    def _each(self, call: Callable[[Any], Any], requests: Iterable[Any]) -> list[Any]:
        with ThreadPoolExecutor(_WAYS) as executor:
            try:
                return list(executor.map(call, requests))
            except BaseException:
                executor.shutdown(wait=False, cancel_futures=True)
                raise

    def close(self) -> None:
        """Say goodbye."""
        for session in self._sessions:
            session.close()
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _taken(method: str, statuses: bytes) -> None:
    """Raise BenchError, which names what else than OK the answers are, unless all are OK."""
    others = sorted(set(statuses) - {pb.OK})
    if others:
        told = ", ".join(f"{statuses.count(status)} × {pb.ItemStatus.Name(status)}" for status in others)
        raise BenchError("the master did not take every chunk", cause=f"{method}: {told}")
