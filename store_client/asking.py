# SPDX-License-Identifier: Apache-2.0
"""The calls of a client that move no bytes: what they ask, the master answers."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moonpool.proto import pool_pb2 as pb
from moonpool.store_client import pins
from moonpool.store_client.errors import ChunkInUseError, ClientClosedError
from moonpool.store_client.packing import packed_hashes
from moonpool.store_client.results import Outcome, Results

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
            MasterUnavailableError: the master did not answer in time.
        """
        request = pb.ExistsRequest(namespace=namespace, hashes=packed_hashes(hashes))
        reply = self._core.call("Exists", request, self._deadline(timeout))
        there: npt.NDArray[np.bool_] = np.frombuffer(reply.statuses, dtype=np.uint8) == pb.OK
        return there

    def match_prefix(self, namespace: str, hashes: Hashes, *, lease: float = 0.0, timeout: float | None = None) -> int:
        """Return how many of the first chunks are there, with all their shards.

        Args:
            namespace: as in `put`.
            hashes: of a chain, from its beginning.
            lease: seconds for which they are not given up, so that they can be got; 0: none.
            timeout: seconds.

        Raises:
            MasterUnavailableError: the master did not answer in time.
        """
        request = pb.MatchPrefixRequest(namespace=namespace, hashes=packed_hashes(hashes), lease_ms=int(lease * 1000))
        matched: int = self._core.call("MatchPrefix", request, self._deadline(timeout)).matched
        return matched

    def remove(self, namespace: str, hashes: Hashes, *, timeout: float | None = None) -> Results:
        """Remove chunks, with all their shards and replicas. Others are: MISS, or FAILED with ChunkInUseError.

        Raises:
            MasterUnavailableError: the master did not answer in time.
        """
        request = pb.RemoveRequest(namespace=namespace, hashes=packed_hashes(hashes))
        statuses = self._core.call("Remove", request, self._deadline(timeout)).statuses
        outcomes = {pb.OK: Outcome.OK, pb.NOT_FOUND: Outcome.MISS}
        failed = {
            index: ChunkInUseError("the chunk is pinned", item=index, retryable=True)
            for index, status in enumerate(statuses)
            if status not in outcomes
        }
        return Results(bytes(outcomes.get(status, Outcome.FAILED) for status in statuses), {**failed})

    def remove_prefix(self, namespace: str, hash: bytes, *, timeout: float | None = None) -> Removed:  # noqa: A002
        """Remove a chunk and all that descend from it.

        Raises:
            MasterUnavailableError: the master did not answer in time.
        """
        (one,) = [packed_hashes([hash])]
        reply = self._core.call(
            "RemovePrefix", pb.RemovePrefixRequest(namespace=namespace, hash=one), self._deadline(timeout)
        )
        return Removed(reply.removed, reply.in_use)

    def pin(self, namespace: str, hashes: Hashes, *, timeout: float | None = None) -> Pin:
        """Keep chunks from being evicted and removed, until the pin is released or this client ends.

        Raises:
            MasterUnavailableError: the master did not answer in time.
        """
        return pins.pin(self._core, namespace, packed_hashes(hashes), self._deadline(timeout))

    def segments(self, *, timeout: float | None = None) -> list[pb.Segment]:
        """Return the segments of the pool, as the master sees them.

        Raises:
            MasterUnavailableError: the master did not answer in time.
        """
        return self._core.segments.refresh(self._deadline(timeout))

    def drain(self, segment: int, *, undo: bool = False, timeout: float | None = None) -> int:
        """Put nothing more into a segment, or again with `undo`. Returns how many chunks are still there.

        Raises:
            MasterUnavailableError: the master did not answer in time.
            MasterError: there is no such segment.
        """
        request = pb.DrainRequest(segment=segment, undo=undo)
        chunks: int = self._core.call("Drain", request, self._deadline(timeout)).chunks
        return chunks

    def master_stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Return what the master says of itself and the pool.

        Raises:
            MasterUnavailableError: the master did not answer in time.
        """
        reply = self._core.call("Stats", pb.StatsRequest(), self._deadline(timeout))
        stats: dict[str, Any] = json.loads(reply.json)
        return stats

    def _deadline(self, timeout: float | None) -> float:
        if self._core.closed.is_set():
            raise ClientClosedError("the client is closed")
        return time.monotonic() + (self._core.settings.timeout if timeout is None else timeout)
