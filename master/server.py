# SPDX-License-Identifier: Apache-2.0
"""A master: its store, its service, its loops and its status pages, in an event loop of the caller or of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, Final

import grpc.aio
import uvloop

from moonpool.address import Address, parse_address
from moonpool.errors import MoonpoolError
from moonpool.master.calls import Calls, methods
from moonpool.master.chunks import ChunkCalls
from moonpool.master.core import Core
from moonpool.master.errors import ListenError, StartError, StoreBusyError, StoreUnavailableError
from moonpool.master.http import StatusPages
from moonpool.master.loops import start_loops
from moonpool.master.membership import MembershipCalls
from moonpool.master.move_calls import MoveCalls
from moonpool.master.overview import OverviewCalls
from moonpool.master.role import Role
from moonpool.master.settings import MasterOptions, MasterSettings
from moonpool.master.store import Identity, MetadataStore, open_store
from moonpool.proto.auth import Verifier
from moonpool.proto.tls import Tls

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

__all__ = ["Master", "MasterServer"]

_log = logging.getLogger("moonpool.master")
# Calls that are under way when it is stopped have so long at most, and no more than their part of `stop_timeout`.
_GRACE_S: Final = 2.0
# How long a master that waits for its turn goes without a look at whether it is stopped.
_TURN_S: Final = 1.0
# Before it tries again, when it was its turn and it could not lead.
_AGAIN_S: Final = 1.0
_START_S: Final = 600.0
_STOP_S: Final = 60.0
# Calls at once, beside the stream of each session and the one that follows it.
_CALLS_MAX: Final = 4096
# Of a PutStart with everything, per chunk, and of the rest of a message.
_BYTES_PER_CHUNK: Final = 80
_BYTES_PER_MESSAGE: Final = 128 << 10


class MasterServer:
    """A master within a running event loop. `Master` is one with a loop of its own.

    With a store that several masters share it leads when it is its turn, and waits otherwise. Callers are told then who
    leads.

    Args:
        settings: checked.

    Attributes:
        address: where it serves, once started.
        http_address: of the status pages; "" without any.
        role: whether it leads.
    """

    def __init__(self, settings: MasterSettings) -> None:
        self.settings = settings
        self.address = ""
        self.http_address = ""
        self.role = Role()
        self._calls = Calls(None if settings.secret is None else Verifier(settings.secret), self.role)
        self._server: grpc.aio.Server | None = None
        self._pages: StatusPages | None = None
        self._store: MetadataStore | None = None
        self._settled = asyncio.Event()
        self._closing = asyncio.Event()
        self._turns: asyncio.Task[None] | None = None

    @property
    def _part(self) -> float:
        """Seconds: each of the three steps of an end has as long."""
        return self.settings.stop_timeout / 3

    @property
    def core(self) -> Core:
        """Its state, while it leads."""
        assert self.role.core is not None, "it does not lead"
        return self.role.core

    async def start(self) -> None:
        """Listen, take what is in the store, and serve; or wait for a turn, if another master has a shared store.

        Raises:
            ConfigError: there is no such kind of store.
            ListenError: an address cannot be listened on.
            StoreBusyError: another process has a store open that is not shared.
            StoreDamagedError: the store cannot be read.
            StoreUnavailableError: the store cannot be made or written. One that is shared and does not answer is waited
                for instead: this returns then, and /healthz says so.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop(grace=0)
            raise

    async def _start(self) -> None:
        settings = self.settings
        self._store = open_store(settings.store, settings)
        self._server = server = grpc.aio.server(
            options=_options(settings), maximum_concurrent_rpcs=_CALLS_MAX + 2 * settings.sessions_max
        )
        server.add_generic_rpc_handlers((self._calls.handlers(),))
        self.address = _bind(server, settings)
        if settings.http is not None:
            self._pages = StatusPages(self.role)
            self.http_address = await self._pages.start(settings.http)
        await server.start()
        self._turns = asyncio.ensure_future(self._take_turns())
        settled = asyncio.ensure_future(self._settled.wait())
        try:
            await asyncio.wait((self._turns, settled), return_when=asyncio.FIRST_COMPLETED)
        finally:
            settled.cancel()
        if self._turns.done():
            await self._turns

    async def stop(self, grace: float = _GRACE_S) -> None:
        """Finish the calls that are under way, end streams, close the store: the next master may lead.

        Args:
            grace: seconds that calls have, and no more than their part of `stop_timeout`.
        """
        if self.role.core is not None:
            self.role.core.say_goodbye()
        if self._server is not None:
            await self._server.stop(min(grace, self._part))
        self._closing.set()
        if self._store is not None and self.role.core is None:
            # Whoever waits for it waits no longer.
            await asyncio.to_thread(self._store.close)
        if self._turns is not None:
            await asyncio.wait((self._turns,))
            if not self._turns.cancelled():
                # Who waited for the start has been told.
                self._turns.exception()
        if self._pages is not None:
            await self._pages.close()
        if self._store is not None:
            await asyncio.to_thread(self._store.close)

    # ---------------------------------------------------------------- turns

    async def _take_turns(self) -> None:
        """Lead whenever it is this master's turn, until it is stopped."""
        assert self._store is not None
        while not self._closing.is_set():
            try:
                await self._lead(self._store)
            except (OSError, MoonpoolError) as error:
                if self._closing.is_set():
                    return
                if not self._settled.is_set() and not _passes(error, self._store):
                    raise
                # Somebody else may lead meanwhile, so this one stays, and says what is wrong with it.
                self.role.trouble = str(error)
                self._settled.set()
                _log.error("this master cannot lead: %s", error)
                with contextlib.suppress(TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
                    await asyncio.wait_for(self._closing.wait(), _AGAIN_S)
            finally:
                await asyncio.to_thread(self._store.close)
            if not self._store.shared:
                return
            self._store = open_store(self.settings.store, self.settings)

    async def _lead(self, store: MetadataStore) -> None:
        """Wait for a turn, and lead until it is over."""
        identity = await self._elected(store)
        if identity is None:
            return
        core = Core(self.settings, store, identity, methods())
        await asyncio.to_thread(core.restore)
        parts: list[object] = [ChunkCalls(core), MoveCalls(core), MembershipCalls(core), OverviewCalls(core)]
        start_loops(core)
        role = self.role
        role.core, role.waits, role.leader, role.trouble, role.turns = core, False, "", "", role.turns + 1
        self._calls.lead(parts, core.metrics, store)
        self._settled.set()
        _log.info("serving on %s, epoch %d, %d chunks", self.address, identity.epoch, core.restored_chunks)
        try:
            await self._until_over(store)
        finally:
            self._calls.follow()
            role.core = None
            core.say_goodbye()
            closing = asyncio.ensure_future(core.close())
            # What waits for a store that does not answer ends when the store is closed.
            await asyncio.wait((closing,), timeout=self._part)
            await asyncio.to_thread(store.close)
            await closing

    async def _elected(self, store: MetadataStore) -> Identity | None:
        """Return when the store is this master's. None: it is being stopped."""
        while not self._closing.is_set():
            try:
                return await asyncio.to_thread(store.open, self._advertised())
            except StoreBusyError as error:
                if not store.shared:
                    raise
                # Its own key may outlive its turn for a moment.
                leader = "" if error.leader == self._advertised() else error.leader
                self.role.waits, self.role.leader, self.role.trouble = True, leader, ""
                self._settled.set()
            await asyncio.to_thread(store.wait_for_turn, _TURN_S)
        return None

    async def _until_over(self, store: MetadataStore) -> None:
        stopped = asyncio.ensure_future(self._closing.wait())
        ends: list[asyncio.Future[Any]] = [stopped]
        if store.taken is not None:
            # The store's own future is nobody's to cancel.
            ends.append(asyncio.ensure_future(asyncio.shield(asyncio.wrap_future(store.taken))))
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()

    def _advertised(self) -> str:
        own = parse_address(self.address)
        if self.settings.advertise is not None:
            given = parse_address(self.settings.advertise)
            return str(given if given.port else Address(given.host, own.port))
        return str(Address(socket.gethostname(), own.port)) if own.host in ("0.0.0.0", "::") else self.address


def _passes(error: Exception, store: MetadataStore) -> bool:
    """Return whether what keeps a master from its store at the start may end without anybody at this master."""
    return store.shared and isinstance(error, StoreUnavailableError) and error.retryable


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
            uvloop.run(self._serve())
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
        await self._end.wait()
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
