# SPDX-License-Identifier: Apache-2.0
"""Networks that misbehave: a relay that can be stalled or cut, and hosts that do not answer."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moonpool.address import parse_address

_CHUNK_BYTES = 1 << 16


class Relay:
    """Relays TCP connections to `target`. Stalled, it passes on no byte; cut, it resets every connection.

    Args:
        target: address of the engine behind it.
        stall_after_bytes: stall by itself once so many bytes went through, both directions together.
    """

    def __init__(self, target: str, stall_after_bytes: int | None = None) -> None:
        parsed = parse_address(target)
        self._target = (parsed.host, parsed.port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._stall_after_bytes = stall_after_bytes
        self._lock = threading.Lock()
        self._open = threading.Event()
        self._open.set()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        #: Set once `stall_after_bytes` have gone through.
        self.stalled = threading.Event()
        #: What was taken from one side, and what was given to the other.
        self.taken_bytes = 0
        self.forwarded_bytes = 0
        #: The same for each connection, in the order in which they came.
        self.connection_bytes: list[int] = []
        self.address = _address(self._listener)
        self._start(self._accept)

    def stall(self) -> None:
        self._open.clear()

    def resume(self) -> None:
        self._stall_after_bytes = None
        self._open.set()

    def cut(self) -> None:
        """Reset every connection; new ones are accepted as before."""
        with self._lock:
            for sock in self._sockets:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                # Wakes the thread that reads from it, which closes it.
                _shutdown(sock)

    def close(self) -> None:
        _shutdown(self._listener)
        self.cut()
        self.resume()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._sockets += [client, server]
                number = len(self.connection_bytes)
                self.connection_bytes.append(0)
            self._start(self._pump, client, server, number)
            self._start(self._pump, server, client, number)

    def _pump(self, source: socket.socket, sink: socket.socket, number: int) -> None:
        try:
            while data := source.recv(_CHUNK_BYTES):
                with self._lock:
                    self.taken_bytes += len(data)
                self._open.wait()
                sink.sendall(data)
                self._count(len(data), number)
        except OSError:
            pass
        finally:
            _shutdown(source)
            _shutdown(sink)
            with self._lock:
                self._sockets.remove(source)
                source.close()

    def _count(self, nbytes: int, number: int) -> None:
        with self._lock:
            self.forwarded_bytes += nbytes
            self.connection_bytes[number] += nbytes
            full = self._stall_after_bytes is not None and self.forwarded_bytes >= self._stall_after_bytes
        if full:
            self._open.clear()
            self.stalled.set()


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()
    return f"{host}:{port}"


def _shutdown(sock: socket.socket) -> None:
    # It may be closed already, or not be connected: either way nobody reads from it.
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


@contextmanager
def relay(target: str, stall_after_bytes: int | None = None) -> Iterator[Relay]:
    instance = Relay(target, stall_after_bytes)
    try:
        yield instance
    finally:
        instance.close()


@contextmanager
def unaccepting_host() -> Iterator[str]:
    """An address where the kernel completes no further connection: a full backlog that nobody accepts from."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        try:
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(listener.getsockname())
            yield _address(listener)
        finally:
            for filler in fillers:
                filler.close()


@contextmanager
def mute_host() -> Iterator[str]:
    """An address that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield _address(listener)
