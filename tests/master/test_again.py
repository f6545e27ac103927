# SPDX-License-Identifier: Apache-2.0
"""Calls that are made again, since their replies were lost on the way."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable

import pytest
from master_testing import Member, call, eventually, hashes

from moonpool.master import Master
from moonpool.master.errors import InvalidRequestError
from moonpool.master.replays import Replays
from moonpool.master.sessions import Session
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client.rpc import MasterLink
from moonpool.store_client.session import Session as ClientSession

Start = Callable[..., Master]
Join = Callable[..., Member]


@pytest.fixture
def client(start_master: Start, join: Join) -> Member:
    master = start_master()
    join(master, pb.NODE).mount(1 << 20)
    return join(master)


def put_start(client: Member, chunks: bytes, request: bytes, **more: int) -> pb.PutStartRequest:
    return pb.PutStartRequest(
        session=client.id, namespace="ns", hashes=chunks, lengths=struct.pack("<Q", 1000), request=request, **more
    )


def test_the_same_put_is_given_the_same_extents(client: Member, join: Join) -> None:
    request = put_start(client, hashes(4), os.urandom(16))
    first = call(client.pool.PutStart, request)
    assert first.statuses == bytes(4)
    assert call(client.pool.PutStart, request) == first
    request.request = os.urandom(16)
    assert call(client.pool.PutStart, request).statuses == bytes([pb.WRITING] * 4)
    other = join(client.channel_address)
    request = put_start(other, request.hashes, request.request)
    assert call(other.pool.PutStart, request).statuses == bytes([pb.WRITING] * 4), "somebody else's id is another one"


def test_a_put_that_comes_again_while_it_waits_for_room_is_one_put(client: Member) -> None:
    given = client.start(hashes(900), 1000)
    request = put_start(client, hashes(200), os.urandom(16), wait_ms=60_000)
    replies: list[pb.PutStartReply] = []
    threads = [threading.Thread(target=lambda: replies.append(call(client.pool.PutStart, request))) for _ in range(3)]
    for thread in threads:
        thread.start()
    client.abort(given, settled=True)
    for thread in threads:
        thread.join()
    assert replies[0].statuses == bytes(200)
    assert replies[0] == replies[1] == replies[2]
    assert client.status()["index"]["writing"] == 200


def test_a_put_whose_caller_went_away_is_done_anew(client: Member) -> None:
    given = client.start(hashes(900), 1000)
    request = put_start(client, hashes(200), os.urandom(16), wait_ms=60_000)
    waiting = client.pool.PutStart.future(request)
    eventually(lambda: client.status()["index"]["writing"] > 900, "it has a part of it")
    waiting.cancel()
    client.abort(given, settled=True)
    assert call(client.pool.PutStart, request).statuses == bytes(200)


def test_the_same_pin_is_one_pin(client: Member) -> None:
    chunks = hashes(3)
    client.put(chunks)
    request = pb.PinRequest(session=client.id, namespace="ns", hashes=chunks, request=os.urandom(16))
    first = call(client.pool.Pin, request)
    assert call(client.pool.Pin, request) == first
    assert client.status()["pins"] == 1
    assert client.unpin(first.pin) == 3
    assert client.remove(chunks) == bytes(3)


def test_the_same_removal_says_the_same(client: Member) -> None:
    chunks = hashes(3)
    client.put(chunks)
    request = pb.RemoveRequest(session=client.id, namespace="ns", hashes=chunks, request=os.urandom(16))
    assert call(client.pool.Remove, request).statuses == bytes(3)
    assert call(client.pool.Remove, request).statuses == bytes(3)
    client.put(chunks)
    assert call(client.pool.Remove, request).statuses == bytes(3)
    assert client.exists(chunks) == bytes(3), "what was put since is another chunk"


def test_an_id_of_another_size_is_refused(client: Member) -> None:
    with pytest.raises(InvalidRequestError, match="id"):
        call(client.pool.PutStart, put_start(client, hashes(1), b"short"))


def test_what_is_kept_is_bounded_and_ends_with_the_session() -> None:
    replays = Replays(calls_of_a_session=4, bytes_in_all=10_000)
    sessions = [Session(os.urandom(16), 0, "", "", 0, b"", owner, 0) for owner in range(40)]
    for session in sessions:
        for _ in range(10):
            replays.once(session, os.urandom(16), pb.PinReply)
    assert 0 < replays.bytes <= 10_000
    large = pb.PutStartReply(extents=bytes(20_000))
    assert replays.once(sessions[0], bytes(16), lambda: large) is large
    assert replays.bytes == 0, "it is larger than all of it"
    last = os.urandom(16)
    kept = replays.once(sessions[0], last, pb.PinReply)
    assert replays.once(sessions[0], last, pb.PinReply) is kept
    for session in sessions:
        replays.forget(session)
    assert replays.bytes == 0


def test_pins_are_named_in_several_messages(start_master: Start, join: Join) -> None:
    master = start_master(batch_max=2000)
    join(master, pb.NODE).mount(1 << 23)
    writer = join(master)
    chunks = hashes(6000)
    for place in range(0, 6000, 2000):
        assert writer.put(chunks[32 * place : 32 * (place + 2000)], 1) == bytes(2000)
    link = MasterLink(master.address, None)
    session = ClientSession(link, pb.CLIENT, "holder", "", os.urandom(16).hex())
    try:
        session.wait(30)
        session.hold(5, "ns", chunks + hashes(1))
        session.hold(6, "ns", chunks)
        for number in range(7, 307):
            session.hold(number, "ns", chunks[:32])
        # To the master that knows the session nothing is new; to another one everything is.
        first = session.opened
        core_session = master.server.core.sessions.alive[session.id]
        core_session.named = False
        assert core_session.outbox is not None
        core_session.outbox.closed = True
        eventually(lambda: session.opened > first, "it is back")
        assert writer.status()["pins"] == 302
        assert writer.status()["index"]["pinned"] == 12_300
        assert session.lost(5)
        assert not session.lost(6)
    finally:
        session.close()
        link.close()
    eventually(lambda: writer.status()["pins"] == 0, "they end with the session")
