# SPDX-License-Identifier: Apache-2.0
"""What all calls of one client share: engine, link to the master, session, segments, staging."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from moonpool.errors import MoonpoolError
from moonpool.proto import pool_pb2 as pb
from moonpool.proto.errors import MasterUnavailableError
from moonpool.proto.tls import Tls
from moonpool.store_client.errors import (
    ClientClosedError,
    ClusterChangedError,
    StoreArgumentError,
    StoreTimeoutError,
)
from moonpool.store_client.locations import Locations
from moonpool.store_client.moves import Move, Moved, Place
from moonpool.store_client.packing import Int64s, Records
from moonpool.store_client.rpc import MasterLink
from moonpool.store_client.segments import SegmentTable
from moonpool.store_client.session import Session
from moonpool.store_client.spans import digests_of
from moonpool.store_client.spoilt import SpoiltCopies
from moonpool.store_client.staging import StagingArea
from moonpool.store_client.values import Registered
from moonpool.transfer_engine import EngineSettings, ForkedError, TransferEngine

if TYPE_CHECKING:
    from moonpool.store_client.moves import Parts
    from moonpool.store_client.settings import StoreClientSettings
    from moonpool.store_client.values import Memory, Piece

__all__ = ["Core", "Job", "open_engine"]

_log = logging.getLogger("moonpool.store_client")
# For what the master is told in passing.
_ASIDE_SECONDS: Final = 1.0
SESSION_UNKNOWN: Final = "SESSION_UNKNOWN"
_SESSION_LOOK: Final = 0.02
# Until a node that was cut off for being slow is known to write no more; the caller waits for its own memory.
_SETTLE_OWN: Final = 5.0
_SETTLE_STAGED: Final = 0.05
_DEADLINE: Final = "DEADLINE"
# Codes of the engine that no node can be the cause of.
_MISTAKES: Final = frozenset({"INVALID_ARGUMENT", "FORKED"})
# Of memory of GPUs: no node can be the cause where the error names none.
_OWN: Final = frozenset({"CUDA", "NO_MEMORY", "REGION_RELEASED"})
_SPOILT_MAX: Final = 65_536


class Job:
    """The moves of one batch, a `Move` for each segment, and what they have come to."""

    def __init__(self, segment: int, rows: npt.NDArray[np.intp]) -> None:
        self.segment = segment
        self.rows = rows
        self.move: Move | None = None
        self.error: MoonpoolError | None = None
        #: Whether the time that the node was given was less than the patience that it deserves.
        self.hurried = False
        #: Whether the engine computes the digests of payloads on the way.
        self.digesting = False

    def finish(self, settle_seconds: float) -> Moved:
        """Wait for the end of it."""
        if self.move is None:
            return Moved(np.zeros(len(self.rows), dtype=np.bool_), error=self.error)
        moved = self.move.finish(settle_seconds)
        self.error = moved.error
        return moved

    @property
    def blamed(self) -> bool:
        """Whether the node is at fault, as far as can be told from here."""
        if self.error is None or isinstance(self.error, ClusterChangedError):
            return False
        return not (self.hurried and self.error.code == _DEADLINE)

    @property
    def settled(self) -> bool:
        """Whether no transfer can touch memory any more, here or there."""
        return self.move is None or self.move.settled


class Core:
    """See the module. Thread-safe."""

    def __init__(
        self, settings: StoreClientSettings, engine: TransferEngine | None, roster: tuple[str, bytes] | None
    ) -> None:
        self.settings = settings
        self.counters: Counter[str] = Counter()
        self._own_engine = engine is None
        self.engine = engine if engine is not None else open_engine(settings)
        self.closed = threading.Event()
        self._pid = os.getpid()
        #: Chunks of which this client has found every copy spoilt -> which generation; the last found at the end.
        self._spoilt: OrderedDict[tuple[str, bytes], int] = OrderedDict()
        self.spoilt_copies = SpoiltCopies()
        self._lock = threading.Lock()
        try:
            self.link = MasterLink(settings.master, settings.secret, Tls.of(settings))
            self.host_id = settings.host_id or socket.gethostname()
            self.session = Session(
                self.link, pb.CLIENT, settings.name, self.host_id, self.engine.incarnation, roster=roster
            )
            self.segments = SegmentTable(self.engine, self.link, settings.avoid, settings.connect_timeout)
            self.staging = StagingArea(self.engine, settings.staging_bytes)
            self.locations = Locations(settings.locations_max)
            self._aside = ThreadPoolExecutor(1, thread_name_prefix="moonpool-store-aside")
            self._aside_waiting = threading.BoundedSemaphore(64)
        except BaseException:
            self._close_engine()
            raise

    def check(self) -> None:
        """Refuse a call before it begins.

        Raises:
            ClientClosedError: the client was closed.
            ForkedError: this is a forked child of the process that made the client.
        """
        if self.forked:
            raise ForkedError(
                "this client was made before the process forked",
                hint="make a new client in the child, or start workers with the spawn method",
            )
        if self.closed.is_set():
            raise ClientClosedError("the client is closed")

    @property
    def forked(self) -> bool:
        """Whether this is a forked child: its threads and connections are those of the parent."""
        return os.getpid() != self._pid

    def count(self, **amounts: int) -> None:
        """Add to counters. A lost update between threads would only cost a count."""
        for name, amount in amounts.items():
            if amount:
                self.counters[name] += amount

    def piece_bytes(self, memory: Memory) -> int:
        """Return how many bytes of a batch are moved at once: half of the staging area, so that two calls fit."""
        return self.settings.batch_bytes if isinstance(memory, Registered) else max(1, self.staging.nbytes // 2)

    # ---------------------------------------------------------------- moving

    def start_moves(
        self,
        op: Any,
        place: Place,
        rows: npt.NDArray[np.intp],
        extents: Records,
        cluster: str,
        deadline: float,
        digest: bool,
        jobs: list[Job],
        parts: Parts = "both",
    ) -> list[Job]:
        """Start the moves of `rows` of `place` to or from the segments of their extents.

        Args:
            op: "read" or "write".
            place: where they lie here.
            rows: which of them.
            extents: for each of `rows`.
            cluster: the id of the cluster whose master gave the extents.
            deadline: of `time.monotonic`.
            digest: compute digests where a CPU touches the bytes.
            jobs: gets what was started, at once, whatever happens next.
            parts: what of the chunks.

        Returns:
            What was started.

        Raises:
            MoonpoolError: the caller has made a mistake, see `mistake`.
        """
        started = []
        for segment, some in _by_segment(extents["segment"]):
            job = Job(segment, some)
            started.append(job)
            jobs.append(job)
            try:
                target = self.segments.target(segment, cluster, deadline)
                offsets = extents["offset"][some].astype(np.int64)
                nbytes = int(place.lengths[rows[some]].sum())
                patience = self.settings.progress_timeout + nbytes / self.settings.slowest_rate
                now = time.monotonic()
                job.hurried = deadline < now + patience
                if now >= deadline:
                    raise StoreTimeoutError("the time is over before anything was begun")
                job.digesting = digest and target.by_cpu and not place.in_spans
                job.move = Move(place, rows[some], offsets, job.digesting, parts)
                job.move.start(self.engine, target, op, min(deadline, now + patience))
            except MoonpoolError as error:
                self.mistake(error, place)
                job.error = error
        return started

    def finish(self, job: Job, place: Place) -> Moved:
        """Wait for the end of a job.

        Raises:
            MoonpoolError: the caller has made a mistake, see `mistake`.
        """
        moved = job.finish(_settle_seconds(place))
        if job.error is not None:
            begun = job.move is not None and job.move.refused is None
            self.mistake(job.error, place, begun=begun)
        return moved

    def mistake(self, error: MoonpoolError, place: Place, *, begun: bool = False) -> None:
        """Raise an error that is a fault of whoever calls, so that no node is blamed for it.

        Args:
            error: of a transfer.
            place: what lies here.
            begun: whether the engine had begun it, so that the error may be what a node has said.

        Raises:
            MoonpoolError: it is one: memory that was released meanwhile or is of another engine, memory of a GPU that
                was freed or whose context is dead, an engine that was closed under its client, a forked child.
        """
        if place.region.released and not self.closed.is_set():
            raise StoreArgumentError(
                "the region was released while the call ran", cause=str(error), hint="release it when the call is over"
            ) from error
        own = (error.code in _MISTAKES and not begun) or (error.code in _OWN and not error.peer)
        if own or (self.engine.closed and not self.closed.is_set()):
            raise error

    def digests(self, place: Place, offsets: Int64s, lengths: Int64s) -> npt.NDArray[np.uint64]:
        """Return the digests of ranges of what holds the payloads of a place.

        Raises:
            MoonpoolError: the caller has made a mistake, see `mistake`.
        """
        try:
            return digests_of(place.region, offsets, lengths)
        except MoonpoolError as error:
            self.mistake(error, place)
            raise

    def give_back(self, piece: Piece) -> None:
        """Nobody needs the place of a piece any more, except perhaps transfers of its jobs that are not settled."""
        for job in piece.slice_.jobs:
            if job.move is not None:
                job.move.cancel(_settle_seconds(piece.place))
        self.staging.give_back(piece.slice_)
        if piece.region is not None:
            try:
                piece.region.release()
            except MoonpoolError as error:
                # It goes with the engine. Whoever owns the buffer has been told by the error of the chunk.
                _log.warning("memory of a chunk stays registered: %s", error)

    # ---------------------------------------------------------------- talking to the master

    def call(self, method: str, request: Any, deadline: float) -> Any:
        """Call the master; one that does not know this session yet is told of it, and asked again.

        Raises:
            MasterUnavailableError: no answer in time, or none but that it does not know the session.
            MoonpoolError: as `MasterLink.call`.
        """
        while True:
            try:
                return self.link.call(method, request, deadline)
            except MoonpoolError as error:
                if error.code != SESSION_UNKNOWN:
                    raise
                if time.monotonic() >= deadline:
                    raise MasterUnavailableError(
                        f"{method} failed: the session with the master was not open again in time",
                        peer=self.link.address,
                        cause=str(error),
                        retryable=True,
                        hint="a longer timeout, or the log of the master",
                    ) from error
            self.session.hurry()
            self.closed.wait(_SESSION_LOOK)

    def same_cluster(self, cluster: str) -> bool:
        """Whether the master that answered last is of this cluster, so that what was located there still means it."""
        return self.link.cluster == cluster

    def report(self, segment: int, cluster: str, error: MoonpoolError, **named: Any) -> None:
        """Tell the master of a fault of a segment of this cluster in passing; `named` are the chunks it is about."""
        request = pb.ReportFailureRequest(session=self.session.id, segment=segment, cause=str(error)[:500], **named)

        def tell(deadline: float) -> None:
            # A master that was started anew counts segments from the beginning: it must not take this for one of its.
            self.segments.refresh(deadline)
            if self.same_cluster(cluster):
                self.link.call("ReportFailure", request, deadline)

        self.aside("ReportFailure", tell)

    def failed(self, segment: int, cluster: str, error: MoonpoolError) -> None:
        """Avoid a segment of this cluster, and tell the master of it in passing."""
        if self.closed.is_set():
            raise ClientClosedError("the client is closed")
        if self.same_cluster(cluster):
            self.segments.failed(segment, cluster, error)
            self.report(segment, cluster, error)

    def spoilt(self, namespace: str, hash_: bytes, generation: int) -> None:
        """Remember that no copy of this generation of a chunk is good, so that the next put of it writes it anew."""
        with self._lock:
            self._spoilt[namespace, hash_] = generation
            if len(self._spoilt) > _SPOILT_MAX:
                self._spoilt.popitem(last=False)

    @property
    def any_spoilt(self) -> bool:
        """Whether there are any, which is hardly ever so."""
        return bool(self._spoilt)

    def take_spoilt(self, namespace: str, hashes: list[bytes]) -> dict[bytes, int]:
        """Return which of these chunks were found spoilt, in which generation, and forget it."""
        with self._lock:
            return {one: self._spoilt.pop((namespace, one)) for one in hashes if (namespace, one) in self._spoilt}

    def aside(self, what: str, tell: Callable[[float], None]) -> None:
        """Have the master told something whose outcome nobody waits for. When too many wait already, it is left out."""
        if not self._aside_waiting.acquire(blocking=False):
            self.count(asides_left_out=1)
            return

        def call() -> None:
            try:
                tell(time.monotonic() + _ASIDE_SECONDS)
            except MoonpoolError as error:
                _log.info("%s: %s", what, error)
            finally:
                self._aside_waiting.release()

        try:
            self._aside.submit(call)
        except RuntimeError:  # closing
            self._aside_waiting.release()

    def close(self) -> None:
        """End everything, in an order in which nothing waits for what has ended before."""
        if self.closed.is_set():
            return
        self.closed.set()
        if self.forked:
            self._close_engine()
            return
        self.staging.close()
        self.link.refuse()
        self._aside.shutdown(cancel_futures=True)
        self.session.close()
        self.link.close()
        self.segments.close()
        if not self._own_engine:
            try:
                self.staging.region.release()
            except MoonpoolError as error:
                _log.warning("the staging area stays with the engine: %s", error)
        self._close_engine()

    def _close_engine(self) -> None:
        if self._own_engine:
            self.engine.close()


def _settle_seconds(place: Place) -> float:
    # Memory of the caller must be quiet, staging can be left alone.
    return _SETTLE_STAGED if place.region is place.headers else _SETTLE_OWN


def _by_segment(segments: npt.NDArray[np.uint32]) -> list[tuple[int, npt.NDArray[np.intp]]]:
    """Return the positions of each segment."""
    if not len(segments):
        return []
    if (segments == segments[0]).all():
        return [(int(segments[0]), np.arange(len(segments)))]
    order = np.argsort(segments, kind="stable")
    different, starts = np.unique(segments[order], return_index=True)
    return list(zip(different.tolist(), np.split(order, starts[1:]), strict=True))


def open_engine(settings: StoreClientSettings, listen: str | None = None) -> TransferEngine:
    """Open an engine that fits these settings, as a client has when it is given none, and accepts peers on `listen`."""
    arguments = {
        "name": settings.name,
        "listen": listen,
        "secret": settings.secret,
        "connect_timeout": settings.connect_timeout,
        "progress_timeout": settings.progress_timeout,
    }
    return TransferEngine(settings=EngineSettings.load(arguments))
