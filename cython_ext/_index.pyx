# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, embedsignature=False
"""The chunk index of the master: checks arguments and calls index/index.hpp. Decides nothing itself."""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport unique_ptr
from libcpp.string cimport string
from libcpp.vector cimport vector

from moonpool_index cimport (DemoteCall, Evicted, Hashes, IndexStats, MendCall, MoveOutCall, MoveToCall, Native,
                             Outcome, PromoteCall, SegmentStats, Spared, StartCall, kEpochMax, kExtentBytes, kHashBytes,
                             kHeaderBytes, kLeafBytes, kMoveBytes, kNone, kReplicasMax, kShardsMax, kUnit, kUnitsMax,
                             its_extent_bytes, string_view)

HASH_BYTES = kHashBytes
EXTENT_BYTES = kExtentBytes
MOVE_BYTES = kMoveBytes
HEADER_BYTES = kHeaderBytes
LEAF_BYTES = kLeafBytes
NO_SEGMENT = kNone
SHARDS_MAX = kShardsMax

# The sums of two of them do not overflow.
cdef int64_t _TIME_MAX = 1 << 61

include "_index_arguments.pxi"


def extent_bytes(length):
    """See _index.pyi."""
    return its_extent_bytes(_integer(length, "length", kUnitsMax * kUnit))


