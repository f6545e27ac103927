# SPDX-License-Identifier: Apache-2.0
"""A client of the wire protocol, written from cython_ext/src/wire.hpp. Tests attack an engine with it.

It can break every rule that the real client keeps: each field of each message can be given.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from moonpool.address import parse_address

if TYPE_CHECKING:
    from typing_extensions import Self

MAGIC = b"MOONPOOL"
VERSION = 2
CONTROL, LANE, RDMA = 1, 2, 4
READ, WRITE = 1, 2
FLAG_DIGEST = 1
HAS_SECRET = 1

HELLO = struct.Struct("<8sHHHH16s32s16sQ64s")
CHALLENGE = struct.Struct("<8sHHHH16s32s96s")
WELCOME = struct.Struct("<H6s32s16s64s96s")
MESSAGE = struct.Struct("<IHH")
REQUEST = struct.Struct("<IBBHIIQQ")
DESC = struct.Struct("<QQQ")
RESPONSE = struct.Struct("<IB3sIIQQ")
FAILED = struct.Struct("<II")
assert (HELLO.size, CHALLENGE.size, WELCOME.size) == (152, 160, 216)
assert (MESSAGE.size, REQUEST.size, DESC.size, RESPONSE.size, FAILED.size) == (8, 32, 24, 32, 8)

OFFER, REGIONS, REGION_GONE, SYNC, NOTIFY, NOTIFY_ACK, FENCE, FENCED = range(1, 9)
REQUEST_MAGIC = int.from_bytes(b"MPRQ", "little")
RESPONSE_MAGIC = int.from_bytes(b"MPRS", "little")


class Challenge(NamedTuple):
    magic: bytes
    version: int
    status: int
    flags: int
    reserved: int
    incarnation: bytes
    nonce: bytes
    message: bytes


class Welcome(NamedTuple):
    status: int
    reserved: bytes
    mac: bytes
    session: bytes
    name: bytes
    message: bytes


@dataclass
class Region:
    key: int
    length: int
    generation: int
    flags: int


@dataclass
class Response:
    request_id: int
    failed: dict[int, int]
    payload: bytes


def connect(address: str, timeout: float = 90.0) -> socket.socket:
    parsed = parse_address(address)
    return socket.create_connection((parsed.host, parsed.port), timeout=timeout)


def receive(sock: socket.socket, count: int) -> bytes:
    """Receive exactly `count` bytes, or raise ConnectionError."""
    data = bytearray()
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionError(f"closed after {len(data)} of {count} bytes")
        data += part
    return bytes(data)


def closed_by_peer(sock: socket.socket) -> bool:
    """Read until the end, which must come before the socket's timeout."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


def hello(
    kind: int = CONTROL,
    *,
    magic: bytes = MAGIC,
    version: int = VERSION,
    flags: int = 0,
    session: bytes | None = None,
    lane_id: int = 0,
    incarnation: bytes | None = None,
) -> bytes:
    return HELLO.pack(
        magic,
        version,
        kind,
        flags,
        0,
        incarnation or os.urandom(16),
        os.urandom(32),
        session or os.urandom(16),
        lane_id,
        b"hostile",
    )


def proof(secret: bytes, hello_bytes: bytes, challenge_bytes: bytes, role: bytes = b"c") -> bytes:
    message = b"moonpool proof " + role + hello_bytes + challenge_bytes
    return hmac.new(secret, message, hashlib.sha256).digest()


def shake_hands(sock: socket.socket, hello_bytes: bytes, secret: bytes = b"") -> Welcome:
    sock.sendall(hello_bytes)
    challenge_bytes = receive(sock, CHALLENGE.size)
    challenge = Challenge(*CHALLENGE.unpack(challenge_bytes))
    if challenge.status:
        raise ConnectionRefusedError(challenge.status, challenge.message.rstrip(b"\0").decode())
    sock.sendall(proof(secret, hello_bytes, challenge_bytes))
    welcome = Welcome(*WELCOME.unpack(receive(sock, WELCOME.size)))
    if welcome.status:
        raise ConnectionRefusedError(welcome.status, welcome.message.rstrip(b"\0").decode())
    assert welcome.mac == proof(secret, hello_bytes, challenge_bytes, role=b"s")
    return welcome


class Client:
    """A session with an engine: the control connection, and lanes on demand."""

    def __init__(self, address: str, secret: bytes = b"") -> None:
        self.address = address
        self.secret = secret
        self.incarnation = os.urandom(16)
        self.control = connect(address)
        self.lanes: list[socket.socket] = []
        welcome = shake_hands(
            self.control, hello(flags=HAS_SECRET if secret else 0, incarnation=self.incarnation), secret
        )
        self.session = welcome.session
        self.regions: dict[str, Region] = {}
        while self.read_message()[0] != SYNC:
            pass

    def read_message(self) -> tuple[int, bytes]:
        size, kind, _ = MESSAGE.unpack(receive(self.control, MESSAGE.size))
        body = receive(self.control, size)
        if kind == REGIONS:
            self._learn(body)
        return kind, body

    def _learn(self, body: bytes) -> None:
        at = 0
        while at < len(body):
            key, length, generation, flags, name_bytes = struct.unpack_from("<QQQII", body, at)
            at += 32
            self.regions[body[at : at + name_bytes].decode()] = Region(key, length, generation, flags)
            at += name_bytes

    def send_message(self, kind: int, body: bytes, *, size: int | None = None) -> None:
        self.control.sendall(MESSAGE.pack(len(body) if size is None else size, kind, 0) + body)

    def notify(self, number: int, payload: bytes, marks: dict[int, int] | None = None) -> None:
        """Send a notification that is to come after so many marks of each lane."""
        body = struct.pack("<QI", number, len(marks or {}))
        body += b"".join(struct.pack("<QII", lane, mark, 0) for lane, mark in (marks or {}).items())
        self.send_message(NOTIFY, body + struct.pack("<I", len(payload)) + payload)

    def open_lane(self, lane_id: int = 1, *, session: bytes | None = None, kind: int = LANE) -> socket.socket:
        lane = connect(self.address)
        self.lanes.append(lane)
        shake_hands(
            lane,
            hello(
                kind,
                flags=HAS_SECRET if self.secret else 0,
                session=session or self.session,
                lane_id=lane_id,
                incarnation=self.incarnation,
            ),
            self.secret,
        )
        return lane

    def close(self) -> None:
        for sock in [self.control, *self.lanes]:
            sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def request(
    op: int,
    descs: list[tuple[int, int, int]],
    *,
    request_id: int = 1,
    flags: int = 0,
    magic: int = REQUEST_MAGIC,
    count: int | None = None,
    payload_bytes: int | None = None,
) -> bytes:
    """Build a request of (key, offset, length) descriptors. A write's payload follows it."""
    total = sum(length for _, _, length in descs) % (1 << 64) if payload_bytes is None else payload_bytes
    head = REQUEST.pack(magic, op, flags, 0, len(descs) if count is None else count, 0, request_id, total)
    return head + b"".join(DESC.pack(*desc) for desc in descs)


def read_response(lane: socket.socket) -> Response:
    magic, _flags, _, failed_count, _, request_id, payload_bytes = RESPONSE.unpack(receive(lane, RESPONSE.size))
    assert magic == RESPONSE_MAGIC
    failed = dict(FAILED.unpack(receive(lane, FAILED.size)) for _ in range(failed_count))
    return Response(request_id, failed, receive(lane, payload_bytes))
