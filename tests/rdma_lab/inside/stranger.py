# SPDX-License-Identifier: Apache-2.0
"""The protocol of RDMA lanes with queue pairs of pyverbs: a client and a server that share no line with the engine."""

from __future__ import annotations

import os
import socket
import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from engine_testing import wire
from pyverbs.pyverbs_error import PyverbsError

from rdma_lab.inside.peer import Address, Buffer, Endpoint

if TYPE_CHECKING:
    from typing_extensions import Self

MAGIC = int.from_bytes(b"MPR1", "little")
CONNECT, CONNECTED, FIND, FOUND, RAIL_CHANGED = range(1, 6)
HEADER = struct.Struct("<IHHIIQ")
QUEUE_PAIR = struct.Struct("<16sIIHBBB3x")
FOUND_HEAD = struct.Struct("<QQQI")
RAIL = struct.Struct("<16sHBBB3x")
assert (HEADER.size, QUEUE_PAIR.size, RAIL.size) == (24, 32, 24)

OK, REGION_UNKNOWN, REGION_RELEASED = 0, 6, 7
TRANSPORT_UNAVAILABLE = 5
WRITABLE = 1


class Frame(NamedTuple):
    kind: int
    status: int
    rail: int
    key: int
    body: bytes


@dataclass
class Keys:
    """Where a region is for devices: byte x at `(start + x) % piece_bytes` of `rkeys[(start + x) // piece_bytes]`."""

    length: int
    piece_bytes: int
    start: int
    rkeys: list[int]


def send_frame(
    lane: socket.socket, kind: int, body: bytes = b"", *, status: int = OK, rail: int = 0, key: int = 0
) -> None:
    lane.sendall(HEADER.pack(MAGIC, kind, status, len(body), rail, key) + body)


def receive_frame(lane: socket.socket) -> Frame:
    magic, kind, status, size, rail, key = HEADER.unpack(wire.receive(lane, HEADER.size))
    assert magic == MAGIC
    return Frame(kind, status, rail, key, wire.receive(lane, size))


def pack_queue_pair(address: Address) -> bytes:
    gid = socket.inet_pton(socket.AF_INET6, address.gid)
    return QUEUE_PAIR.pack(gid, address.qpn, address.psn, 0, address.mtu, 16, 16)


def unpack_queue_pair(body: bytes) -> Address:
    gid, qpn, psn, _lid, mtu, _initiated, _served = QUEUE_PAIR.unpack(body)
    groups = [gid.hex()[i : i + 4] for i in range(0, 32, 4)]  # pyverbs takes no short form
    return Address(qpn, psn, ":".join(groups), mtu)


