# SPDX-License-Identifier: Apache-2.0
"""The calls of a client that move no bytes: what they ask, the master answers."""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moonpool.proto import pool_pb2 as pb
from moonpool.proto.errors import SegmentLostError
from moonpool.store_client import pins, relocating
from moonpool.store_client.arguments import (
    checked_flag,
    checked_lease,
    checked_namespace,
    checked_segment,
    checked_shard,
    checked_timeout,
    packed_hashes,
)
from moonpool.store_client.errors import ChunkInUseError, StoreArgumentError
from moonpool.store_client.packing import HASH_BYTES, extents_of
from moonpool.store_client.results import Outcome, Results
from moonpool.store_client.rpc import MasterIdentity

if TYPE_CHECKING:
    from moonpool.store_client.core import Core
    from moonpool.store_client.packing import Hashes
    from moonpool.store_client.pins import Pin

__all__ = ["Asking", "Removed"]


class Removed(NamedTuple):
    """What `StoreClient.remove_prefix` did."""

    removed: int
    #: Chunks that are pinned, and stay.
    in_use: int


class Asking:
    """Part of `StoreClient`."""

    _core: Core

    def exists(self, namespace: str, hashes: Hashes, *, timeout: float | None = None) -> npt.NDArray[np.bool_]:
        """Return for each chunk whether it is there. It is not kept by this, nor does it become younger.

        Raises:
            StoreArgumentError: an argument is wrong.
            MasterUnavailableError: the master did not answer in time.
        """

        def ask(some: bytes) -> bytes:
            return bytes(self._core.call("Exists", pb.ExistsRequest(namespace=name, hashes=some), deadline).statuses)

        name, deadline, batches = self._batches(namespace, hashes, timeout)
        statuses = b"".join(ask(some) for some in batches)
        there: npt.NDArray[np.bool_] = np.frombuffer(statuses, dtype=np.uint8) == pb.OK
        return there

    def match_prefix(
        self,
        namespace: str,
        hashes: Hashes,
        *,
        lease: float = 0.0,
        shard: int = 0,
        timeout: float | None = None,
    ) -> int:
        """Return how many of the first chunks are there, with all their shards.

        Args:
            namespace: as in `put`.
            hashes: of a chain, from its beginning.
            lease: seconds for which they are not given up, so that they can be got; 0: none. A get of them that
                follows, with no longer a lease than this one, needs not ask the master.
            shard: which part of the chunks that get will be of.
            timeout: seconds.

        Raises:
            StoreArgumentError: an argument is wrong.
            MasterUnavailableError: the master did not answer in time.
        """
        lease_ms = math.ceil(checked_lease(lease, none=True) * 1000)
        shard, core = checked_shard(shard), self._core
        name, deadline, batches = self._batches(namespace, hashes, timeout)
        wanted = lease_ms > 0 and core.settings.locations_max > 0
        matched = 0
        for some in batches:
            sent, forgotten = time.monotonic(), core.locations.forgotten
            request = pb.MatchPrefixRequest(
                namespace=name, hashes=some, lease_ms=lease_ms, want_extents=wanted, shard=shard
            )
            reply = core.call("MatchPrefix", request, deadline)
            more: int = reply.matched
            if wanted and more:
                extents = extents_of(reply.extents, more, max(1, reply.replicas))
                known = some[: more * HASH_BYTES]
                until = sent + reply.lease_ms / 1000
                master = MasterIdentity.of(reply.header)
                core.locations.keep(name, shard, known, extents, until, master, forgotten)
            matched += more
            if more * HASH_BYTES < len(some):
                break
        return matched

    def remove(self, namespace: str, hashes: Hashes, *, timeout: float | None = None) -> Results:
        """Remove chunks, with all their shards and replicas. Others are: MISS, or FAILED with ChunkInUseError.

        Raises:
            StoreArgumentError: an argument is wrong.
            MasterUnavailableError: the master did not answer in time.
        """
        name, deadline, batches = self._batches(namespace, hashes, timeout)
        try:
            statuses = b"".join(
                self._core.call("Remove", pb.RemoveRequest(namespace=name, hashes=some), deadline).statuses
                for some in batches
            )
        finally:
            self._core.locations.forget(name, b"".join(batches))
        outcomes: dict[int, Outcome] = {pb.OK: Outcome.OK, pb.NOT_FOUND: Outcome.MISS}
        failed = {
            index: ChunkInUseError("the chunk is pinned", item=index, retryable=True)
            for index, status in enumerate(statuses)
            if status not in outcomes
        }
        return Results(bytes(outcomes.get(status, Outcome.FAILED) for status in statuses), {**failed})

    def remove_prefix(self, namespace: str, hash: bytes, *, timeout: float | None = None) -> Removed:  # noqa: A002
        """Remove a chunk and all that descend from it.

        Raises:
            StoreArgumentError: an argument is wrong.
            MasterUnavailableError: the master did not answer in time.
        """
        request = pb.RemovePrefixRequest(namespace=checked_namespace(namespace), hash=packed_hashes([hash]))
        try:
            reply = self._core.call("RemovePrefix", request, self._deadline(timeout))
        finally:
            self._core.locations.clear()
        return Removed(reply.removed, reply.in_use)

    def move(
        self,
        namespace: str,
        hashes: Hashes,
        *,
        segment: int | None = None,
        node: str | None = None,
        timeout: float | None = None,
    ) -> Results:
        """Move chunks to another segment, with all their shards. They can be read all the time.

        Of a chunk with several replicas one goes: the one on the same host as the segment, or else the first.

        Args:
            namespace: as in `put`.
            hashes: as in `put`.
            segment: where to: its number.
            node: or the name of its node.
            timeout: seconds. What has not been moved in three quarters of it is not in time.

        Returns:
            For each chunk OK, ALREADY (it was there), MISS, or FAILED with its error: NoSpaceError,
            ChunkTooLargeError, NodeUnreachableError (it could not be copied and is where it was), ChunkBusyError (not
            in time, it may move yet).

        Raises:
            StoreArgumentError: an argument is wrong, or there is no such node.
            MasterUnavailableError: the master did not answer in time.
            MasterError: there is no such segment.
        """
        if (segment is None) == (node is None):
            raise StoreArgumentError("a move goes to a segment or to a node", hint="segment=... or node=...")
        name, deadline, batches = self._batches(namespace, hashes, timeout)
        if node is not None:
            segment = relocating.segment_of(self._core, node, deadline)
        return relocating.move(self._core, name, batches, checked_segment(segment), deadline)

    def pin(self, namespace: str, hashes: Hashes, *, timeout: float | None = None) -> Pin:
        """Keep chunks from being evicted and removed, until the pin is released or this client ends.

        Raises:
            StoreArgumentError: an argument is wrong.
            MasterUnavailableError: the master did not answer in time.
        """
        name, deadline, batches = self._batches(namespace, hashes, timeout)
        return pins.pin(self._core, name, batches, deadline)

    def segments(self, *, timeout: float | None = None) -> list[pb.Segment]:
        """Return the segments of the pool, as the master sees them.

        Raises:
            MasterUnavailableError: the master did not answer in time.
        """
        return self._core.segments.refresh(self._deadline(timeout))

    def drain(self, segment: int, *, undo: bool = False, drop: bool = False, timeout: float | None = None) -> int:
        """Put nothing more into a segment and have what it holds moved to others, or use it again with `undo`.

        What a disk holds stays there, and is a hit again when its node is back. With `drop` a disk is given up with
        what lies nowhere else, until its node is started again; how many extents that were is returned.

        Returns how many extents are still there: of chunks, of puts that are under way, and of what was moved and
        others may still read. `Segment.draining` of `segments()` says how far it has got. At 0 its node can leave.

        Raises:
            MasterUnavailableError: the master did not answer in time.
            MasterError: there is no such segment.
            InvalidRequestError: it is a disk and this no `drop`, or the other way round.
        """
        flags = {"undo": checked_flag(undo, "undo"), "drop": checked_flag(drop, "drop")}
        request = pb.DrainRequest(segment=checked_segment(segment), **flags)
        try:
            chunks: int = self._core.call("Drain", request, self._deadline(timeout)).chunks
        except SegmentLostError:
            if not drop:
                raise
            return 0  # it was given up before: the reply was lost
        return chunks

    def master_stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Return what the master says of itself and the pool.

        Raises:
            MasterUnavailableError: the master did not answer in time.
        """
        reply = self._core.call("Stats", pb.StatsRequest(), self._deadline(timeout))
        stats: dict[str, Any] = json.loads(reply.json)
        return stats

    def _batches(self, namespace: str, hashes: Hashes, timeout: float | None) -> tuple[str, float, list[bytes]]:
        """Return (namespace, deadline, hashes of one call to the master each)."""
        self._core.check()
        name, packed = checked_namespace(namespace), packed_hashes(hashes)
        step = HASH_BYTES * self._core.settings.batch_chunks
        batches = [packed[begin : begin + step] for begin in range(0, len(packed), step)]
        return name, self._deadline(timeout), batches

    def _deadline(self, timeout: float | None) -> float:
        self._core.check()
        return time.monotonic() + (self._core.settings.timeout if timeout is None else checked_timeout(timeout))
