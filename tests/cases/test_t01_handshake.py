# SPDX-License-Identifier: Apache-2.0
"""T1, the part before a request: nobody gets as far as that without speaking the protocol and knowing the secret.

What must happen: garbage and half frames on the port, a peer of another protocol version, a wrong secret: each is a
typed error on the side that made the mistake, and the other side keeps serving.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest
from engine_testing import wire
from engine_testing.fixtures import OpenEngine
from engine_testing.leaks import eventually

from moonpool.transfer_engine import ProtocolError, Status, TransferEngine, VersionMismatchError

SECRET = b"the cluster's"


@pytest.fixture
def engine(open_engine: OpenEngine) -> Iterator[TransferEngine]:
    """A listening engine, which must still serve at the end of each test."""
    engine = open_engine("target", secret=SECRET, transports="tcp")
    yield engine
    assert open_engine(listen=None, secret=SECRET, transports="tcp").connect(engine.address or "").name == "target"


GARBAGE = {
    "nothing": b"",
    "one byte": b"\0",
    "http": b"GET / HTTP/1.1\r\nHost: moonpool\r\n\r\n",
    "tls": bytes.fromhex("16030100f5010000f10303") + bytes(300),
    "zeros": bytes(4096),
    "random": os.urandom(4096),
    "almost the magic": b"MOONPOOK" + bytes(144),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_on_the_port(engine: TransferEngine, kind: str) -> None:
    with wire.connect(engine.address or "") as sock:
        sock.sendall(GARBAGE[kind])
        if kind in ("nothing", "one byte"):
            sock.shutdown(socket.SHUT_WR)
        assert wire.closed_by_peer(sock)


@pytest.mark.parametrize("length", [1, 8, 10, 151])
def test_half_a_hello(engine: TransferEngine, length: int) -> None:
    with wire.connect(engine.address or "") as sock:
        sock.sendall(wire.hello()[:length])
        sock.shutdown(socket.SHUT_WR)
        assert wire.closed_by_peer(sock)


def test_half_a_hello_has_a_deadline(open_engine: OpenEngine) -> None:
    engine = open_engine(transports="tcp", connect_timeout=0.2)
    with wire.connect(engine.address or "") as sock:
        sock.sendall(wire.hello()[:100])
        assert wire.closed_by_peer(sock)


@pytest.mark.parametrize("version", [0, wire.VERSION - 1, wire.VERSION + 1, 255, 65535])
def test_another_version(engine: TransferEngine, version: int) -> None:
    with wire.connect(engine.address or "") as sock:
        sock.sendall(wire.hello(version=version))
        challenge = wire.Challenge(*wire.CHALLENGE.unpack(wire.receive(sock, wire.CHALLENGE.size)))
        assert (challenge.magic, challenge.version, challenge.status) == (wire.MAGIC, wire.VERSION, Status.VERSION)
        assert str(version).encode() in challenge.message
        assert wire.closed_by_peer(sock)


@pytest.mark.parametrize("kind", [0, 6, 65535])
def test_a_connection_of_an_unknown_kind(engine: TransferEngine, kind: int) -> None:
    with wire.connect(engine.address or "") as sock, pytest.raises(ConnectionRefusedError) as caught:
        wire.shake_hands(sock, wire.hello(kind), SECRET)
    assert caught.value.errno == Status.PROTOCOL


@pytest.mark.parametrize("secret", [b"", b"wrong", SECRET + b"x", SECRET[:-1]])
def test_a_wrong_secret(engine: TransferEngine, secret: bytes) -> None:
    with wire.connect(engine.address or "") as sock, pytest.raises(ConnectionRefusedError) as caught:
        wire.shake_hands(sock, wire.hello(flags=wire.HAS_SECRET), secret)
    assert caught.value.errno == Status.AUTH


def test_claiming_that_there_is_no_secret(engine: TransferEngine) -> None:
    with wire.connect(engine.address or "") as sock, pytest.raises(ConnectionRefusedError):
        wire.shake_hands(sock, wire.hello(flags=0), b"")


def test_the_servers_own_proof_sent_back_is_no_proof(engine: TransferEngine) -> None:
    """The two roles prove different things, so a reflected or replayed proof is worth nothing."""
    with wire.connect(engine.address or "") as first:
        hello = wire.hello(flags=wire.HAS_SECRET)
        first.sendall(hello)
        challenge = wire.receive(first, wire.CHALLENGE.size)
        first.sendall(wire.proof(SECRET, hello, challenge, role=b"s"))
        welcome = wire.Welcome(*wire.WELCOME.unpack(wire.receive(first, wire.WELCOME.size)))
        assert welcome.status == Status.AUTH
        assert welcome.mac == bytes(32)


def test_a_replayed_proof_is_refused(engine: TransferEngine) -> None:
    hello = wire.hello(flags=wire.HAS_SECRET)
    with wire.connect(engine.address or "") as sock:
        sock.sendall(hello)
        proof = wire.proof(SECRET, hello, wire.receive(sock, wire.CHALLENGE.size))
        sock.sendall(proof)
        assert wire.Welcome(*wire.WELCOME.unpack(wire.receive(sock, wire.WELCOME.size))).status == Status.OK
    with wire.connect(engine.address or "") as sock:
        sock.sendall(hello)
        wire.receive(sock, wire.CHALLENGE.size)
        sock.sendall(proof)
        assert wire.Welcome(*wire.WELCOME.unpack(wire.receive(sock, wire.WELCOME.size))).status == Status.AUTH


def test_a_lane_needs_the_token_of_a_session(engine: TransferEngine) -> None:
    with wire.Client(engine.address or "", SECRET) as client:
        for session in (bytes(16), os.urandom(16), client.session[::-1]):
            with pytest.raises(ConnectionRefusedError):
                client.open_lane(session=session)
        client.open_lane()
    # The session ends with its control connection, and its token with it.
    assert eventually(lambda: engine.stats()["serving"]["sessions"] == 0)
    with pytest.raises(ConnectionRefusedError):
        client.open_lane(9)
    client.close()


@pytest.mark.parametrize(
    ("kind", "body", "size"),
    [
        (0, b"", None),
        (99, b"", None),
        (wire.OFFER, b"", None),
        (wire.REGIONS, bytes(32), None),
        (wire.NOTIFY, b"", None),
        (wire.NOTIFY, bytes(12) + b"more than was announced", None),
        (wire.NOTIFY, bytes(8) + b"\xff\xff\xff\xff", None),
        (wire.FENCE, b"123", None),
        (wire.FENCE, b"", (1 << 20) + 1),
        (wire.NOTIFY, b"", (1 << 32) - 1),
    ],
)
def test_a_malformed_control_message_ends_the_session(
    engine: TransferEngine, kind: int, body: bytes, size: int | None
) -> None:
    with wire.Client(engine.address or "", SECRET) as client:
        client.send_message(kind, body, size=size)
        assert wire.closed_by_peer(client.control)
    assert engine.notifications() == []


def test_many_half_open_handshakes_do_not_keep_others_out(open_engine: OpenEngine) -> None:
    engine = open_engine("target", transports="tcp")
    idle = [wire.connect(engine.address or "") for _ in range(100)]
    try:
        assert open_engine(listen=None, transports="tcp").connect(engine.address or "").name == "target"
    finally:
        for sock in idle:
            sock.close()


def challenge(version: int, status: int) -> bytes:
    return wire.CHALLENGE.pack(wire.MAGIC, version, status, 0, 0, bytes(16), bytes(32), b"")


def answer_with(listener: socket.socket, reply: bytes) -> None:
    sock, _ = listener.accept()
    with sock:
        sock.recv(wire.HELLO.size)
        sock.sendall(reply)
        wire.closed_by_peer(sock)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(200), ProtocolError),
        (bytes(200), ProtocolError),
        (
            wire.CHALLENGE.pack(wire.MAGIC, 7, Status.VERSION, 0, 0, bytes(16), bytes(32), b"too old"),
            VersionMismatchError,
        ),
        (wire.CHALLENGE.pack(wire.MAGIC, 7, 0, 0, 0, bytes(16), bytes(32), b""), VersionMismatchError),
    ],
)
def test_connecting_to_something_else(open_engine: OpenEngine, reply: bytes, error: type[Exception]) -> None:
    """The mirror image: this engine is the client, and says what it found there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer_with, args=(listener, reply))
        thread.start()
        with pytest.raises(error) as caught:
            open_engine(listen=None, transports="tcp").connect(f"127.0.0.1:{listener.getsockname()[1]}")
        thread.join()
    assert isinstance(caught.value, ConnectionError)
    assert caught.value.hint  # type: ignore[attr-defined]


def test_a_server_that_does_not_know_the_secret_is_refused(open_engine: OpenEngine) -> None:
    """Mutual: a server that waves everybody through gets no client."""

    def wave_through(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            wire.receive(sock, wire.HELLO.size)
            sock.sendall(wire.CHALLENGE.pack(wire.MAGIC, wire.VERSION, 0, 1, 0, os.urandom(16), os.urandom(32), b""))
            wire.receive(sock, 32)
            sock.sendall(wire.WELCOME.pack(0, bytes(6), os.urandom(32), os.urandom(16), b"liar", b""))
            wire.closed_by_peer(sock)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=wave_through, args=(listener,))
        thread.start()
        with pytest.raises(PermissionError, match="did not prove"):
            open_engine(listen=None, transports="tcp", secret=SECRET).connect(f"127.0.0.1:{listener.getsockname()[1]}")
        thread.join()
