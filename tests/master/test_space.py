# SPDX-License-Identifier: Apache-2.0
"""Space is never given to somebody while somebody else may still write or read there.

Clients put, give up, vanish, read with leases and remove at random; a node answers fences when it likes. For every
extent that is given, everything that was ever given in the same place must be over, by what the test itself has seen.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from master_testing import Given, Member, hashes

from moonpool.master import Master
from moonpool.proto import pool_pb2 as pb

Start = Callable[..., Master]
Join = Callable[..., Member]

DEADLINE = 0.4
BEGIN = 0.15
LEASE = 0.3


@dataclass
class Extent:
    """What was given once, and since when it may be given again, as far as is known here."""

    segment: int
    offset: int
    end: int
    generation: int
    chunk: bytes
    writer: bytes
    #: Its writer begins nothing from then on.
    begins_until: float
    #: It is given up from then on; a fence after that frees it.
    given_up: float
    settled: bool = False
    committed: bool = False
    read_until: float = 0.0


@dataclass
class World:
    """Everything that happened."""

    chance: random.Random
    node: Member
    clients: list[Member]
    extents: list[Extent] = field(default_factory=list)
    open_: list[tuple[Member, Given, list[Extent]]] = field(default_factory=list)
    #: Incarnation -> when it was last fenced.
    fenced: dict[bytes, float] = field(default_factory=dict)
    answered: int = 0

    def put(self) -> None:
        client = self.chance.choice(self.clients)
        chunks = hashes(self.chance.randrange(1, 5))
        length = self.chance.randrange(1, 20_000)
        sent = time.monotonic()
        given = client.start(chunks, length, wait_ms=self.chance.choice([0, 20]))
        now = time.monotonic()
        new = []
        for place, status in enumerate(given.statuses):
            assert status in (pb.OK, pb.NO_SPACE)
            if status == pb.OK:
                raw = given.extents[32 * place :][:32]
                generation, offset, size = (int.from_bytes(raw[at : at + 8], "little") for at in (0, 8, 16))
                assert size == length
                segment = int.from_bytes(raw[24:28], "little")
                extent = Extent(
                    segment,
                    offset,
                    offset + 64 + length,
                    generation,
                    chunks[32 * place :][:32],
                    client.incarnation,
                    sent + BEGIN,
                    sent + DEADLINE,
                )
                self.check(extent, now)
                new.append(extent)
        self.extents += new
        good = [place for place, status in enumerate(given.statuses) if status == pb.OK]
        some = Given(
            b"".join(extent.chunk for extent in new),
            bytes(len(new)),
            b"",
            b"".join(given.generations[8 * place :][:8] for place in good),
            0,
        )
        if new:
            self.open_.append((client, some, new))

    def check(self, new: Extent, now: float) -> None:
        for old in self.extents:
            if old.segment != new.segment or old.end <= new.offset or new.end <= old.offset:
                continue
            assert old.generation != new.generation
            if old.committed:
                located = self.clients[0].locate(old.chunk)
                generation = int.from_bytes(located.extents[:8], "little")
                assert located.statuses != bytes([pb.OK]) or generation != old.generation, "a chunk that is there"
            elif not old.settled:
                fenced = self.fenced.get(old.writer, 0.0)
                assert fenced >= min(old.begins_until, old.given_up), "its writer was not fenced"
                assert now >= old.given_up or fenced >= old.given_up, "its writer had not given up"
            assert now >= old.read_until, "a reader has a lease"
        self.extents = [
            old for old in self.extents if old.segment != new.segment or old.end <= new.offset or new.end <= old.offset
        ]

    def finish(self) -> None:
        """Commit or abort what was begun, or forget about it."""
        if not self.open_:
            return
        client, given, extents = self.open_.pop(self.chance.randrange(len(self.open_)))
        what = self.chance.random()
        if what < 0.6:
            for extent, status in zip(extents, client.commit(given), strict=True):
                assert status in (pb.OK, pb.NOT_OWNER)
                extent.committed = status == pb.OK
        elif what < 0.9:
            settled = self.chance.random() < 0.5
            asked = time.monotonic()
            for extent, status in zip(extents, client.abort(given, settled), strict=True):
                extent.settled = settled and status == pb.OK
                extent.given_up = min(extent.given_up, asked)
                extent.begins_until = min(extent.begins_until, asked)

    def read(self) -> None:
        committed = [extent for extent in self.extents if extent.committed]
        if committed:
            extent = self.chance.choice(committed)
            sent = time.monotonic()
            located = self.clients[0].locate(extent.chunk, lease_ms=round(LEASE * 1000))
            if located.statuses == bytes([pb.OK]):
                extent.read_until = sent + located.lease_ms / 1000

    def remove(self) -> None:
        committed = [extent for extent in self.extents if extent.committed]
        if committed:
            self.clients[0].remove(self.chance.choice(committed).chunk)

    def answer(self) -> None:
        """Carry out the fences that have come."""
        fences, self.node.fences = self.node.fences, []
        for fence in fences:
            self.fenced[fence.incarnation] = time.monotonic()
            self.answered += 1
            self.node.answer(fence)

    def replace(self, join: Callable[[], Member]) -> None:
        place = self.chance.randrange(1, len(self.clients))
        gone = self.clients[place]
        asked = time.monotonic()
        if self.chance.random() < 0.7:
            gone.goodbye()
        else:
            gone.vanish()
        self.open_ = [entry for entry in self.open_ if entry[0] is not gone]
        for extent in self.extents:
            if extent.writer == gone.incarnation:
                extent.given_up = min(extent.given_up, asked)
        self.clients[place] = join()


@pytest.mark.parametrize("seed", range(3))
def test_space_is_given_when_nobody_else_can_use_it(start_master: Start, join: Join, seed: int) -> None:
    master = start_master(
        put_deadline=DEADLINE, put_begin=BEGIN, session_timeout=1.5, heartbeat_interval=0.1, lease_max=LEASE
    )
    node = join(master, pb.NODE, host="node-0", answers=False)
    node.mount(300_000)
    node.mount(200_000, region="another")
    world = World(random.Random(seed), node, [join(master) for _ in range(4)])
    for _ in range(600):
        what = world.chance.random()
        if what < 0.45:
            world.put()
        elif what < 0.75:
            world.finish()
        elif what < 0.85:
            world.read()
        elif what < 0.88:
            world.remove()
        elif what < 0.98:
            world.answer()
        else:
            world.replace(lambda: join(master))
    assert world.answered > 5
    status = world.clients[0].status()
    assert status["healthy"]
    assert not any(loop["failures"] for loop in status["loops"].values())
