# SPDX-License-Identifier: Apache-2.0
"""Copies extents between the memory and the disk of a node, when the master asks for it.

An extent is the same in both: header, payload, digests of leaves. What comes from the disk is believed only when
header and digests say that it is what the master wants; so it does not matter what a crash, a late write or a bad disk
has left there.
"""

from __future__ import annotations

import errno
import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from moonpool.errors import MoonpoolError
from moonpool.node.copying import EXTENT
from moonpool.node.slab import BLOCK, ShortReadError
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client.errors import StoreTimeoutError
from moonpool.store_client.leaves import proved, table_bytes
from moonpool.store_client.moves import Place
from moonpool.store_client.packing import HEADER_BYTES, headers_of
from moonpool.transfer_engine import copy_batch

if TYPE_CHECKING:
    import numpy.typing as npt

    from moonpool.node.slab import Slab
    from moonpool.store_client.packing import Flags, Records
    from moonpool.transfer_engine import Region

__all__ = ["DiskCopier"]

_log = logging.getLogger("moonpool.node")
Answer: TypeAlias = Callable[[pb.CopyDone], None]

# A master asks for a few at a time. What is beyond that is refused.
_WAITING_MAX: Final = 256
# Of one thread, and what one step of it takes in at most, in bytes and extents. A larger extent goes in parts.
_BUFFER: Final = 4 << 20
_STEP_BYTES: Final = 1 << 20
_STEP_COUNT: Final = 64
# So many steps in a row that the disk has refused, and it is taken to have failed.
_FAILURES: Final = 3
_CLOSE: Final = 5.0


class _Job:
    # One copy that was asked for. `left` and `touching` are steps: that are not over, that write into memory now.
    def __init__(self, copy: pb.Copy, answer: Answer, up: bool) -> None:
        self.copy = copy
        self.answer = answer
        self.up = up
        self.deadline = time.monotonic() + copy.deadline_ms / 1000
        self.extents = np.frombuffer(copy.extents, dtype=EXTENT)
        self.statuses = np.full(len(self.extents), pb.NOT_MOVED, dtype=np.uint8)
        self.cause = ""
        self.over = False
        self.left = 0
        self.touching = 0


