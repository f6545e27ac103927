# SPDX-License-Identifier: Apache-2.0
"""A master: its store, its service, its loops and its status pages, in an event loop of the caller or of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, Final

import grpc.aio

from moonpool.address import Address, parse_address
from moonpool.master.calls import Calls, methods
from moonpool.master.chunks import ChunkCalls
from moonpool.master.core import Core
from moonpool.master.errors import ListenError, StartError, StoreLostError
from moonpool.master.http import StatusPages
from moonpool.master.loops import start_loops
from moonpool.master.membership import MembershipCalls
from moonpool.master.move_calls import MoveCalls
from moonpool.master.overview import OverviewCalls
from moonpool.master.settings import MasterOptions, MasterSettings
from moonpool.master.store import MetadataStore, open_store
from moonpool.proto.auth import Verifier
from moonpool.proto.tls import Tls

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

__all__ = ["Master", "MasterServer"]

_log = logging.getLogger("moonpool.master")
# Calls that are under way when it is stopped have so long.
_GRACE_S: Final = 2.0
# So long it is waited for the store, which then gives up by itself.
_STORE_S: Final = 5.0
_START_S: Final = 600.0
_STOP_S: Final = 60.0
# Calls at once, beside the stream of each session and the one that follows it.
_CALLS_MAX: Final = 4096
# Of a PutStart with everything, per chunk, and of the rest of a message.
_BYTES_PER_CHUNK: Final = 80
_BYTES_PER_MESSAGE: Final = 64 << 10


class MasterServer:
    """A master within a running event loop. `Master` is one with a loop of its own.

    Args:
        settings: checked.

    Attributes:
        address: where it serves, once started.
        http_address: of the status pages; "" without any.
        core: its state.
    """

    def __init__(self, settings: MasterSettings) -> None:
        self.settings = settings
        self.address = ""
        self.http_address = ""
        self._store: MetadataStore | None = None
        self._server: grpc.aio.Server | None = None
        self._pages: StatusPages | None = None
        self._core: Core | None = None

    @property
    def core(self) -> Core:
        """Its state, once started."""
        assert self._core is not None, "start() comes first"
        return self._core

    async def start(self) -> None:
        """Open the store, take what is in it, and serve.

        Raises:
            ListenError: an address cannot be listened on.
            StoreBusyError: another process has the store open.
            StoreDamagedError: the store cannot be read.
            StoreUnavailableError: the store cannot be made or written.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop(grace=0)
            raise

    async def _start(self) -> None:
        settings = self.settings
        self._store = open_store(settings.store, settings)
        identity = await asyncio.to_thread(self._store.open)
        self._core = core = Core(settings, self._store, identity, methods())
        await asyncio.to_thread(core.restore)
        self._server = server = grpc.aio.server(
            options=_options(settings), maximum_concurrent_rpcs=_CALLS_MAX + 2 * settings.sessions_max
        )
        verifier = None if settings.secret is None else Verifier(settings.secret)
        parts: list[object] = [ChunkCalls(core), MoveCalls(core), MembershipCalls(core), OverviewCalls(core)]
        server.add_generic_rpc_handlers((Calls(core.metrics, verifier, core.check_leading).handlers(parts),))
        self.address = _bind(server, settings)
        start_loops(core)
        if settings.http is not None:
            self._pages = StatusPages(core)
            self.http_address = await self._pages.start(settings.http)
        await server.start()
        _log.info("serving on %s, epoch %d, %d chunks", self.address, identity.epoch, core.restored_chunks)

    async def lost(self) -> StoreLostError:
        """Wait until another master has taken over the store, and return what is known of that. For most, for ever."""
        lost = None if self._store is None else self._store.lost
        return await asyncio.wrap_future(Future() if lost is None else lost)

    async def stop(self, grace: float = _GRACE_S) -> None:
        """Finish the calls that are under way, end streams, close the store.

        Args:
            grace: seconds that calls have.
        """
        if self._core is not None:
            self._core.closing.set()
            self._core.events.wake()
            self._core.freed()
        if self._server is not None:
            await self._server.stop(grace)
        closing = [] if self._core is None else [asyncio.ensure_future(self._core.close())]
        if closing:
            # What waits for a store that does not answer ends when the store is closed.
            await asyncio.wait(closing, timeout=_STORE_S)
        if self._pages is not None:
            await self._pages.close()
        if self._store is not None:
            await asyncio.to_thread(self._store.close)
        await asyncio.gather(*closing)


def _options(settings: MasterSettings) -> list[tuple[str, Any]]:
    return [
        # A second master on the same port is a mistake, not a way to share the load.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", _BYTES_PER_MESSAGE + _BYTES_PER_CHUNK * settings.batch_max),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ]


def _bind(server: grpc.aio.Server, settings: MasterSettings) -> str:
    listen, tls = settings.listen, Tls.of(settings)
    address = parse_address(listen)
    credentials = None if tls is None else tls.server_credentials()
    try:
        port = server.add_insecure_port(listen) if credentials is None else server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        raise ListenError(
            f"could not listen on {listen}", cause=str(error), hint="another port, or see who has this one"
        ) from error
    return str(Address(address.host, port))


class Master:
    """A master with an event loop and a thread of its own. A context manager. Thread-safe.

    Args:
        settings: every setting at once. Excludes `options`.
        options: single settings by name, see `MasterSettings`.

    Attributes:
        address: where it serves.
        http_address: of the status pages; "" without any.

    Raises:
        ConfigError: an unknown option or impossible value.
        AddressError: an address is none.
        ListenError: an address cannot be listened on.
        StoreBusyError: another process has the store open.
        StoreDamagedError: the store cannot be read.
        StoreUnavailableError: the store cannot be made or written.
        StartError: it does not come up.
    """

    def __init__(self, *, settings: MasterSettings | None = None, **options: Unpack[MasterOptions]) -> None:
        if settings is not None and options:
            raise TypeError("settings and single options exclude each other")
        if settings is None:
            settings = MasterSettings.load(dict(options))
        else:
            settings.check()
        self._server = MasterServer(settings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._started: Future[None] = Future()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="moonpool-master", daemon=True)
        self._thread.start()
        try:
            self._started.result(_START_S)
        except FutureTimeoutError as error:
            raise StartError(f"the master on {settings.listen} did not start in {_START_S:.0f} s") from error
        self.address = self._server.address
        self.http_address = self._server.http_address

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001  # it ends the thread: whoever waits for it is told
            if self._started.done():
                _log.exception("the master ended")
            else:
                self._started.set_exception(error)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        await self._server.start()
        self._started.set_result(None)
        ends = [asyncio.ensure_future(self._end.wait()), asyncio.ensure_future(self._server.lost())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        await self._server.stop()

    @property
    def server(self) -> MasterServer:
        """The server, which lives in the thread of the master."""
        return self._server

    def close(self) -> None:
        """Stop it, and wait until its thread has ended. Calling it again does nothing.

        Raises:
            StartError: it does not end.
        """
        with self._lock:
            if self._thread.is_alive() and self._loop is not None and self._end is not None:
                self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(_STOP_S)
            if self._thread.is_alive():
                raise StartError(f"the master on {self.address} did not end in {_STOP_S:.0f} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Master on {self.address}>"
