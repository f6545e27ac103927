# SPDX-License-Identifier: Apache-2.0
"""Chunks through the calls of a real master on loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from master_testing import Member, call, eventually, hashes

from moonpool.master import Master
from moonpool.master.errors import InvalidRequestError, SegmentUnknownError, SessionUnknownError
from moonpool.proto import pool_pb2 as pb

Start = Callable[..., Master]
Join = Callable[..., Member]
MIB = 1 << 20


@pytest.fixture
def pool(start_master: Start, join: Join) -> tuple[Member, Member]:
    """A client, and a node with one segment of 1 MiB."""
    master = start_master()
    node = join(master, pb.NODE, host="node-0")
    node.mount(MIB)
    return join(master), node


def test_a_chunk_is_there_once_it_is_committed(pool: tuple[Member, Member]) -> None:
    client, _ = pool
    chunks = hashes(5)
    given = client.start(chunks)
    assert given.statuses == bytes([pb.OK] * 5)
    assert client.exists(chunks) == bytes([pb.NOT_FOUND] * 5)
    assert client.locate(chunks).statuses == bytes([pb.NOT_FOUND] * 5)
    assert client.commit(given) == bytes([pb.OK] * 5)
    assert client.exists(chunks) == bytes([pb.OK] * 5)
    located = client.locate(chunks, lease_ms=500)
    assert located.statuses == bytes([pb.OK] * 5)
    assert located.extents == given.extents
    assert (located.replicas, located.lease_ms) == (1, 500)
    assert client.exists(chunks, namespace="another") == bytes([pb.NOT_FOUND] * 5)


def test_a_prefix_is_matched_up_to_the_first_gap(pool: tuple[Member, Member]) -> None:
    client, _ = pool
    chain = hashes(6)
    client.put(chain[:96], parents=bytes(32))
    client.put(chain[128:], parents=chain[96:128])
    reply = call(client.pool.MatchPrefix, pb.MatchPrefixRequest(namespace="ns", hashes=chain, lease_ms=10**9))
    assert reply.matched == 3
    assert reply.lease_ms == 5_000, "a lease is no longer than the master's longest"
    # The put that closes the gap, and finds what is behind it, joins the two.
    client.put(chain[96:], parents=chain[64:96])
    removed = call(client.pool.RemovePrefix, pb.RemovePrefixRequest(namespace="ns", hash=chain[32:64]))
    assert (removed.removed, removed.in_use) == (5, 0)
    assert client.exists(chain) == bytes([pb.OK] + [pb.NOT_FOUND] * 5)


def test_a_put_under_a_committed_key_says_so(pool: tuple[Member, Member], join: Join) -> None:
    """M4: a put of another value under a committed key returned success and was dropped."""
    client, _ = pool
    chunk = hashes(1)
    assert client.put(chunk, 1000) == bytes([pb.OK])
    assert client.put(chunk, 1000) == bytes([pb.ALREADY])
    assert client.put(chunk, 1001) == bytes([pb.CONFLICT])


def test_somebody_who_is_writing_is_named(pool: tuple[Member, Member], join: Join, start_master: Start) -> None:
    client, _ = pool
    other = Member(client.channel_address, pb.CLIENT)
    chunk = hashes(1)
    given = client.start(chunk)
    assert other.start(chunk).statuses == bytes([pb.WRITING])
    assert other.commit(given) == bytes([pb.NOT_OWNER])
    assert client.abort(given, settled=True) == bytes([pb.OK])
    assert client.commit(given) == bytes([pb.NOT_OWNER])
    assert other.put(chunk) == bytes([pb.OK])
    other.vanish()


def test_probes_extend_nothing(start_master: Start, join: Join) -> None:
    """M1: existence probes renewed the leases of everything, and nothing could be evicted."""
    master = start_master(high_watermark=1.0, low_watermark=1.0)
    join(master, pb.NODE, host="node-0").mount(MIB)
    client = join(master)
    old = hashes(15)
    assert client.put(old, 60_000) == bytes(15)
    for _ in range(50):
        assert client.exists(old) == bytes(15)
    new = hashes(15)
    assert client.put(new, 60_000, wait_ms=2000) == bytes(15)
    assert client.exists(new) == bytes(15)


def test_a_put_waits_for_room_that_a_lease_holds(start_master: Start, join: Join) -> None:
    """M2: a put with no room failed at once although room would have come."""
    master = start_master(put_begin=8.0)
    join(master, pb.NODE, host="node-0").mount(MIB)
    client = join(master)
    old = hashes(15)
    client.put(old, 60_000)
    client.locate(old, lease_ms=500)
    refused = client.start(hashes(5), 60_000)
    assert bytes([pb.NO_SPACE]) in refused.statuses
    assert refused.retry_after_ms > 0
    assert client.put(hashes(5), 60_000, wait_ms=4000) == bytes(5)


def test_a_put_that_finds_no_room_ends_when_its_wait_does(pool: tuple[Member, Member]) -> None:
    client, _ = pool
    old = hashes(15)
    client.put(old, 60_000)
    assert client.pin(old).statuses == bytes(15)
    began = time.monotonic()
    refused = client.start(hashes(5), 60_000, wait_ms=50)
    assert refused.statuses.count(pb.NO_SPACE) >= 3
    assert refused.retry_after_ms > 0
    assert time.monotonic() - began < 30
    assert client.exists(old) == bytes(15)


def test_writing_many_times_the_capacity_from_many_clients_is_no_error(start_master: Start, join: Join) -> None:
    master = start_master(put_begin=20.0)
    join(master, pb.NODE, host="node-0").mount(MIB)
    clients = [join(master) for _ in range(4)]
    wrong: list[bytes] = []

    def write(client: Member) -> None:
        for _ in range(8):
            statuses = client.put(hashes(8), 15_000, wait_ms=9000)
            if statuses != bytes(8):
                wrong.append(statuses)

    threads = [threading.Thread(target=write, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert clients[0].status()["index"]["used_bytes"] <= MIB


def test_without_a_segment_that_could_take_it_nothing_is_evicted(pool: tuple[Member, Member]) -> None:
    client, node = pool
    old = hashes(10)
    client.put(old, 60_000)
    (segment,) = node.segments()
    assert client.start(hashes(10), 60_000, avoid=[segment]).statuses == bytes([pb.NO_SPACE] * 10)
    assert call(client.pool.Drain, pb.DrainRequest(segment=segment)).chunks == 10
    assert client.start(hashes(10), 60_000, wait_ms=100).statuses == bytes([pb.NO_SPACE] * 10)
    assert client.exists(old) == bytes(10), "what is there is still read"
    call(client.pool.Drain, pb.DrainRequest(segment=segment, undo=True))
    assert client.put(hashes(1), 60_000) == bytes(1)


def test_eviction_keeps_below_the_watermark(start_master: Start, join: Join) -> None:
    master = start_master(high_watermark=0.8, low_watermark=0.5)
    join(master, pb.NODE, host="node-0").mount(MIB)
    client = join(master)
    client.put(hashes(16), 60_000)

    def used() -> int:
        number: int = client.status()["index"]["used_bytes"]
        return number

    eventually(lambda: used() <= MIB // 2, "used bytes at the low watermark")
    assert used() > MIB // 4, "but not much more than that"


def test_replicas_are_on_different_hosts_and_a_part_of_them_will_do(start_master: Start, join: Join) -> None:
    master = start_master()
    segments = {join(master, pb.NODE, host=f"node-{number}").mount(MIB) for number in range(3)}
    client = join(master)
    chunks = hashes(4)
    given = client.start(chunks, replicas=2)
    assert given.statuses == bytes(4)
    used = [
        int.from_bytes(given.extents[place + 24 : place + 28], "little") for place in range(0, len(given.extents), 32)
    ]
    assert set(used) <= segments
    assert all(used[place] != used[place + 1] for place in range(0, 8, 2))
    assert client.commit(given, written=bytes([1, 2, 3, 3])) == bytes(4)
    located = client.locate(chunks)
    assert located.statuses == bytes(4)


def test_removal_is_at_once_and_pins_prevent_it(pool: tuple[Member, Member]) -> None:
    client, _ = pool
    chunks = hashes(3)
    client.put(chunks)
    pin = client.pin(chunks[:32])
    assert client.remove(chunks + hashes(1)) == bytes([pb.IN_USE, pb.OK, pb.OK, pb.NOT_FOUND])
    assert client.exists(chunks) == bytes([pb.OK, pb.NOT_FOUND, pb.NOT_FOUND])
    assert client.unpin(pin.pin) == 1
    generation = client.locate(chunks[:32]).extents[:8]
    for wrong in (bytes(8), generation[:7] + bytes([generation[7] ^ 1])):
        request = pb.RemoveRequest(namespace="ns", hashes=chunks[:32], generations=wrong)
        assert call(client.pool.Remove, request).statuses == bytes([pb.NOT_FOUND])
    request = pb.RemoveRequest(namespace="ns", hashes=chunks[:32], generations=generation)
    assert call(client.pool.Remove, request).statuses == bytes([pb.OK])
    with pytest.raises(InvalidRequestError):
        call(client.pool.Remove, pb.RemoveRequest(namespace="ns", hashes=chunks, generations=generation))


def test_batches_are_one_call_of_the_index(pool: tuple[Member, Member]) -> None:
    """M11: a batch call was N single calls inside. Here one transaction, and one call, has 2,000 chunks."""
    client, _ = pool
    chunks = hashes(2000)
    before = client.status()["store"]
    assert client.put(chunks, 100) == bytes(2000)
    after = client.status()["store"]
    assert after["writes"] - before["writes"] == 2000
    # One for who writes, one for the namespace, one for the commit.
    assert after["transactions"] - before["transactions"] <= 3


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Exists", pb.ExistsRequest(hashes=b"x" * 33)),
        ("Locate", pb.LocateRequest(hashes=b"x")),
        ("MatchPrefix", pb.MatchPrefixRequest(hashes=b"x" * 31)),
        ("Remove", pb.RemoveRequest(hashes=b"x")),
        ("RemovePrefix", pb.RemovePrefixRequest(hash=b"x")),
        ("Exists", pb.ExistsRequest(hashes=bytes(32 * 65_537))),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    pool: tuple[Member, Member], method: str, request_: pb.ExistsRequest
) -> None:
    client, _ = pool
    with pytest.raises(InvalidRequestError):
        call(getattr(client.pool, method), request_)


@pytest.mark.parametrize(
    "more",
    [
        {"lengths": b""},
        {"lengths": bytes(9)},
        {"parents": bytes(31)},
        {"hashes": bytes(33)},
        {"replicas": 2**32 - 1},
        {"shards": 2**32 - 1},
        {"spared": bytes(15)},
        {"spared": bytes(16 * 4097)},
        {"namespace": ""},
        {"namespace": "x" * 256},
    ],
    ids=lambda more: next(iter(more)),
)
def test_a_put_that_makes_no_sense_is_refused(pool: tuple[Member, Member], more: dict[str, object]) -> None:
    client, _ = pool
    fields = {"session": client.id, "namespace": "ns", "hashes": hashes(2), "lengths": (100).to_bytes(8, "little")}
    with pytest.raises(InvalidRequestError):
        call(client.pool.PutStart, pb.PutStartRequest(**{**fields, **more}))  # type: ignore[arg-type]


def test_what_a_client_gets_wrong_is_its_own_error(pool: tuple[Member, Member]) -> None:
    """M8: client races killed the master: an assertion on client input."""
    client, _ = pool
    chunks = hashes(4)
    given = client.start(chunks)
    assert client.start(chunks).statuses == bytes([pb.WRITING] * 4)
    twice = pb.PutStartRequest(
        session=client.id, namespace="ns", hashes=hashes(1) * 3, lengths=(100).to_bytes(8, "little")
    )
    assert call(client.pool.PutStart, twice).statuses.count(pb.OK) == 1
    given.generations = bytes(32)
    assert client.commit(given) == bytes([pb.NOT_OWNER] * 4)
    assert client.abort(given, settled=False) == bytes([pb.NOT_OWNER] * 4)
    statuses = client.start(hashes(1), 0).statuses + client.start(hashes(1), 2**63).statuses
    assert statuses == bytes([pb.INVALID, pb.TOO_LARGE])
    assert client.start(hashes(1), shard=5, shards=2).statuses == bytes([pb.INVALID])
    for session in (b"", bytes(16), b"x" * 1000):
        request = pb.PutStartRequest(session=session, namespace="ns", hashes=chunks, lengths=bytes(8))
        with pytest.raises(SessionUnknownError):
            call(client.pool.PutStart, request)
    with pytest.raises(SegmentUnknownError):
        call(client.pool.Move, pb.MoveRequest(namespace="ns", hashes=chunks, segment=9))
    assert client.put(hashes(1)) == bytes(1)


def test_puts_of_the_same_chunks_at_once_have_one_winner_each(pool: tuple[Member, Member], join: Join) -> None:
    """M8."""
    client, _ = pool
    clients = [join(client.channel_address) for _ in range(6)]
    chunks = hashes(64)
    committed: list[bytes] = []

    def race(one: Member) -> None:
        committed.append(one.put(chunks, 200))

    threads = [threading.Thread(target=race, args=(one,)) for one in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place in range(64):
        assert sorted({statuses[place] for statuses in committed} - {pb.ALREADY, pb.WRITING}) == [pb.OK]
        assert [statuses[place] for statuses in committed].count(pb.OK) == 1
    assert client.exists(chunks) == bytes(64)


def test_at_the_cap_puts_are_refused_and_the_master_lives(start_master: Start, join: Join) -> None:
    """M9: the master ran out of memory at some tens of millions of chunks."""
    master = start_master(chunks_max=100)
    join(master, pb.NODE, host="node-0").mount(64 * MIB)
    client = join(master)
    statuses = client.put(hashes(150), 100)
    assert statuses.count(pb.OK) <= 100
    assert set(statuses) == {pb.OK, pb.CHUNKS_MAX}
    index = client.status()["index"]
    assert index["chunks"] <= index["chunks_max"] == 100
    assert index["memory_bytes"] > 0


def test_what_a_caller_that_went_away_was_given_is_free_at_once(start_master: Start, join: Join) -> None:
    master = start_master(put_begin=20.0)
    node = join(master, pb.NODE, host="node-0")
    node.mount(MIB)
    client = join(master)
    chunks = hashes(20)
    request = pb.PutStartRequest(
        session=client.id, namespace="ns", hashes=chunks, lengths=(60_000).to_bytes(8, "little"), wait_ms=10_000
    )
    waiting = client.pool.PutStart.future(request, timeout=60)
    eventually(lambda: client.status()["counts"]["put_waits_calls"] == 1, "a put that waits")
    assert client.status()["index"]["writing"] == 17
    waiting.cancel()
    eventually(lambda: client.status()["index"]["writing"] == 0, "nothing is being written")
    assert client.put(chunks[: 32 * 17], 60_000) == bytes(17)
    assert not node.fences


def test_no_lease_ends_before_the_reader_thinks_so(start_master: Start, join: Join) -> None:
    """The master's clock has whole milliseconds; what is granted in the middle of one must not lose the rest."""
    master = start_master(high_watermark=1.0, low_watermark=1.0)
    join(master, pb.NODE).mount(1088)
    client = join(master)
    given = client.start(hashes(1))
    for _ in range(100):
        assert client.commit(given) == bytes(1)
        asked = time.monotonic()
        assert client.locate(given.hashes, lease_ms=2).statuses == bytes(1)
        chunk = hashes(1)
        while (given := client.start(chunk)).statuses != bytes(1):
            pass
        assert time.monotonic() - asked >= 0.002


def test_shards_count_towards_the_cap_and_have_one_of_their_own(start_master: Start, join: Join) -> None:
    master = start_master(chunks_max=64, shards_max=16)
    join(master, pb.NODE).mount(1 << 20)
    client = join(master)
    given = client.start(hashes(5), shards=16)
    assert given.statuses == bytes([pb.OK] * 4 + [pb.CHUNKS_MAX])
    assert client.start(given.hashes[:32], shards=16, shard=1).statuses == bytes(1), "its memory is taken already"
    with pytest.raises(InvalidRequestError, match="shards_max"):
        client.start(hashes(1), shards=17)


def test_a_batch_that_is_too_large_names_the_setting(start_master: Start, join: Join) -> None:
    client = join(start_master(batch_max=100))
    with pytest.raises(InvalidRequestError, match=r"at most 100.*batch_max"):
        client.exists(hashes(101))
    with pytest.raises(InvalidRequestError, match="batch_max"):
        client.exists(hashes(100_000))
