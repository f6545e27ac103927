# SPDX-License-Identifier: Apache-2.0
"""A store node: lends memory to a pool, and keeps out whoever the master says."""

from __future__ import annotations

import logging
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final

from moonpool.address import Address, parse_address
from moonpool.errors import MoonpoolError
from moonpool.node.selftest import self_test
from moonpool.node.settings import NodeSettings
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client.rpc import MasterLink
from moonpool.store_client.session import Session
from moonpool.transfer_engine import EngineSettings, TransferEngine

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["StoreNode"]

_log = logging.getLogger("moonpool.node")
REGION: Final = "pool"
_HUGE_PAGES: Final = {"auto": None, "required": True, "never": False}
_MOUNT_SECONDS: Final = 5.0
_UNMOUNT_SECONDS: Final = 1.0


class StoreNode:
    """Lends memory to the pool of a master, from when it is made until it is closed.

    Clients read and write the memory one-sidedly; the node itself takes no part in that. It holds its session with
    the master on a thread of its own, mounts its segment again after either was away, and fences clients on request.

    Args:
        settings: every setting at once. Excludes `options`.
        options: single settings by name, see `NodeSettings`.

    Raises:
        ConfigError: an unknown option or impossible value.
        OutOfMemoryError: there is no such memory.
        ListenError: the address cannot be listened on.
        SelfTestError: what was written into the memory did not come back.
        MasterUnavailableError: the master did not take the segment within `startup_timeout`.

    A context manager. It is closed at the end of the interpreter, if not before. Thread-safe.
    """

    def __init__(self, *, settings: NodeSettings | None = None, **options: Any) -> None:
        self.settings = settings = settings if settings is not None else NodeSettings.load(options)
        host = socket.gethostname()
        self.name = settings.name or host
        self._mounted = threading.Event()
        self._parts = parts = _Parts()
        self._finalizer = weakref.finalize(self, parts.close)
        try:
            engine_settings = _engine_settings(self.name, settings)
            parts.engine = engine = TransferEngine(settings=engine_settings)
            region = engine.allocate(settings.dram, name=REGION, huge_pages=_HUGE_PAGES[settings.huge_pages])
            self.address = _advertised(settings, engine.address or "")
            if settings.self_test:
                paths = self_test(engine_settings, self.address, region)
                _log.info("self-test of %d bytes over %s passed", region.nbytes, ", ".join(paths))
            parts.link = MasterLink(settings.master, settings.secret)
            mount = _Mount(parts, engine, self.address, region.nbytes, self._mounted)
            parts.session = Session(
                parts.link,
                pb.NODE,
                self.name,
                settings.host_id or host,
                engine.incarnation,
                on_welcome=mount,
                on_fence=lambda incarnation: _fence(engine, incarnation),
            )
            parts.session.wait(settings.startup_timeout)
        except BaseException:
            self.close()
            raise

    @property
    def segment(self) -> int:
        """The number that the master gave to the memory."""
        return self._parts.segment

    @property
    def mounted(self) -> bool:
        """Whether the master knows of the memory now, as far as is known here."""
        session = self._parts.session
        return self._mounted.is_set() and session is not None and session.alive

    @property
    def engine(self) -> TransferEngine:
        """The engine that owns the memory."""
        assert self._parts.engine is not None
        return self._parts.engine

    def close(self) -> None:
        """Take the memory back from the pool: unmount, goodbye, end. Calling it again does nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<StoreNode {self.name!r} segment {self.segment} at {self.address}>"


class _Parts:
    # What must be ended. Not the StoreNode, so that that one can be collected.
    def __init__(self) -> None:
        self.engine: TransferEngine | None = None
        self.link: MasterLink | None = None
        self.session: Session | None = None
        self.segment = 0

    def close(self) -> None:
        if self.session is not None and self.link is not None:
            if self.segment and self.session.alive:
                request = pb.UnmountSegmentRequest(session=self.session.id, segment=self.segment)
                try:
                    self.link.call("UnmountSegment", request, time.monotonic() + _UNMOUNT_SECONDS)
                except MoonpoolError as error:
                    # The session ends next, and the segment with it.
                    _log.info("unmount: %s", error)
            self.session.close()
        if self.link is not None:
            self.link.close()
        if self.engine is not None:
            self.engine.close()


class _Mount:
    """Called on the session's thread after each Welcome: tells the master of the segment, with the number it had."""

    def __init__(
        self, parts: _Parts, engine: TransferEngine, address: str, capacity: int, mounted: threading.Event
    ) -> None:
        self._parts = parts
        self._request = pb.MountSegmentRequest(
            address=address,
            region=REGION,
            incarnation=bytes.fromhex(engine.incarnation),
            capacity_bytes=capacity,
        )
        self._mounted = mounted

    def __call__(self, session: Session) -> None:
        link = self._parts.link
        assert link is not None
        self._request.session = session.id
        self._request.segment = self._parts.segment
        reply = link.call("MountSegment", self._request, time.monotonic() + _MOUNT_SECONDS)
        if self._parts.segment not in (0, reply.segment):
            _log.warning("segment %d is segment %d now: the master knew it no more", self._parts.segment, reply.segment)
        self._parts.segment = reply.segment
        self._mounted.set()


def _fence(engine: TransferEngine, incarnation: str) -> None:
    connections = engine.fence(incarnation)
    _log.info("incarnation %s is fenced: %d connections", incarnation, connections)


def _engine_settings(name: str, settings: NodeSettings) -> EngineSettings:
    return EngineSettings.load(
        {
            "name": name,
            "listen": settings.listen,
            "secret": settings.secret,
            "insecure": settings.insecure,
            "transports": settings.transports,
        }
    )


def _advertised(settings: NodeSettings, listening: str) -> str:
    if settings.advertise is not None:
        advertised = parse_address(settings.advertise)
        return str(advertised if advertised.port else Address(advertised.host, parse_address(listening).port))
    own = parse_address(listening)
    if own.host not in ("0.0.0.0", "::"):
        return listening
    master = parse_address(settings.master)
    # Nothing is sent: connecting a datagram socket only looks up the way.
    family, kind, protocol, _, target = socket.getaddrinfo(master.host, master.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(Address(probe.getsockname()[0], own.port))