class StrangeClient:
    """A session with an engine, and a queue pair of pyverbs that the engine is connected to."""

    def __init__(self, address: str, device: str, *, rail: int = 0) -> None:
        self._client = wire.Client(address)
        self.notify = self._client.notify
        self.endpoint = Endpoint(device)
        self.lane = self._client.open_lane(kind=wire.RDMA)
        send_frame(self.lane, CONNECT, pack_queue_pair(self.endpoint.address), rail=rail)
        answer = receive_frame(self.lane)
        assert (answer.kind, answer.status) == (CONNECTED, OK), answer
        self.endpoint.connect(unpack_queue_pair(answer.body))
        self.regions = self._client.regions

    def find(self, key: int) -> tuple[int, Keys | None]:
        """Return the status and, if it is OK, where the region is."""
        send_frame(self.lane, FIND, key=key)
        answer = receive_frame(self.lane)
        assert (answer.kind, answer.key) == (FOUND, key)
        if answer.status != OK:
            return answer.status, None
        length, piece_bytes, start, count = FOUND_HEAD.unpack_from(answer.body)
        return OK, Keys(
            length, piece_bytes, start, list(struct.unpack_from(f"<{count}I", answer.body, FOUND_HEAD.size))
        )

    def keys_of(self, name: str) -> Keys:
        """Return where the region of this name is."""
        status, keys = self.find(self.regions[name].key)
        assert status == OK
        assert keys is not None
        return keys

    def close(self) -> None:
        self._client.close()
        self.endpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StrangeServer:
    """Answers like an engine with one region, whose memory pyverbs registered."""

    def __init__(self, device: str, nbytes: int, *, flags: int = WRITABLE, rails: int = 1) -> None:
        self._device = device
        self._flags = flags
        self._rails = rails
        #: Rails for which there is no queue pair, and those for which there was one, in order.
        self.refused: set[int] = set()
        self.connected: list[int] = []
        self._lanes: list[socket.socket] = []
        self._endpoints: list[Endpoint] = []
        self._owner = Endpoint(device)
        self.buffer: Buffer = self._owner.register(nbytes)
        #: Payloads of notifications, and the marks that each was to come after.
        self.notified: list[tuple[bytes, dict[int, int]]] = []
        self._incarnation, self._session = os.urandom(16), os.urandom(16)
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.errors: list[Exception] = []
        self._start(self._accept)

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            self._sockets.append(sock)
            self._start(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        try:
            hello = wire.receive(sock, wire.HELLO.size)
            kind = wire.HELLO.unpack(hello)[2]
            challenge = wire.CHALLENGE.pack(wire.MAGIC, wire.VERSION, OK, 0, 0, self._incarnation, os.urandom(32), b"")
            sock.sendall(challenge)
            assert wire.receive(sock, 32) == wire.proof(b"", hello, challenge)
            mac = wire.proof(b"", hello, challenge, role=b"s")
            sock.sendall(wire.WELCOME.pack(OK, b"", mac, self._session, b"stranger", b""))
            if kind == wire.CONTROL:
                self._announce(sock)
            else:
                assert kind == wire.RDMA
                self._serve_lane(sock)
        except OSError:
            pass  # the engine left
        except (AssertionError, PyverbsError, struct.error) as error:
            self.errors.append(error)

    def _announce(self, sock: socket.socket) -> None:
        def message(kind: int, body: bytes) -> None:
            sock.sendall(wire.MESSAGE.pack(len(body), kind, 0) + body)

        address = self._owner.address
        rail = RAIL.pack(socket.inet_pton(socket.AF_INET6, address.gid), 0, 1, 1, address.mtu)
        blob = bytes([2, self._rails]) + rail * self._rails
        name = b"rdma"
        message(wire.OFFER, struct.pack("<I", len(name)) + name + struct.pack("<I", len(blob)) + blob)
        region = b"kv"
        message(wire.REGIONS, struct.pack("<QQQII", 4711, self.buffer.length, 1, self._flags, len(region)) + region)
        message(wire.SYNC, b"")
        while True:
            size, kind, _ = wire.MESSAGE.unpack(wire.receive(sock, wire.MESSAGE.size))
            body = wire.receive(sock, size)
            if kind == wire.NOTIFY:
                number, count = struct.unpack_from("<QI", body)
                marks = [struct.unpack_from("<QII", body, 12 + 16 * index) for index in range(count)]
                self.notified.append((body[16 + 16 * count :], {lane: mark for lane, mark, _ in marks}))
                message(wire.NOTIFY_ACK, struct.pack("<QI", number, OK))

    def _serve_lane(self, sock: socket.socket) -> None:
        while True:
            frame = receive_frame(sock)
            if frame.kind == CONNECT and frame.rail in self.refused:
                send_frame(sock, CONNECTED, b"not today", status=TRANSPORT_UNAVAILABLE)
            elif frame.kind == CONNECT:
                self.connected.append(frame.rail)
                self._lanes.append(sock)
                endpoint = Endpoint(self._device, beside=self._owner)
                self._endpoints.append(endpoint)
                endpoint.connect(unpack_queue_pair(frame.body))
                for _ in range(32):
                    endpoint.receive(self.buffer)
                send_frame(sock, CONNECTED, pack_queue_pair(endpoint.address))
            else:
                assert (frame.kind, frame.key) == (FIND, 4711)
                length = self.buffer.length
                body = FOUND_HEAD.pack(length, 1 << 62, self.buffer.address, 1) + struct.pack("<I", self.buffer.rkey)
                send_frame(sock, FOUND, body, key=frame.key)

    def say(self, *, rail: int, up: bool) -> None:
        """Tell the client of the latest lane that a rail went up or down."""
        send_frame(self._lanes[-1], RAIL_CHANGED, status=OK if up else TRANSPORT_UNAVAILABLE, rail=rail)

    def marks(self) -> list[int]:
        """Return how many marks each queue pair was given."""
        taken = [endpoint.cq.poll(32)[1] for endpoint in self._endpoints]
        return [len(completions) for completions in taken]

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            sock.close()
        for endpoint in [*self._endpoints, self._owner]:
            endpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
