# SPDX-License-Identifier: Apache-2.0
"""One incarnation of what a node lends: an engine, its memory, and the session that offers it."""

from __future__ import annotations

import logging
import socket
import threading
import time
from typing import TYPE_CHECKING, Final

from moonpool.address import Address, parse_address, parse_addresses
from moonpool.errors import MoonpoolError
from moonpool.node.copying import Answer, Copier
from moonpool.node.disk import Disk
from moonpool.node.prober import Prober
from moonpool.node.selftest import self_test
from moonpool.proto import pool_pb2 as pb
from moonpool.proto.errors import SegmentLostError
from moonpool.proto.tls import Tls
from moonpool.store_client.rpc import MasterLink
from moonpool.store_client.session import Session
from moonpool.transfer_engine import EngineSettings, TransferEngine

if TYPE_CHECKING:
    from moonpool.node.settings import NodeSettings
    from moonpool.node.slab import Slab

__all__ = ["Lending"]

_log = logging.getLogger("moonpool.node")
REGION: Final = "pool"
_HUGE_PAGES: Final = {"auto": None, "required": True, "never": False}
_MOUNT_SECONDS: Final = 5.0
_UNMOUNT_SECONDS: Final = 1.0
_END_COPIES_SECONDS: Final = 5.0


class Lending:
    """See the module.

    Args:
        settings: of the node.
        name: of the node.
        lost: set when the master has given the segment up, and this must be closed and another one made.
        slab: the disk below the memory; its owner closes it after this.

    Raises:
        MoonpoolError: as `StoreNode`. Nothing is left open then.
    """

    def __init__(self, settings: NodeSettings, name: str, lost: threading.Event, slab: Slab | None = None) -> None:
        self.segment = 0
        self.mounted_event = threading.Event()
        self._lost = lost
        engine_settings = _engine_settings(name, settings)
        self.engine = TransferEngine(settings=engine_settings)
        try:
            region = self.engine.allocate(settings.dram, name=REGION, huge_pages=_HUGE_PAGES[settings.huge_pages])
            self.address = _advertised(settings, self.engine.address or "")
            if settings.self_test:
                paths = self_test(engine_settings, self.address, region)
                _log.info("self-test of %d bytes over %s passed", region.nbytes, ", ".join(paths))
            self._mount = pb.MountSegmentRequest(
                address=self.address,
                region=REGION,
                incarnation=bytes.fromhex(self.engine.incarnation),
                capacity_bytes=region.nbytes,
            )
            self.link = MasterLink(settings.master, settings.secret, Tls.of(settings))
            self._prober = Prober(self.engine)
            self._copier = Copier(self.engine, region, name)
            self.disk = (
                Disk(slab, self.engine, region, self.address, self.link, name, settings.ssd_threads) if slab else None
            )
        except BaseException:
            self.engine.close()
            raise
        self.session = Session(
            self.link,
            pb.NODE,
            name,
            settings.host_id or socket.gethostname(),
            self.engine.incarnation,
            on_welcome=self._welcomed,
            on_fence=self._fence,
            on_probe=self._prober.ask,
            on_copy=self._copy,
        )

    @property
    def mounted(self) -> bool:
        """Whether the master knows of the memory now."""
        return self.mounted_event.is_set() and self.session.alive

    def close(self) -> None:
        """Unmount, goodbye, end."""
        if self.segment and self.session.alive:
            request = pb.UnmountSegmentRequest(session=self.session.id, segment=self.segment)
            try:
                self.link.call("UnmountSegment", request, time.monotonic() + _UNMOUNT_SECONDS)
            except MoonpoolError as error:
                # The session ends next, and the segment with it.
                _log.info("unmount: %s", error)
        self.session.close()
        self._prober.close()
        self._copier.close()
        if self.disk is not None:
            self.disk.close()
        self.link.close()
        self.engine.close()

    def _welcomed(self, session: Session) -> None:
        # On the session's thread, after every Welcome. A master that does not know of the copies that were begun gives
        # their room to others, as soon as the memory is mounted.
        self._copier.end_all(_END_COPIES_SECONDS)
        if self.disk is not None:
            self.disk.unmounted(_END_COPIES_SECONDS)
        self._mount.session = session.id
        self._mount.segment = self.segment
        try:
            reply = self.link.call("MountSegment", self._mount, time.monotonic() + _MOUNT_SECONDS)
        except SegmentLostError:
            self._lost.set()
            raise
        self.segment = reply.segment
        self.mounted_event.set()
        _log.info("segment %d of %d bytes is mounted at %s", self.segment, self._mount.capacity_bytes, self.address)

        if self.disk is not None:
            self.disk.mount(session.id, self.segment)

    def _copy(self, copy: pb.Copy, answer: Answer) -> None:
        if self.disk is not None and self.disk.copier.serves(copy):
            self.disk.copier.take(copy, answer)
        else:
            self._copier.take(copy, answer)

    def _fence(self, incarnation: str) -> None:
        connections = self.engine.fence(incarnation)
        _log.info("incarnation %s is fenced: it had %d connections", incarnation, connections)


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
        given = parse_address(settings.advertise)
        return str(given if given.port else Address(given.host, parse_address(listening).port))
    own = parse_address(listening)
    if own.host not in ("0.0.0.0", "::"):
        return listening
    master = parse_addresses(settings.master)[0]
    # Nothing is sent: connecting a datagram socket only looks up the way.
    family, kind, protocol, _, target = socket.getaddrinfo(master.host, master.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(Address(probe.getsockname()[0], own.port))
