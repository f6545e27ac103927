# SPDX-License-Identifier: Apache-2.0
"""T1.

What people met: a peer could read or write any address of the process: the wire address was cast to a pointer.

What must happen instead: every request is checked against a registered region (unknown key, out of range, offset
overflow, zero length, region already released, read-only region): the peer gets a typed error, the target stays up and
untouched.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
from collections.abc import Iterator

import pytest
from engine_testing import wire
from engine_testing.fixtures import OpenEngine
from engine_testing.leaks import eventually
from engine_testing.patterns import pattern
from engine_testing.processes import Target

from moonpool.transfer_engine import Status, TransferEngine

NBYTES = 1 << 16
SECRET = "the cluster's"


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """One target for all attacks: it must survive each of them, which the fixture below checks."""
    with Target({"kv": NBYTES}, secret=SECRET, transports="tcp") as target:
        target.ask("register", name="constant", nbytes=NBYTES, writable=False)
        yield target


@pytest.fixture(autouse=True)
def target_stays_up_and_untouched(target: Target, no_leaks: None) -> Iterator[None]:
    yield
    assert target.ask("intact", name="kv")
    assert target.ask("intact", name="constant")
    # An honest peer is served as before.
    with TransferEngine(listen=None, secret=SECRET, transports="tcp") as engine:
        peer = engine.connect(target.address)
        local = engine.allocate(NBYTES)
        engine.read(peer, local, peer.regions["kv"]).wait()
        assert bytes(local) == pattern(NBYTES)


@pytest.fixture
def client(target: Target) -> Iterator[wire.Client]:
    with wire.Client(target.address, SECRET.encode()) as client:
        yield client


def test_the_hostile_client_could_do_honest_work(client: wire.Client) -> None:
    """Otherwise the refusals below would prove nothing."""
    lane = client.open_lane()
    region = client.regions["kv"]
    lane.sendall(wire.request(wire.READ, [(region.key, 100, 50)], request_id=7))
    response = wire.read_response(lane)
    assert (response.request_id, response.failed, response.payload) == (7, {}, pattern(NBYTES)[100:150])
    lane.sendall(wire.request(wire.WRITE, [(region.key, 100, 50)]) + pattern(NBYTES)[100:150])
    assert wire.read_response(lane).failed == {}


OUT_OF_RANGE = [
    (NBYTES, 1),
    (NBYTES - 1, 2),
    (0, NBYTES + 1),
    (1 << 63, 1),
    ((1 << 64) - 1, 1),
    ((1 << 64) - 1, 2),
    ((1 << 64) - NBYTES, NBYTES),
    ((1 << 64) - 4096, 8192),
    (0, 0),
    (100, 0),
]


@pytest.mark.parametrize(("offset", "length"), OUT_OF_RANGE)
@pytest.mark.parametrize("op", [wire.READ, wire.WRITE])
def test_beyond_the_region(client: wire.Client, op: int, offset: int, length: int) -> None:
    lane = client.open_lane()
    payload = os.urandom(length) if op == wire.WRITE else b""
    lane.sendall(wire.request(op, [(client.regions["kv"].key, offset, length)]) + payload)
    response = wire.read_response(lane)
    assert (response.failed, response.payload) == ({0: Status.OUT_OF_RANGE}, b"")


@pytest.mark.parametrize("op", [wire.READ, wire.WRITE])
def test_an_unknown_key(client: wire.Client, op: int) -> None:
    lane = client.open_lane()
    real = client.regions["kv"].key
    for key in (0, 1, (1 << 64) - 1, real ^ 1, real ^ (1 << 63)):
        lane.sendall(wire.request(op, [(key, 0, 64)]) + (bytes(64) if op == wire.WRITE else b""))
        assert wire.read_response(lane).failed == {0: Status.REGION_UNKNOWN}


def test_a_region_without_a_name_is_private(target: Target) -> None:
    """Its key is random, but even a peer that knew it is refused."""
    with TransferEngine(transports="tcp") as engine:
        private = engine.allocate(4096)
        memoryview(private)[:4] = b"mine"
        with wire.Client(engine.address or "") as client:
            assert client.regions == {}
            lane = client.open_lane()
            lane.sendall(wire.request(wire.READ, [(private.key, 0, 4)]))
            assert wire.read_response(lane).failed == {0: Status.REGION_UNKNOWN}


def test_a_write_to_a_read_only_region(client: wire.Client) -> None:
    lane = client.open_lane()
    lane.sendall(wire.request(wire.WRITE, [(client.regions["constant"].key, 0, 64)]) + bytes(64))
    assert wire.read_response(lane).failed == {0: Status.REGION_READ_ONLY}


def test_a_region_that_was_released(target: Target) -> None:
    target.ask("allocate", name="short-lived", nbytes=4096)
    with wire.Client(target.address, SECRET.encode()) as client:
        lane = client.open_lane()
        key = client.regions["short-lived"].key
        target.ask("release", name="short-lived")
        for op, payload in ((wire.READ, b""), (wire.WRITE, bytes(64))):
            lane.sendall(wire.request(op, [(key, 0, 64)]) + payload)
            assert wire.read_response(lane).failed == {0: Status.REGION_RELEASED}


def test_good_and_bad_descriptors_in_one_request(client: wire.Client) -> None:
    lane = client.open_lane()
    key = client.regions["kv"].key
    descs = [(key, 0, 16), (key ^ 1, 0, 16), (key, NBYTES, 16), (key, 32, 16), (key, 5, 0)]
    lane.sendall(wire.request(wire.READ, descs))
    response = wire.read_response(lane)
    assert response.failed == {1: Status.REGION_UNKNOWN, 2: Status.OUT_OF_RANGE, 4: Status.OUT_OF_RANGE}
    assert response.payload == pattern(NBYTES)[:16] + pattern(NBYTES)[32:48]
    # The payload of a refused piece is taken off the stream and dropped, so what follows is still understood.
    good = pattern(NBYTES)
    lane.sendall(wire.request(wire.WRITE, descs[:4]) + good[:16] + b"\xff" * 32 + good[32:48])
    assert wire.read_response(lane).failed == {1: Status.REGION_UNKNOWN, 2: Status.OUT_OF_RANGE}
    lane.sendall(wire.request(wire.READ, [(key, 8, 8)], request_id=99))
    assert wire.read_response(lane).request_id == 99


@pytest.mark.parametrize(
    "malformed",
    [
        {"magic": 0},
        {"op": 0},
        {"op": 3},
        {"op": 255},
        {"flags": 2},
        {"flags": 255},
        {"count": 0},
        {"count": 4097},
        {"count": (1 << 32) - 1},
        {"payload_bytes": 0},
        {"payload_bytes": 65},
        {"payload_bytes": (64 << 20) + 1},
        {"payload_bytes": (1 << 64) - 1},
    ],
)
def test_a_malformed_request_ends_the_lane_only(client: wire.Client, malformed: dict[str, int]) -> None:
    key = client.regions["kv"].key
    lane, other = client.open_lane(1), client.open_lane(2)
    changes = dict(malformed)
    lane.sendall(wire.request(changes.pop("op", wire.READ), [(key, 0, 64)], **changes))
    assert wire.closed_by_peer(lane)
    other.sendall(wire.request(wire.READ, [(key, 0, 64)]))
    assert wire.read_response(other).payload == pattern(NBYTES)[:64]


def test_descriptors_that_overflow_the_payload_sum(client: wire.Client) -> None:
    """Lengths whose sum wraps round to the payload that was announced."""
    key = client.regions["kv"].key
    lane = client.open_lane()
    lane.sendall(wire.request(wire.WRITE, [(key, 0, 1 << 63), (key, 0, 1 << 63)], payload_bytes=0))
    assert wire.closed_by_peer(lane)
    lane = client.open_lane(2)
    lane.sendall(wire.request(wire.WRITE, [(key, 0, (1 << 64) - 64), (key, 0, 128)], payload_bytes=64) + bytes(64))
    assert wire.closed_by_peer(lane)


def test_half_a_request_and_then_nothing(client: wire.Client) -> None:
    """The lane may wait, but it holds nothing that others need; a reset is cleaned up."""
    whole = wire.request(wire.WRITE, [(client.regions["kv"].key, 0, 64), (client.regions["kv"].key, 64, 64)])
    for cut in (1, 31, 33, 56, len(whole)):
        lane = client.open_lane(cut)
        lane.sendall(whole[:cut])
        lane.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        lane.close()


@pytest.mark.parametrize("seed", range(5))
def test_garbage_on_a_proven_lane(client: wire.Client, seed: int) -> None:
    generator = random.Random(seed)
    lane = client.open_lane()
    lane.sendall(generator.randbytes(4096))
    assert wire.closed_by_peer(lane)


@pytest.mark.parametrize("seed", range(30))
def test_requests_with_some_bits_flipped(client: wire.Client, seed: int) -> None:
    """Whatever the bits say, the target answers or hangs up; reads only, so that a lucky flip cannot write."""
    generator = random.Random(seed)
    key = client.regions["kv"].key
    lane = client.open_lane()
    lane.settimeout(90.0)
    data = bytearray(wire.request(wire.READ, [(key, 0, 64), (key, 128, 64)]))
    for _ in range(generator.randint(1, 6)):
        position = generator.randrange(len(data))
        data[position] ^= 1 << generator.randrange(8)
    data[4] = wire.READ
    # It may have hung up already.
    with contextlib.suppress(OSError):
        lane.sendall(data)
        lane.shutdown(socket.SHUT_WR)
    assert wire.closed_by_peer(lane)


def test_the_refusals_are_counted(target: Target, client: wire.Client) -> None:
    before = target.ask("stats")["serving"]["requests_refused"]
    lane = client.open_lane()
    lane.sendall(wire.request(wire.READ, [(1, 0, 64)] * 3))
    assert len(wire.read_response(lane).failed) == 3
    assert target.ask("stats")["serving"]["requests_refused"] == before + 3


def test_sessions_of_attackers_are_put_away(target: Target, open_engine: OpenEngine) -> None:
    for _ in range(10):
        with wire.Client(target.address, SECRET.encode()) as client:
            client.open_lane().sendall(b"\0" * 56)
    assert eventually(lambda: target.ask("stats")["serving"]["sessions"] == 0)
    assert eventually(lambda: target.ask("stats")["serving"]["lanes"] == 0)
