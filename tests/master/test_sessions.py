# SPDX-License-Identifier: Apache-2.0
"""Sessions, pins, fences and segments through the calls of a real master on loopback."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
from master_testing import Member, call, eventually, hashes

from moonpool.master import Master
from moonpool.master.errors import (
    InvalidRequestError,
    LimitError,
    SegmentLostError,
    SegmentUnknownError,
    SessionUnknownError,
)
from moonpool.proto import pool_pb2 as pb

Start = Callable[..., Master]
Join = Callable[..., Member]
MIB = 1 << 20


def test_a_session_lives_over_a_reconnect(start_master: Start, join: Join) -> None:
    master = start_master()
    node = join(master, pb.NODE, host="node-0")
    segment = node.mount(MIB)
    client = join(master)
    chunks = hashes(2)
    client.put(chunks)
    pin = client.pin(chunks).pin
    client.vanish()
    node.vanish()
    client = join(master, session=client.id, incarnation=client.incarnation)
    node = join(master, pb.NODE, host="node-0", session=node.id, incarnation=node.incarnation)
    assert node.mount(MIB, segment=segment) == segment
    assert client.exists(chunks) == bytes(2)
    assert client.remove(chunks) == bytes([pb.IN_USE] * 2)
    assert client.unpin(pin) == 2


def test_a_second_stream_of_a_session_ends_the_first(start_master: Start, join: Join) -> None:
    master = start_master()
    first = join(master)
    second = join(master, session=first.id, incarnation=first.incarnation)
    eventually(lambda: first.ended, "the end of the first stream")
    assert not second.ended
    assert second.status()["clients"] == 1


def test_who_is_in_a_roster_is_told_of_the_others_that_are_there(start_master: Start, join: Join) -> None:
    master = start_master(session_timeout=1.0)
    first = join(master, roster=("engines", b"one"))
    second = join(master, roster=("engines", b"two"))
    join(master, roster=("others", b"three"))
    alone = join(master)
    assert (list(first.welcome.entries), list(second.welcome.entries)) == ([], [b"one"])
    assert list(alone.welcome.entries) == []
    first.vanish()
    again = join(master, session=first.id, incarnation=first.incarnation, roster=("engines", b"changed"))
    assert list(again.welcome.entries) == [b"two"]
    assert list(join(master, roster=("engines", b"")).welcome.entries) == [b"changed", b"two"]
    second.goodbye()
    again.vanish()
    eventually(lambda: list(join(master, roster=("engines", b"")).welcome.entries).count(b"changed") == 0, "its end")


def test_a_roster_has_bounds(start_master: Start, join: Join) -> None:
    master = start_master()
    for roster in (("r" * 256, b""), ("r", bytes(4097))):
        with pytest.raises(InvalidRequestError, match="roster"):
            Member(master.address, roster=roster)
    members = [join(master, roster=("r", bytes(4096))) for _ in range(66)]
    assert len(members[-1].welcome.entries) == 64


def test_a_session_is_of_one_incarnation(start_master: Start, join: Join) -> None:
    master = start_master()
    first = join(master)
    with pytest.raises(InvalidRequestError):
        Member(master.address, session=first.id, incarnation=os.urandom(16))
    with pytest.raises(InvalidRequestError):
        Member(master.address, pb.NODE, session=first.id, incarnation=first.incarnation)


@pytest.mark.parametrize("member", [{"session": b"short"}, {"incarnation": b"short"}, {"host": "x" * 300}])
def test_a_hello_that_makes_no_sense_is_refused(start_master: Start, member: dict[str, str]) -> None:
    with pytest.raises(InvalidRequestError):
        Member(start_master().address, **member)  # type: ignore[arg-type]


def test_an_idle_session_lives(start_master: Start, join: Join) -> None:
    """M14: an idle client was reaped as dead because its heartbeat started with its first request."""
    master = start_master(session_timeout=1.0, heartbeat_interval=0.1)
    client = join(master)
    time.sleep(2.5)
    assert not client.ended
    assert client.pin(hashes(1)).statuses == bytes([pb.NOT_FOUND])


def test_a_silent_session_ends_and_its_pins_with_it(start_master: Start, join: Join) -> None:
    """M12: pins leaked by aborted requests until the hit rate was 0."""
    master = start_master(session_timeout=1.0, heartbeat_interval=0.1)
    join(master, pb.NODE, host="node-0").mount(MIB)
    other = join(master)
    chunks = hashes(3)
    other.put(chunks)
    for end in ("silence", "goodbye"):
        client = join(master)
        client.pin(chunks)
        assert other.remove(chunks) == bytes([pb.IN_USE] * 3)
        if end == "goodbye":
            client.goodbye()
        else:
            client.beats = False
        eventually(lambda: other.status()["index"]["pinned"] == 0, f"no pin after {end}")
        assert other.status()["pins"] == 0
        with pytest.raises(SessionUnknownError):
            call(other.pool.Pin, pb.PinRequest(session=client.id, namespace="ns", hashes=chunks))
    assert other.remove(chunks) == bytes(3)


def test_a_pin_is_its_sessions_own_and_ends_once(start_master: Start, join: Join) -> None:
    """M12: a double unpin freed someone else's."""
    master = start_master()
    join(master, pb.NODE, host="node-0").mount(MIB)
    first, second = join(master), join(master)
    chunks = hashes(2)
    first.put(chunks)
    pins = [first.pin(chunks).pin, first.pin(chunks).pin, second.pin(chunks).pin]
    assert len(set(pins)) == 3
    assert second.unpin(pins[0]) == 0
    assert first.unpin(pins[0]) == 2
    assert first.unpin(pins[0]) == 0
    assert first.remove(chunks) == bytes([pb.IN_USE] * 2)
    assert first.unpin(pins[1]) == 2
    assert first.remove(chunks) == bytes([pb.IN_USE] * 2), "the other session's pin"
    assert second.unpin(pins[2]) == 2
    assert first.status()["pins"] == 0
    assert first.remove(chunks) == bytes(2)
    assert first.pin(chunks).pin == 0


