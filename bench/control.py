# SPDX-License-Identifier: Apache-2.0
"""The connection by which the two processes of a run agree: lines of JSON, each with a deadline.

Both sides first prove that they know the secret of the run (HMAC-SHA256 over both nonces); the secret itself does
not travel.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from moonpool.bench.errors import ControlError, TargetError

if TYPE_CHECKING:
    from moonpool.address import Address

__all__ = ["Channel", "connect", "listen", "prove_initiator", "prove_target"]

#: Both sides must speak the same; changed with every change of a command.
PROTOCOL: Final = 4
_LINE_BYTES_MAX: Final = 1 << 20
_HANDSHAKE_S: Final = 5.0


class Channel:
    """JSON lines over a connected socket. Used by one thread at a time; `close` may come from another."""

    def __init__(self, connected: socket.socket, peer: str) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanished without a word is noticed while nothing is asked of it.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self._socket = connected
        self._buffer = bytearray()
        self.peer = peer

    def send(self, message: dict[str, Any], timeout: float) -> None:
        """Send one object."""
        try:
            self._socket.settimeout(timeout)
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise self._gone(error) from error

    def receive(self, timeout: float | None) -> dict[str, Any]:
        """Return the next object.

        Raises:
            ControlError: the other side is gone or silent (None waits for as long as it is there), or sent something
                else.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._buffer:
            if len(self._buffer) > _LINE_BYTES_MAX:
                raise ControlError("the other side sent a line without an end", peer=self.peer)
            try:
                self._socket.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
                received = self._socket.recv(65536)
            except OSError as error:
                raise self._gone(error) from error
            if not received:
                raise ControlError("the other process of the benchmark ended", peer=self.peer)
            self._buffer += received
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        try:
            message = json.loads(line)
        except ValueError as error:
            raise ControlError("the other side does not speak JSON", peer=self.peer, hint=_SAME) from error
        if not isinstance(message, dict):
            raise ControlError("the other side sent no JSON object", peer=self.peer, hint=_SAME)
        return message

    def start(self, name: str, arguments: dict[str, Any], timeout: float) -> Callable[[], Any]:
        """Send a command; the result returns its answer."""
        self.send({"call": name, "arguments": arguments}, timeout)

        def answer() -> Any:
            reply = self.receive(timeout)
            if "error" in reply:
                error = reply["error"]
                raise TargetError(
                    f"on the target: {error.get('message', '')}",
                    code=str(error.get("code", "BENCH_TARGET")),
                    peer=self.peer,
                    hint=str(error.get("hint", "")),
                )
            return reply.get("result")

        return answer

    def close(self) -> None:
        """Close the connection; a `receive` in another thread ends. Idempotent."""
        with contextlib.suppress(OSError):  # not connected any more: that is what was wanted
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _gone(self, error: OSError) -> ControlError:
        if isinstance(error, TimeoutError):
            return ControlError("the other process of the benchmark does not answer", peer=self.peer)
        return ControlError(f"the other process of the benchmark is gone: {error}", peer=self.peer)


_SAME: Final = "one version of mooncake-bench on both sides"


def listen(address: Address) -> socket.socket:
    """Return a listening socket.

    Raises:
        ControlError: the address cannot be listened on.
    """
    try:
        family, _, _, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(where[:2], family=family, backlog=8)
    except OSError as error:
        raise ControlError(f"cannot listen on {address}: {error}", hint="another port, or port 0") from error


def connect(address: Address, timeout: float) -> Channel:
    """Connect to a listening benchmark.

    Raises:
        ControlError: nobody answers there.
    """
    try:
        return Channel(socket.create_connection((address.host, address.port), timeout=timeout), str(address))
    except OSError as error:
        raise ControlError(
            f"cannot connect to {address}: {error}",
            retryable=True,
            hint="`mooncake-bench transfer --listen HOST:PORT` on the other host first",
        ) from error


def prove_initiator(channel: Channel, secret: bytes | None) -> None:
    """Prove to the target that this side knows the secret, and make sure that the target does."""
    hello = channel.receive(_HANDSHAKE_S)
    if hello.get("mooncake_bench") != PROTOCOL:
        raise ControlError("the other side is no benchmark of this version", peer=channel.peer, hint=_SAME)
    theirs, ours = str(hello.get("nonce")), secrets.token_hex(32)
    channel.send({"nonce": ours, "proof": _proof(secret, "initiator", theirs, ours)}, _HANDSHAKE_S)
    answer = channel.receive(_HANDSHAKE_S)
    if not _equal(answer.get("proof"), _proof(secret, "target", theirs, ours)):
        raise ControlError("the two sides have different secrets", peer=channel.peer, hint="the same --secret on both")


def prove_target(channel: Channel, secret: bytes | None) -> None:
    """Make sure that the initiating side knows the secret, and prove that this side does.

    Raises:
        ControlError: it does not, or is no benchmark; it has been told.
    """
    ours = secrets.token_hex(32)
    channel.send({"mooncake_bench": PROTOCOL, "nonce": ours}, _HANDSHAKE_S)
    answer = channel.receive(_HANDSHAKE_S)
    theirs = str(answer.get("nonce"))
    if not _equal(answer.get("proof"), _proof(secret, "initiator", ours, theirs)):
        channel.send({"proof": ""}, _HANDSHAKE_S)
        raise ControlError("a caller has another secret", peer=channel.peer, hint="the same --secret on both")
    channel.send({"proof": _proof(secret, "target", ours, theirs)}, _HANDSHAKE_S)


def _proof(secret: bytes | None, role: str, target_nonce: str, initiator_nonce: str) -> str:
    text = f"mooncake-bench {PROTOCOL} {role} {target_nonce} {initiator_nonce}"
    return hmac.new(secret or b"", text.encode(), hashlib.sha256).hexdigest()


def _equal(given: object, expected: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given.encode(), expected.encode())
