# SPDX-License-Identifier: Apache-2.0
"""The pool that is measured, a client of it, and what the benchmark does beside the client: look, compare, empty."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moonpool.bench.errors import BenchError
from moonpool.bench.memory import allocate
from moonpool.bench.pool.loading import AT_ONCE, batches_of
from moonpool.bench.pool.opening import opened
from moonpool.bench.pool.work import LOCATED
from moonpool.proto import pool_pb2 as pb
from moonpool.proto.tls import Tls
from moonpool.store_client import StoreClient, StoreClientSettings
from moonpool.store_client.packing import EXTENT, Records, extents_of
from moonpool.store_client.rpc import MasterLink
from moonpool.store_client.segments import SegmentTable, Target
from moonpool.store_client.session import Session
from moonpool.units import format_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

    from moonpool.bench.pool.opening import PoolOptions
    from moonpool.transfer_engine import Region

__all__ = ["Given", "PoolPlace"]

_CALL_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 0.02
#: How long after the last lease room may take to be free.
_EMPTY_SECONDS: Final = 10.0
#: Of the pool that was started, so much is written once before anything is measured.
_TOUCHED: Final = 0.9
_TOUCH_BYTES: Final = 1 << 20


class Given:
    """Room that the master gave for chunks, which nobody else may write until it is given back.

    Attributes:
        extents: a row for each chunk, a column for each replica.
        begin_until: no transfer into it may begin later (`time.monotonic`).
        write_until: when the master takes it back.
    """

    def __init__(self, hashes: bytes, extents: Records, begin_until: float, write_until: float) -> None:
        self.hashes = hashes
        self.extents = extents
        self.begin_until = begin_until
        self.write_until = write_until


class PoolPlace:
    """A pool that was started, or one that runs. A context manager. Used by one thread.

    Args:
        options: which pool it is.

    Raises:
        ClusterError: the pool did not start.
        MasterUnavailableError: the master does not answer.
        AuthenticationError: it has another secret.
    """

    def __init__(self, options: PoolOptions) -> None:
        self._stack = contextlib.ExitStack()
        self.namespace = f"mooncake-bench-{os.urandom(8).hex()}"
        self._own = options.master is None
        self._knowing: StoreClient | None = None
        self._memories: dict[str, tuple[NDArray[np.uint8], Region]] = {}
        try:
            self._open(options)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, options: PoolOptions) -> None:
        address, self._fitting = self._stack.enter_context(opened(options))
        # It asks the master whatever it does.
        settings = StoreClientSettings.load(
            {"master": address, "name": "mooncake-bench", "locations_max": 0, **self._fitting}
        )
        self.client = self._stack.enter_context(StoreClient(settings=settings))
        self.engine = self.client.engine
        self._link = MasterLink(address, settings.secret, Tls.of(settings))
        self._stack.callback(self._link.close)
        # A session of its own: room is given to a session, and that of the client belongs to the client.
        self._session = Session(self._link, pb.CLIENT, "mooncake-bench limit", "", self.engine.incarnation)
        self._stack.callback(self._session.close)
        self._session.wait(_CALL_SECONDS)
        self._table = SegmentTable(self.engine, self._link, 1.0, 5.0)
        self._stack.callback(self._table.close)
        self.address = address
        self.lease = settings.lease
        if self._own:
            self._touch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the client, and the pool if it was started here."""
        self._stack.close()
        self._memories.clear()

    def client_of(self, located: str) -> StoreClient:
        """Return the client for gets of this kind, see `LOCATED`."""
        if located == LOCATED[0]:
            return self.client
        if self._knowing is None:
            self._knowing = self._stack.enter_context(
                StoreClient(self.address, name="mooncake-bench known", engine=self.engine, **self._fitting)
            )
        return self._knowing

    # ---------------------------------------------------------------- facts

    def describe(self) -> dict[str, Any]:
        """Return what is worth knowing about the pool, as JSON values."""
        segments = self.client.segments()
        status = self.client.master_stats()
        return {
            "master": self.address,
            "started": self._own,
            "nodes": len({segment.node for segment in segments}),
            "segments": len(segments),
            "capacity_bytes": sum(segment.capacity_bytes for segment in segments),
            "used_bytes": sum(segment.used_bytes for segment in segments),
            "store": status["store"]["kind"],
        }

    def target(self, segment: int) -> Target:
        """Return how to reach a segment without the client."""
        return self._table.target(segment, self._link.cluster, time.monotonic() + _CALL_SECONDS)

    def memory(self, name: str, nbytes: int) -> tuple[NDArray[np.uint8], Region]:
        """Return memory of this process that is registered, the same again for the same size."""
        known = self._memories.get(name)
        if known is not None and known[0].nbytes == nbytes:
            return known
        if known is not None:
            known[1].release()
        memory = allocate(nbytes)
        self._memories[name] = memory, self.engine.register(memory)
        return self._memories[name]

    # ---------------------------------------------------------------- beside the client

    def locate(self, hashes: bytes) -> Records:
        """Return where chunks are, without a lease.

        Raises:
            BenchError: one is not there.
        """
        found = []
        for some in batches_of(hashes):
            reply = self._call("Locate", pb.LocateRequest(namespace=self.namespace, hashes=some))
            if reply.statuses.strip(b"\0"):
                missing = len(some) // 32 - reply.statuses.count(pb.OK)
                raise BenchError(
                    f"{missing} chunks that were put are not there any more",
                    hint="a pool with more room, and for itself",
                )
            found.append(extents_of(reply.extents, len(some) // 32, max(1, reply.replicas)))
        if not found:
            return np.empty((0, 1), dtype=EXTENT)
        if len({extents.shape[1] for extents in found}) > 1:
            raise BenchError("some chunks have fewer replicas than others", hint="as many nodes as replicas")
        return np.concatenate(found)

    def start(self, hashes: bytes, length: int, replicas: int) -> Given:
        """Have the master give room for chunks, as a put has it.

        Raises:
            BenchError: there is no room.
        """
        sent = time.monotonic()
        found, begin_ms, deadline_ms = [], 1 << 62, 1 << 62
        for some in batches_of(hashes):
            reply = self._call(
                "PutStart",
                pb.PutStartRequest(
                    session=self._session.id,
                    namespace=self.namespace,
                    hashes=some,
                    lengths=length.to_bytes(8, "little"),
                    replicas=replicas,
                    wait_ms=1000,
                ),
            )
            found.append(extents_of(reply.extents, len(some) // 32, reply.replicas))
            begin_ms, deadline_ms = min(begin_ms, reply.begin_ms), min(deadline_ms, reply.deadline_ms)
            if reply.statuses.strip(b"\0"):
                self.give_back(Given(hashes, np.concatenate(found), 0.0, 0.0))
                raise BenchError(
                    "the pool has no room for the limit of puts", hint="more --dram, or a smaller --footprint"
                )
        return Given(hashes, np.concatenate(found), sent + begin_ms / 1000, sent + deadline_ms / 1000)

    def give_back(self, given: Given) -> None:
        """Give room back. No transfer into it is under way."""
        for begin in range(0, len(given.extents), AT_ONCE):
            self._call(
                "PutAbort",
                pb.PutAbortRequest(
                    session=self._session.id,
                    namespace=self.namespace,
                    hashes=given.hashes[32 * begin : 32 * (begin + AT_ONCE)],
                    generations=np.ascontiguousarray(given.extents["generation"][begin : begin + AT_ONCE, 0]).tobytes(),
                    settled=True,
                ),
            )

    def remove(self, hashes: bytes) -> None:
        """Remove chunks, and wait until their room is free again."""
        for some in batches_of(hashes):
            self.client.remove(self.namespace, some)
        deadline = time.monotonic() + _EMPTY_SECONDS + self.lease
        while self._own and (used := sum(segment.used_bytes for segment in self.client.segments())):
            if time.monotonic() > deadline:
                raise BenchError(f"{format_bytes(used)} of the pool are still in use though every chunk was removed")
            time.sleep(_LOOK_SECONDS)

    def _call(self, method: str, request: Any) -> Any:
        return self._link.call(method, request, time.monotonic() + _CALL_SECONDS)

    def _touch(self) -> None:
        """Write nearly all of the pool once, so that no window meets memory for the first time."""
        capacity = sum(segment.capacity_bytes for segment in self.client.segments())
        count = int(capacity * _TOUCHED) // (_TOUCH_BYTES + 128)
        hashes = os.urandom(32 * count)
        value = memoryview(bytes(_TOUCH_BYTES))
        for begin in range(0, count, 16):
            some = hashes[32 * begin : 32 * (begin + 16)]
            # Where a row of nodes is uneven, one is full before the others.
            if not self.client.put(self.namespace, some, [value] * (len(some) // 32), timeout=_CALL_SECONDS).ok:
                break
        self.remove(hashes)