class DiskCopier:
    """See the module. Thread-safe.

    Args:
        slab: the disk; its owner closes it.
        region: the memory that the node lends.
        incarnation: of its engine.
        name: of the node.
        threads: reads and writes that are under way at once.
        failed: called, from any thread, when the disk has failed.

    Attributes:
        memory: the number of the segment of that memory.
        counts: what was read, written and refused, since the start.
    """

    def __init__(
        self, slab: Slab, region: Region, incarnation: bytes, name: str, threads: int, failed: Callable[[str], None]
    ) -> None:
        self._slab = slab
        self._region = region
        self._incarnation = incarnation
        self._failed = failed
        self.memory = 0
        self.counts = {"read_bytes": 0, "written_bytes": 0, "spoilt": 0, "errors": 0}
        self._changed = threading.Condition()
        self._jobs: set[_Job] = set()
        self._failures = 0
        self._closed = False
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"moonpool-disk-{name}")

    def serves(self, copy: pb.Copy) -> bool:
        """Whether a copy is one from or to the disk."""
        return bool(self._slab.segment) and self._slab.segment in (copy.segment, copy.source.segment)

    def take(self, copy: pb.Copy, answer: Answer) -> None:
        """Begin a copy on other threads.

        Args:
            copy: what the master asks for.
            answer: called with the outcome, when nothing of the copy can write any more.
        """
        job = _Job(copy, answer, up=copy.source.segment == self._slab.segment)
        refusal = self._refusal(job)
        steps = [] if refusal else list(_steps(job.extents))
        with self._changed:
            if not refusal and (self._closed or len(self._jobs) >= _WAITING_MAX):
                refusal = "the node has enough to do, or is closing"
            if not refusal:
                job.left = len(steps)
                self._jobs.add(job)
                for step in steps:
                    self._pool.submit(self._run, job, step)
        if refusal:
            job.cause = refusal
            self._answer(job)

    def _refusal(self, job: _Job) -> str:
        copy, extents = job.copy, job.extents
        memory, disk = ("here", "there") if job.up else ("there", "here")
        if not job.up and copy.source.incarnation != self._incarnation:
            return "a disk takes what lies in the memory of its node"
        if job.up and copy.segment != self.memory:
            return "what lies on a disk goes to the memory of its node"
        sizes = _sizes(extents)
        inside = (extents[memory] + sizes <= self._region.nbytes) & (extents[disk] + sizes <= self._slab.capacity)
        if not len(extents) or not inside.all() or (extents[disk] % BLOCK).any():
            return "there are no such extents"
        return ""

    def end_all(self, timeout: float) -> bool:
        """Give up every copy, and wait until none of them writes into memory, which takes no disk.

        Returns whether none of them writes to the disk either; what does would not be believed.

        Raises:
            StoreTimeoutError: not so in time. They stay given up: call again.
        """
        end = time.monotonic() + timeout
        with self._changed:
            jobs = list(self._jobs)
            for job in jobs:
                job.over = True
            if not self._changed.wait_for(lambda: not any(job.touching for job in jobs), timeout):
                raise StoreTimeoutError(f"copies from the disk did not end in {timeout:g}s", retryable=True)
            return self._changed.wait_for(lambda: self._jobs.isdisjoint(jobs), max(0.0, end - time.monotonic()))

    def close(self) -> bool:
        """Give up every copy and end the threads. Returns whether they have ended: a disk may hang."""
        with self._changed:
            self._closed = True
        try:
            ended = self.end_all(_CLOSE)
        except StoreTimeoutError as error:
            _log.warning("%s", error)
            ended = False
        self._pool.shutdown(wait=ended, cancel_futures=True)
        return ended

    # ---------------------------------------------------------------- the threads

    def _run(self, job: _Job, rows: npt.NDArray[np.intp]) -> None:
        try:
            if not job.over and time.monotonic() < job.deadline:
                (self._up if job.up else self._down)(job, rows)
                self._failures = 0
        except OSError as error:
            self._refused(job, rows, error)
        except MoonpoolError as error:
            job.cause = str(error)
        except Exception as error:  # noqa: BLE001 - whatever the master has sent, the thread lives and it gets an answer
            _log.exception("a copy failed")
            job.cause = f"{type(error).__name__}: {error}"
        with self._changed:
            job.left -= 1
            if job.left:
                return
        self._finish(job)

    def _refused(self, job: _Job, rows: npt.NDArray[np.intp], error: OSError) -> None:
        """The disk did not do it. What was to be read is given up; what was to be written stays where it is."""
        job.cause = f"the disk says: {error}"
        self.counts["errors"] += 1
        _log.warning("%s: %s", self._slab.path, error)
        if job.up:
            job.statuses[rows] = pb.SPOILT
        if isinstance(error, ShortReadError) or error.errno in (errno.ENOSPC, errno.EDQUOT):
            return  # the disk works
        self._failures += 1
        if self._failures >= _FAILURES:
            self._failed(job.cause)

    def _finish(self, job: _Job) -> None:
        if not job.up and (job.statuses == pb.OK).any() and not job.over:
            try:
                self._slab.sync()
            except OSError as error:
                # Which of them is there nobody knows, now and after the next sync.
                job.statuses[:] = pb.NOT_MOVED
                self._refused(job, np.zeros(0, dtype=np.intp), error)
                self._failed(job.cause)
        with self._changed:
            self._jobs.discard(job)
            self._changed.notify_all()
        if not job.over:
            self._answer(job)

    def _answer(self, job: _Job) -> None:
        if job.cause:
            _log.info("copy of %d extents from or to the disk: %s", len(job.extents), job.cause)
        job.answer(pb.CopyDone(copy=job.copy.copy, statuses=job.statuses.tobytes(), cause=job.cause[:500]))

    def _buffer(self) -> memoryview:
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None:
            # Anonymous memory begins with a page, as reads past the page cache want it.
            buffer = self._local.buffer = memoryview(mmap.mmap(-1, _BUFFER))
        return buffer

    # ---------------------------------------------------------------- from the disk

    def _up(self, job: _Job, rows: npt.NDArray[np.intp]) -> None:
        extents, buffer = job.extents[rows], self._buffer()
        whole = True
        for extent, size in zip(extents, _sizes(extents).tolist(), strict=True):
            there, here = int(extent["there"]), int(extent["here"])
            for at in range(0, size, _BUFFER):
                length = min(size - at, _BUFFER)
                self._slab.read(there + at, buffer[: -(-length // BLOCK) * BLOCK])
                whole = whole and self._into_memory(job, here + at, buffer, length)
        if not whole:
            return
        good = self._right(extents, extents["here"].astype(np.int64))
        job.statuses[rows] = np.where(good, pb.OK, pb.SPOILT)
        self.counts["read_bytes"] += int(extents["length"].sum())
        if not good.all():
            self.counts["spoilt"] += int((~good).sum())
            job.cause = f"{int((~good).sum())} extents on the disk are not what they should be"

    def _into_memory(self, job: _Job, here: int, buffer: memoryview, length: int) -> bool:
        """Copy a part, unless the copy was given up: its room in memory may be another's then."""
        with self._changed:
            if job.over:
                return False
            job.touching += 1
        try:
            copy_batch(self._region, here, buffer, 0, length)
        finally:
            with self._changed:
                job.touching -= 1
                self._changed.notify_all()
        return True

    # ---------------------------------------------------------------- to the disk

    def _down(self, job: _Job, rows: npt.NDArray[np.intp]) -> None:
        extents, buffer = job.extents[rows], self._buffer()
        good = self._right(extents, extents["there"].astype(np.int64))
        if not good.all():
            job.cause = f"{int((~good).sum())} extents in memory are not what they should be"
        extents = extents[good]
        for extent, size in zip(extents, _sizes(extents).tolist(), strict=True):
            there, here = int(extent["there"]), int(extent["here"])
            for at in range(0, size, _BUFFER):
                if job.over:
                    return
                length = min(size - at, _BUFFER)
                padded = -(-length // BLOCK) * BLOCK
                copy_batch(buffer, 0, self._region, there + at, length)
                buffer[length:padded] = bytes(padded - length)
                self._slab.write(here + at, buffer[:padded])
        self.counts["written_bytes"] += int(extents["length"].sum())
        job.statuses[rows[good]] = pb.OK

    def _right(self, extents: Records, offsets: npt.NDArray[np.int64]) -> Flags:
        """Return which extents in memory are what the master said, as far as headers, tables and leaves prove."""
        region, lengths = self._region, extents["length"].astype(np.int64)
        sizes = table_bytes(lengths)
        starts, several = np.cumsum(sizes) - sizes, sizes > 0
        tables = np.empty(max(1, int(sizes.sum()) // 8), dtype="<u8")
        payloads = offsets + HEADER_BYTES
        if several.any():
            copy_batch(tables, starts[several], region, (payloads + lengths)[several], sizes[several])
        place = Place(
            region, payloads, lengths, region, offsets, starts, lengths, joined=True, starts=np.zeros_like(lengths)
        )
        wanted = headers_of(extents, extents["hash"], extents["shard"].astype(np.uint64))
        return proved(tables, place, np.arange(len(extents)), wanted, None)


def _sizes(extents: Records) -> npt.NDArray[np.int64]:
    """Return what extents take: header, payload, digests of leaves."""
    lengths = extents["length"].astype(np.int64)
    return HEADER_BYTES + lengths + table_bytes(lengths)


def _steps(extents: Records) -> Iterator[npt.NDArray[np.intp]]:
    """Yield which extents are copied together: those of a few, or one."""
    first, nbytes = 0, 0
    for row, size in enumerate(_sizes(extents).tolist()):
        if row > first and (nbytes + size > _STEP_BYTES or row - first >= _STEP_COUNT):
            yield np.arange(first, row)
            first, nbytes = row, 0
        nbytes += size
    yield np.arange(first, len(extents))
