# SPDX-License-Identifier: Apache-2.0
"""What the chunk index is to do, as plain as it can be said: dictionaries, and nothing packed.

It does not place extents: it is told where they are and says whether that may be.
"""

from __future__ import annotations

from index.model_moves import Moves
from index.model_parts import Chunk, Extent, Key, Lru, Row, Segment, Shard, Status, size_of


class Model:
    def __init__(self, chunks_max: int, epoch: int) -> None:
        self.chunks_max = chunks_max
        self.epoch = epoch
        self.generations = 0
        self.commits = 0
        self.segments: dict[int, Segment] = {}
        self.chunks: dict[Key, Chunk] = {}
        self.slots: dict[int, Chunk] = {}  # also of those that are removed, until reclaim
        self.fences: dict[tuple[int, int], dict[int, Extent]] = {}  # owner, segment -> generation -> extent
        self.read: list[tuple[int, Extent]] = []  # until when
        self.pins: dict[tuple[int, int], list[Chunk]] = {}  # owner, pin
        self.moves = Moves(self)
        self.lru = Lru()
        self.orphans: dict[Key, list[Chunk]] = {}  # while restoring, by the parent that is not there yet
        self.sweep_at = 0
        self.evicted = 0

    # ---------------------------------------------------------------- what is where

    def lost(self, extent: Extent) -> bool:
        return extent.segment not in self.segments

    def has(self, shard: Shard) -> bool:
        return any(not self.lost(extent) for extent in shard.extents)

    def readable(self, shard: Shard) -> list[Extent]:
        return [e for e in shard.extents if not self.lost(e) and self.segments[e.segment].readable]

    def visible(self, chunk: Chunk | None) -> bool:
        return chunk is not None and chunk.complete and all(map(self.has, chunk.shards.values()))

    def whole(self, chunk: Chunk | None) -> bool:
        return chunk is not None and chunk.complete and all(map(self.readable, chunk.shards.values()))

    def taken(self) -> list[Extent]:
        """Every extent that is not free."""
        everything = [e for chunk in self.slots.values() for shard in chunk.shards.values() for e in shard.extents]
        everything += [extent for waiting in self.fences.values() for extent in waiting.values()]
        everything += [extent for _, extent in self.read]
        everything += [move.new for move in self.moves.all.values() if move.new is not None]
        return [extent for extent in everything if not self.lost(extent)]

    def largest_gap(self, segment: Segment) -> int:
        end = largest = 0
        here = sorted((e for e in self.taken() if e.segment == segment.number), key=lambda e: e.offset)
        for extent in here:
            largest = max(largest, extent.offset - end)
            end = extent.offset + extent.size
        return max(largest, segment.capacity - end)

    # ---------------------------------------------------------------- puts

    def may_start(self, key: Key, length: int, shard: int, shards: int) -> Status:
        """What `start` says before it looks for space; OK if it is to look."""
        if length == 0 or shard >= shards:
            return Status.INVALID
        chunk = self.chunks.get(key)
        if chunk is None:
            taken = sum(other.count for other in self.slots.values())
            return Status.CHUNKS_MAX if taken + shards > self.chunks_max else Status.OK
        if chunk.count != shards:
            return Status.CONFLICT if any(s.committed for s in chunk.shards.values()) else Status.WRITING
        its = chunk.shards.get(shard)
        if its is not None and its.committed and self.has(its):
            return Status.ALREADY if its.length == length else Status.CONFLICT
        if (its is not None and not its.committed) or self.moves.on_its_way(chunk):
            return Status.WRITING
        if its is not None:
            self.moves.leave(chunk, shard)
            del chunk.shards[shard]  # written anew
        return Status.OK

    def room(self, length: int, replicas: int, avoid: list[int]) -> Status:
        size = size_of(length)
        if self.segments and size > max(segment.capacity for segment in self.segments.values()):
            return Status.TOO_LARGE
        usable = [s for s in self.segments.values() if s.writable and s.number not in avoid]
        hosts = {segment.host for segment in usable}
        with_room = {segment.host for segment in usable if self.largest_gap(segment) >= size}
        wanted = min(replicas, len(hosts))
        return Status.OK if wanted and len(with_room) >= wanted else Status.NO_SPACE

    def started(self, key: Key, shard: int, shards: int, its: Shard) -> Chunk:
        chunk = self.chunks.get(key)
        if chunk is None:
            slot = next(slot for slot in range(self.chunks_max) if slot not in self.slots)
            chunk = self.chunks[key] = self.slots[slot] = Chunk(key, slot, shards)
        self.generations += 1
        assert its.generation == self.epoch << 40 | self.generations
        chunk.shards[shard] = its
        return chunk

    def join(self, chunk: Chunk, parent: Chunk | None) -> None:
        """Unless it has a parent, or would be its own ancestor."""
        if chunk.parent is not None or parent is None:
            return
        above: Chunk | None = parent
        while above is not None:
            if above is chunk:
                return
            above = above.parent
        chunk.parent = parent
        parent.children.append(chunk)

    def written_by(self, owner: int, key: Key, shard: int, generation: int) -> tuple[Chunk, Shard] | None:
        chunk = self.chunks.get(key)
        its = chunk.shards.get(shard) if chunk is not None else None
        if chunk is None or its is None or its.committed or its.commit:
            return None
        return (chunk, its) if (its.owner, its.generation) == (owner, generation) else None

    def give_up(self, chunk: Chunk, shard: Shard, settled: bool) -> set[tuple[int, int]]:
        pairs = set()
        for extent in shard.extents:
            if not settled and not self.lost(extent):
                self.fences.setdefault((shard.owner, extent.segment), {})[shard.generation] = extent
                pairs.add((shard.owner, extent.segment))
        chunk.shards = {number: its for number, its in chunk.shards.items() if its is not shard}
        if not chunk.shards and not chunk.durable:
            self.forget(chunk)
            del self.slots[chunk.slot]
        return pairs

    def commit(
        self, owner: int, key: Key, shard: int, generation: int, written: int
    ) -> tuple[Status, tuple[int, Row] | None]:
        found = self.written_by(owner, key, shard, generation)
        if found is None:
            chunk = self.chunks.get(key)
            its = chunk.shards.get(shard) if chunk is not None else None
            again = its is not None and its.committed and its.generation == generation
            return (Status.ALREADY if again else Status.NOT_OWNER), None
        chunk, its = found
        named = [extent for r, extent in enumerate(its.extents) if written >> r & 1]
        if not named:
            return Status.INVALID, None
        kept = [extent for extent in named if not self.lost(extent)]
        if not kept:
            self.give_up(chunk, its, settled=False)
            return Status.NOT_OWNER, None
        for extent in its.extents:
            if extent not in kept and not self.lost(extent):
                self.fences.setdefault((owner, extent.segment), {})[generation] = extent
        its.extents = kept
        self.commits += 1
        its.commit = self.commits
        return Status.OK, (chunk.slot, self.row_of(chunk))

    def row_of(self, chunk: Chunk) -> Row:
        shards = {}
        for number, its in chunk.shards.items():
            extents = [extent for extent in its.extents if not self.lost(extent)]
            if (its.committed or its.commit) and extents:
                shards[number] = Shard(its.generation, its.length, extents, committed=True)
        return Row(chunk.key, chunk.parent.key if chunk.parent else None, chunk.count, shards)

    def oldest_commit(self, slot: int) -> tuple[list[Shard], int]:
        """The shards of the oldest commit of this slot, and the number of the next one or 0."""
        chunk = self.slots.get(slot)
        waiting = [s for s in chunk.shards.values() if s.commit] if chunk is not None and not chunk.removed else []
        numbers = sorted({shard.commit for shard in waiting})
        oldest = [shard for shard in waiting if shard.commit == numbers[0]]
        return oldest, numbers[1] if len(numbers) > 1 else 0

    def publish(self, slots: list[int]) -> list[Key]:
        complete = []
        for slot in slots:
            oldest, _ = self.oldest_commit(slot)
            if not oldest:
                continue
            chunk = self.slots[slot]
            for shard in oldest:
                shard.commit, shard.committed = 0, True
            chunk.durable = True
            if chunk not in self.lru:
                self.lru.insert(chunk)
            if self.visible(chunk):
                complete.append(chunk.key)
        return complete

    def revoke(self, slots: list[int]) -> None:
        for slot in slots:
            oldest, following = self.oldest_commit(slot)
            for shard in oldest:
                if following:
                    shard.commit = following
                else:
                    self.give_up(self.slots[slot], shard, settled=True)

    def abort(self, owner: int, key: Key, shard: int, generation: int, settled: bool) -> Status:
        found = self.written_by(owner, key, shard, generation)
        if found is not None:
            self.give_up(*found, settled=settled)
            return Status.OK
        pairs = [pair for pair, waiting in self.fences.items() if pair[0] == owner and generation in waiting]
        if not settled or not pairs:
            return Status.NOT_OWNER
        for pair in pairs:
            self.take_fence(pair, generation)
        return Status.OK

    def take_fence(self, pair: tuple[int, int], generation: int) -> None:
        del self.fences[pair][generation]
        if not self.fences[pair]:
            del self.fences[pair]

    def open_writes(self) -> list[tuple[Chunk, Shard]]:
        shards = [(chunk, shard) for chunk in self.chunks.values() for shard in chunk.shards.values()]
        return [(chunk, shard) for chunk, shard in shards if not shard.committed and not shard.commit]

    def expire(self, now: int) -> set[tuple[int, int]]:
        late = [(chunk, shard) for chunk, shard in self.open_writes() if shard.deadline <= now]
        return set().union(*(self.give_up(chunk, shard, settled=False) for chunk, shard in late))

    def drop_owner(self, owner: int) -> set[tuple[int, int]]:
        for pair in [pair for pair in self.pins if pair[0] == owner]:
            self.unpin(*pair)
        its = [(chunk, shard) for chunk, shard in self.open_writes() if shard.owner == owner]
        return set().union(*(self.give_up(chunk, shard, settled=False) for chunk, shard in its))

    def fenced(self, owner: int, segment: int) -> int:
        return sum(extent.size for extent in self.fences.pop((owner, segment), {}).values())

    # ---------------------------------------------------------------- reads

    def touch(self, chunks: list[Chunk]) -> None:
        for chunk in reversed(chunks):
            self.lru.touch(chunk)

    def match(self, keys: list[Key], now: int, lease: int) -> int:
        matched: list[Chunk] = []
        for key in keys:
            chunk = self.chunks.get(key)
            if chunk is None or not self.whole(chunk):
                break
            matched.append(chunk)
        self.touch(matched)
        for chunk in matched:
            chunk.leased_until = max(chunk.leased_until, now + lease if lease else 0)
        return len(matched)

    def locate(self, keys: list[Key], shard: int, now: int, lease: int) -> list[tuple[Status, Shard | None]]:
        answers: list[tuple[Status, Shard | None]] = []
        found = []
        for key in keys:
            chunk = self.chunks.get(key)
            if chunk is None or not chunk.complete:
                answers.append((Status.NOT_FOUND, None))
            elif shard >= chunk.count:
                answers.append((Status.INVALID, None))
            elif not self.readable(chunk.shards[shard]):
                answers.append((Status.NOT_FOUND, None))
            else:
                found.append(chunk)
                answers.append((Status.OK, chunk.shards[shard]))
        self.touch([chunk for chunk in found if chunk.leased_until <= now])
        for chunk in found:
            chunk.leased_until = max(chunk.leased_until, now + lease if lease else 0)
        return answers

    def pin(self, owner: int, pin: int, key: Key) -> Status:
        chunk = self.chunks.get(key)
        if chunk is None or not self.visible(chunk):
            return Status.NOT_FOUND
        if sum(map(len, self.pins.values())) >= self.chunks_max:
            return Status.CHUNKS_MAX
        chunk.pins += 1
        self.pins.setdefault((owner, pin), []).append(chunk)
        return Status.OK

    def unpin(self, owner: int, pin: int) -> int:
        held = [chunk for chunk in self.pins.pop((owner, pin), []) if not chunk.removed]
        for chunk in held:
            chunk.pins -= 1
        return len(held)

    # ---------------------------------------------------------------- removal

    def forget(self, chunk: Chunk) -> None:
        """Gone for every call."""
        chunk.removed = True
        self.moves.leave(chunk)
        self.lru.remove(chunk)
        for child in chunk.children:
            child.parent = None
        chunk.children = []
        if chunk.parent is not None:
            chunk.parent.children.remove(chunk)
            if not chunk.parent.children:
                self.lru.leaf(chunk.parent)
            chunk.parent = None
        del self.chunks[chunk.key]

    def remove(self, key: Key, generation: int | None = None) -> tuple[Status, int | None]:
        chunk = self.chunks.get(key)
        if chunk is None or not self.visible(chunk):
            return Status.NOT_FOUND, None
        if generation is not None and not self.has_generation(chunk, [(generation, generation)]):
            return Status.NOT_FOUND, None
        if chunk.pins:
            return Status.IN_USE, None
        self.forget(chunk)
        return Status.OK, chunk.slot

    def has_generation(self, chunk: Chunk, ranges: list[tuple[int, int]]) -> bool:
        found = [shard.generation for shard in chunk.shards.values() if shard.committed]
        return any(first <= generation <= last for generation in found for first, last in ranges)

    def remove_prefix(self, key: Key) -> tuple[set[int], int]:
        family = [self.chunks[key]] if key in self.chunks else []
        for chunk in family:
            family.extend(chunk.children)
        pinned = [chunk for chunk in family if chunk.pins]
        gone = [chunk for chunk in family if not chunk.pins and chunk.durable and not chunk.written]
        for chunk in gone:
            self.forget(chunk)
        return {chunk.slot for chunk in gone}, len(pinned)

    def writable_bytes(self, chunk: Chunk) -> int:
        extents = [e for shard in chunk.shards.values() for e in shard.extents if not self.lost(e)]
        return sum(e.size for e in extents if self.segments[e.segment].writable)

    def may_go(self, chunk: Chunk, now: int) -> bool:
        in_use = chunk.pins or chunk.written or chunk.leased_until > now
        return not in_use and self.writable_bytes(chunk) > 0

    def victim(self, now: int, ranges: list[tuple[int, int]], kept: set[Key]) -> Chunk | None:
        for _ in range(len(self.lru.order)):
            oldest = self.lru.order[0]
            spared = oldest.key in kept or self.has_generation(oldest, ranges)
            if oldest.children:
                self.lru.parked.add(self.lru.order.pop(0))
            elif self.may_go(oldest, now) and not spared:
                return oldest
            else:
                self.lru.touch(oldest)
        return None

    def evict(
        self, want: int, now: int, ranges: list[tuple[int, int]], kept: set[Key], newest: int
    ) -> tuple[list[Chunk], int]:
        gone: list[Chunk] = []
        given = 0
        while given < want and (chunk := self.victim(now, ranges, kept)) is not None:
            if self.has_generation(chunk, [(newest + 1, 2**64)]):
                break
            given += self.writable_bytes(chunk)
            self.forget(chunk)
            gone.append(chunk)
        self.evicted += len(gone)
        return gone, given

    def reclaim(self, slots: list[int], now: int) -> int:
        freed = 0
        for slot in slots:
            if slot not in self.slots or not self.slots[slot].removed:
                continue
            chunk = self.slots.pop(slot)
            for extent in (e for shard in chunk.shards.values() for e in shard.extents if not self.lost(e)):
                if chunk.leased_until > now:
                    self.read.append((chunk.leased_until, extent))
                else:
                    freed += extent.size
            freed += self.moves.reclaimed(chunk)
        freed += sum(extent.size for until, extent in self.read if until <= now and not self.lost(extent))
        self.read = [(until, extent) for until, extent in self.read if until > now]
        return freed

    # ---------------------------------------------------------------- segments and restarts

    def drop_segment(self, number: int) -> None:
        del self.segments[number]
        for pair in [pair for pair in self.fences if pair[1] == number]:
            del self.fences[pair]

    def sweep(self, count_max: int) -> tuple[set[int], bool]:
        ahead = sorted(slot for slot in self.slots if slot >= self.sweep_at)
        gone = set()
        for slot in ahead[:count_max]:
            chunk = self.slots[slot]
            committed = [shard for shard in chunk.shards.values() if shard.committed]
            if self.moves.on_its_way(chunk):
                continue
            lost = not committed or not all(map(self.has, committed))
            if lost and not chunk.written and not chunk.removed:
                self.forget(chunk)
                gone.add(slot)
        complete = len(ahead) <= count_max
        self.sweep_at = 0 if complete else ahead[count_max]
        return gone, complete

    def restore(self, slot: int, row: Row) -> None:
        chunk = Chunk(row.key, slot, row.count, dict(row.shards), durable=True)
        self.slots[slot] = self.chunks[row.key] = chunk
        if row.parent is not None:
            self.join(chunk, self.chunks.get(row.parent))
            if row.parent not in self.chunks:
                self.orphans.setdefault(row.parent, []).append(chunk)
        self.lru.insert(chunk)
        for orphan in self.orphans.pop(row.key, []):
            self.join(orphan, chunk)
