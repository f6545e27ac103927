# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy between two engines that is a bad network."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from moonpool.address import Address, parse_address
from moonpool.transfer_engine.errors import AddressError, ArgumentTypeError, ClosedError
from moonpool.transfer_engine.testing._relaying import Applied, Relayed, Target
from moonpool.transfer_engine.testing.rules import (
    Corrupt,
    Cut,
    Delay,
    Refuse,
    Reorder,
    check_count,
    check_kind,
    draw,
)

if TYPE_CHECKING:
    from typing_extensions import Self

    from moonpool.transfer_engine.testing.rules import Kind, Rule

__all__ = ["FaultProxy"]

_T = TypeVar("_T")
# Hundreds of engines may connect at once; the kernel cuts it down to net.core.somaxconn.
_BACKLOG = 1024


class FaultProxy:
    """Passes TCP connections on to an engine, and does to them what networks do.

    ::

        with TransferEngine("server") as server, FaultProxy(server.address, seed=7) as network:
            peer = client.connect(network.address)
            network.apply(Cut(only="lane", after_bytes=(1 << 16, 1 << 24), probability=0.5))
            ...
            network.stall()

    Commands (`stall`, `cut`, ...) act at once, and are in force when they return. Rules (`apply`) act on connections
    that are there and on those that come, until `clear`. The seed decides what probabilities and ranges leave open, in
    the order in which connections come and bytes arrive; with threads and processes on both sides that order is
    not the same in every run.

    One thread does the work. Everything may be called from any thread.

    Behind a proxy the end of a connection says nothing about the process behind it. An engine takes the end of a
    control connection for the end of its peer's session, so a write that was cut can be reported as settled while the
    engine behind the proxy still applies what had arrived there.

    Args:
        target: ``"host:port"`` of the engine behind it.
        seed: of every choice that is left to chance.

    Attributes:
        address: ``"127.0.0.1:port"``, to be given to `TransferEngine.connect`.
        stalled: an event that is set while every connection is stalled.
        taken_bytes: that were taken from either side.
        forwarded_bytes: that were given to the other side.
        connection_bytes: the latter for each connection, in the order in which they were accepted.
        connections_cut: how many connections were ended by a command or a rule.

    Raises:
        AddressError: `target` is not an address, or its host is unknown.
        ArgumentTypeError: `target` is no text, or `seed` no int.
    """

    def __init__(self, target: str, *, seed: int = 0) -> None:
        self._target = _resolve(target)
        if not isinstance(seed, int):
            raise ArgumentTypeError(f"seed is a {type(seed).__name__}", hint="an int")
        self._chance = random.Random(seed)
        self._rules: list[Applied] = []
        self._relayed: dict[Relayed, asyncio.Task[None]] = {}
        self._stall_at: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = asyncio.Event()
        self._close_lock = threading.Lock()
        self.stalled = threading.Event()
        self.taken_bytes = 0
        self.forwarded_bytes = 0
        self.connection_bytes: list[int] = []
        self.connections_cut = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.address = str(Address(*self._listener.getsockname()))
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(started)), name="fault-proxy", daemon=True)
        self._thread.start()
        started.wait()

    # ---------------------------------------------------------------- commands

    def stall(self, after_bytes: int = 0, *, only: Kind | None = None, count: int | None = None) -> None:
        """Pass on no more bytes. What was begun, at most a piece of 128 KiB for each connection, still goes.

        Args:
            after_bytes: pass on so many more first, all connections and both directions together. Then everything
                stalls, whatever `only` and `count` say.
            only: connections of this kind; None: all, and all that come.
            count: so many of them, chosen by the seed; None: all.

        Raises:
            InvalidArgumentError: there is no such kind, or a number is negative or no int.
        """
        check_count("after_bytes", after_bytes, 0, "an int from 0 on")
        _check_choice(only, count)

        def stall() -> None:
            if after_bytes > 0:
                self._stall_at = self.forwarded_bytes + after_bytes
            elif only is None and count is None:
                self._stall_everything()
            else:
                for relayed in self._choose(only, count):
                    relayed.passing.clear()

        self._call(stall)

    def resume(self) -> None:
        """Pass bytes on again, over every connection."""

        def resume() -> None:
            self._stall_at = None
            self.stalled.clear()
            for relayed in self._relayed:
                relayed.passing.set()

        self._call(resume)

    def cut(self, *, reset: bool = True, only: Kind | None = None, count: int | None = None) -> int:
        """End connections; new ones are accepted as before.

        Args:
            reset: as in `Cut`.
            only: connections of this kind; None: all.
            count: so many of them, chosen by the seed; None: all.

        Returns:
            How many.

        Raises:
            InvalidArgumentError: there is no such kind, or `count` is negative or no int.
        """
        _check_choice(only, count)

        def cut() -> int:
            chosen = self._choose(only, count)
            for relayed in chosen:
                relayed.cut(reset=reset)
            return len(chosen)

        return self._call(cut)

    def apply(self, *rules: Rule) -> None:
        """Add rules to those in force. They concern the connections that are there, and those that come.

        Raises:
            ArgumentTypeError: one of them is no rule.
        """
        for rule in rules:
            if not isinstance(rule, (Delay, Cut, Corrupt, Refuse, Reorder)):
                raise ArgumentTypeError(f"{rule!r} is no rule", hint="a Delay, Cut, Corrupt, Refuse or Reorder")

        def apply() -> None:
            for rule in rules:
                applied = Applied(rule)
                self._rules.append(applied)
                if not isinstance(rule, Reorder):
                    for relayed in [known for known in self._relayed if known.known]:
                        self._concern(relayed, applied)

        self._call(apply)

    def clear(self) -> None:
        """Take back every rule. Connections that were cut or corrupted stay so."""

        def clear() -> None:
            self._rules.clear()
            for relayed in self._relayed:
                relayed.forget_rules()

        self._call(clear)

    def retarget(self, target: str) -> None:
        """Pass connections that come from now on to another address, such as that of a restarted process.

        Raises:
            AddressError: `target` is not an address, or its host is unknown.
            ArgumentTypeError: `target` is no text.
        """
        resolved = _resolve(target)

        def retarget() -> None:
            self._target = resolved

        self._call(retarget)

    def connections(self, only: Kind | None = None) -> int:
        """Return how many connections there are, or how many of a kind.

        Raises:
            InvalidArgumentError: there is no such kind.
        """
        check_kind(only)
        return self._call(lambda: len(self._matching(only)))

    def close(self) -> None:
        """Reset every connection, and end the thread. Calling it again does nothing."""
        with self._close_lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._closing.set)
                self._thread.join()
                self._loop = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._loop is None else f"{len(self._relayed)} connections"
        return f"<FaultProxy {self.address} to {self._target.text}, {state}>"

    # ---------------------------------------------------------------- inside the thread

    def _call(self, work: Callable[[], _T]) -> _T:
        """Run `work` in the thread that owns everything, and return what it returns."""

        async def run() -> _T:
            return work()

        with self._close_lock:
            if self._loop is None:
                raise ClosedError("the proxy was closed", hint="a FaultProxy that is open")
            # It ends for certain: while the lock is held, nobody stops the loop.
            return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    async def _run(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        accepted: asyncio.Queue[socket.socket] = asyncio.Queue()
        # Not `sock_accept`: what it has accepted is lost when it is cancelled.
        self._loop.add_reader(self._listener, self._accept, accepted)
        connecting = asyncio.create_task(self._connect(accepted))
        started.set()
        await self._closing.wait()
        self._loop.remove_reader(self._listener)
        relayed = list(self._relayed)
        tasks = [connecting, *self._relayed.values()]
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for begun in relayed:
            begun.close()
        while not accepted.empty():
            accepted.get_nowait().close()
        self._listener.close()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    def _accept(self, accepted: asyncio.Queue[socket.socket]) -> None:
        # Another one may have been faster than the news, and a client that went away again is an error.
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            accepted.put_nowait(self._listener.accept()[0])

    async def _connect(self, accepted: asyncio.Queue[socket.socket]) -> None:
        while True:
            batch = [await accepted.get()]
            try:
                hold = await self._wait_for_others()
                while len(batch) < hold and not accepted.empty():
                    batch.append(accepted.get_nowait())
                if hold > 1:
                    self._chance.shuffle(batch)
                while batch:
                    begun = self._begin(batch.pop())
                    if hold > 1:
                        # The next one only when this one stands, so that the target sees the order.
                        await begun.connected.wait()
            finally:
                for client in batch:
                    client.close()

    async def _wait_for_others(self) -> int:
        """Wait as long as a `Reorder` says, and return how many connections it takes; 1 when none concerns this one."""
        for applied in self._rules:
            rule = applied.rule
            if isinstance(rule, Reorder) and applied.concerns(None, self._chance):
                await asyncio.sleep(draw(self._chance, rule.seconds))
                return rule.hold
        return 1

    def _begin(self, client: socket.socket) -> Relayed:
        number = len(self.connection_bytes)
        self.connection_bytes.append(0)
        relayed = Relayed(client, number, _Watcher(self), self._chance)
        if self.stalled.is_set():
            relayed.passing.clear()
        task = asyncio.create_task(relayed.run(self._target))
        self._relayed[relayed] = task
        task.add_done_callback(lambda _: self._relayed.pop(relayed))
        return relayed

    def _matching(self, only: Kind | None) -> list[Relayed]:
        return [relayed for relayed in self._relayed if only is None or relayed.kind == only]

    def _choose(self, only: Kind | None, count: int | None) -> list[Relayed]:
        matching = self._matching(only)
        return matching if count is None or count >= len(matching) else self._chance.sample(matching, count)

    def _stall_everything(self) -> None:
        self._stall_at = None
        for relayed in self._relayed:
            relayed.passing.clear()
        self.stalled.set()

    def _concern(self, relayed: Relayed, applied: Applied) -> None:
        if applied.concerns(relayed.kind, self._chance):
            relayed.concern(applied.rule)


class _Watcher:
    """What a proxy wants to know of its connections. Not the proxy itself, whose methods are for its users."""

    def __init__(self, proxy: FaultProxy) -> None:
        self._proxy = proxy

    def known(self, relayed: Relayed) -> None:
        for applied in self._proxy._rules:
            if not isinstance(applied.rule, Reorder):
                self._proxy._concern(relayed, applied)

    def taken(self, nbytes: int) -> None:
        self._proxy.taken_bytes += nbytes

    def forwarded(self, number: int, nbytes: int) -> None:
        proxy = self._proxy
        proxy.forwarded_bytes += nbytes
        proxy.connection_bytes[number] += nbytes
        if proxy._stall_at is not None and proxy.forwarded_bytes >= proxy._stall_at:
            proxy._stall_everything()

    def ended(self) -> None:
        self._proxy.connections_cut += 1


def _check_choice(only: object, count: object) -> None:
    check_kind(only)
    if count is not None:
        check_count("count", count, 0, "an int from 0 on, or None for all")


def _resolve(address: str) -> Target:
    if not isinstance(address, str):
        raise ArgumentTypeError(
            f"target is a {type(address).__name__}", hint="'host:port', such as the address of an engine that listens"
        )
    parsed = parse_address(address)
    try:
        found = socket.getaddrinfo(parsed.host, parsed.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(f"{address!r}: the host is unknown", cause=str(error)) from None
    family, _, _, _, resolved = found[0]
    return Target(address, family, resolved)
