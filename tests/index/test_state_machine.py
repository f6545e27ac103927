# SPDX-License-Identifier: Apache-2.0
"""The index and the model of it, through the same random calls, publications that fail, and restarts."""

from __future__ import annotations

import random
import struct

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from index.invariants import AtAnyTime
from index.model import Model
from index.model_parts import HEADER_BYTES, Extent, Key, Row, Segment, Shard, Status, size_of
from index.packing import (
    hash_of,
    pack_records,
    statuses_of,
    u32s,
    u64s,
    unpack_extents,
    unpack_keys,
    unpack_mends,
    unpack_moves,
    unpack_pairs,
    unpack_records,
    unpack_u32s,
)

from moonpool._index import EXTENT_BYTES, NO_SEGMENT, ChunkIndex

CHUNKS_MAX = 12
NO_HASH = bytes(32)
HASHES = [hash_of(number) for number in range(7)]

spaces = st.sampled_from([1, 1, 1, 2])
batches = st.lists(st.sampled_from(HASHES), min_size=1, max_size=6)
owners = st.integers(1, 3)
lengths = st.sampled_from([64, 64, 64, 65, 500, 500, 1000, 4000, 9000, 0])
times = st.integers(0, 30)


class IndexAgainstModel(AtAnyTime):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000
        self.epoch = 1
        self.next_segment = 1
        self.lost: list[int] = []
        self.rows: dict[int, tuple[bytes, Row]] = {}  # what is durable
        self.commits: list[list[tuple[int, bytes, Row]]] = []  # what waits for that
        self.moves: list[int] = []  # whose bytes are copied
        self.moved: list[tuple[list[int], list[tuple[int, bytes, Row]]]] = []  # whose records wait to be durable
        self.started: list[tuple[int, Key, int, int]] = []  # owner, key, shard, generation
        self.deletes: list[int] = []  # slots whose removal is not durable yet

    @initialize(seed=st.integers(0, 2**64 - 1))
    def begin(self, seed: int) -> None:
        self.seed = seed
        self.index = ChunkIndex(policy="lru", chunks_max=CHUNKS_MAX, epoch=1, seed=seed)
        self.model = Model(CHUNKS_MAX, 1)
        for host in (1, 2):
            self.add_segment(host, 150, 0)

    # ---------------------------------------------------------------- segments

    @precondition(lambda self: len(self.model.segments) < 5)
    @rule(host=st.integers(1, 3), units=st.integers(1, 400), ramp=st.integers(0, 50))
    def add_segment(self, host: int, units: int, ramp: int) -> None:
        number, self.next_segment = self.next_segment, self.next_segment + 1
        self.index.add_segment(number, units * 64, host, ramp, self.now)
        self.model.segments[number] = Segment(number, units * 64, host)

    @precondition(lambda self: self.model.segments)
    @rule(data=st.data(), writable=st.booleans(), readable=st.booleans())
    def set_segment(self, data: st.DataObject, writable: bool, readable: bool) -> None:
        segment = data.draw(st.sampled_from(list(self.model.segments.values())))
        self.index.set_segment(segment.number, writable=writable, readable=readable)
        segment.writable, segment.readable = writable, readable

    @precondition(lambda self: self.model.segments)
    @rule(data=st.data())
    def drop_segment(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(list(self.model.segments)))
        self.index.drop_segment(number)
        self.model.drop_segment(number)
        self.lost.append(number)

    @rule(count=st.integers(1, 20))
    def sweep(self, count: int) -> None:
        slots, complete = self.index.sweep(count)
        assert (set(unpack_u32s(slots)), complete) == self.model.sweep(count)
        self.deletes += unpack_u32s(slots)

    @precondition(lambda self: self.model.segments)
    @rule(data=st.data())
    def list_chunks_in(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(list(self.model.segments)))
        listed = unpack_keys(self.index.chunks_in(number, 100))
        expected = [
            key
            for key, chunk in self.model.chunks.items()
            if self.model.visible(chunk)
            and any(e.segment == number for shard in chunk.shards.values() for e in shard.extents)
        ]
        assert sorted(listed) == sorted(expected)

    # ---------------------------------------------------------------- puts

    @rule(
        owner=owners,
        space=spaces,
        hashes=batches,
        length=lengths,
        shard=st.sampled_from([0, 0, 0, 0, 1, 1, 2]),
        shards=st.sampled_from([1, 1, 2]),
        replicas=st.integers(1, 3),
        chained=st.booleans(),
        first=st.sampled_from([*HASHES, NO_HASH]),
        data=st.data(),
        wait=times,
    )
    def start(
        self,
        owner: int,
        space: int,
        hashes: list[bytes],
        length: int,
        shard: int,
        shards: int,
        replicas: int,
        chained: bool,
        first: bytes,
        data: st.DataObject,
        wait: int,
    ) -> None:
        avoid = data.draw(st.lists(st.sampled_from([*self.model.segments, 99]), max_size=2))
        host = data.draw(st.integers(0, 3))
        parents = [first, *hashes[:-1]] if chained else []
        packed = first if chained else b""
        deadline = self.now + wait
        answer = self.index.start(
            owner,
            space,
            b"".join(hashes),
            packed,
            u64s([length]),
            shard,
            shards,
            replicas,
            avoid,
            host,
            self.now,
            deadline,
        )
        statuses = statuses_of(answer[0])
        used = []
        for i, (name, status, extents) in enumerate(
            zip(hashes, statuses, unpack_extents(answer[1], replicas), strict=True)
        ):
            key = (space, name)
            expected = self.model.may_start(key, length, shard, shards)
            if expected is Status.OK:
                expected = self.model.room(length, replicas, avoid)
            assert status is expected
            assert (status is Status.OK) == bool(extents)
            if status is Status.OK:
                self.take(owner, key, length, shard, shards, replicas, avoid, extents, deadline)
            if status in (Status.OK, Status.ALREADY):
                chunk = self.model.chunks[key]
                named = answer[1][EXTENT_BYTES * replicas * i :][:8]
                assert named == u64s([chunk.shards[shard].generation])
                if status is Status.ALREADY and shard == 0 and chunk.leased_until <= self.now:
                    used.append(chunk)
                if chained:
                    self.model.join(chunk, self.model.chunks.get((space, parents[i])))
        self.model.touch(used)

    def take(
        self,
        owner: int,
        key: Key,
        length: int,
        shard: int,
        shards: int,
        replicas: int,
        avoid: list[int],
        extents: list[tuple[int, int, int, int]],
        deadline: int,
    ) -> None:
        """The index has chosen these extents. May it?"""
        usable = [s for s in self.model.segments.values() if s.writable and s.number not in avoid]
        hosts = [self.model.segments[segment].host for _, _, _, segment in extents]
        assert len(hosts) == len(set(hosts)) == min(replicas, len({segment.host for segment in usable}))
        made = [Extent(segment, offset, size_of(length)) for _, offset, _, segment in extents]
        taken = self.model.taken()
        for extent in made:
            segment = self.model.segments[extent.segment]
            assert segment in usable
            assert extent.offset % 64 == 0
            assert extent.offset + HEADER_BYTES + length <= segment.capacity
            for other in taken:
                apart = extent.offset + extent.size <= other.offset or other.offset + other.size <= extent.offset
                assert extent.segment != other.segment or apart, "two extents overlap"
        generation = extents[0][0]
        assert all((g, its) == (generation, length) for g, _, its, _ in extents)
        self.model.started(key, shard, shards, Shard(generation, length, made, owner, deadline))
        self.started.append((owner, key, shard, generation))

    @rule(owner=owners, count=st.integers(1, len(HASHES)), replicas=st.integers(1, 2), data=st.data())
    def put(self, owner: int, count: int, replicas: int, data: st.DataObject) -> None:
        """A chain from its beginning, to the end of the put: most of what is random gets nowhere."""
        del self.started[:]
        self.start(owner, 1, HASHES[:count], 64, 0, 1, replicas, True, NO_HASH, data, 100)
        while self.started:
            self.commit_these([self.started.pop()], None)
        while self.commits:
            self.publish()

    @precondition(lambda self: self.started)
    @rule(data=st.data(), written=st.sampled_from([None, None, 0xFF, 0, 1, 2, 5]), other=st.booleans())
    def commit(self, data: st.DataObject, written: int | None, other: bool) -> None:
        one = data.draw(st.sampled_from(self.started))
        together = [w for w in self.started if (w[0], w[1][0], w[2]) == (one[0], one[1][0], one[2])]
        self.commit_these([one] if other else together, written)

    def commit_these(self, chosen: list[tuple[int, Key, int, int]], written: int | None) -> None:
        owner, (space, _), shard, _ = chosen[0]
        names = b"".join(key[1] for _, key, _, _ in chosen)
        mask = b"" if written is None else bytes([written] * len(chosen))
        answer = self.index.commit(owner, space, names, u64s(w[3] for w in chosen), shard, mask)
        expected, rows = [], []
        for its in chosen:
            status, row = self.model.commit(owner, its[1], shard, its[3], 0xFF if written is None else written)
            expected.append(status)
            if row is not None:
                rows.append(row)
        assert statuses_of(answer[0]) == expected
        assert unpack_u32s(answer[1]) == [slot for slot, _ in rows]
        records = unpack_records(answer[2])
        self.commits.append([(slot, record, row) for (slot, row), record in zip(rows, records, strict=True)])

    @precondition(lambda self: self.commits)
    @rule()
    def publish(self) -> None:
        done = self.commits.pop(0)
        for slot, record, row in done:
            self.rows[slot] = (record, row)
        slots = [slot for slot, _, _ in done]
        assert unpack_keys(self.index.publish(u32s(slots))) == self.model.publish(slots)

    @precondition(lambda self: self.commits)
    @rule()
    def revoke(self) -> None:
        slots = [slot for slot, _, _ in self.commits.pop(0)]
        self.index.revoke(u32s(slots))
        self.model.revoke(slots)

    @precondition(lambda self: self.started)
    @rule(data=st.data(), settled=st.booleans(), owner=st.none() | owners)
    def abort(self, data: st.DataObject, settled: bool, owner: int | None) -> None:
        its, (space, name), shard, generation = data.draw(st.sampled_from(self.started))
        owner = its if owner is None else owner
        answer = self.index.abort(owner, space, name, u64s([generation]), shard, settled)
        assert statuses_of(answer) == [self.model.abort(owner, (space, name), shard, generation, settled)]

    @rule()
    def expire(self) -> None:
        assert unpack_pairs(self.index.expire(self.now)) == self.model.expire(self.now)

    @rule(owner=owners)
    def drop_owner(self, owner: int) -> None:
        assert unpack_pairs(self.index.drop_owner(owner)) == self.model.drop_owner(owner)

    @precondition(lambda self: self.model.fences)
    @rule(data=st.data())
    def fenced(self, data: st.DataObject) -> None:
        pair = data.draw(st.sampled_from(sorted(self.model.fences)))
        assert self.index.fenced(*pair) == self.model.fenced(*pair)

    # ---------------------------------------------------------------- reads

    @rule(space=spaces, hashes=batches)
    def exists(self, space: int, hashes: list[bytes]) -> None:
        there = [self.model.whole(self.model.chunks.get((space, name))) for name in hashes]
        answer = statuses_of(self.index.exists(space, b"".join(hashes)))
        assert answer == [Status.OK if its else Status.NOT_FOUND for its in there]

    @rule(space=spaces, hashes=batches, lease=times)
    def match_prefix(self, space: int, hashes: list[bytes], lease: int) -> None:
        expected = self.model.match([(space, name) for name in hashes], self.now, lease)
        assert self.index.match_prefix(space, b"".join(hashes), self.now, lease) == expected

    @rule(space=spaces, hashes=batches, shard=st.integers(0, 2), lease=times)
    def locate(self, space: int, hashes: list[bytes], shard: int, lease: int) -> None:
        packed, extents, replicas = self.index.locate(space, b"".join(hashes), shard, self.now, lease)
        expected = self.model.locate([(space, name) for name in hashes], shard, self.now, lease)
        assert statuses_of(packed) == [status for status, _ in expected]
        for got, (_, its) in zip(unpack_extents(extents, replicas), expected, strict=True):
            readable = self.model.readable(its) if its is not None else []
            assert got == [(its.generation, e.offset, its.length, e.segment) for e in readable if its is not None]

    @rule(owner=owners, pin=st.integers(0, 2), space=spaces, hashes=batches)
    def pin(self, owner: int, pin: int, space: int, hashes: list[bytes]) -> None:
        expected = [self.model.pin(owner, pin, (space, name)) for name in hashes]
        assert statuses_of(self.index.pin(owner, pin, space, b"".join(hashes))) == expected

    @rule(owner=owners, pin=st.integers(0, 2))
    def unpin(self, owner: int, pin: int) -> None:
        assert self.index.unpin(owner, pin) == self.model.unpin(owner, pin)

    # ---------------------------------------------------------------- moves

    @precondition(lambda self: self.model.segments)
    @rule(data=st.data(), limited=st.booleans())
    def move_out(self, data: st.DataObject, limited: bool) -> None:
        number = data.draw(st.sampled_from(list(self.model.segments)))
        avoid = data.draw(st.lists(st.sampled_from([*self.model.segments, 99]), max_size=1))
        movable = self.model.moves.movable(number)
        looked_at = len(movable)
        bounds = (2, 1, 100, 600) if limited else (1000, 1000, 1 << 40, 1 << 40)
        packed, following, no_room = self.index.move_out(number, 0, *bounds, avoid, self.now)
        moves = unpack_moves(packed)
        assert not limited or len(moves) <= 1
        for move in moves:
            old = self.moves_begins(move)
            assert not limited or old.size <= 600
            key = next(k for k, extent in movable.items() if extent == old)
            assert move[2] in self.model.moves.targets(*key, old, [number, *avoid])
            self.begin_move(move, key[0])
            movable = {k: extent for k, extent in movable.items() if k[0] != key[0]}
        if not limited:
            assert following == NO_SEGMENT
            # One shard of a chunk may have found room after another one had not.
            assert len(movable) <= no_room <= looked_at
            assert not any(self.model.moves.targets(*key, old, [number, *avoid]) for key, old in movable.items())

    @precondition(lambda self: self.model.segments)
    @rule(data=st.data(), space=spaces, hashes=batches, most=st.integers(0, 5))
    def move_to(self, data: st.DataObject, space: int, hashes: list[bytes], most: int) -> None:
        number = data.draw(st.sampled_from(list(self.model.segments)))
        packed, moves = self.index.move_to(space, b"".join(hashes), number, most, 1 << 40)
        begun = iter(unpack_moves(moves))
        for name, status in zip(hashes, statuses_of(packed), strict=True):
            expected, shard, old = self.model.moves.may_go((space, name), number, most == 0)
            assert status is expected
            if status is Status.OK:
                move = next(begun)
                assert (self.moves_begins(move), move[7], move[2]) == (old, shard, number)
                self.begin_move(move, (space, name))
                most -= 1
        assert next(begun, None) is None

    def moves_begins(self, move: tuple[int, int, int, int, int, int, int, int, bytes]) -> Extent:
        """The old extent."""
        return Extent(move[1], move[4], size_of(move[6]))

    def begin_move(self, move: tuple[int, int, int, int, int, int, int, int, bytes], key: Key) -> None:
        number, _, to, generation, _, offset, length, shard, name = move
        its = self.model.chunks[key].shards[shard]
        assert (key[1], its.generation, its.length) == (name, generation, length)
        self.take_move(number, key, shard, self.moves_begins(move), to, offset)

    def take_move(self, number: int, key: Key, shard: int, old: Extent, to: int, offset: int) -> None:
        new = Extent(to, offset, old.size)
        assert new.offset + new.size <= self.model.segments[to].capacity
        for other in self.model.taken():
            apart = new.offset + new.size <= other.offset or other.offset + other.size <= new.offset
            assert new.segment != other.segment or apart, "two extents overlap"
        self.model.moves.begin(number, key, shard, old, new)
        self.moves.append(number)

    @precondition(lambda self: self.model.chunks)
    @rule(data=st.data(), replace=st.booleans(), stale=st.booleans())
    def mend(self, data: st.DataObject, replace: bool, stale: bool) -> None:
        """A copy is spoilt. `stale`: what is said of it has been so."""
        copies = [
            (key, number, extent)
            for key, chunk in sorted(self.model.chunks.items(), key=lambda item: item[0])
            for number, its in sorted(chunk.shards.items())
            for extent in its.extents
        ]
        if not copies:
            return
        key, shard, old = data.draw(st.sampled_from(copies))
        its = self.model.chunks[key].shards[shard]
        generation = its.generation - (1 if stale else 0)
        expected, others = self.model.moves.may_mend(key, shard, generation, old)
        packed = struct.pack("<QQQII", generation, old.offset, its.length, old.segment, 0)
        targets = self.model.moves.targets(key, shard, old, []) if others and replace else set()
        statuses, moves, slots = self.index.mend(key[0], key[1], shard, packed, replace, self.now)
        assert statuses_of(statuses) == [expected]
        if expected is Status.OK and not others:
            assert unpack_u32s(slots) == [self.model.chunks[key].slot]
            self.model.forget(self.model.chunks[key])
            self.deletes += unpack_u32s(slots)
        assert bool(slots) == (expected is Status.OK and not others)
        assert bool(moves) == bool(others)
        for move, source, space in unpack_mends(moves):
            number, leaves, to, *_ = move
            assert (leaves, space, move[8], move[3], move[6], move[7]) == (
                old.segment,
                *key,
                generation,
                its.length,
                shard,
            )
            readable = [e for e in others if self.model.segments[e.segment].readable]
            if not readable or not targets:
                assert (to, source, move[4]) == (NO_SEGMENT, old.segment, old.offset)
                self.model.moves.begin(number, key, shard, old, None)
                self.moves.append(number)
            else:
                assert to in targets
                assert (source, move[4]) == (readable[0].segment, readable[0].offset)
                self.take_move(number, key, shard, old, to, move[5])

    @precondition(lambda self: self.moves)
    @rule(data=st.data())
    def commit_moves(self, data: st.DataObject) -> None:
        self.commit_moves_of(data.draw(st.lists(st.sampled_from(self.moves), min_size=1, max_size=4)))

    def commit_moves_of(self, chosen: list[int]) -> None:
        statuses, slots, records = self.index.commit_moves(u64s(chosen))
        expected, rows = [], []
        for number in chosen:
            status, row = self.model.moves.commit(number)
            expected.append(status)
            if row is not None:
                rows.append(row)
        assert statuses_of(statuses) == expected
        assert unpack_u32s(slots) == [slot for slot, _ in rows]
        good = [number for number, status in zip(chosen, expected, strict=True) if status is Status.OK]
        made = [(slot, record, row) for (slot, row), record in zip(rows, unpack_records(records), strict=True)]
        self.moves = [number for number in self.moves if number not in good]
        self.moved.append((good, made))

    @precondition(lambda self: self.model.segments)
    @rule(data=st.data(), lease=st.sampled_from([0, 0, 20]), meanwhile=st.sampled_from(["", "", "remove", "drop"]))
    def drain(self, data: st.DataObject, lease: int, meanwhile: str) -> None:
        """Moves to their end, perhaps while the chunks are read, and removed or lost."""
        self.move_out(data, False)
        if not self.moves:
            return
        chunks = [move.chunk for move in self.model.moves.all.values() if move.chunk is not None]
        for space, name in [chunk.key for chunk in chunks]:
            self.match_prefix(space, [name], lease)
        self.commit_moves_of(list(self.moves))
        for space, name in [chunk.key for chunk in chunks] if meanwhile == "remove" else []:
            self.remove(space, [name])
        if meanwhile == "drop":
            self.drop_segment(data)
        self.publish_moves(True, -1)

    @precondition(lambda self: self.moved)
    @rule(durable=st.booleans(), any_=st.integers(0, 3))
    def publish_moves(self, durable: bool, any_: int) -> None:
        numbers, rows = self.moved.pop(any_ % len(self.moved))
        if durable:
            self.rows.update({slot: (record, row) for slot, record, row in rows})
            freed = self.index.publish_moves(u64s(numbers), self.now)
            assert freed == self.model.moves.publish(numbers, self.now)
        else:
            assert self.index.abort_moves(u64s(numbers)) == self.model.moves.abort(numbers)

    @precondition(lambda self: self.moves)
    @rule(data=st.data())
    def abort_move(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.moves))
        if not any(number in numbers for numbers, _ in self.moved):
            assert self.index.abort_moves(u64s([number])) == self.model.moves.abort([number])

    # ---------------------------------------------------------------- removal

    @rule(space=spaces, hashes=batches, since=st.none() | st.integers(0, 60))
    def remove(self, space: int, hashes: list[bytes], since: int | None = None) -> None:
        generations = [None if since is None else self.generation(since + i) for i in range(len(hashes))]
        named = None if since is None else u64s(its or 0 for its in generations)
        packed, slots = self.index.remove(space, b"".join(hashes), named)
        expected = [self.model.remove((space, name), its) for name, its in zip(hashes, generations, strict=True)]
        assert statuses_of(packed) == [status for status, _ in expected]
        assert unpack_u32s(slots) == [slot for _, slot in expected if slot is not None]
        self.deletes += unpack_u32s(slots)

    @rule(space=spaces, name=st.sampled_from(HASHES))
    def remove_prefix(self, space: int, name: bytes) -> None:
        slots, pinned = self.index.remove_prefix(space, name)
        assert (set(unpack_u32s(slots)), pinned) == self.model.remove_prefix((space, name))
        self.deletes += unpack_u32s(slots)

    @rule(
        want=st.integers(0, 6000),
        space=spaces,
        kept=st.lists(st.sampled_from(HASHES), max_size=2),
        bounds=st.lists(st.integers(0, 60), max_size=4, unique=True).map(sorted),
        last=st.none() | st.integers(0, 60),
    )
    def evict(self, want: int, space: int, kept: list[bytes], bounds: list[int], last: int | None) -> None:
        ranges = [(self.generation(a), self.generation(b)) for a, b in zip(bounds[::2], bounds[1::2], strict=False)]
        packed = u64s(bound for range_ in reversed(ranges) for bound in range_)
        newest = 2**64 - 1 if last is None else self.generation(last)
        slots, keys, given, *_ = self.index.evict(
            want, self.now, generations=packed, namespace=space, hashes=b"".join(kept), newest=newest
        )
        chunks, expected = self.model.evict(want, self.now, ranges, {(space, name) for name in kept}, newest)
        assert unpack_u32s(slots) == [chunk.slot for chunk in chunks]
        assert unpack_keys(keys) == [chunk.key for chunk in chunks]
        assert given == expected
        self.deletes += unpack_u32s(slots)

    @rule(later=st.booleans())
    def reclaim(self, later: bool) -> None:
        slots = [] if later else self.deletes
        for slot in slots:
            self.rows.pop(slot, None)
        # Their records came before the removal.
        self.moved = [(numbers, [row for row in rows if row[0] not in slots]) for numbers, rows in self.moved]
        assert self.index.reclaim(u32s(slots), self.now) == self.model.reclaim(slots, self.now)
        self.deletes = self.deletes if later else []

    # ---------------------------------------------------------------- time and restarts

    @rule(by=st.integers(1, 40))
    def wait(self, by: int) -> None:
        self.now += by

    @rule(order=st.randoms(use_true_random=False), damaged=st.booleans())
    def restart(self, order: random.Random, damaged: bool) -> None:
        """The process ends; what is durable comes back, and then the segments."""
        self.epoch += 1
        for _, rows in self.moved:
            if order.random() < 0.5:  # durable, and not published
                self.rows.update({slot: (record, row) for slot, record, row in rows})
        segments = list(self.model.segments.values())
        slots = list(self.rows)
        order.shuffle(slots)
        self.index = ChunkIndex(policy="lru", chunks_max=CHUNKS_MAX, epoch=self.epoch, seed=self.seed)
        self.model = Model(CHUNKS_MAX, self.epoch)
        for segment in segments:
            self.model.segments[segment.number] = segment
        records = [self.rows[slot][0] for slot in slots]
        refused = slots[:1] if damaged else []
        if refused:
            at = order.randrange(len(records[0]))
            records[0] = records[0][:at] + bytes([records[0][at] ^ 1]) + records[0][at + 1 :]
        taken = self.index.restore(u32s(slots), pack_records(records))
        for slot in slots[len(refused) :]:
            row = self.rows[slot][1]
            if row.key in self.model.chunks:
                # It was removed and put again, and the removal was not durable: the first that comes is as good.
                refused.append(slot)
            else:
                self.model.restore(slot, row)
        assert taken == len(slots) - len(refused)
        for number in self.lost:
            if any(
                number == e.segment for _, row in self.rows.values() for s in row.shards.values() for e in s.extents
            ):
                try:
                    self.index.drop_segment(number)
                except KeyError:
                    assert refused, "a segment that a record names is not known"
        order.shuffle(segments)
        for segment in segments:
            segment.writable = segment.readable = True
            self.index.add_segment(segment.number, segment.capacity, segment.host, 0, self.now)
        self.commits, self.started, self.deletes, self.moves, self.moved = [], [], [], [], []
        if refused:
            named, _ = self.index.sweep(0)
            assert unpack_u32s(named) == refused
            # The round has begun, and the slots that are named here are still taken.
            self.model.sweep_at = min([*refused, *self.model.slots])
            for slot in refused:
                del self.rows[slot]
            assert self.index.reclaim(named, self.now) == 0


TestIndexAgainstModel = IndexAgainstModel.TestCase
TestIndexAgainstModel.settings = settings(max_examples=60, stateful_step_count=60)