cdef class ChunkIndex:
    """See _index.pyi."""

    cdef unique_ptr[Native] _index
    cdef str _policy

    def __cinit__(self, *, str policy not None="prefix", chunks_max=100_000_000, epoch=1, seed=0):
        cdef bytes name = policy.encode()
        cdef const char *name_at = name
        cdef size_t name_bytes = len(name)
        cdef uint32_t most = _integer(chunks_max, "chunks_max", kNone - 1)
        cdef uint64_t its_epoch = _integer(epoch, "epoch", kEpochMax)
        cdef uint64_t its_seed = _u64(seed, "seed")
        if most == 0:
            raise ValueError("chunks_max must be at least 1")
        if policy not in _POLICIES:
            raise ValueError(f'there is no policy "{policy}". Choose from: {", ".join(_POLICIES)}')
        with nogil:
            self._index = Native.make(string_view(name_at, name_bytes), most, its_epoch, its_seed)
        if not self._index:
            raise MemoryError("the index found no memory")
        self._policy = policy

    # ---- segments

    def add_segment(self, segment, capacity_bytes, host, ramp_up_ms, now_ms, *, disk_of=None):
        cdef uint32_t number = _segment(segment), at = _u32(host, "host")
        cdef uint32_t memory = kNone if disk_of is None else _segment(disk_of)
        cdef uint64_t capacity = _integer(capacity_bytes, "capacity_bytes", kUnitsMax * kUnit)
        cdef int64_t ramp_up = _time(ramp_up_ms, "ramp_up_ms"), now = _time(now_ms, "now_ms")
        cdef Outcome outcome
        if capacity < kUnit:
            raise ValueError(f"capacity_bytes must be at least {kUnit}, not {capacity}")
        with nogil:
            outcome = self._index.get().add_segment(number, capacity, at, ramp_up, now, memory)
        _check(outcome, segment)

    def know_disk(self, segment):
        cdef uint32_t number = _segment(segment)
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().know_disk(number)
        _check(outcome, segment)

    def set_segment(self, segment, *, cbool writable, cbool readable):
        cdef uint32_t number = _segment(segment)
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().set_segment(number, writable, readable)
        _check(outcome, segment)

    def drop_segment(self, segment):
        cdef uint32_t number = _segment(segment)
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().drop_segment(number)
        _check(outcome, segment)

    def drop_unknown(self, known):
        cdef vector[uint32_t] numbers
        for segment in known:
            numbers.push_back(_segment(segment))
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().drop_unknown(numbers)
        _check(outcome)

    def sweep(self, count_max):
        cdef uint32_t most = _u32(count_max, "count_max")
        cdef string slots
        cdef cbool complete = False
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().sweep(most, &slots, &complete)
        _check(outcome)
        return <bytes>slots, complete

    def chunks_in(self, segment, count_max):
        cdef uint32_t number = _segment(segment), most = _u32(count_max, "count_max")
        cdef string keys
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().chunks_in(number, most, &keys)
        _check(outcome, segment)
        return <bytes>keys

    # ---- puts

    def start(self, owner, namespace, bytes hashes not None, bytes parents not None, bytes lengths not None, shard,
              shards, replicas, avoid, host, now_ms, deadline_ms):
        cdef StartCall call
        call.hashes = _hashes(hashes, namespace)
        call.owner = _u32(owner, "owner")
        cdef size_t count = call.hashes.count
        if len(parents) not in (0, kHashBytes, count * kHashBytes):
            raise ValueError(f"parents must be 0, {kHashBytes} or {count} x {kHashBytes} bytes, not {len(parents)}")
        call.parents.data = _bytes(parents, "parents")
        call.parents.bytes = len(parents)
        call.one_length = len(lengths) == 8
        call.lengths = _each(lengths, "lengths", 1 if call.one_length else count, 8)
        call.shard = _u32(shard, "shard")
        call.shards = _integer(shards, "shards", kShardsMax)
        call.replicas = _integer(replicas, "replicas", kReplicasMax)
        if call.shards == 0 or call.replicas == 0:
            raise ValueError("shards and replicas must be at least 1")
        for segment in avoid:
            call.avoid.push_back(_u32(segment, "avoid"))
        call.host = _u32(host, "host")
        call.now = _time(now_ms, "now_ms")
        call.deadline = _time(deadline_ms, "deadline_ms")
        cdef bytes statuses = _new(count), extents = _new(count * call.replicas * kExtentBytes)
        cdef uint8_t *statuses_at = _room(statuses)
        cdef uint8_t *extents_at = _room(extents)
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().start(call, statuses_at, extents_at)
        _check(outcome)
        return statuses, extents

    def commit(self, owner, namespace, bytes hashes not None, bytes generations not None, shard,
               bytes written not None):
        cdef uint32_t its_owner = _u32(owner, "owner"), its_shard = _u32(shard, "shard")
        cdef Hashes batch = _hashes(hashes, namespace)
        cdef const uint8_t *generations_at = _each(generations, "generations", batch.count, 8)
        cdef const uint8_t *written_at = _each(written, "written", batch.count, 1) if len(written) != 0 else NULL
        cdef bytes statuses = _new(batch.count)
        cdef uint8_t *statuses_at = _room(statuses)
        cdef string slots, records
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().commit(its_owner, batch, generations_at, its_shard, written_at, statuses_at,
                                               &slots, &records)
        _check(outcome)
        return statuses, <bytes>slots, <bytes>records

    def publish(self, bytes slots not None):
        cdef size_t count = 0
        cdef const uint8_t *slots_at = _slots(slots, &count)
        cdef string keys
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().publish(slots_at, count, &keys)
        _check(outcome)
        return <bytes>keys

    def revoke(self, bytes slots not None):
        cdef size_t count = 0
        cdef const uint8_t *slots_at = _slots(slots, &count)
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().revoke(slots_at, count)
        _check(outcome)

    def abort(self, owner, namespace, bytes hashes not None, bytes generations not None, shard, cbool settled):
        cdef uint32_t its_owner = _u32(owner, "owner"), its_shard = _u32(shard, "shard")
        cdef Hashes batch = _hashes(hashes, namespace)
        cdef const uint8_t *generations_at = _each(generations, "generations", batch.count, 8)
        cdef bytes statuses = _new(batch.count)
        cdef uint8_t *statuses_at = _room(statuses)
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().abort(its_owner, batch, generations_at, its_shard, settled, statuses_at)
        _check(outcome)
        return statuses

    def expire(self, now_ms):
        cdef int64_t now = _time(now_ms, "now_ms")
        cdef string pairs
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().expire(now, &pairs)
        _check(outcome)
        return <bytes>pairs

    def drop_owner(self, owner):
        cdef uint32_t its_owner = _u32(owner, "owner")
        cdef string pairs
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().drop_owner(its_owner, &pairs)
        _check(outcome)
        return <bytes>pairs

    def to_fence(self):
        cdef string pairs
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().to_fence(&pairs)
        _check(outcome)
        return <bytes>pairs

    def fenced(self, owner, segment):
        cdef uint32_t its_owner = _u32(owner, "owner"), number = _segment(segment)
        cdef uint64_t freed = 0
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().fenced(its_owner, number, &freed)
        _check(outcome)
        return freed

    # ---- reads

    def exists(self, namespace, bytes hashes not None):
        cdef Hashes batch = _hashes(hashes, namespace)
        cdef bytes statuses = _new(batch.count)
        cdef uint8_t *statuses_at = _room(statuses)
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().exists(batch, statuses_at)
        _check(outcome)
        return statuses

    def match_prefix(self, namespace, bytes hashes not None, now_ms, lease_ms):
        cdef Hashes batch = _hashes(hashes, namespace)
        cdef int64_t now = _time(now_ms, "now_ms"), lease = _time(lease_ms, "lease_ms")
        cdef size_t matched = 0
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().match_prefix(batch, now, lease, &matched)
        _check(outcome)
        return matched

    def locate(self, namespace, bytes hashes not None, shard, now_ms, lease_ms):
        cdef Hashes batch = _hashes(hashes, namespace)
        cdef uint32_t its_shard = _u32(shard, "shard"), replicas = 0
        cdef int64_t now = _time(now_ms, "now_ms"), lease = _time(lease_ms, "lease_ms")
        cdef bytes statuses = _new(batch.count)
        cdef uint8_t *statuses_at = _room(statuses)
        cdef string extents
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().locate(batch, its_shard, now, lease, statuses_at, &extents, &replicas)
        _check(outcome)
        return statuses, <bytes>extents, replicas

    def pin(self, owner, pin, namespace, bytes hashes not None):
        cdef uint32_t its_owner = _u32(owner, "owner")
        cdef uint64_t its_pin = _u64(pin, "pin")
        cdef Hashes batch = _hashes(hashes, namespace)
        cdef bytes statuses = _new(batch.count)
        cdef uint8_t *statuses_at = _room(statuses)
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().pin(its_owner, its_pin, batch, statuses_at)
        _check(outcome)
        return statuses

    def unpin(self, owner, pin):
        cdef uint32_t its_owner = _u32(owner, "owner")
        cdef uint64_t its_pin = _u64(pin, "pin")
        cdef size_t count = 0
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().unpin(its_owner, its_pin, &count)
        _check(outcome)
        return count

    # ---- removal

    def remove(self, namespace, bytes hashes not None, bytes generations=None):
        cdef Hashes batch = _hashes(hashes, namespace)
        cdef const uint8_t *generations_at = NULL
        if generations is not None:
            generations_at = _each(generations, "generations", batch.count, 8)
        cdef bytes statuses = _new(batch.count)
        cdef uint8_t *statuses_at = _room(statuses)
        cdef string slots
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().remove(batch, statuses_at, &slots, generations_at)
        _check(outcome)
        return statuses, <bytes>slots

    def remove_prefix(self, namespace, bytes hash not None):
        cdef uint32_t space = _u32(namespace, "namespace")
        cdef const uint8_t *hash_at = _each(hash, "hash", 1, kHashBytes)
        cdef string slots
        cdef size_t pinned = 0
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().remove_prefix(space, hash_at, &slots, &pinned)
        _check(outcome)
        return <bytes>slots, pinned

    def evict(self, want_bytes, now_ms, *, uses_min=0, count_max=0, bytes_max=0, avoid=(),
              bytes generations not None=b"", namespace=0, bytes hashes not None=b"", newest=0xffffffffffffffff):
        cdef uint64_t want = _u64(want_bytes, "want_bytes")
        cdef Spared spared
        spared.count = len(generations) // 16
        spared.ranges = _each(generations, "generations", spared.count, 16)
        spared.hashes = _hashes(hashes, namespace)
        spared.newest = _u64(newest, "newest")
        cdef int64_t now = _time(now_ms, "now_ms")
        cdef DemoteCall demote = _demote(uses_min, count_max, bytes_max, avoid)
        cdef Evicted evicted
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().evict(want, now, demote, &evicted, spared)
        _check(outcome)
        slots, keys, moves = <bytes>evicted.slots, <bytes>evicted.keys, <bytes>evicted.moves
        return slots, keys, evicted.lost_bytes, evicted.bytes, moves, evicted.full

    def reclaim(self, bytes slots not None, now_ms):
        cdef size_t count = 0
        cdef const uint8_t *slots_at = _slots(slots, &count)
        cdef int64_t now = _time(now_ms, "now_ms")
        cdef uint64_t freed = 0
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().reclaim(slots_at, count, now, &freed)
        _check(outcome)
        return freed

    # ---- moves

    def move_out(self, segment, begin, looks_max, count_max, bytes_max, room_bytes, avoid, now_ms):
        cdef MoveOutCall call
        call.segment = _segment(segment)
        call.begin = _u32(begin, "begin")
        call.looks_max = _u32(looks_max, "looks_max")
        call.count_max = _u32(count_max, "count_max")
        call.bytes_max = _u64(bytes_max, "bytes_max")
        call.room = _u64(room_bytes, "room_bytes")
        for one in avoid:
            call.avoid.push_back(_u32(one, "avoid"))
        call.now = _time(now_ms, "now_ms")
        cdef string moves
        cdef uint32_t following = 0
        cdef uint64_t no_room = 0
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().move_out(call, &moves, &following, &no_room)
        _check(outcome, segment)
        return <bytes>moves, following, no_room

    def move_to(self, namespace, bytes hashes not None, segment, count_max, bytes_max):
        cdef MoveToCall call
        call.hashes = _hashes(hashes, namespace)
        call.segment = _segment(segment)
        call.count_max = _u32(count_max, "count_max")
        call.bytes_max = _u64(bytes_max, "bytes_max")
        cdef bytes statuses = _new(call.hashes.count)
        cdef uint8_t *statuses_at = _room(statuses)
        cdef string moves
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().move_to(call, statuses_at, &moves)
        _check(outcome, segment)
        return statuses, <bytes>moves

    def mend(self, namespace, bytes hashes not None, shard, bytes extents not None, replace, now_ms):
        cdef MendCall call
        call.hashes = _hashes(hashes, namespace)
        call.shard = _u32(shard, "shard")
        call.extents = _each(extents, "extents", call.hashes.count, kExtentBytes)
        call.replace = bool(replace)
        call.now = _time(now_ms, "now_ms")
        cdef bytes statuses = _new(call.hashes.count)
        cdef uint8_t *statuses_at = _room(statuses)
        cdef string moves, slots
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().mend(call, statuses_at, &moves, &slots)
        _check(outcome)
        return statuses, <bytes>moves, <bytes>slots

    def commit_moves(self, bytes moves not None):
        cdef size_t count = 0
        cdef const uint8_t *moves_at = _moves(moves, &count)
        cdef bytes statuses = _new(count)
        cdef uint8_t *statuses_at = _room(statuses)
        cdef string slots, records
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().commit_moves(moves_at, count, statuses_at, &slots, &records)
        _check(outcome)
        return statuses, <bytes>slots, <bytes>records

    def publish_moves(self, bytes moves not None, now_ms):
        cdef size_t count = 0
        cdef const uint8_t *moves_at = _moves(moves, &count)
        cdef int64_t now = _time(now_ms, "now_ms")
        cdef uint64_t freed = 0
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().publish_moves(moves_at, count, now, &freed)
        _check(outcome)
        return freed

    def abort_moves(self, bytes moves not None):
        cdef size_t count = 0
        cdef const uint8_t *moves_at = _moves(moves, &count)
        cdef uint64_t freed = 0
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().abort_moves(moves_at, count, &freed)
        _check(outcome)
        return freed

    # ---- memory and disks

    def demote_more(self, bytes slots not None, uses_min, avoid):
        cdef size_t count = 0
        cdef const uint8_t *slots_at = _slots(slots, &count)
        cdef DemoteCall demote = _demote(uses_min, 0, 0, avoid)
        cdef string moves
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().demote_more(slots_at, count, demote, &moves)
        _check(outcome)
        return <bytes>moves

    def evict_disk(self, segment, want_bytes, now_ms):
        cdef uint32_t number = _segment(segment)
        cdef uint64_t want = _u64(want_bytes, "want_bytes"), given = 0
        cdef int64_t now = _time(now_ms, "now_ms")
        cdef string slots, keys
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().evict_disk(number, want, now, &slots, &keys, &given)
        _check(outcome, segment)
        return <bytes>slots, <bytes>keys, given

    def promote(self, namespace, bytes hashes not None, shard, count_max, bytes_max):
        cdef PromoteCall call
        call.hashes = _hashes(hashes, namespace)
        call.shard = _u32(shard, "shard")
        call.count_max = _u32(count_max, "count_max")
        call.bytes_max = _u64(bytes_max, "bytes_max")
        cdef bytes statuses = _new(call.hashes.count)
        cdef uint8_t *statuses_at = _room(statuses)
        cdef string moves
        cdef uint64_t no_room = 0
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().promote(call, statuses_at, &moves, &no_room)
        _check(outcome)
        return statuses, <bytes>moves, no_room

    def spoilt(self, bytes moves not None):
        cdef size_t count = 0
        cdef const uint8_t *moves_at = _moves(moves, &count)
        cdef string slots, keys
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().spoilt(moves_at, count, &slots, &keys)
        _check(outcome)
        return <bytes>slots, <bytes>keys

    # ---- restart

    def restore(self, bytes slots not None, bytes records not None):
        cdef size_t count = 0, taken = 0
        cdef const uint8_t *slots_at = _slots(slots, &count)
        cdef const uint8_t *records_at = _bytes(records, "records")
        cdef size_t records_bytes = len(records)
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().restore(slots_at, count, records_at, records_bytes, &taken)
        _check(outcome)
        return taken

    # ---- state

    def segment_stats(self, segment):
        cdef uint32_t number = _segment(segment)
        cdef SegmentStats stats
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().segment_stats(number, &stats)
        _check(outcome, segment)
        return {
            "capacity_bytes": stats.capacity_bytes,
            "used_bytes": stats.used_bytes,
            "waiting_bytes": stats.waiting_bytes,
            "largest_free_bytes": stats.largest_free_bytes,
            "extents": stats.extents,
            "chunks": stats.chunks,
            "free_pieces": stats.free_pieces,
        }

    def stats(self):
        cdef IndexStats stats
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().stats(&stats)
        _check(outcome)
        return {
            "chunks": stats.chunks,
            "chunks_max": stats.chunks_max,
            "on_disk": stats.on_disk,
            "writing": stats.writing,
            "moving": stats.moving,
            "pinned": stats.pinned,
            "leased_until_ms": stats.leased_until_ms,
            "used_bytes": stats.used_bytes,
            "free_bytes": stats.free_bytes,
            "capacity_bytes": stats.capacity_bytes,
            "condemned_bytes": stats.condemned_bytes,
            "memory_bytes": stats.memory_bytes,
            "evicted": stats.evicted,
            "refused_records": stats.refused_records,
            "generation": stats.generation,
            "policy": self._policy,
        }

    def namespaces(self):
        cdef string numbers
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().namespaces(&numbers)
        _check(outcome)
        return <bytes>numbers

    def check(self):
        cdef string wrong
        cdef Outcome outcome
        with nogil:
            outcome = self._index.get().check(&wrong)
        _check(outcome)
        return (<bytes>wrong).decode()


_POLICIES = ("prefix", "s3fifo", "lru")
