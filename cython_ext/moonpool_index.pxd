# SPDX-License-Identifier: Apache-2.0
# What _index.pyx calls: index/index.hpp.

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport unique_ptr
from libcpp.string cimport string
from libcpp.vector cimport vector


cdef extern from "<string_view>" namespace "std" nogil:
    cdef cppclass string_view:
        string_view(const char *, size_t)


cdef extern from "index.hpp" namespace "moonpool::index" nogil:
    size_t kHashBytes
    size_t kExtentBytes
    size_t kMoveBytes
    uint64_t kHeaderBytes
    uint64_t kLeafBytes
    uint64_t kEpochMax
    uint64_t kUnitsMax
    uint64_t kUnit
    uint32_t kNone
    uint32_t kReplicasMax
    uint32_t kShardsMax
    uint64_t its_extent_bytes "moonpool::index::extent_bytes"(uint64_t payload)

    cdef enum class Outcome(uint8_t):
        kOk
        kNoMemory
        kUnknownSegment
        kLostSegment
        kTooSmall
        kTooManySegments
        kDamaged

    cdef cppclass Hashes:
        const uint8_t *data
        size_t count
        uint32_t name_space

    cdef cppclass Parents:
        const uint8_t *data
        size_t bytes

    cdef cppclass StartCall:
        uint32_t owner
        Hashes hashes
        Parents parents
        const uint8_t *lengths
        cbool one_length
        uint32_t shard
        uint32_t shards
        uint32_t replicas
        vector[uint32_t] avoid
        uint32_t host
        int64_t now
        int64_t deadline

    cdef cppclass MoveOutCall:
        uint32_t segment
        uint32_t begin
        uint32_t looks_max
        uint32_t count_max
        uint64_t bytes_max
        uint64_t room
        vector[uint32_t] avoid
        int64_t now

    cdef cppclass MoveToCall:
        Hashes hashes
        uint32_t segment
        uint32_t count_max
        uint64_t bytes_max

    cdef cppclass Spared:
        const uint8_t *ranges
        size_t count
        Hashes hashes
        uint64_t newest

    cdef cppclass MendCall:
        Hashes hashes
        uint32_t shard
        const uint8_t *extents
        bint replace
        int64_t now

    cdef cppclass DemoteCall:
        uint32_t uses_min
        uint32_t count_max
        uint64_t bytes_max
        vector[uint32_t] avoid

    cdef cppclass PromoteCall:
        Hashes hashes
        uint32_t shard
        uint32_t count_max
        uint64_t bytes_max

    cdef cppclass Evicted:
        string slots
        string keys
        uint64_t bytes
        uint64_t lost_bytes
        string moves
        uint32_t full

    cdef cppclass SegmentStats:
        uint64_t capacity_bytes
        uint64_t used_bytes
        uint64_t waiting_bytes
        uint64_t largest_free_bytes
        uint64_t extents
        uint64_t chunks
        uint64_t free_pieces

    cdef cppclass IndexStats:
        uint64_t chunks
        uint64_t chunks_max
        uint64_t on_disk
        uint64_t writing
        uint64_t moving
        uint64_t pinned
        uint64_t used_bytes
        uint64_t free_bytes
        uint64_t capacity_bytes
        uint64_t condemned_bytes
        uint64_t memory_bytes
        uint64_t evicted
        uint64_t refused_records
        uint64_t generation
        int64_t leased_until_ms

    cdef cppclass Native "moonpool::index::ChunkIndex":
        @staticmethod
        unique_ptr[Native] make(string_view, uint32_t, uint64_t, uint64_t)
        Outcome add_segment(uint32_t, uint64_t, uint32_t, int64_t, int64_t, uint32_t)
        Outcome know_disk(uint32_t)
        Outcome set_segment(uint32_t, cbool, cbool)
        Outcome drop_segment(uint32_t)
        Outcome drop_unknown(const vector[uint32_t] &)
        Outcome sweep(uint32_t, string *, cbool *)
        Outcome chunks_in(uint32_t, uint32_t, string *)
        Outcome segment_stats(uint32_t, SegmentStats *)
        Outcome start(const StartCall &, uint8_t *, uint8_t *)
        Outcome commit(uint32_t, Hashes, const uint8_t *, uint32_t, const uint8_t *, uint8_t *, string *, string *)
        Outcome publish(const uint8_t *, size_t, string *)
        Outcome revoke(const uint8_t *, size_t)
        Outcome abort(uint32_t, Hashes, const uint8_t *, uint32_t, cbool, uint8_t *)
        Outcome expire(int64_t, string *)
        Outcome drop_owner(uint32_t, string *)
        Outcome to_fence(string *)
        Outcome fenced(uint32_t, uint32_t, uint64_t *)
        Outcome exists(Hashes, uint8_t *)
        Outcome match_prefix(Hashes, int64_t, int64_t, size_t *)
        Outcome locate(Hashes, uint32_t, int64_t, int64_t, uint8_t *, string *, uint32_t *)
        Outcome pin(uint32_t, uint64_t, Hashes, uint8_t *)
        Outcome unpin(uint32_t, uint64_t, size_t *)
        Outcome remove(Hashes, uint8_t *, string *, const uint8_t *)
        Outcome remove_prefix(uint32_t, const uint8_t *, string *, size_t *)
        Outcome evict(uint64_t, int64_t, const DemoteCall &, Evicted *, const Spared &)
        Outcome demote_more(const uint8_t *, size_t, const DemoteCall &, string *)
        Outcome evict_disk(uint32_t, uint64_t, int64_t, string *, string *, uint64_t *)
        Outcome promote(const PromoteCall &, uint8_t *, string *, uint64_t *)
        Outcome spoilt(const uint8_t *, size_t, string *, string *)
        Outcome reclaim(const uint8_t *, size_t, int64_t, uint64_t *)
        Outcome move_out(const MoveOutCall &, string *, uint32_t *, uint64_t *)
        Outcome move_to(const MoveToCall &, uint8_t *, string *)
        Outcome mend(const MendCall &, uint8_t *, string *, string *)
        Outcome commit_moves(const uint8_t *, size_t, uint8_t *, string *, string *)
        Outcome publish_moves(const uint8_t *, size_t, int64_t, uint64_t *)
        Outcome abort_moves(const uint8_t *, size_t, uint64_t *)
        Outcome restore(const uint8_t *, size_t, const uint8_t *, size_t, size_t *)
        Outcome stats(IndexStats *)
        Outcome namespaces(string *)
        Outcome check(string *)
