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
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from moonpool.errors import MoonpoolError
from moonpool.node.extents import EXTENT_BYTES, extents_of, is_right, size_of
from moonpool.node.slab import BLOCK, ShortReadError
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client.errors import StoreTimeoutError
from moonpool.transfer_engine import copy_batch

if TYPE_CHECKING:
    from moonpool.node.copying import Answer
    from moonpool.node.extents import Extent
    from moonpool.node.slab import Slab
    from moonpool.transfer_engine import Region

__all__ = ["DiskCopier"]

_log = logging.getLogger("moonpool.node")

# A master asks for a few at a time. What is beyond that is refused.
_WAITING_MAX: Final = 256
# Of one thread, and what one step of it takes in at most, in bytes and extents. A larger extent goes in parts.
_BUFFER: Final = 4 << 20
_STEP_BYTES: Final = 1 << 20
_STEP_COUNT: Final = 64
# So many extents in a row that the disk has refused, and it is taken to have failed.
_FAILURES: Final = 3
_CLOSE: Final = 5.0


class _Job:
    # One copy that was asked for. `left` and `touching` are steps: that are not over, that write into memory now.
    def __init__(self, copy: pb.Copy, answer: Answer, up: bool) -> None:
        self.copy = copy
        self.answer = answer
        self.up = up
        self.deadline = time.monotonic() + copy.deadline_ms / 1000
        self.extents: list[Extent] = []
        self.statuses = bytearray([pb.NOT_MOVED]) * (len(copy.extents) // EXTENT_BYTES)
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
        copy = job.copy
        if not job.up and copy.source.incarnation != self._incarnation:
            return "a disk takes what lies in the memory of its node"
        if job.up and copy.segment != self.memory:
            return "what lies on a disk goes to the memory of its node"
        try:
            job.extents = extents_of(copy.extents)
        except struct.error as error:
            return str(error)
        for extent in job.extents:
            disk, memory = (extent.there, extent.here) if job.up else (extent.here, extent.there)
            size = size_of(extent.length)
            if disk % BLOCK or disk + size > self._slab.capacity or memory + size > self._region.nbytes:
                return "there are no such extents"
        return "" if job.extents else "there are no extents"

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

    def _run(self, job: _Job, rows: range) -> None:
        for row in rows:
            if job.over or time.monotonic() >= job.deadline:
                break
            try:
                good = (self._up if job.up else self._down)(job, job.extents[row])
                self._failures = 0
                job.statuses[row] = good
            except OSError as error:
                self._refused(job, error)
                if job.up:
                    job.statuses[row] = pb.SPOILT
            except MoonpoolError as error:
                job.cause = str(error)
            except Exception as error:  # noqa: BLE001 - whatever the master has sent, the thread lives, and it gets an answer
                _log.exception("a copy failed")
                job.cause = f"{type(error).__name__}: {error}"
        with self._changed:
            job.left -= 1
            if job.left:
                return
        self._finish(job)

    def _refused(self, job: _Job, error: OSError) -> None:
        """The disk did not do it. What was to be read is given up; what was to be written stays where it is."""
        job.cause = f"the disk says: {error}"
        self.counts["errors"] += 1
        _log.warning("%s: %s", self._slab.path, error)
        if isinstance(error, ShortReadError) or error.errno in (errno.ENOSPC, errno.EDQUOT):
            return  # the disk works
        self._failures += 1
        if self._failures >= _FAILURES:
            self._failed(job.cause)

    def _finish(self, job: _Job) -> None:
        if not job.up and pb.OK in job.statuses and not job.over:
            try:
                self._slab.sync()
            except OSError as error:
                # Which of them is there nobody knows, now and after the next sync.
                job.statuses[:] = bytes([pb.NOT_MOVED]) * len(job.statuses)
                self._refused(job, error)
                self._failed(job.cause)
        with self._changed:
            self._jobs.discard(job)
            self._changed.notify_all()
        if not job.over:
            self._answer(job)

    def _answer(self, job: _Job) -> None:
        if job.cause:
            _log.info("copy of %d extents from or to the disk: %s", len(job.statuses), job.cause)
        job.answer(pb.CopyDone(copy=job.copy.copy, statuses=bytes(job.statuses), cause=job.cause[:500]))

    def _buffer(self) -> memoryview:
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None:
            # Anonymous memory begins with a page, as reads past the page cache want it.
            buffer = self._local.buffer = memoryview(mmap.mmap(-1, _BUFFER))
        return buffer

    # ---------------------------------------------------------------- from the disk

    def _up(self, job: _Job, extent: Extent) -> int:
        """Return what became of it."""
        buffer, size = self._buffer(), size_of(extent.length)
        if size <= _BUFFER:
            self._slab.read(extent.there, buffer[: _padded(size)])
            # While it is in the cache of this core.
            good = is_right(buffer, 0, extent)
            if good and not self._into_memory(job, extent.here, buffer, size):
                return pb.NOT_MOVED
        else:
            for at in range(0, size, _BUFFER):
                length = min(size - at, _BUFFER)
                self._slab.read(extent.there + at, buffer[: _padded(length)])
                if not self._into_memory(job, extent.here + at, buffer, length):
                    return pb.NOT_MOVED
            good = is_right(self._region, extent.here, extent)
        self.counts["read_bytes"] += extent.length
        if good:
            return pb.OK
        self.counts["spoilt"] += 1
        job.cause = "an extent on the disk is not what it should be"
        return pb.SPOILT

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

    def _down(self, job: _Job, extent: Extent) -> int:
        """Return what became of it; it is not safe from a crash yet."""
        buffer, size = self._buffer(), size_of(extent.length)
        good = size <= _BUFFER or is_right(self._region, extent.there, extent)
        for at in range(0, size if good else 0, _BUFFER):
            length = min(size - at, _BUFFER)
            padded = _padded(length)
            copy_batch(buffer, 0, self._region, extent.there + at, length)
            buffer[length:padded] = bytes(padded - length)
            good = size > _BUFFER or is_right(buffer, 0, extent)
            if job.over or not good:
                break
            self._slab.write(extent.here + at, buffer[:padded])
        if job.over:
            return pb.NOT_MOVED
        if not good:
            job.cause = "an extent in memory is not what it should be"
            return pb.SPOILT
        self.counts["written_bytes"] += extent.length
        return pb.OK


def _padded(length: int) -> int:
    """Return the bytes of the blocks that so many bytes take."""
    return -(-length // BLOCK) * BLOCK


def _steps(extents: list[Extent]) -> Iterator[range]:
    """Yield which extents one thread copies after each other: those of a few, or one."""
    first, nbytes = 0, 0
    for row, extent in enumerate(extents):
        size = size_of(extent.length)
        if row > first and (nbytes + size > _STEP_BYTES or row - first >= _STEP_COUNT):
            yield range(first, row)
            first, nbytes = row, 0
        nbytes += size
    yield range(first, len(extents))
