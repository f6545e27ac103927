# SPDX-License-Identifier: Apache-2.0
"""A master in a process of its own that is killed with -9, and one that comes after it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from master_testing import Member, call, eventually, hashes

from moonpool.master.errors import SegmentLostError, SessionUnknownError
from moonpool.proto import pool_pb2 as pb
from moonpool.proto.errors import RemoteError

Join = Callable[..., Member]
MIB = 1 << 20
SECONDS = 60.0


class Process:
    """`moonpool master` with a store in a file."""

    def __init__(self, store: Path, **settings: str) -> None:
        reading, writing = os.pipe()
        environment = os.environ | {f"MOONPOOL_MASTER_{name.upper()}": value for name, value in settings.items()}
        command = [sys.executable, "-m", "moonpool.cli", "master", "--listen", "127.0.0.1:0", "--http", "none"]
        self.process = subprocess.Popen(
            [*command, "--store", f"sqlite:{store}", "--ready-fd", str(writing)],
            pass_fds=(writing,),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(writing)
        with os.fdopen(reading) as ready:
            self.address = ready.readline().strip()
        if not self.address:
            raise AssertionError(self.process.communicate(timeout=SECONDS))

    def end(self, number: int) -> tuple[int, str, str]:
        if self.process.poll() is None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, out, err


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def run_(**settings: str) -> Process:
        quick = {"heartbeat_interval": "0.2", "put_begin": "0.3", "lease_max": "0.5", "ramp_up": "0"}
        processes.append(Process(tmp_path / "master.db", **{**quick, **settings}))
        return processes[-1]

    yield run_
    for process in processes:
        process.end(signal.SIGKILL)


def test_every_committed_chunk_is_a_hit_again_once_its_node_is_back(run: Callable[..., Process], join: Join) -> None:
    """M6: master restarted: cached data orphaned and overwritten, or everything lost."""
    master = run()
    node = join(master.address, pb.NODE, host="node-0")
    segment = node.mount(64 * MIB)
    client = join(master.address)
    committed: list[bytes] = []
    halfway = threading.Event()

    def write() -> None:
        try:
            while True:
                chunks = hashes(64)
                if client.put(chunks, 1000) == bytes(64):
                    committed.append(chunks)
                if len(committed) == 20:
                    halfway.set()
        except RemoteError:
            # The master is gone, in the middle of whatever it was.
            halfway.set()

    writer = threading.Thread(target=write)
    writer.start()
    assert halfway.wait(SECONDS)
    old = client.header
    assert master.end(signal.SIGKILL)[0] == -signal.SIGKILL
    writer.join()
    chunks = b"".join(committed)
    count = len(chunks) // 32
    assert count >= 20 * 64

    master = run()
    client = join(master.address, session=client.id, incarnation=client.incarnation)
    assert client.header.cluster_id == old.cluster_id
    assert client.header.boot_id != old.boot_id
    assert client.header.epoch > old.epoch
    assert client.exists(chunks) == bytes([pb.NOT_FOUND] * count), "nobody knows yet whether the node lives"
    back = join(master.address, pb.NODE, host="node-0", session=node.id, incarnation=node.incarnation)
    assert back.mount(64 * MIB, segment=segment) == segment
    assert client.exists(chunks) == bytes(count)
    located = client.locate(chunks)
    assert located.statuses == bytes(count)
    # New chunks overlap none of them, and have generations that were never given.
    new = eventually(lambda: (given := client.start(hashes(64))).statuses == bytes(64) and given, "room")
    generations = [int.from_bytes(new.generations[place : place + 8], "little") >> 40 for place in range(0, 512, 8)]
    assert set(generations) == {client.header.epoch}
    places = [
        (int.from_bytes(extents[at + 8 : at + 16], "little"), int.from_bytes(extents[at + 16 : at + 24], "little") + 64)
        for extents in (located.extents, new.extents)
        for at in range(0, len(extents), 32)
    ]
    places.sort()
    assert all(offset + length <= after for (offset, length), (after, _) in itertools.pairwise(places))


def test_writers_of_before_are_fenced_before_the_segment_takes_new_chunks(
    run: Callable[..., Process], join: Join
) -> None:
    master = run()
    node = join(master.address, pb.NODE, host="node-0")
    segment = node.mount(MIB)
    writer = join(master.address)
    gone = join(master.address)
    gone.goodbye()
    assert writer.start(hashes(16), 60_000).statuses == bytes(16)
    master.end(signal.SIGKILL)

    master = run(lease_max="0.1")  # so that it is the fences that are waited for
    client = join(master.address)
    back = join(master.address, pb.NODE, host="node-0", incarnation=node.incarnation, answers=False)
    back.mount(MIB, segment=segment)
    # They come one by one.
    eventually(lambda: writer.incarnation in {fence.incarnation for fence in back.fences}, "the writer's fence")
    # Of one that had said goodbye with nothing open nothing is left to fence, once the store has heard of that.
    assert {fence.incarnation for fence in back.fences} <= {writer.incarnation, gone.incarnation}
    assert client.start(hashes(1), wait_ms=100).statuses == bytes([pb.NO_SPACE])
    back.answers = True
    for fence in list(back.fences):
        back.answer(fence)
    eventually(lambda: client.put(hashes(1)) == bytes(1), "room")
    # The third master fences nobody of the first: only the client of the second.
    eventually(lambda: client.status()["writers_before_restart"] == 0, "they are forgotten")
    client.put(hashes(1))
    master.end(signal.SIGTERM)
    master = run()
    third = join(master.address, pb.NODE, host="node-0", incarnation=node.incarnation)
    third.mount(MIB, segment=segment)
    eventually(lambda: third.fences, "a fence")
    assert {fence.incarnation for fence in third.fences} == {client.incarnation}


def test_nothing_is_put_where_a_lease_of_before_may_run(run: Callable[..., Process], join: Join) -> None:
    """What was removed before the restart has left no record, and a reader that was told the place may still read."""
    seconds = 2.0
    master = run(lease_max=str(seconds))
    node = join(master.address, pb.NODE, host="node-0")
    segment = node.mount(MIB)
    client = join(master.address)
    chunks = hashes(4)
    client.put(chunks)
    begin = time.monotonic()
    assert client.locate(chunks, lease_ms=60_000).lease_ms == seconds * 1000
    assert client.remove(chunks) == bytes(4)
    client.goodbye()  # so that there is no writer of before either
    master.end(signal.SIGTERM)

    master = run(lease_max=str(seconds))
    client = join(master.address)
    join(master.address, pb.NODE, host="node-0", incarnation=node.incarnation).mount(MIB, segment=segment)
    given = client.start(hashes(1))
    assert given.retry_after_ms or not any(given.statuses)
    eventually(lambda: client.put(hashes(1)) == bytes(1), "room")
    assert time.monotonic() - begin >= seconds


def test_a_segment_that_does_not_come_back_is_lost(run: Callable[..., Process], join: Join) -> None:
    master = run()
    node = join(master.address, pb.NODE, host="node-0")
    segment = node.mount(MIB)
    client = join(master.address)
    client.put(hashes(4))
    master.end(signal.SIGKILL)

    master = run(segment_grace="0.5s")
    client = join(master.address)
    eventually(lambda: client.status()["index"]["chunks"] == 0, "its chunks are gone")
    late = join(master.address, pb.NODE, host="node-0", incarnation=node.incarnation)
    with pytest.raises(SegmentLostError):
        late.mount(MIB, segment=segment)
    fresh = join(master.address, pb.NODE, host="node-0")
    assert fresh.mount(MIB) > segment


def test_pins_are_asserted_again(run: Callable[..., Process], join: Join) -> None:
    master = run()
    node = join(master.address, pb.NODE, host="node-0")
    segment = node.mount(MIB)
    client = join(master.address)
    chunks = hashes(3)
    client.put(chunks)
    pin = client.pin(chunks).pin
    master.end(signal.SIGKILL)

    master = run()
    join(master.address, pb.NODE, host="node-0", incarnation=node.incarnation).mount(MIB, segment=segment)
    other = join(master.address)
    with pytest.raises(SessionUnknownError):
        call(other.pool.Unpin, pb.UnpinRequest(session=client.id, pin=pin))
    held = (pb.HeldPin(pin=pin, namespace="ns", hashes=chunks),)
    back = join(master.address, session=client.id, incarnation=client.incarnation, pins=held)
    assert other.remove(chunks) == bytes([pb.IN_USE] * 3)
    assert back.unpin(pin) == 3


def test_removals_and_draining_outlive_a_restart(run: Callable[..., Process], join: Join) -> None:
    master = run()
    node = join(master.address, pb.NODE, host="node-0")
    segment = node.mount(MIB)
    client = join(master.address)
    chunks = hashes(4)
    client.put(chunks)
    client.remove(chunks[:64])
    call(client.pool.Drain, pb.DrainRequest(segment=segment))
    master.end(signal.SIGKILL)

    master = run()
    client = join(master.address)
    # Who waits for 0 before the node is stopped has to wait on.
    assert client.drain(segment).chunks == client.segments()[segment].chunks == 2
    assert client.segments()[segment].away
    join(master.address, pb.NODE, host="node-0", incarnation=node.incarnation).mount(MIB, segment=segment)
    assert client.exists(chunks) == bytes([pb.NOT_FOUND, pb.NOT_FOUND, pb.OK, pb.OK])
    assert client.drain(segment).chunks == client.segments()[segment].chunks == 2
    assert client.segments()[segment].state == pb.DRAINING


def test_moves_that_are_not_durable_have_not_happened(run: Callable[..., Process], join: Join) -> None:
    """The master is killed while a node copies: what is durable counts, and the room of the rest is free."""
    master = run()
    old = join(master.address, pb.NODE, host="old")
    new = join(master.address, pb.NODE, host="new", answers=False)
    assert [old.mount(MIB), new.mount(MIB)] == [1, 2]
    client = join(master.address)
    moved, under_way = hashes(3), hashes(3)
    assert not any(client.put(moved + under_way, avoid=[2]))
    for chunks in (moved, under_way):
        assert client.move(chunks, 2, wait_ms=50) == bytes([pb.WRITING] * 3)
        if chunks == moved:
            new.copy_done(eventually(lambda: new.copies, "the copy")[0])
            eventually(lambda: client.where(moved) == [2] * 3, "the moves")
    late = eventually(lambda: len(new.copies) == 2 and new.copies[1], "the second copy")
    master.end(signal.SIGKILL)

    master = run()
    client = join(master.address)
    new = join(master.address, pb.NODE, host="new", incarnation=new.incarnation)
    assert new.mount(MIB, segment=2) == 2
    assert join(master.address, pb.NODE, host="old", incarnation=old.incarnation).mount(MIB, segment=1) == 1
    new.copy_done(late)  # it knows nothing of that one
    assert client.where(moved + under_way) == [2] * 3 + [1] * 3
    assert client.segments()[2].chunks == 3
    # Moves begin again when the readers of before are through.
    assert eventually(lambda: client.move(under_way, 2) == bytes([pb.ALREADY] * 3), "the moves")


def test_a_drain_goes_on_after_a_restart(run: Callable[..., Process], join: Join) -> None:
    master = run(drain_rate=str(20_000))
    old, new = (join(master.address, pb.NODE, host=host) for host in ("old", "new"))
    assert [old.mount(MIB), new.mount(MIB)] == [1, 2]
    client = join(master.address)
    chunks = hashes(40)
    assert not any(client.put(chunks, 1000, avoid=[2]))
    call(client.pool.Drain, pb.DrainRequest(segment=1))
    eventually(lambda: client.segments()[1].chunks < 40, "a beginning")
    master.end(signal.SIGKILL)

    master = run()
    client = join(master.address)
    for node, number in ((old, 1), (new, 2)):
        join(master.address, pb.NODE, host=f"{number}", incarnation=node.incarnation).mount(MIB, segment=number)
    eventually(lambda: client.segments()[1].chunks == 0, "an empty segment")
    assert client.where(chunks) == [2] * 40


def test_sigterm_ends_it_in_good_order(run: Callable[..., Process], join: Join) -> None:
    master = run()
    client = join(master.address)
    status, out, err = master.end(signal.SIGTERM)
    assert status == 0
    assert out == f"moonpool master: serving on {master.address}\n"
    assert not err
    eventually(lambda: client.ended, "the end of the stream")


def test_a_second_master_on_the_same_store_says_what_is_wrong(run: Callable[..., Process], tmp_path: Path) -> None:
    run()
    command = [sys.executable, "-m", "moonpool.cli", "master", "--listen", "127.0.0.1:0", "--http", "none"]
    second = subprocess.run(
        [*command, "--store", f"sqlite:{tmp_path / 'master.db'}"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert second.returncode == 3
    assert "another process has it open" in second.stderr
    assert "Traceback" not in second.stderr


def test_nothing_is_removed_before_holders_of_pins_had_time_to_come_back(
    run: Callable[..., Process], join: Join
) -> None:
    master = run(session_timeout="4")
    node = join(master.address, pb.NODE, host="node-0")
    segment = node.mount(MIB)
    holder, gone = join(master.address), join(master.address)
    chunks = hashes(3)
    holder.put(chunks)
    pin = holder.pin(chunks).pin
    assert gone.pin(hashes(1) + chunks).pin
    master.end(signal.SIGKILL)

    master = run(session_timeout="4")
    join(master.address, pb.NODE, host="node-0", incarnation=node.incarnation).mount(MIB, segment=segment)
    other = join(master.address)
    assert other.remove(chunks + hashes(1)) == bytes([pb.IN_USE] * 3 + [pb.NOT_FOUND]), "they may be pinned"
    lost = hashes(1)
    held = (pb.HeldPin(pin=pin, namespace="ns", hashes=chunks[:32]), pb.HeldPin(pin=9, namespace="ns", hashes=lost))
    back = join(master.address, session=holder.id, incarnation=holder.incarnation, pins=held)
    assert list(back.welcome.lost_pins) == [9]
    assert other.remove(chunks) == bytes([pb.IN_USE] * 3), "the other one may hold pins too"
    # It never comes back, and its time is over.
    removed = call(other.pool.RemovePrefix, pb.RemovePrefixRequest(namespace="ns", hash=chunks[32:64]))
    assert removed.removed == 1
    assert other.remove(chunks) == bytes([pb.IN_USE, pb.NOT_FOUND, pb.OK])
    assert gone.ended


def test_when_all_are_back_removals_do_not_wait(run: Callable[..., Process], join: Join) -> None:
    master = run(session_timeout="60")
    node = join(master.address, pb.NODE, host="node-0")
    segment = node.mount(MIB)
    client = join(master.address)
    chunks = hashes(3)
    client.put(chunks)
    master.end(signal.SIGKILL)

    master = run(session_timeout="60")
    join(master.address, pb.NODE, host="node-0", incarnation=node.incarnation).mount(MIB, segment=segment)
    back = join(master.address, session=client.id, incarnation=client.incarnation)
    assert back.remove(chunks) == bytes(3)
