# SPDX-License-Identifier: Apache-2.0
"""Segments by number: where they are, how they are reached, and which are better left alone for a while."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moonpool.errors import MoonpoolError
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client.errors import ClusterChangedError, NodeUnreachableError, StoreTimeoutError
from moonpool.transfer_engine import ForkedError, Peer, RemoteRegion, TransferEngine

if TYPE_CHECKING:
    from moonpool.store_client.rpc import MasterLink

__all__ = ["SegmentTable", "Target", "reach"]

_log = logging.getLogger("moonpool.store_client")


@dataclass(frozen=True)
class Target:
    """A segment that can be read and written: a connection and the region behind it."""

    segment: int
    address: str
    peer: Peer
    region: RemoteRegion
    #: Whether the bytes pass a CPU on their way, so that the engine computes digests of them for little.
    by_cpu: bool


def reach(engine: TransferEngine, known: pb.Segment, timeout: float, peer: Peer | None = None) -> Target:
    """Return how to reach a segment.

    Args:
        engine: of this process.
        known: what the master says of it.
        timeout: seconds.
        peer: a connection to its node, if there is one.

    Raises:
        NodeUnreachableError: it cannot be reached, or another engine is there.
        ForkedError: this is a forked child.
    """
    try:
        if peer is None:
            peer = engine.connect(known.address, timeout=timeout)
        if peer.incarnation != known.incarnation.hex():
            peer.close()
            raise NodeUnreachableError(
                f"the node of segment {known.segment} was started anew", peer=known.address, retryable=True
            )
        region = peer.regions.wait(known.region, timeout)
    except (NodeUnreachableError, ForkedError):
        raise
    except MoonpoolError as error:
        raise NodeUnreachableError(
            f"segment {known.segment} of node {known.node!r} cannot be reached",
            peer=known.address,
            cause=str(error),
            retryable=True,
        ) from error
    return Target(known.segment, known.address, peer, region, peer.path != "rdma")


class SegmentTable:
    """What this client knows of segments. Thread-safe; no lock is held while a node or the master is asked."""

    def __init__(self, engine: TransferEngine, link: MasterLink, avoid_seconds: float, connect_timeout: float) -> None:
        self._engine = engine
        self._link = link
        self._avoid_seconds = avoid_seconds
        self._connect_timeout = connect_timeout
        self._lock = threading.Lock()
        self._known: dict[int, pb.Segment] = {}
        self._targets: dict[int, Future[Target]] = {}
        self._peers: dict[tuple[str, str], Peer] = {}
        self._avoided: dict[int, float] = {}
        self._cluster = ""
        self.failures = 0

    def target(self, segment: int, cluster: str, deadline: float) -> Target:
        """Return how to reach a segment; connect to its node first when that has not been done.

        Args:
            segment: its number.
            cluster: the id of the cluster whose master gave it this number. Another one means another segment by it.
            deadline: of `time.monotonic`.

        Raises:
            ClusterChangedError: another cluster answers now.
            NodeUnreachableError: the master knows no such segment, or its node cannot be reached.
        """
        if cluster != self._link.cluster:
            raise _changed()
        # Made first: between its place in the table and its outcome there is no step without the `except`.
        mine: Future[Target] = Future()
        try:
            with self._lock:
                self._of_cluster(cluster)
                future = self._targets.setdefault(segment, mine)
            if future is mine:
                future.set_result(self._connect(segment, cluster, deadline))
        except BaseException as error:
            with self._lock:
                if self._targets.get(segment) is mine:
                    del self._targets[segment]
            if not mine.done():
                mine.set_exception(error)
            raise
        try:
            return future.result(timeout=max(0.0, deadline - time.monotonic()))
        except FutureTimeoutError as error:
            raise StoreTimeoutError(f"segment {segment} was not reached in time") from error

    def host_of(self, segment: int) -> str:
        """Return the host of a segment; empty when it is not known."""
        known = self._known.get(segment)
        return known.host_id if known is not None else ""

    def refresh(self, deadline: float) -> list[pb.Segment]:
        """Ask the master for all segments, and forget connections to those that have another incarnation now.

        Raises:
            MasterUnavailableError: it does not answer.
        """
        reply = self._link.call("ListSegments", pb.ListSegmentsRequest(), deadline)
        stale = []
        with self._lock:
            self._of_cluster(reply.header.cluster_id.hex())
            for segment in reply.segments:
                before = self._known.get(segment.segment)
                if before is not None and before.incarnation != segment.incarnation:
                    stale.append(segment.segment)
            self._known = {segment.segment: segment for segment in reply.segments}
        for number in stale:
            self._drop(number)
        return list(reply.segments)

    def failed(self, segment: int, cluster: str, error: MoonpoolError | None) -> None:
        """A transfer with this segment failed: avoid it for a while, connect anew afterwards."""
        with self._lock:
            if cluster != self._cluster:
                return  # a segment of the same number is another one now
            self.failures += 1
            self._avoided[segment] = time.monotonic() + self._avoid_seconds
        self._drop(segment)
        _log.warning("segment %d is avoided for %gs: %s", segment, self._avoid_seconds, error)

    def avoided(self) -> list[int]:
        """Return the segments that are avoided now."""
        now = time.monotonic()
        with self._lock:
            self._avoided = {segment: until for segment, until in self._avoided.items() if until > now}
            return sorted(self._avoided)

    def forgive(self, segments: list[int]) -> None:
        """Avoid these no longer."""
        with self._lock:
            for segment in segments:
                self._avoided.pop(segment, None)

    def close(self) -> None:
        """Forget everything. The connections end with the engine, or here when it goes on."""
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
            self._targets.clear()
        for peer in peers:
            peer.close()

    def _of_cluster(self, cluster: str) -> None:
        # A master that remembers nothing counts segments from the beginning.
        if cluster != self._cluster:
            self._cluster = cluster
            self._known, self._targets, self._peers, self._avoided = {}, {}, {}, {}

    def _drop(self, segment: int) -> None:
        # The connection is not closed here, because others may be using it: it goes with the last who does.
        with self._lock:
            future = self._targets.pop(segment, None)
            if future is not None and future.done() and future.exception() is None:
                gone = future.result().peer
                self._peers = {key: peer for key, peer in self._peers.items() if peer is not gone}

    def _connect(self, segment: int, cluster: str, deadline: float) -> Target:
        known = self._known.get(segment)
        if known is None or segment in self._avoided:
            self.refresh(deadline)
            if cluster != self._link.cluster:
                raise _changed()
        with self._lock:
            if cluster != self._cluster:
                raise _changed()
            known = self._known.get(segment)
        if known is None:
            raise NodeUnreachableError(f"the master knows no segment {segment}", retryable=True)
        key = (known.address, known.incarnation.hex())
        with self._lock:
            peer = self._peers.get(key)
        timeout = max(0.001, min(self._connect_timeout, deadline - time.monotonic()))
        target = reach(self._engine, known, timeout, peer)
        with self._lock:
            self._peers[key] = target.peer
        return target


def _changed() -> ClusterChangedError:
    return ClusterChangedError("another cluster answers than the one that gave the segment its number", retryable=True)
