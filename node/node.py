# SPDX-License-Identifier: Apache-2.0
"""A store node: lends memory to a pool, and keeps out whoever the master says."""

from __future__ import annotations

import atexit
import logging
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final

from moonpool.errors import MoonpoolError
from moonpool.node.hostmemory import check_dram
from moonpool.node.lending import Lending
from moonpool.node.settings import NodeSettings
from moonpool.node.slab import Slab, SlabPlace
from moonpool.proto.errors import MasterUnavailableError

if TYPE_CHECKING:
    from typing_extensions import Self

    from moonpool.transfer_engine import TransferEngine

__all__ = ["StoreNode"]

_log = logging.getLogger("moonpool.node")
# Between two attempts to lend memory again after the master gave up the segment.
_AGAIN_FIRST: Final = 0.1
_AGAIN_LAST: Final = 5.0


class StoreNode:
    """Lends memory to the pool of a master, from when it is made until it is closed.

    Clients read and write the memory one-sidedly; the node itself takes no part in that. It holds its session with
    the master on a thread of its own, mounts its segment again after either was away, and fences clients on request.
    When the master gave up the segment meanwhile, the node lends new memory under a new incarnation.

    Args:
        settings: every setting at once. Excludes `options`.
        options: single settings by name, see `NodeSettings`.

    Raises:
        ConfigError: an unknown option or impossible value, files for TLS that cannot be used, or more memory or disk
            than this host has.
        DiskError: the file `ssd` cannot be used.
        OutOfMemoryError: there is no such memory.
        ListenError: the address cannot be listened on.
        SelfTestError: what was written into the memory did not come back.
        AuthenticationError: node and master do not have the same secret.
        TlsError: they do not agree on TLS.
        MasterUnavailableError: the master did not take the segment within `startup_timeout`.

    A context manager. It is closed at the end of the interpreter, if not before. Thread-safe.
    """

    def __init__(self, *, settings: NodeSettings | None = None, **options: Any) -> None:
        self.settings = settings = settings if settings is not None else NodeSettings.load(options)
        check_dram(settings.dram)
        self.name = settings.name or socket.gethostname()
        self._keeper = keeper = _Keeper(settings, self.name)
        self._finalizer = weakref.finalize(self, keeper.close)
        # At the end of the interpreter before any finalizer: that of an engine which was opened later would come first.
        atexit.register(keeper.close)
        try:
            keeper.start()
        except BaseException:
            self.close()
            raise

    @property
    def segment(self) -> int:
        """The number that the master gave to the memory."""
        return self._keeper.lending.segment

    @property
    def address(self) -> str:
        """Where clients reach it."""
        return self._keeper.lending.address

    @property
    def disk_note(self) -> str:
        """Why its disk began empty though the file was there; "": it did not, or there is none."""
        return self._keeper.disk_note

    @property
    def mounted(self) -> bool:
        """Whether the master knows of the memory now, as far as is known here."""
        return self._keeper.lending.mounted

    @property
    def engine(self) -> TransferEngine:
        """The engine that owns the memory."""
        return self._keeper.lending.engine

    def close(self) -> None:
        """Take the memory back from the pool: unmount, goodbye, end. Calling it again does nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<StoreNode {self.name!r} segment {self.segment} at {self.address}>"


class _Keeper:
    """Lends, and lends anew when the master has given up what was lent. Not the StoreNode, which may be collected."""

    lending: Lending

    def __init__(self, settings: NodeSettings, name: str) -> None:
        self._settings = settings
        self._name = name
        self._lost = threading.Event()
        self._closing = threading.Event()
        self._open: Lending | None = None
        self._slab = None if settings.ssd is None else Slab(SlabPlace.parse(settings.ssd))
        self._thread = threading.Thread(target=self._run, name=f"moonpool-node-{name}", daemon=True)

    @property
    def disk_note(self) -> str:
        return "" if self._slab is None else self._slab.note

    def start(self) -> None:
        self._lend(self._settings.startup_timeout)
        self._thread.start()

    def close(self) -> None:
        atexit.unregister(self.close)
        self._closing.set()
        self._lost.set()
        if self._thread.is_alive():
            self._thread.join()
        self._end()
        if self._slab is not None:
            self._slab.close()

    def _run(self) -> None:
        delay = _AGAIN_FIRST
        while True:
            self._lost.wait()
            if self._closing.is_set():
                return
            _log.warning("the master has given up segment %d: its memory is lent anew", self.lending.segment)
            self._end()
            self._lost.clear()
            try:
                self._lend(self._settings.startup_timeout)
                delay = _AGAIN_FIRST
            except MoonpoolError as error:
                _log.warning("memory could not be lent again: %s", error)
                self._lost.set()
                self._closing.wait(delay)
                delay = min(2 * delay, _AGAIN_LAST)

    def _lend(self, timeout: float) -> None:
        lending = Lending(self._settings, self._name, self._lost, self._slab)
        self._open = self.lending = lending
        deadline = time.monotonic() + timeout
        lending.session.wait(timeout)
        if not lending.mounted_event.wait(max(0.0, deadline - time.monotonic())):
            raise MasterUnavailableError("the master did not take the segment in time", retryable=True)
        if lending.disk is not None:
            # So that what is on it is there when the node is said to be. Without it the memory is as good.
            lending.disk.wait(max(0.0, deadline - time.monotonic()))

    def _end(self) -> None:
        lending, self._open = self._open, None
        if lending is not None:
            lending.close()
