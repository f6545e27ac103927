# SPDX-License-Identifier: Apache-2.0
"""Copies extents out of other nodes' memory into that of this one, when the master asks for it.

The node is the only one that writes there for that purpose, so what matters is that it knows when it does not any
more: an answer is given when nothing of a copy can write, and `end_all` returns only when that is true of all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from moonpool.errors import MoonpoolError
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client.errors import StoreTimeoutError
from moonpool.store_client.leaves import DIGEST_BYTES, proved, table_bytes
from moonpool.store_client.moves import Move, Place
from moonpool.store_client.packing import HEADER_BYTES, headers_of
from moonpool.store_client.segments import Target, reach
from moonpool.transfer_engine import Region, TransferEngine, copy_batch

if TYPE_CHECKING:
    import numpy.typing as npt

    from moonpool.store_client.packing import Flags, Records

__all__ = ["Answer", "Copier"]

_log = logging.getLogger("moonpool.node")
Answer: TypeAlias = Callable[[pb.CopyDone], None]

#: An extent of a Copy: see ``proto/pool.proto``.
_EXTENT: Final = np.dtype(
    [
        ("generation", "<u8"),
        ("there", "<u8"),
        ("here", "<u8"),
        ("length", "<u8"),
        ("shard", "<u4"),
        ("zero", "<u4"),
        ("hash", "<u8", (4,)),
    ]
)
_THREADS: Final = 2
# A master asks for a few at a time. What is beyond that is refused.
_WAITING_MAX: Final = 256
# A node that answers nothing for so long, and the time that the bytes take at this rate, is not waited for.
_PATIENCE: Final = 2.0
_SLOWEST: Final = 64 << 20
_CONNECT: Final = 1.0
_SETTLE: Final = 0.5
_CLOSE: Final = 5.0
# Connections to other nodes.
_TARGETS_MAX: Final = 64


class _Job:
    """One copy that was asked for."""

    def __init__(self, copy: pb.Copy, answer: Answer) -> None:
        self.copy = copy
        self.answer = answer
        self.deadline = time.monotonic() + copy.deadline_ms / 1000
        self.extents = np.frombuffer(copy.extents, dtype=_EXTENT)
        self.move: Move | None = None
        self.over = False


class Copier:
    """See the module. Thread-safe.

    Args:
        engine: of the node.
        region: what it lends.
        name: of the node.
    """

    def __init__(self, engine: TransferEngine, region: Region, name: str) -> None:
        self._engine = engine
        self._region = region
        self._changed = threading.Condition()
        self._jobs: set[_Job] = set()
        self._targets: dict[bytes, Target] = {}
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"moonpool-copy-{name}")

    def take(self, copy: pb.Copy, answer: Answer) -> None:
        """Begin a copy on another thread.

        Args:
            copy: what the master asks for.
            answer: called with the outcome, when nothing of the copy can write any more.
        """
        job = _Job(copy, answer)
        with self._changed:
            refused = self._closed.is_set() or len(self._jobs) >= _WAITING_MAX
            if not refused:
                self._jobs.add(job)
                self._pool.submit(self._run, job)
        if refused:
            self._answer(job, b"", "the node has enough to do, or is closing")

    def end_all(self, timeout: float) -> None:
        """Give up every copy, and wait until nothing of them can write any more.

        Raises:
            StoreTimeoutError: not so in time. They stay given up: call again.
        """
        end = time.monotonic() + timeout
        with self._changed:
            jobs = list(self._jobs)
            for job in jobs:
                job.over = True
        for job in jobs:
            if job.move is not None:
                job.move.cancel(_SETTLE)
        with self._changed:
            if not self._changed.wait_for(lambda: self._jobs.isdisjoint(jobs), max(0.0, end - time.monotonic())):
                raise StoreTimeoutError(f"copies of this node did not end in {timeout:g}s", retryable=True)

    def close(self) -> None:
        """Give up every copy and end the threads. The engine, which ends what is left, is closed after this."""
        self._closed.set()
        try:
            self.end_all(_CLOSE)
        except StoreTimeoutError as error:
            _log.warning("%s", error)
        self._pool.shutdown()

    # ---------------------------------------------------------------- the threads

    def _run(self, job: _Job) -> None:
        good = np.zeros(len(job.extents), dtype=np.bool_)
        cause = "it was given up before it began"
        try:
            if not job.over and time.monotonic() < job.deadline:
                good, cause = self._copy(job)
        except MoonpoolError as error:
            cause = str(error)
            self._targets.pop(job.copy.source.incarnation, None)
        except Exception as error:  # noqa: BLE001 - whatever the master has sent, the thread lives and it gets an answer
            _log.exception("a copy failed")
            cause = f"{type(error).__name__}: {error}"
        finally:
            self._settle(job)
            with self._changed:
                self._jobs.discard(job)
                self._changed.notify_all()
        if not job.over:
            self._answer(job, np.where(good, pb.OK, pb.NOT_MOVED).astype(np.uint8).tobytes(), cause)

    def _answer(self, job: _Job, statuses: bytes, cause: str) -> None:
        if cause:
            _log.info("copy of %d extents from segment %d: %s", len(job.extents), job.copy.source.segment, cause)
        job.answer(pb.CopyDone(copy=job.copy.copy, statuses=statuses, cause=cause[:500]))

    def _settle(self, job: _Job) -> None:
        """Return when nothing of it can write here any more; or the engine is about to be closed, which ends it too."""
        while job.move is not None and not job.move.settled and not self._closed.is_set():
            job.move.cancel(_SETTLE)

    def _copy(self, job: _Job) -> tuple[npt.NDArray[np.bool_], str]:
        """Return which extents are here, right from their headers to their digests, and what went wrong."""
        extents = job.extents
        target = self._target(job)
        here, lengths = extents["here"].astype(np.int64), extents["length"].astype(np.int64)
        # As ranges that are whole payloads, so that header, leaves and table come, and can be proved leaf by leaf.
        place = Place(
            self._region,
            here + HEADER_BYTES,
            lengths,
            self._region,
            here,
            here + HEADER_BYTES + lengths,
            lengths,
            joined=True,
            starts=np.zeros_like(lengths),
        )
        patience = _PATIENCE + int(lengths.sum()) / _SLOWEST
        there = extents["there"].astype(np.int64)
        job.move = move = Move(place, np.arange(len(extents)), there, target.by_cpu, "both")
        move.start(self._engine, target, "read", min(job.deadline, time.monotonic() + patience))
        if job.over:
            move.cancel(_SETTLE)
        moved = move.finish(_SETTLE)
        if moved.error is not None:
            self._targets.pop(job.copy.source.incarnation, None)
        if not moved.settled:
            return np.zeros(len(extents), dtype=np.bool_), str(moved.error)
        good = moved.good & self._right(extents, place, moved.digests)
        cause = str(moved.error or "")
        if not cause and not good.all():
            cause = f"{len(good) - int(good.sum())} extents are not what they should be"
        return good, cause

    def _right(self, extents: Records, place: Place, digests: npt.NDArray[np.uint64] | None) -> Flags:
        """Return which extents are what the master said, as far as their headers and tables prove."""
        wanted = headers_of(extents, extents["hash"], extents["shard"].astype(np.uint64))
        sizes = table_bytes(place.sizes)
        tables, several = np.cumsum(sizes) - sizes, sizes > 0
        words = np.empty(int(sizes.sum()) // DIGEST_BYTES, dtype="<u8")
        if several.any():
            copy_batch(words, tables[several], self._region, place.table_offsets[several], sizes[several])
        return proved(words, replace(place, table_offsets=tables), np.arange(len(extents)), wanted, digests)

    def _target(self, job: _Job) -> Target:
        source = job.copy.source
        known = self._targets.get(source.incarnation)
        peer = known.peer if known is not None and known.address == source.address else None
        target = reach(self._engine, source, max(0.001, min(_CONNECT, job.deadline - time.monotonic())), peer)
        if len(self._targets) >= _TARGETS_MAX:
            self._targets.clear()  # what is used goes on until it ends
        self._targets[source.incarnation] = target
        return target