def test_space_of_a_write_that_ran_out_of_time_waits_for_the_fence(start_master: Start, join: Join) -> None:
    master = start_master(put_deadline=0.3)
    node = join(master, pb.NODE, host="node-0", answers=False)
    node.mount(MIB)
    writer, other = join(master), join(master)
    given = writer.start(hashes(17), 60_000)
    assert given.statuses == bytes(17)
    (fence,) = eventually(lambda: node.fences, "a fence")
    assert fence.incarnation == writer.incarnation
    assert writer.commit(given) == bytes([pb.NOT_OWNER] * 17)
    chunks = hashes(16)
    assert other.start(chunks, 60_000, wait_ms=100).statuses == bytes([pb.NO_SPACE] * 16)
    # It is asked for again, under the same number, until it is done.
    eventually(lambda: len(node.fences) > 1, "another one")
    assert {one.fence for one in node.fences} == {fence.fence}
    node.answer(fence)
    eventually(lambda: other.status()["index"]["condemned_bytes"] == 0, "nothing waits")
    assert other.put(chunks, 60_000) == bytes(16)


def test_what_is_given_up_after_a_fence_needs_another_one(start_master: Start, join: Join) -> None:
    master = start_master()
    node = join(master, pb.NODE, host="node-0", answers=False)
    node.mount(MIB)
    writer = join(master)
    first, second = writer.start(hashes(4), 60_000), writer.start(hashes(4), 60_000)
    assert writer.abort(first, settled=False) == bytes(4)
    (fence,) = eventually(lambda: node.fences, "a fence")
    # After the node may have carried out the first fence.
    assert writer.abort(second, settled=False) == bytes(4)
    node.answer(fence)
    again = eventually(lambda: [one for one in node.fences if one.fence != fence.fence], "another fence")
    assert writer.status()["index"]["condemned_bytes"] > 400_000
    node.answer(again[0])
    eventually(lambda: writer.status()["index"]["condemned_bytes"] == 0, "nothing waits")


def test_a_settled_abort_needs_no_fence(start_master: Start, join: Join) -> None:
    master = start_master()
    node = join(master, pb.NODE, host="node-0")
    node.mount(MIB)
    writer = join(master)
    given = writer.start(hashes(16), 60_000)
    assert writer.abort(given, settled=True) == bytes(16)
    assert writer.put(hashes(16), 60_000) == bytes(16)
    assert not node.fences


def test_a_dead_clients_writes_are_fenced_when_it_can_begin_no_more(start_master: Start, join: Join) -> None:
    master = start_master(put_begin=2.0)
    node = join(master, pb.NODE, host="node-0")
    node.mount(MIB)
    writer, other = join(master), join(master)
    began = time.monotonic()
    assert writer.start(hashes(16), 60_000).statuses == bytes(16)
    asked = time.monotonic()
    writer.goodbye()
    eventually(lambda: node.fences, "a fence")
    assert time.monotonic() - began >= 1.9, "it might have begun until then"
    assert asked
    eventually(lambda: other.status()["index"]["condemned_bytes"] == 0, "nothing waits")
    assert other.put(hashes(16), 60_000) == bytes(16)


def test_fences_reach_a_node_that_was_away(start_master: Start, join: Join) -> None:
    master = start_master(put_deadline=0.3)
    node = join(master, pb.NODE, host="node-0")
    node.mount(MIB)
    writer = join(master)
    node.vanish()
    writer.start(hashes(4), 60_000)
    eventually(lambda: writer.status()["fences_outstanding"] == 1, "a fence that waits")
    back = join(master, pb.NODE, host="node-0", session=node.id, incarnation=node.incarnation)
    eventually(lambda: back.fences, "the fence")
    eventually(lambda: writer.status()["index"]["condemned_bytes"] == 0, "nothing waits")


