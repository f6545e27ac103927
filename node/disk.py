# SPDX-License-Identifier: Apache-2.0
"""The disk below the memory of a node, as the master is told of it: mounted, reported when it fails, mounted again."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from moonpool.errors import MoonpoolError
from moonpool.node.diskcopying import DiskCopier
from moonpool.proto import pool_pb2 as pb
from moonpool.proto.errors import SegmentLostError

if TYPE_CHECKING:
    from moonpool.node.slab import Slab
    from moonpool.store_client.rpc import MasterLink
    from moonpool.transfer_engine import Region, TransferEngine

__all__ = ["Disk"]

_log = logging.getLogger("moonpool.node")
_CALL_SECONDS: Final = 5.0
# Between two attempts to mount a disk that could not be, or to see whether it works again.
_AGAIN: Final = 1.0


class Disk:
    """See the module. It never keeps the memory of the node from being lent.

    Args:
        slab: the file; its owner closes it.
        engine: of the node.
        region: the memory that the node lends.
        address: by which clients reach the node.
        link: to the master.
        name: of the node.
        threads: reads and writes that are under way at once.
    """

    def __init__(
        self,
        slab: Slab,
        engine: TransferEngine,
        region: Region,
        address: str,
        link: MasterLink,
        name: str,
        threads: int,
    ) -> None:
        self._slab = slab
        self._address = address
        self._link = link
        self._session = b""
        self._ready = threading.Event()
        self._failing = threading.Event()
        self._wake = threading.Event()
        self._closing = threading.Event()
        incarnation = bytes.fromhex(engine.incarnation)
        self.copier = DiskCopier(slab, region, incarnation, name, threads, self._failed)
        self._thread = threading.Thread(target=self._run, name=f"moonpool-disk-{name}", daemon=True)
        self._thread.start()

    @property
    def segment(self) -> int:
        """The number that the master gave to it."""
        return self._slab.segment

    @property
    def mounted(self) -> bool:
        """Whether the master may use it now, as far as is known here."""
        return self._ready.is_set()

    def wait(self, timeout: float) -> bool:
        """Wait until the master may use it. Returns whether it may."""
        return self._ready.wait(timeout)

    def unmounted(self, timeout: float) -> None:
        """There is another master, or another stream: nothing is copied any more for what was asked before.

        Raises:
            StoreTimeoutError: something still writes into memory.
        """
        self._ready.clear()
        self.copier.end_all(timeout)

    def mount(self, session: bytes, memory: int) -> None:
        """Have it offered, on another thread, to the master that has just taken the memory of this node."""
        self._session, self.copier.memory = session, memory
        self._ready.clear()
        self._wake.set()

    def close(self) -> None:
        """End the threads."""
        self._closing.set()
        self._wake.set()
        self._thread.join()
        self.copier.close()

    def _failed(self, cause: str) -> None:
        if not self._failing.is_set():
            _log.warning("the disk %s has failed: %s", self._slab.path, cause)
            self._failing.set()
            self._wake.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            idle = not self._session or (self._ready.is_set() and not self._failing.is_set())
            self._wake.wait(None if idle else _AGAIN)
            self._wake.clear()
            if self._closing.is_set() or not self._session:
                continue
            try:
                if self._failing.is_set():
                    self._report_and_look()
                if not self._ready.is_set():
                    self._mount()
            except (MoonpoolError, OSError) as error:
                _log.warning("the disk %s is not used: %s", self._slab.path, error)

    def _report_and_look(self) -> None:
        if self._ready.is_set():
            report = pb.ReportFailureRequest(session=self._session, segment=self.segment, cause="the disk has failed")
            self._link.call("ReportFailure", report, time.monotonic() + _CALL_SECONDS)
            self._ready.clear()
            self._closing.wait(_AGAIN)
        self._slab.check()
        self._failing.clear()

    def _mount(self) -> None:
        request = pb.MountSegmentRequest(
            session=self._session, address=self._address, capacity_bytes=self._slab.capacity, medium=pb.DISK
        )
        for again in (False, True):
            request.incarnation, request.segment = self._slab.identity, self._slab.segment
            request.note = self._slab.note
            try:
                reply = self._link.call("MountSegment", request, time.monotonic() + _CALL_SECONDS)
            except SegmentLostError as error:
                if again:
                    raise
                self._slab.format(f"what {self._slab.path} held is not used: the master does not know it ({error})")
                continue
            self._slab.keep(reply.header.cluster_id, reply.segment)
            self._ready.set()
            _log.info("segment %d of %d bytes is mounted on %s", reply.segment, self._slab.capacity, self._slab.path)
            return
