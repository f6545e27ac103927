# SPDX-License-Identifier: Apache-2.0
"""The client of a pool."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from moonpool.store_client.arguments import (
    checked_flag,
    checked_lease,
    checked_namespace,
    checked_ranges,
    checked_replicas,
    checked_roster,
    checked_shard,
    checked_shards,
    packed_hashes,
    packed_parents,
)
from moonpool.store_client.asking import Asking, Removed
from moonpool.store_client.core import Core
from moonpool.store_client.errors import ChunkConflictError, ClientClosedError, StoreArgumentError
from moonpool.store_client.getting import GetRequest, get
from moonpool.store_client.packing import HASH_BYTES
from moonpool.store_client.pins import Pin
from moonpool.store_client.putting import PutRequest, put
from moonpool.store_client.ranges import Ranges
from moonpool.store_client.results import GetResults, Outcome, Results
from moonpool.store_client.settings import StoreClientSettings
from moonpool.store_client.values import destinations_of, values_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from moonpool.store_client.packing import Hashes
    from moonpool.transfer_engine import Region, TransferEngine

__all__ = ["Removed", "StoreClient"]

T = TypeVar("T")


class StoreClient(Asking):
    """Puts chunks into a pool and gets them out again, many at a time.

    ::

        with StoreClient("master-0:7600") as client:
            client.put("llama", [hash_0, hash_1], [kv_0, kv_1]).require()
            found = client.get("llama", [hash_0, hash_1])
            found[0]  # bytes, or None

    What concerns single chunks is in the results, and only what concerns the whole call is raised. A get gives
    either exactly the bytes that were put, or none.

    Args:
        master: ``"host:port"``; None: the setting `master`.
        engine: an open engine to use, such as the one whose regions hold the KV blocks. None: one of its own.
        settings: every setting at once. Excludes `options`.
        roster: the name of a roster, and what those who open a client with the same name are told of this one, 4 KiB at
            most. None: it is in none.
        options: single settings by name, see `StoreClientSettings`.

    Raises:
        ConfigError: an unknown option or impossible value, or files for TLS that cannot be used.
        AddressError: `master` is no address.
        TlsError: master and client do not agree on TLS.
        MasterUnavailableError: the master did not open a session within `startup_timeout`.

    A context manager. All methods are thread-safe. In a forked child they raise ForkedError.
    """

    def __init__(
        self,
        master: str | None = None,
        *,
        engine: TransferEngine | None = None,
        settings: StoreClientSettings | None = None,
        roster: tuple[str, bytes] | None = None,
        **options: Any,
    ) -> None:
        if settings is None:
            settings = StoreClientSettings.load(options if master is None else {"master": master, **options})
        elif master is not None or options:
            raise StoreArgumentError(
                "settings= was given together with others", hint="dataclasses.replace(settings, ...)"
            )
        self._core = Core(settings, engine, checked_roster(roster))
        self._pool = ThreadPoolExecutor(settings.threads, thread_name_prefix="moonpool-store")
        self._waiting = threading.BoundedSemaphore(settings.pending_max)
        self._finalizer = weakref.finalize(self, _abandon, self._core, self._pool)
        try:
            self._core.session.wait(settings.startup_timeout)
        except BaseException:
            self.close()
            raise

    # ---------------------------------------------------------------- chunks

    def put(
        self,
        namespace: str,
        hashes: Hashes,
        values: Any,
        *,
        parents: Hashes | None = None,
        shard: int = 0,
        shards: int = 1,
        replicas: int = 1,
        verify: bool = False,
        timeout: float | None = None,
    ) -> Results:
        """Put chunks. What is OK or ALREADY when it returns is durable and can be got by everybody.

        Nothing of that is evicted for the rest of the call: what finds no room is NoSpaceError, of a chain with all
        that comes after it.

        Args:
            namespace: keeps chunks of different models apart.
            hashes: 32 bytes for each chunk: a list, n x 32 bytes, or an array of uint8.
            values: a contiguous buffer for each chunk, or ``(region, offsets, lengths)`` with a registered region of
                `engine` and arrays, which is not copied and costs no Python work per chunk. With
                ``(region, offsets, lengths, counts)`` a chunk lies in spans: the arrays are of all spans in the order
                of the chunks, counts (an int or an array) says how many spans each chunk has, and its bytes are these
                one after the other. With ``(regions, which)`` as region each span lies in one of several.
            parents: of a chain, the hash that comes before the first chunk (`ROOT`: none); or one for each.
            shard: which part of the chunks this is, from 0 on; a chunk can be got when all `shards` are there.
            shards: how many parts they have.
            replicas: copies, on different hosts as far as there are.
            verify: read back what is there ALREADY, and fail with ChunkConflictError when it is other bytes.
            timeout: seconds; None: the setting `timeout`.

        Returns:
            For each chunk OK, ALREADY, or FAILED with its error: ChunkConflictError, NoSpaceError (with retry_after),
            ChunkBusyError, ChunkTooLargeError, IndexFullError, NodeUnreachableError. `Results.replicas` says how many
            copies each has got, which is fewer than `replicas` where there are not so many hosts.

        Raises:
            StoreArgumentError: an argument is wrong, or they do not fit each other.
            MasterUnavailableError: the master did not answer in time. What came of the chunks is not known.
            StagingFullError: other calls held all of the staging area.

        A node that fails is avoided at once, and its chunks are placed elsewhere in the same call.
        """
        self._core.check()
        namespace, shards = checked_namespace(namespace), checked_shards(shards)
        shard, replicas = checked_shard(shard, shards), checked_replicas(replicas)
        verify = checked_flag(verify, "verify")
        packed = packed_hashes(hashes)
        count = len(packed) // HASH_BYTES
        memory = values_of(self._core.engine, values, count)
        chain = packed_parents(parents, count)
        request = PutRequest(namespace, packed, chain, memory, shard, shards, replicas, self._deadline(timeout))
        results = put(self._core, request)
        return self._verified(results, request) if verify else results

    def get(
        self,
        namespace: str,
        hashes: Hashes,
        *,
        ranges: tuple[Any, Any] | None = None,
        shard: int = 0,
        lease: float | None = None,
        timeout: float | None = None,
    ) -> GetResults:
        """Get chunks as bytes.

        Args:
            namespace: as in `put`.
            hashes: as in `put`.
            ranges: (offsets, lengths), each an int or one for each chunk: only that part of it. The leaves of 256 KiB
                that it touches are read, through the staging area, and verified.
            shard: which part of the chunks.
            lease: seconds that the chunks stay where they are; None: the setting `lease`. Where they are is known from
                an earlier call as long as half of it is left; then the master is not asked.
            timeout: seconds; None: the setting `timeout`.

        Returns:
            For each chunk OK, MISS, CORRUPT, or FAILED with its error (NodeUnreachableError, ChunkRangeError, and
            ChunkTooLargeError for a range whose leaves do not fit `staging_bytes`).

        Raises:
            StoreArgumentError: an argument is wrong, or they do not fit each other.
            MasterUnavailableError: the master did not answer in time.
            StagingFullError: other calls held all of the staging area.
        """
        return self._get(namespace, hashes, None, ranges, shard, lease, timeout)

    def get_into(
        self,
        namespace: str,
        hashes: Hashes,
        destinations: Any,
        *,
        ranges: tuple[Any, Any] | None = None,
        shard: int = 0,
        lease: float | None = None,
        timeout: float | None = None,
    ) -> GetResults:
        """Get chunks into memory of the caller.

        Args:
            namespace: as in `put`.
            hashes: as in `put`.
            destinations: a writable contiguous buffer for each chunk, or ``(region, offsets, lengths)`` with a
                registered region of `engine`, or spans as in `put`, into which the bytes go straight. A destination may
                be larger than its chunk: `GetResults.lengths` says how long that is.
            ranges: as in `get`.
            shard: as in `get`.
            lease: as in `get`.
            timeout: as in `get`.

        Returns and raises what `get` does. The content of a destination in a registered region is undefined unless its
        chunk is OK; other destinations are changed only then. For that, a chunk larger than `staging_bytes` takes
        memory of its own size while it comes.
        """
        return self._get(namespace, hashes, destinations, ranges, shard, lease, timeout)

    # ---------------------------------------------------------------- the same, later

    def put_async(self, *args: Any, **kwargs: Any) -> Future[Results]:
        """Call `put` on another thread. Values must not change before the future is done."""
        return self._later(self.put, *args, **kwargs)

    def get_async(self, *args: Any, **kwargs: Any) -> Future[GetResults]:
        """Call `get` on another thread."""
        return self._later(self.get, *args, **kwargs)

    def get_into_async(self, *args: Any, **kwargs: Any) -> Future[GetResults]:
        """Call `get_into` on another thread. Destinations belong to the call until the future is done."""
        return self._later(self.get_into, *args, **kwargs)

    def exists_async(self, *args: Any, **kwargs: Any) -> Future[npt.NDArray[np.bool_]]:
        """Call `exists` on another thread."""
        return self._later(self.exists, *args, **kwargs)

    def match_prefix_async(self, *args: Any, **kwargs: Any) -> Future[int]:
        """Call `match_prefix` on another thread."""
        return self._later(self.match_prefix, *args, **kwargs)

    def remove_async(self, *args: Any, **kwargs: Any) -> Future[Results]:
        """Call `remove` on another thread."""
        return self._later(self.remove, *args, **kwargs)

    def move_async(self, *args: Any, **kwargs: Any) -> Future[Results]:
        """Call `move` on another thread."""
        return self._later(self.move, *args, **kwargs)

    def pin_async(self, *args: Any, **kwargs: Any) -> Future[Pin]:
        """Call `pin` on another thread."""
        return self._later(self.pin, *args, **kwargs)

    # ---------------------------------------------------------------- state

    @property
    def engine(self) -> TransferEngine:
        """The engine in use: memory that it has registered or allocated needs no staging."""
        return self._core.engine

    @property
    def roster(self) -> tuple[bytes, ...]:
        """What those say of themselves that were in its roster when its session was opened last, 64 at most.

        One that was killed counts for as long as its session lasts.
        """
        return self._core.session.entries

    def allocate(self, nbytes: int) -> Region:
        """Allocate registered memory for values and destinations."""
        return self._core.engine.allocate(nbytes)

    def stats(self) -> dict[str, Any]:
        """Return counters of this client."""
        core = self._core
        if core.forked:
            core.check()
        identity = core.link.identity
        return {
            **core.counters,
            "master": {
                "address": core.link.address,
                "session_open": core.session.alive,
                "sessions_opened": core.session.opened,
                "retries": core.link.retries,
                "restarts_seen": core.link.restarts_seen,
                "boot_id": identity.boot_id if identity else "",
                "epoch": identity.epoch if identity else 0,
            },
            "segment_failures": core.segments.failures,
            "segments_avoided": core.segments.avoided(),
            "staging_free_bytes": 0 if core.closed.is_set() else core.staging.free_bytes,
            "engine": core.engine.stats(),
        }

    def close(self) -> None:
        """End the session and every thread. Calls that run fail with ClientClosedError. Again: nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._core.closed.is_set() else "open" if self._core.session.alive else "without a session"
        return f"<StoreClient of {self._core.link.address}, {state}>"

    # ---------------------------------------------------------------- inside

    def _get(
        self,
        namespace: str,
        hashes: Hashes,
        destinations: Any,
        ranges: tuple[Any, Any] | None,
        shard: int,
        lease: float | None,
        timeout: float | None,
    ) -> GetResults:
        self._core.check()
        namespace, shard = checked_namespace(namespace), checked_shard(shard)
        packed = packed_hashes(hashes)
        count = len(packed) // HASH_BYTES
        memory = destinations_of(self._core.engine, destinations, count)
        seconds = self._core.settings.lease if lease is None else checked_lease(lease)
        if ranges is not None:
            memory = Ranges(memory, *checked_ranges(ranges, count))
        request = GetRequest(namespace, packed, memory, shard, seconds, self._deadline(timeout))
        return get(self._core, request)

    def _verified(self, results: Results, request: PutRequest) -> Results:
        before = results.where(Outcome.ALREADY)
        if not before:
            return results
        items = np.array(before)
        memory = destinations_of(self._core.engine, None, len(before))
        lease = self._core.settings.lease
        packed = request.hashes_of(items)
        there = get(self._core, GetRequest(request.namespace, packed, memory, request.shard, lease, request.deadline))
        outcomes, errors = bytearray(results.outcomes), dict(results.errors)
        for index, value in zip(before, there, strict=True):
            if value is not None and value != request.memory.value(index):
                outcomes[index] = Outcome.FAILED
                errors[index] = ChunkConflictError(
                    "the chunk is there with other bytes", item=index, hint="a hash that covers all of the value"
                )
        return Results(bytes(outcomes), errors, results.replicas)

    def _later(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        self._core.check()
        self._waiting.acquire()
        try:
            future = self._pool.submit(call, *args, **kwargs)
        except RuntimeError as error:
            self._waiting.release()
            raise ClientClosedError("the client is closed", cause=str(error)) from error
        future.add_done_callback(lambda _: self._waiting.release())
        return future


def _abandon(core: Core, pool: ThreadPoolExecutor) -> None:
    # Also when the client was forgotten, or the interpreter ends.
    core.close()
    if not core.forked:  # a child has none of these threads
        pool.shutdown(wait=True, cancel_futures=True)
