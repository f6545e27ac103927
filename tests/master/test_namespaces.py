# SPDX-License-Identifier: Apache-2.0
"""Namespaces that have no chunk any more make room for others."""

from __future__ import annotations

import sqlite3
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from master_testing import Member, call, eventually, hashes

from moonpool.master import Master
from moonpool.master.errors import LimitError, StoreUnavailableError
from moonpool.proto import pool_pb2 as pb

Start = Callable[..., Master]
Join = Callable[..., Member]
MIB = 1 << 20
THERE = bytes([pb.OK])
GONE = bytes([pb.NOT_FOUND])


def swept(client: Member) -> None:
    """Before the first round there may be records that nobody has."""
    eventually(lambda: client.status()["loops"]["sweep"]["rounds"] > 0, "a round of the sweep")


def test_one_without_chunks_is_given_back(start_master: Start, join: Join) -> None:
    master = start_master(namespaces_max=3)
    join(master, pb.NODE).mount(MIB)
    client = join(master)
    swept(client)
    chunk = hashes(1)
    for name in "abc":
        assert client.put(chunk, namespace=name) == THERE
    with pytest.raises(LimitError, match=r"3 namespaces with chunks.*namespaces_max"):
        client.put(chunk, namespace="d")
    # What is being written counts, and so does what readers may still read.
    given = client.start(hashes(1), namespace="b")
    client.locate(chunk, lease_ms=300, namespace="b")
    call(client.pool.Remove, pb.RemoveRequest(namespace="b", hashes=chunk))
    with pytest.raises(LimitError):
        client.put(chunk, namespace="d")
    assert client.abort(given, settled=True, namespace="b") == THERE
    assert client.put(chunk, namespace="d") == THERE
    assert [client.exists(chunk, namespace=name) for name in "abcd"] == [THERE, GONE, THERE, THERE]
    # Whoever still knows the old one has it back when there is room.
    with pytest.raises(LimitError):
        client.put(chunk, namespace="b")
    call(client.pool.RemovePrefix, pb.RemovePrefixRequest(namespace="a", hash=chunk))
    assert client.put(hashes(1), namespace="b") == THERE
    assert [client.exists(chunk, namespace=name) for name in "abcd"] == [GONE, GONE, THERE, THERE]
    assert client.status()["namespaces"] == 3


def test_a_put_that_waits_keeps_its_namespace(start_master: Start, join: Join) -> None:
    master = start_master(namespaces_max=2, put_begin=20.0)
    join(master, pb.NODE).mount(MIB)
    client, other = join(master), join(master)
    swept(client)
    old = hashes(17)
    assert client.put(old, 60_000, namespace="a") == THERE * 17
    pin = client.pin(old, namespace="a").pin
    waiting, chunk = [], hashes(1)
    thread = threading.Thread(target=lambda: waiting.append(other.put(chunk, 60_000, namespace="b", wait_ms=9000)))
    thread.start()
    eventually(lambda: client.status()["counts"]["put_waits_calls"] == 1, "a put that waits")
    for _ in range(3):
        with pytest.raises(LimitError):
            client.start(hashes(1), namespace="c")
    client.unpin(pin)
    thread.join()
    assert waiting == [THERE]
    assert other.exists(chunk, namespace="b") == THERE


def test_events_name_what_was_given_back(start_master: Start, join: Join) -> None:
    master = start_master(namespaces_max=1)
    join(master, pb.NODE).mount(MIB)
    client = join(master)
    swept(client)
    watching = client.pool.WatchEvents(pb.WatchEventsRequest(boot_id=client.header.boot_id, cursor=0))
    assert next(watching).kind == pb.Event.SEGMENT
    for name in ("a", "b", "a"):
        chunk = hashes(1)
        assert client.put(chunk, namespace=name) == THERE
        assert client.remove(chunk, namespace=name) == THERE
    told = [next(watching) for _ in range(6)]
    assert [event.namespace for event in told] == ["a", "a", "b", "b", "a", "a"]
    watching.cancel()


def test_a_later_master_gives_no_chunk_to_another_name(start_master: Start, join: Join, tmp_path: Path) -> None:
    path = tmp_path / "master.db"
    options = {"store": f"sqlite:{path}", "namespaces_max": 2, "lease_max": 0.05}
    master = start_master(**options)
    node, client = join(master, pb.NODE), join(master)
    segment = node.mount(MIB)
    swept(client)
    chunk = hashes(1)
    assert client.put(chunk, namespace="a") == client.put(chunk, namespace="b") == THERE
    assert client.remove(chunk, namespace="b") == client.put(chunk, namespace="c") == THERE
    master.close()
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT name FROM namespaces ORDER BY number").fetchall() == [("a",), ("c",)]
    database.close()
    master = start_master(**options)
    again = join(master, pb.NODE, session=node.id, incarnation=node.incarnation)
    again.mount(MIB, segment)
    client = join(master, session=client.id, incarnation=client.incarnation)
    swept(client)
    assert [client.exists(chunk, namespace=name) for name in "abc"] == [THERE, GONE, THERE]
    assert client.remove(chunk, namespace="a") == THERE
    # Not before the leases of then are over.
    eventually(lambda: len(master.server.core.index.namespaces()) == 4, "one namespace")
    eventually(lambda: client.put(hashes(1), namespace="d") == THERE, "room")
    assert [client.exists(chunk, namespace=name) for name in "acd"] == [GONE, THERE, GONE]


def test_what_the_store_does_not_take_keeps_its_name(start_master: Start, join: Join) -> None:
    master = start_master(namespaces_max=1)
    join(master, pb.NODE).mount(MIB)
    client = join(master)
    swept(client)
    chunk = hashes(1)
    request = pb.PutStartRequest(session=client.id, namespace="b", hashes=chunk, lengths=struct.pack("<Q", 100))
    assert client.put(chunk, namespace="a") == client.remove(chunk, namespace="a") == THERE
    store = master.server.core.store
    store._open = False  # type: ignore[attr-defined]
    with pytest.raises(StoreUnavailableError):
        call(client.pool.PutStart, request)
    store._open = True  # type: ignore[attr-defined]
    assert client.put(chunk, namespace="a") == THERE
    with pytest.raises(LimitError):
        call(client.pool.PutStart, request)
