# SPDX-License-Identifier: Apache-2.0
"""Drain: a segment that takes nothing new is emptied, within bounds, and what cannot go is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillWaiting  # another class than the builtin before Python 3.11
from typing import Any

import pytest
from master_testing import Member, eventually, hashes

from moonpool.master import Master
from moonpool.master.errors import SegmentLostError
from moonpool.proto import pool_pb2 as pb

Start = Callable[..., Master]
Join = Callable[..., Member]
MIB = 1 << 20


def nodes(join: Join, master: Master, count: int, capacity: int = MIB, **options: object) -> list[Member]:
    made = []
    for number in range(count):
        node = join(master, pb.NODE, host=f"node-{number + 1}", **options)
        assert node.mount(capacity) == number + 1
        made.append(node)
    return made


def test_everything_goes_elsewhere(start_master: Start, join: Join) -> None:
    master = start_master()
    client = join(master)
    nodes(join, master, 3)
    chunks = hashes(500)
    assert not any(client.put(chunks, 300, avoid=[2, 3]))
    pin = client.pin(chunks[:320])
    assert client.drain(1).chunks == 500
    eventually(lambda: client.segments()[1].chunks == 0, "an empty segment")
    assert client.segments()[1].draining.moved == 500
    assert client.exists(chunks) == bytes(500)
    assert 1 not in client.where(chunks)
    assert client.unpin(pin.pin) == 10
    # What is committed only now was given before.
    assert client.drain(1).chunks == 0


def test_a_put_that_was_under_way_moves_too(start_master: Start, join: Join) -> None:
    master = start_master()
    client = join(master)
    nodes(join, master, 2)
    given = client.start(hashes(3), 300, avoid=[2])
    client.drain(1)
    assert client.commit(given) == bytes(3)
    eventually(lambda: client.segments()[1].chunks == 0, "an empty segment")
    assert client.where(given.hashes) == [2] * 3


def test_a_node_copies_a_bounded_amount_at_once(start_master: Start, join: Join) -> None:
    master = start_master(copies_at_once=2, copy_bytes=1 << 16)
    client = join(master)
    node = nodes(join, master, 2, 8 * MIB, answers=False)[1]
    assert not any(client.put(hashes(400), 10_000, avoid=[2]))
    client.drain(1)
    eventually(lambda: len(node.copies) == 2, "two copies")
    answered = 0
    while client.segments()[1].chunks:
        time.sleep(0.01)
        waiting = node.copies[answered:]
        assert len(waiting) <= 2
        assert all(len(copy.extents) // 72 * 10_000 <= (1 << 16) + 10_000 for copy in waiting)
        for copy in waiting:
            node.copy_done(copy)
        answered += len(waiting)
    assert answered >= 400 * 10_000 >> 17


def test_the_rate_is_a_bound(start_master: Start, join: Join) -> None:
    master = start_master(drain_rate=1 << 20, copy_bytes=1 << 16)
    client = join(master)
    nodes(join, master, 2, 8 * MIB)
    assert not any(client.put(hashes(100), 10_000, avoid=[2]))
    begin = time.monotonic()
    client.drain(1)
    eventually(lambda: client.segments()[1].chunks == 0, "an empty segment")
    assert time.monotonic() - begin > 0.5  # a second, less what may go at once


def test_what_has_no_room_elsewhere_stays_and_is_told(start_master: Start, join: Join) -> None:
    master = start_master()
    client = join(master)
    nodes(join, master, 2)
    kept = hashes(90)
    assert not any(client.put(kept, 10_000, avoid=[1]))
    pin = client.pin(kept).pin
    chunks = hashes(50)
    assert not any(client.put(chunks, 10_000, avoid=[2]))
    client.drain(1)
    stuck = eventually(lambda: client.segments()[1].draining.stuck, "that there is no room")
    assert stuck == client.segments()[1].chunks > 30
    assert "no room elsewhere" in client.segments()[1].draining.cause
    assert client.exists(chunks + kept) == bytes(140)
    assert client.unpin(pin) == 90
    # It makes nothing go. When something goes by itself, it goes on.
    client.remove(kept)
    eventually(lambda: client.segments()[1].chunks == 0, "an empty segment")
    assert client.exists(chunks) == bytes(50)
    assert client.segments()[1].draining.stuck == 0


def test_what_has_no_other_segment_stays_and_is_told(start_master: Start, join: Join) -> None:
    client = join(master := start_master())
    nodes(join, master, 1)
    assert not any(client.put(hashes(3)))
    client.drain(1)
    assert eventually(lambda: client.segments()[1].draining.stuck, "that there is none") == 3
    assert client.segments()[1].draining.cause == "no other segment takes chunks now"
    assert join(master, pb.NODE, host="node-2").mount(MIB) == 2
    eventually(lambda: client.segments()[1].chunks == 0, "an empty segment")
    assert client.segments()[1].draining.stuck == 0


def test_copies_of_a_chunk_that_is_everywhere_else_stay(start_master: Start, join: Join) -> None:
    master = start_master()
    client = join(master)
    nodes(join, master, 2)
    chunks = hashes(10)
    assert not any(client.put(chunks, replicas=2))
    client.drain(1)
    eventually(lambda: client.segments()[1].draining.stuck == 10, "that they cannot go")
    assert client.exists(chunks) == bytes(10)
    node = join(master, pb.NODE, host="node-3")
    assert node.mount(MIB) == 3
    eventually(lambda: client.segments()[1].chunks == 0, "an empty segment")
    assert client.segments()[3].chunks == 10


def test_undo_stops_it(start_master: Start, join: Join) -> None:
    master = start_master(copies_at_once=1, copy_bytes=10_000)
    client = join(master)
    node = nodes(join, master, 2, answers=False)[1]
    assert not any(client.put(hashes(20), 5000, avoid=[2]))
    client.drain(1)
    eventually(lambda: node.copies, "a copy")
    assert client.drain(1, undo=True).draining.moving == 0
    asked = len(node.copies)
    for copy in list(node.copies):
        node.copy_done(copy)
    eventually(lambda: client.status()["copies"] == 0, "the end of the copy")
    assert len(node.copies) == asked
    segment = client.segments()[1]
    assert segment.state == pb.ACTIVE
    assert segment.chunks == 20 - len(node.copies[0].extents) // 72
    assert not segment.HasField("draining")


class SlowStore:
    """Takes the first record of a segment that is drained only when it is told to."""

    def __init__(self, master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
        store = master.server.core.store
        self.asked = threading.Event()
        self.kept: Future[None] = Future()
        self._put = store.put_segment
        monkeypatch.setattr(store, "put_segment", self._put_segment)

    def _put_segment(self, row: Any) -> Future[None]:
        done = self._put(row)
        if not row.draining or self.asked.is_set():
            return done
        self.asked.set()
        return self.kept


def test_a_node_that_leaves_while_its_drain_is_written_stays_lost(
    start_master: Start, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = start_master()
    client = join(master)
    node = nodes(join, master, 2)[0]
    chunks = hashes(10)
    assert not any(client.put(chunks, 300, avoid=[2]))
    slow = SlowStore(master, monkeypatch)
    with ThreadPoolExecutor(1) as threads:
        draining = threads.submit(client.drain, 1)
        assert slow.asked.wait(60)
        node.goodbye()
        slow.kept.set_result(None)
        with pytest.raises(SegmentLostError):
            draining.result(60)
    assert set(client.segments()) == {2}
    eventually(lambda: client.status()["index"]["chunks"] == 0, "its chunks are gone")


def test_a_drain_and_its_undo_that_cross_come_one_after_the_other(
    start_master: Start, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = start_master()
    client = join(master)
    nodes(join, master, 2)
    slow = SlowStore(master, monkeypatch)
    with ThreadPoolExecutor(2) as threads:
        draining = threads.submit(client.drain, 1)
        assert slow.asked.wait(60)
        undoing = threads.submit(client.drain, 1, undo=True)
        with pytest.raises(StillWaiting):
            undoing.result(0.3)
        slow.kept.set_result(None)
        draining.result(60)
        undoing.result(60)
    assert client.segments()[1].state == pb.ACTIVE
    assert not any(client.put(hashes(1), avoid=[2]))


def test_copies_that_fail_are_tried_again_later_and_later(start_master: Start, join: Join) -> None:
    master = start_master()
    client = join(master)
    node = nodes(join, master, 2)[1]
    node.copied = pb.NOT_MOVED
    chunks = hashes(5)
    assert not any(client.put(chunks, avoid=[2]))
    client.drain(1)
    eventually(lambda: len(node.copies) >= 3, "attempts")
    began = len(node.copies)
    time.sleep(0.5)
    assert len(node.copies) <= began + 2
    assert client.segments()[1].draining.stuck == 5
    assert client.segments()[1].draining.cause == "5 could not be copied: a test"
    node.copied = pb.OK
    eventually(lambda: client.segments()[1].chunks == 0, "an empty segment")


def test_a_drain_leaves_puts_the_room_that_they_need(start_master: Start, join: Join) -> None:
    master = start_master(high_watermark=0.9, low_watermark=0.8)
    client = join(master)
    nodes(join, master, 2)
    assert not any(client.put(hashes(80), 10_000, avoid=[1]))
    assert not any(client.put(hashes(80), 10_000, avoid=[2]))
    client.drain(1)
    eventually(lambda: client.segments()[1].draining.stuck, "that there is no more room")
    assert client.segments()[2].used_bytes <= 0.9 * MIB
    assert client.status()["index"]["evicted"] == 0
    for _ in range(5):
        assert client.put(hashes(9), 10_000, wait_ms=5000) == bytes(9)