def test_a_node_that_ends_takes_its_chunks_with_it(start_master: Start, join: Join) -> None:
    master = start_master(session_timeout=1.0, heartbeat_interval=0.1)
    nodes = [join(master, pb.NODE, host=f"node-{number}") for number in range(3)]
    segments = [node.mount(MIB) for node in nodes]
    client = join(master)
    chunks = {}
    for number, segment in enumerate(segments):
        chunks[number] = hashes(4)
        assert client.put(chunks[number], avoid=[one for one in segments if one != segment]) == bytes(4)
    nodes[0].goodbye()
    nodes[1].vanish()
    assert call(nodes[2].pool.UnmountSegment, pb.UnmountSegmentRequest(session=nodes[2].id, segment=segments[2]))
    for some in chunks.values():
        eventually(lambda some=some: client.exists(some) == bytes([pb.NOT_FOUND] * 4), "chunks are gone")
    # No put fails while there is a node.
    assert nodes[2].mount(MIB, region="another") > max(segments)
    assert client.put(chunks[0]) == bytes(4)
    eventually(lambda: client.status()["index"]["chunks"] == 4, "lost chunks are tidied up")


def test_memory_of_a_lost_segment_comes_back_only_under_a_new_incarnation(start_master: Start, join: Join) -> None:
    master = start_master()
    node = join(master, pb.NODE, host="node-0")
    segment = node.mount(MIB)
    assert node.mount(MIB) == segment, "a reply may be lost, and the call made again"
    node.goodbye()
    again = join(master, pb.NODE, host="node-0", session=node.id, incarnation=node.incarnation)
    for number in (segment, 0, segment + 17):
        with pytest.raises(SegmentLostError, match="new"):
            again.mount(MIB, segment=number)
    fresh = join(master, pb.NODE, host="node-0")
    assert fresh.mount(MIB) == segment + 1


def test_mounts_that_make_no_sense_are_refused(start_master: Start, join: Join) -> None:
    master = start_master(segments_max=2)
    node, client = join(master, pb.NODE), join(master)
    for capacity in (0, 2**50):
        with pytest.raises(InvalidRequestError):
            node.mount(capacity)
    with pytest.raises(InvalidRequestError, match="client"):
        client.mount(MIB)
    segment = node.mount(MIB)
    with pytest.raises(InvalidRequestError, match="same memory"):
        node.mount(2 * MIB, segment=segment)
    other = join(master, pb.NODE)
    other.mount(MIB)
    with pytest.raises(InvalidRequestError, match="another session"):
        call(other.pool.UnmountSegment, pb.UnmountSegmentRequest(session=other.id, segment=segment))
    with pytest.raises(LimitError, match="segments_max"):
        node.mount(MIB, region="more")
    with pytest.raises(SegmentUnknownError):
        call(client.pool.Drain, pb.DrainRequest(segment=99))


def test_two_reporters_have_a_segment_quarantined_and_it_comes_back(start_master: Start, join: Join) -> None:
    """M5: one client's bad NIC had a healthy node thrown out for everybody."""
    master = start_master(quarantine=1.0)
    node = join(master, pb.NODE, host="node-0")
    segment = node.mount(MIB)
    first, second = join(master), join(master)
    chunks = hashes(4)
    first.put(chunks)
    for _ in range(5):
        first.report(segment)
    assert first.exists(chunks) == bytes(4), "one reporter is not enough, however often"
    second.report(segment)
    assert first.exists(chunks) == bytes([pb.NOT_FOUND] * 4)
    assert first.segments()[segment].state == pb.QUARANTINED
    assert first.start(hashes(1)).statuses == bytes([pb.NO_SPACE])
    eventually(lambda: first.exists(chunks) == bytes(4), "it is back")
    assert first.segments()[segment].state == pb.ACTIVE
    assert first.put(hashes(1)) == bytes(1)


def test_one_reporter_is_enough_when_the_node_is_away(start_master: Start, join: Join) -> None:
    master = start_master(quarantine=0.3)
    node = join(master, pb.NODE, host="node-0")
    segment = node.mount(MIB)
    client = join(master)
    chunks = hashes(4)
    client.put(chunks)
    node.vanish()

    def quarantined() -> bool:
        client.report(segment)
        return client.segments()[segment].state == pb.QUARANTINED

    eventually(quarantined, "quarantine")
    time.sleep(1.0)
    assert client.segments()[segment].state == pb.QUARANTINED, "its node is still away"
    join(master, pb.NODE, host="node-0", session=node.id, incarnation=node.incarnation)
    eventually(lambda: client.exists(chunks) == bytes(4), "it is back")


def test_sessions_are_bounded(start_master: Start, join: Join) -> None:
    master = start_master(sessions_max=3)
    members = [join(master) for _ in range(3)]
    with pytest.raises(LimitError, match="sessions_max"):
        Member(master.address)
    members[0].goodbye()

    def room() -> bool:
        try:
            join(master)
        except LimitError:
            return False
        return True

    eventually(room, "room for another session")
