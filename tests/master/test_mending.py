# SPDX-License-Identifier: Apache-2.0
"""Copies that a client reports as spoilt: what the master asks nodes, believes, and makes durable."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
from master_testing import Member, eventually, hashes

from moonpool.master import Master
from moonpool.master.errors import InvalidRequestError, StoreUnavailableError
from moonpool.proto import pool_pb2 as pb

Start = Callable[..., Master]
Join = Callable[..., Member]
MIB = 1 << 20


class Pool:
    """Two nodes, and chunks of which each has a copy."""

    def __init__(self, start_master: Start, join: Join, tmp_path: Path, **options: object) -> None:
        self._start, self._join = start_master, join
        self._store = f"sqlite:{tmp_path / 'master.db'}"
        self.master = start_master(store=self._store, **options)
        self.client = join(self.master)
        self.nodes = {number: join(self.master, pb.NODE, host=f"node-{number}") for number in (1, 2)}
        for number, node in self.nodes.items():
            assert node.mount(MIB) == number
        self.chunks = hashes(4)
        assert not any(self.client.put(self.chunks, replicas=2))

    def copies(self) -> list[list[tuple[int, int]]]:
        """Segment and offset of the copies of each chunk that is there."""
        reply = self.client.locate(self.chunks)
        every = list(struct.iter_unpack("<QQQII", reply.extents))
        rows = [every[at : at + reply.replicas] for at in range(0, len(every), reply.replicas)]
        return [[(segment, offset) for _, offset, _, segment, _ in row if segment < 9] for row in rows]

    def report(self, segment: int = 1, age: int = 0, chunks: bytes = b"") -> None:
        reply = self.client.locate(self.chunks)
        given = [row[0] - age for row in struct.iter_unpack("<QQQII", reply.extents)][:: reply.replicas]
        self.client.report(
            segment, namespace="ns", hashes=chunks or self.chunks, generations=struct.pack("<4Q", *given)
        )

    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = self.client.status()["counts"]
        return counts

    def restart(self) -> None:
        for member in (self.client, *self.nodes.values()):
            member.vanish()
        self.master.close()
        self.master = self._start(store=self._store, lease_max=0.01)
        self.client = self._join(self.master)
        for number, node in self.nodes.items():
            back = self._join(self.master, pb.NODE, session=node.id, incarnation=node.incarnation)
            back.mount(MIB, segment=number)


@pytest.fixture
def pool(start_master: Start, join: Join, tmp_path: Path) -> Pool:
    return Pool(start_master, join, tmp_path, lease_max=0.01)


def test_what_its_node_finds_spoilt_is_replaced(pool: Pool) -> None:
    before = pool.copies()
    pool.nodes[1].looked = pb.SPOILT
    pool.report()
    eventually(lambda: pool.counts()["spoilt_replaced_items"] == 4, "that they are")
    look, copy = pool.nodes[1].copies
    assert (look.source.segment, look.segment) == (1, 1)
    assert (copy.source.segment, copy.segment) == (2, 1)
    looked = list(struct.iter_unpack("<QQQQII32s", look.extents))
    assert sorted((there, here) for _, there, here, *_ in looked) == sorted(
        (at, at) for ((_, at), _) in map(sorted, before)
    )
    after = pool.copies()
    for old, new in zip(before, after, strict=True):
        assert sorted(new)[1] == sorted(old)[1]
        assert sorted(new)[0] != sorted(old)[0]
    pool.restart()
    eventually(lambda: pool.copies() == after, "all of that again")


def test_what_cannot_be_replaced_is_dropped(pool: Pool) -> None:
    pool.nodes[1].looked = pool.nodes[2].looked = pb.SPOILT
    for node in pool.nodes.values():
        node.copied = pb.NOT_MOVED
    pool.report()
    eventually(lambda: {len(row) for row in pool.copies()} == {1}, "one copy less")
    assert {segment for ((segment, _),) in pool.copies()} == {2}
    assert pool.client.segments()[1].used_bytes == 0
    pool.restart()
    eventually(lambda: {segment for row in pool.copies() for segment, _ in row} == {2}, "the good ones")
    assert pool.client.exists(pool.chunks) == bytes(4)


def test_a_chunk_without_a_good_copy_is_removed(pool: Pool) -> None:
    assert pool.client.pin(pool.chunks).pin
    for node in pool.nodes.values():
        node.looked = node.copied = pb.SPOILT
    pool.report()
    eventually(lambda: pool.client.exists(pool.chunks) == bytes([pb.NOT_FOUND] * 4), "that they are")
    eventually(lambda: pool.counts()["spoilt_lost_items"] == 4, "and counted")
    assert pool.counts()["spoilt_items"] == 8
    assert not any(segment.used_bytes for segment in pool.client.segments().values())
    pool.restart()
    assert pool.client.exists(pool.chunks) == bytes([pb.NOT_FOUND] * 4)


def test_a_client_that_is_wrong_costs_no_copy(pool: Pool) -> None:
    before = pool.copies()
    pool.report()
    eventually(lambda: pool.counts()["probes"], "that the segment is looked at")
    pool.nodes[1].answers = False
    pool.report()
    eventually(lambda: len(pool.nodes[1].copies) == 2, "a node that says nothing")
    assert pool.copies() == before
    assert pool.counts()["spoilt_items"] == 0
    assert pool.client.segments()[1].state == pb.ACTIVE
    began = time.monotonic()
    pool.master.close()
    assert time.monotonic() - began < 10, "it is not waited for"


def test_what_is_not_there_is_not_looked_at(pool: Pool) -> None:
    pool.report(age=1)
    pool.report(chunks=hashes(4))
    with pytest.raises(InvalidRequestError):
        pool.client.report(1, namespace="ns", hashes=pool.chunks, generations=b"short")
    pool.report()
    eventually(lambda: pool.nodes[1].copies, "the last one")
    assert len(pool.nodes[1].copies) == 1


def test_what_is_not_durable_has_not_happened(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Future[None]:
        failed: Future[None] = Future()
        failed.set_exception(StoreUnavailableError("the disk is full", retryable=True))
        return failed

    before = pool.copies()
    pool.nodes[1].looked = pb.SPOILT
    with monkeypatch.context() as patch:
        patch.setattr(pool.master.server.core.store, "apply", refuse)
        pool.report()
        eventually(lambda: pool.counts()["not_moved_items"] == 4, "that they cannot move")
        eventually(lambda: not pool.client.status()["index"]["moving"], "nor be dropped")
        assert pool.copies() == before
    pool.report()
    eventually(lambda: pool.counts()["spoilt_replaced_items"] == 4, "that they are replaced")
