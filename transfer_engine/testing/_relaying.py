# SPDX-License-Identifier: Apache-2.0
"""One TCP connection that goes through a `FaultProxy`, and what the rules do to it. Lives in the proxy's thread."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from moonpool.transfer_engine.testing.rules import Corrupt, Cut, Delay, Refuse, Rule, draw

if TYPE_CHECKING:
    from moonpool.transfer_engine.testing.rules import Direction, Kind

__all__ = ["Applied", "Relayed", "Target", "Watcher"]

_PIECE_BYTES = 1 << 17
# How a Hello begins (docs/protocol.md): the magic, the version, and the kind of the connection.
_MAGIC = b"MOONPOOL"
_HEAD = struct.Struct("<8sHH")
_KINDS: dict[int, Kind] = {1: "control", 2: "lane"}


@dataclass
class Applied:
    """A rule in force, and how many connections it has concerned."""

    rule: Rule
    used: int = 0

    def concerns(self, kind: Kind | None, chance: random.Random) -> bool:
        """Decide about one connection, once."""
        rule = self.rule
        if rule.only not in (None, kind) or self.used == rule.times or chance.random() >= rule.probability:
            return False
        self.used += 1
        return True


@dataclass(frozen=True)
class Target:
    """A resolved address, and the text it came from."""

    text: str
    family: socket.AddressFamily
    address: tuple[Any, ...]


class Watcher(Protocol):
    """Who is told of what a connection does."""

    def known(self, relayed: Relayed) -> None:
        """Its kind is known: rules may concern it."""

    def taken(self, nbytes: int) -> None:
        """Bytes were taken from one side."""

    def forwarded(self, number: int, nbytes: int) -> None:
        """Bytes of connection `number` were given to the other side."""

    def ended(self) -> None:
        """A command or a rule ended it."""


class Relayed:
    """One connection: a client's socket, one to the target, and a task for each direction."""

    def __init__(self, client: socket.socket, number: int, watcher: Watcher, chance: random.Random) -> None:
        self.kind: Kind | None = None
        #: Whether `kind` is final. Nothing is passed on before.
        self.known = False
        #: Set while bytes may pass.
        self.passing = asyncio.Event()
        self.passing.set()
        #: Set once the target has accepted, or cannot be reached.
        self.connected = asyncio.Event()
        self._client = client
        self._number = number
        self._watcher = watcher
        self._chance = chance
        self._head = b""
        self._passed: dict[Direction, int] = {"to_target": 0, "from_target": 0}
        self._delays: list[Delay] = []
        # Positions in what has passed, ascending.
        self._cuts: list[tuple[int, bool]] = []
        self._spoils: dict[Direction, list[int]] = {"to_target": [], "from_target": []}
        self._ending = asyncio.Event()
        self._in_order = False

    def concern(self, rule: Rule) -> None:
        """Let the rule be in force for this connection."""
        match rule:
            case Delay():
                self._delays.append(rule)
            case Cut():
                after = sum(self._passed.values()) + int(draw(self._chance, rule.after_bytes))
                self._cuts.append((after, rule.reset))
                self._cuts.sort()
            case Corrupt():
                after = self._passed[rule.direction] + int(draw(self._chance, rule.after_bytes))
                self._spoils[rule.direction].append(after)
            case Refuse():
                self.cut(reset=True)

    def forget_rules(self) -> None:
        """Behave, from now on."""
        self._delays.clear()
        self._cuts.clear()
        for positions in self._spoils.values():
            positions.clear()

    def cut(self, *, reset: bool) -> None:
        """End it."""
        if not self._ending.is_set():
            self._in_order = not reset
            self._ending.set()
            self._watcher.ended()

    async def run(self, target: Target) -> None:
        """Carry it from the first byte to the end. Both sockets are closed afterwards."""
        server = socket.socket(target.family, socket.SOCK_STREAM)
        try:
            await self._carry(server, target)
        finally:
            self.connected.set()
            self._end(server)
            self.close()

    def close(self) -> None:
        """Close the client's socket, if `run` has not: a task that is cancelled before its first step does nothing."""
        if self._client.fileno() >= 0:
            self._end(self._client)

    def _end(self, sock: socket.socket) -> None:
        if not self._in_order:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()

    async def _carry(self, server: socket.socket, target: Target) -> None:
        for sock in (self._client, server):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await asyncio.get_running_loop().sock_connect(server, target.address)
        except OSError:
            return
        self.connected.set()
        carrying = asyncio.create_task(self._both_ways(self._client, server))
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait([carrying, ending], return_when=asyncio.FIRST_COMPLETED)
            if not self._ending.is_set():
                self._in_order = await carrying
        finally:
            for task in (carrying, ending):
                task.cancel()
            outcomes = await asyncio.gather(carrying, ending, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        if self._ending.is_set() and self._in_order:
            await self._end_in_order(self._client, server)

    async def _both_ways(self, client: socket.socket, server: socket.socket) -> bool:
        ended = await asyncio.gather(self._pump(client, server, "to_target"), self._pump(server, client, "from_target"))
        return all(ended)

    async def _pump(self, source: socket.socket, sink: socket.socket, direction: Direction) -> bool:
        """Pass on what comes from `source` until it ends. Return whether that was in good order."""
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(source, _PIECE_BYTES):
                self._watcher.taken(len(data))
                if direction == "to_target" and not self.known:
                    self._head += data
                    if not self._recognise():
                        continue
                    data = self._head
                await self._pass_on(data, sink, direction)
            await self.passing.wait()
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            # One side reset it, so the other one is reset too.
            self._ending.set()
            return False
        return True

    def _recognise(self) -> bool:
        if len(self._head) < _HEAD.size and _MAGIC.startswith(self._head[: len(_MAGIC)]):
            return False
        self.known = True
        if len(self._head) >= _HEAD.size:
            magic, _, kind = _HEAD.unpack_from(self._head)
            self.kind = _KINDS.get(kind) if magic == _MAGIC else None
        self._watcher.known(self)
        return True

    async def _pass_on(self, data: bytes, sink: socket.socket, direction: Direction) -> None:
        loop = asyncio.get_running_loop()
        for delay in self._delays:
            await asyncio.sleep(draw(self._chance, delay.seconds))
        while data:
            await self.passing.wait()
            if self._ending.is_set():
                return
            passed = sum(self._passed.values())
            piece = data if not self._cuts else data[: max(self._cuts[0][0] - passed, 0)]
            data = data[len(piece) :]
            await loop.sock_sendall(sink, self._spoil(piece, direction))
            self._passed[direction] += len(piece)
            self._watcher.forwarded(self._number, len(piece))
            if self._cuts and sum(self._passed.values()) >= self._cuts[0][0]:
                self.cut(reset=self._cuts[0][1])

    def _spoil(self, piece: bytes, direction: Direction) -> bytes | bytearray:
        start = self._passed[direction]
        here = [position - start for position in self._spoils[direction] if position < start + len(piece)]
        if not here:
            return piece
        self._spoils[direction] = [position for position in self._spoils[direction] if position >= start + len(piece)]
        spoilt = bytearray(piece)
        for position in here:
            spoilt[position] ^= 1 << self._chance.randrange(8)
        return spoilt

    @staticmethod
    async def _end_in_order(*sockets: socket.socket) -> None:
        """Say to both sides that there is no more, and read on until they have said so too, so that none is reset."""
        loop = asyncio.get_running_loop()
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        for sock in sockets:
            with contextlib.suppress(OSError):
                while await loop.sock_recv(sock, _PIECE_BYTES):
                    pass
