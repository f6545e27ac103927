// SPDX-License-Identifier: Apache-2.0
//
// The chunk index of the master. What the calls mean is in _index.pyi; here batches come as pointers and counts, of the
// sizes that _index.pyx has checked. Thread-safe: reads run at the same time, everything else alone. No call throws,
// and one that finds no memory leaves nothing half done (kNoMemory; _index.pyi says what it has done then).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "chunk.hpp"
#include "cold.hpp"
#include "condemned.hpp"
#include "family.hpp"
#include "key.hpp"
#include "lock.hpp"
#include "moves.hpp"
#include "pins.hpp"
#include "placement.hpp"
#include "policy.hpp"
#include "record.hpp"
#include "segments.hpp"
#include "table.hpp"
#include "undo.hpp"
#include "writes.hpp"

namespace moonpool::index {

constexpr size_t kExtentBytes = 32;
constexpr size_t kMoveBytes = 96;
constexpr uint64_t kHeaderBytes = 64;
// As the digest of the transfer engine has them.
constexpr uint64_t kLeafBytes = uint64_t{256} << 10;
constexpr uint64_t kLeafDigestBytes = 8;
constexpr uint64_t kEpochMax = (1u << 24) - 1;

// As in proto/pool.proto.
enum class ItemStatus : uint8_t {
  kOk,
  kAlready,
  kNotFound,
  kWriting,
  kNoSpace,
  kConflict,
  kNotOwner,
  kChunksMax,
  kTooLarge,
  kInvalid,
  kInUse,
  kNotMoved,
  kSpoilt,
  kLoading,
};

// What an extent takes: header, payload, and the digests of its leaves where it has more than one. The payload is at
// most that of a segment.
constexpr uint64_t extent_bytes(uint64_t payload) {
  const uint64_t leaves = (payload + kLeafBytes - 1) / kLeafBytes;
  return kHeaderBytes + payload + (leaves > 1 ? leaves * kLeafDigestBytes : 0);
}
// Chunks that one call of evict() looks at: it ends also where nearly everything is in use.
constexpr uint32_t kLooksMax = 100'000;

constexpr uint64_t units_of(uint64_t payload) { return (extent_bytes(payload) + kUnit - 1) / kUnit; }

// Of a call as a whole.
enum class Outcome : uint8_t { kOk, kNoMemory, kUnknownSegment, kLostSegment, kTooSmall, kTooManySegments, kDamaged };

struct Hashes {
  const uint8_t *data;
  size_t count;
  uint32_t name_space;
  const uint8_t *operator[](size_t i) const { return data + i * kHashBytes; }
};

// Parents of a batch, packed as in PutStart.
struct Parents {
  const uint8_t *data;
  size_t bytes;  // 0, 32 (of the first; each other's is the one before it) or 32 each
};

struct StartCall {
  uint32_t owner;
  Hashes hashes;
  Parents parents;
  const uint8_t *lengths;  // u64 each
  bool one_length;         // for all
  uint32_t shard, shards, replicas;
  std::vector<uint32_t> avoid;
  uint32_t host;
  int64_t now, deadline;
};

struct MoveOutCall {
  uint32_t segment;
  uint32_t begin;  // what an earlier call of the same round returned as `next`, or 0
  uint32_t looks_max, count_max;
  uint64_t bytes_max, room;
  std::vector<uint32_t> avoid;
  int64_t now;
};

struct MoveToCall {
  Hashes hashes;
  uint32_t segment;
  uint32_t count_max;
  uint64_t bytes_max;
};

// What an eviction passes over: chunks with a shard of these generations, and chunks with these hashes. And it ends
// where a chunk with a shard of a later generation than `newest` would go next.
struct Spared {
  const uint8_t *ranges = nullptr;  // u64 first, u64 last; they do not overlap
  size_t count = 0;
  Hashes hashes{};
  uint64_t newest = UINT64_MAX;
};

struct MendCall {
  Hashes hashes;
  uint32_t shard;
  const uint8_t *extents;  // the copy of each that is spoilt
  bool replace;
  int64_t now;
};

// What may be copied to disks instead of being evicted.
struct DemoteCall {
  uint32_t uses_min;  // by who was used so often, or was put under an earlier epoch; 0: nothing is copied
  uint32_t count_max;
  uint64_t bytes_max;
  std::vector<uint32_t> avoid;  // disks that have enough to do
};

struct PromoteCall {
  Hashes hashes;
  uint32_t shard;
  uint32_t count_max;
  uint64_t bytes_max;
};

struct Evicted {
  std::string slots, keys;
  uint64_t bytes = 0, lost_bytes = 0;  // that leave memory; of those, what is nowhere else
  std::string moves;
  uint32_t full = kNone;  // a disk that had no room
};

struct SegmentStats {
  uint64_t capacity_bytes, used_bytes, waiting_bytes, largest_free_bytes, extents, chunks, free_pieces;
};

struct IndexStats {
  uint64_t chunks, chunks_max, on_disk, writing, moving, pinned, used_bytes, free_bytes, capacity_bytes,
      condemned_bytes, memory_bytes, evicted, refused_records, generation;
  int64_t leased_until_ms;
};

class ChunkIndex {
 public:
  // Null: no such policy, or no memory.
  static std::unique_ptr<ChunkIndex> make(std::string_view policy, uint32_t chunks_max, uint64_t epoch, uint64_t seed);

  // ---- segments (index_segments.cpp)
  // `memory`: it is the disk of the node that lends this segment; kNone: it is memory itself.
  Outcome add_segment(uint32_t number, uint64_t capacity, uint32_t host, int64_t ramp_up, int64_t now,
                      uint32_t memory = kNone) noexcept;
  Outcome know_disk(uint32_t number) noexcept;
  Outcome set_segment(uint32_t number, bool writable, bool readable) noexcept;
  Outcome drop_segment(uint32_t number) noexcept;
  Outcome drop_unknown(const std::vector<uint32_t> &known) noexcept;
  Outcome sweep(uint32_t count_max, std::string *slots, bool *complete) noexcept;
  Outcome chunks_in(uint32_t number, uint32_t count_max, std::string *keys) noexcept;
  Outcome segment_stats(uint32_t number, SegmentStats *stats) noexcept;

  // ---- puts (index_put.cpp, index_commit.cpp)
  Outcome start(const StartCall &call, uint8_t *statuses, uint8_t *extents) noexcept;
  Outcome commit(uint32_t owner, Hashes hashes, const uint8_t *generations, uint32_t shard, const uint8_t *written,
                 uint8_t *statuses, std::string *slots, std::string *records) noexcept;
  Outcome publish(const uint8_t *slots, size_t count, std::string *keys) noexcept;
  Outcome revoke(const uint8_t *slots, size_t count) noexcept;
  Outcome abort(uint32_t owner, Hashes hashes, const uint8_t *generations, uint32_t shard, bool settled,
                uint8_t *statuses) noexcept;
  Outcome expire(int64_t now, std::string *pairs) noexcept;
  Outcome drop_owner(uint32_t owner, std::string *pairs) noexcept;
  Outcome to_fence(std::string *pairs) noexcept;
  Outcome fenced(uint32_t owner, uint32_t segment, uint64_t *bytes) noexcept;

  // ---- reads (index_read.cpp)
  Outcome exists(Hashes hashes, uint8_t *statuses) noexcept;
  Outcome match_prefix(Hashes hashes, int64_t now, int64_t lease, size_t *matched) noexcept;
  Outcome locate(Hashes hashes, uint32_t shard, int64_t now, int64_t lease, uint8_t *statuses, std::string *extents,
                 uint32_t *replicas) noexcept;
  Outcome pin(uint32_t owner, uint64_t pin, Hashes hashes, uint8_t *statuses) noexcept;
  Outcome unpin(uint32_t owner, uint64_t pin, size_t *count) noexcept;

  // ---- removal (index_remove.cpp)
  // `generations`: u64 each, or null for whatever is there.
  Outcome remove(Hashes hashes, uint8_t *statuses, std::string *slots, const uint8_t *generations = nullptr) noexcept;
  Outcome remove_prefix(uint32_t name_space, const uint8_t *hash, std::string *slots, size_t *pinned) noexcept;
  Outcome evict(uint64_t want, int64_t now, const DemoteCall &demote, Evicted *evicted,
                const Spared &spared = {}) noexcept;
  Outcome reclaim(const uint8_t *slots, size_t count, int64_t now, uint64_t *bytes) noexcept;

  // ---- moves (index_move.cpp)
  Outcome move_out(const MoveOutCall &call, std::string *moves, uint32_t *next, uint64_t *no_room) noexcept;
  Outcome move_to(const MoveToCall &call, uint8_t *statuses, std::string *moves) noexcept;
  Outcome mend(const MendCall &call, uint8_t *statuses, std::string *moves, std::string *slots) noexcept;
  Outcome commit_moves(const uint8_t *ids, size_t count, uint8_t *statuses, std::string *slots,
                       std::string *records) noexcept;
  Outcome publish_moves(const uint8_t *ids, size_t count, int64_t now, uint64_t *bytes) noexcept;
  Outcome abort_moves(const uint8_t *ids, size_t count, uint64_t *bytes) noexcept;

  // ---- memory and disks (index_tiers.cpp)
  Outcome demote_more(const uint8_t *slots, size_t count, const DemoteCall &call, std::string *moves) noexcept;
  Outcome evict_disk(uint32_t number, uint64_t want, int64_t now, std::string *slots, std::string *keys,
                     uint64_t *bytes) noexcept;
  // `no_room`: bytes that found none in memory.
  Outcome promote(const PromoteCall &call, uint8_t *statuses, std::string *moves, uint64_t *no_room) noexcept;
  Outcome spoilt(const uint8_t *ids, size_t count, std::string *slots, std::string *keys) noexcept;

  // ---- restart (index_restore.cpp)
  // `records` as commit() makes them. kDamaged: it is no row of as many records as slots, and nothing has changed.
  Outcome restore(const uint8_t *slots, size_t count, const uint8_t *records, size_t records_bytes,
                  size_t *taken) noexcept;

  // ---- state (index_state.cpp)
  Outcome stats(IndexStats *stats) noexcept;
  // u32 each.
  Outcome namespaces(std::string *numbers) noexcept;
  // What contradicts itself in the index, or "". For tests: it looks at everything.
  Outcome check(std::string *wrong) noexcept;

 private:
  using Exclusive = std::unique_lock<RwLock>;
  using Pairs = std::vector<std::pair<uint32_t, uint16_t>>;  // owner, place of the segment
  class GivenUp;

  ChunkIndex(std::string_view policy, uint32_t chunks_max, uint64_t epoch, uint64_t seed);

  // The write lock; what readers have touched is in the policy then.
  Exclusive exclusive();
  // Whether there are so many by now that somebody is to take the write lock.
  bool touch(const std::vector<uint32_t> &slots);
  void give_leases(const std::vector<uint32_t> &slots, int64_t now, int64_t lease);

  uint64_t hash_of(const uint8_t *hash, uint32_t name_space) const { return key_hash(hash, name_space, table_seed_); }
  uint32_t find(const uint8_t *hash, uint32_t name_space) const;
  // Calls `each(i, slot or kNone)` for each hash in turn until it returns false. What it will look at is fetched ahead.
  template <class Each>
  void find_each(Hashes hashes, Each each) const;

  // ---- of a chunk
  bool lost(const Shard &shard) const;  // no extent is left
  bool abandoned(const Shard &shard) const;
  bool readable(const Shard &shard) const;  // at least one extent can be read, be it by its node only
  bool visible(const Chunk &chunk) const;   // complete, and no shard is lost
  bool whole(const Chunk &chunk) const;     // complete, and each shard is readable
  void drop_lost_places(Shard &shard);
  uint64_t free_places(Shard &shard);
  // Gone for every call; its slot and extents wait for reclaim().
  void detach(uint32_t slot, bool evicted);
  // There has never been a record of it: nothing waits.
  void forget(uint32_t slot);
  void forget_if_empty(uint32_t slot);
  void list(uint32_t slot);
  void leave_family(uint32_t slot);
  void tell_capacity();
  bool may_go(uint32_t slot, int64_t now);
  bool give_up_chunk(uint32_t slot, std::string *slots, std::string *keys);
  uint64_t writable_bytes(const Chunk &chunk) const;
  uint32_t write_extents(const Shard &shard, uint8_t *out) const;
  bool unpin_one(Pinned pinned);

  // ---- of writes
  ItemStatus start_one(const StartCall &call, size_t i, uint32_t *slot, Placement &placement, uint8_t *extents);
  // All of it, or std::bad_alloc and the places are free.
  void begin_write(const StartCall &call, size_t i, uint32_t *slot, const Place *places, uint32_t count);
  void take_back(const StartCall &call, const uint8_t *statuses, size_t count);
  uint32_t parent_of(const StartCall &call, size_t i) const;
  Shard *written_by(uint32_t owner, uint32_t slot, uint32_t shard, uint64_t generation);
  // Whether it can be committed; what is lost is given up.
  ItemStatus may_commit(Shard &shard, uint8_t written);
  ItemStatus commit_missing(uint32_t slot, uint32_t shard, uint64_t generation) const;
  void finish_commit(Shard &shard, uint8_t written);
  // With a shard that is being committed, of its replicas those in `written`; with the new place of a move, or none,
  // instead of the old one.
  Record record_of(uint32_t slot, const Shard *committing, uint8_t written, const Move *move) const;
  RecordExtent record_of(Place place) const;
  // The number of the oldest commit of this slot, and of the one after it; 0: there is none.
  uint64_t oldest_commit(uint32_t slot, uint64_t *next);
  // Calls `each(write)` for the writes of a commit.
  template <class Each>
  void each_of_commit(uint32_t slot, uint64_t number, Each each);
  void end_write(uint32_t write);
  // Its extents are free, or wait for the fence of (owner, segment), which goes into `pairs` where the caller wants
  // it and has made room there. Takes no memory.
  void give_up(uint32_t write, bool settled, Pairs *pairs);
  void append_pair(uint32_t owner, uint16_t segment, std::string *out) const;
  void append_pairs(Pairs pairs, std::string *out) const;

  // ---- of moves
  bool may_move(uint32_t slot);
  bool movable(uint32_t slot, Place from, uint32_t *shard);
  // Replicas in memory that are not lost, but for the one at `from`; `others` has room for all.
  uint32_t others_of(const Shard &shard, Place from, Place *others) const;
  bool lies_elsewhere(const Shard &shard, Place from) const;
  ItemStatus mend_one(const MendCall &call, size_t i, uint32_t slot, Placement &placement, std::string *moves,
                      bool *last);
  bool place_elsewhere(Placement &placement, const Shard &shard, Place from, Place *to);
  Move &begin_move(uint32_t slot, uint32_t shard, Place from, Place to, MoveKind kind, std::string *moves);
  void take_back_moves(const std::string &moves, size_t from);
  ItemStatus move_one(uint32_t slot, Segment &target, uint16_t at, bool enough, std::string *moves, const Move **made);
  bool lies_in(const Shard &shard, uint16_t segment) const;
  bool source_of(const Shard &shard, const Segment &target, Place *from) const;
  ItemStatus commit_move(const Move &move) const;
  uint64_t change_places(const Move &move, int64_t now);
  bool leaves(const Move &move, uint32_t shard, Place place) const;
  uint32_t leaves_of(const Move &move) const;
  uint64_t give_when_read(Place place, int64_t until, int64_t now, uint32_t *reserved);
  uint64_t end_move(const Move &move);
  void leave_move(uint32_t slot);

  // ---- of memory and disks
  enum class Chilled : uint8_t {
    kNot,     // it is to be evicted
    kSheds,   // it is on disks already
    kCopied,  // a copy of it is begun
    kWaits,   // for room on a disk, or for the disk
  };
  bool make_disk(uint32_t at);
  uint32_t cold_at(const Chunk &chunk) const;
  void settle(uint32_t slot);
  void set_cold(uint32_t slot, bool cold);
  void touch_one(uint32_t slot);
  uint32_t readable_in_memory(const Shard &shard) const;
  bool readable_on_disk(const Shard &shard, Place *found) const;
  Place memory_of(const Chunk &chunk) const;
  uint32_t missing_on_disk(const Chunk &chunk) const;
  Chilled chill_one(uint32_t slot, const DemoteCall &call, std::string *moves, uint32_t *full);
  bool nothing_cold(uint32_t number) const;
  ItemStatus promotable(uint32_t slot, uint32_t shard, Place *from) const;
  ItemStatus promote_one(uint32_t slot, uint32_t shard, Place from, std::string *moves);

  // ---- of a restart
  bool restore_one(uint32_t slot, const uint8_t *record, size_t size);
  bool restore_shard(const RecordShard &from, Chunk &chunk, uint32_t slot);
  void refuse(uint32_t slot);

  std::string check_chunk(uint32_t slot) const;
  std::string check_sums();

  const uint64_t chunks_max_, table_seed_;
  const uint64_t epoch_;

  RwLock lock_;  // of everything below but what readers touch
  Chunks chunks_;
  Table table_;
  Family family_{chunks_};
  Segments segments_;
  Writes writes_;
  Pins pins_;
  Condemned condemned_;
  Moves moves_;
  std::unique_ptr<Policy> policy_;  // of what is in memory
  Cold cold_{chunks_};
  Random random_;
  uint64_t generations_ = 0, commits_ = 0;
  uint64_t listed_ = 0, evicted_ = 0, refused_ = 0;
  uint32_t sweep_at_ = 0;
  std::vector<uint32_t> refused_slots_;                     // for the next sweep
  std::unordered_multimap<std::string, uint32_t> orphans_;  // while restoring: key of the parent -> slot

  // ---- by readers
  std::atomic<int64_t> leased_until_{0};
  std::mutex touched_lock_;
  std::vector<uint32_t> touched_;
};

// ---- shared by the files of the class

// What an extent takes there: on a disk, whole blocks.
uint64_t units_in(const Segment &segment, uint64_t payload);
// `source`: what is to be read.
void append_move(std::string *out, const Move &move, Place source, const Segments &segments, const Chunk &chunk);

template <class Call>
Outcome guarded(Call call) noexcept {
  try {
    return call();
  } catch (const std::bad_alloc &) {
    return Outcome::kNoMemory;
  }
}

inline uint64_t load_u64(const uint8_t *at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

inline uint32_t load_u32(const uint8_t *at) {
  uint32_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

inline void append_u32(std::string *out, uint32_t value) {
  out->append(reinterpret_cast<const char *>(&value), sizeof value);
}

inline void append_u64(std::string *out, uint64_t value) {
  out->append(reinterpret_cast<const char *>(&value), sizeof value);
}

inline void append_key(std::string *out, uint32_t name_space, const uint8_t *hash) {
  append_u32(out, name_space);
  out->append(reinterpret_cast<const char *>(hash), kHashBytes);
}

inline void append_key(std::string *out, const Chunk &chunk) { append_key(out, chunk.name_space, chunk.hash); }

inline void write_extent(uint8_t *at, uint64_t generation, uint64_t offset, uint64_t length, uint32_t segment) {
  const uint32_t zero = 0;
  std::memcpy(at, &generation, 8);
  std::memcpy(at + 8, &offset, 8);
  std::memcpy(at + 16, &length, 8);
  std::memcpy(at + 24, &segment, 4);
  std::memcpy(at + 28, &zero, 4);
}

inline void write_no_extent(uint8_t *at) { write_extent(at, 0, 0, 0, kNone); }

template <class Each>
void ChunkIndex::find_each(Hashes hashes, Each each) const {
  constexpr size_t kAhead = 16;
  uint64_t keys[kAhead];
  uint32_t slots[kAhead];
  for (size_t begin = 0; begin < hashes.count; begin += kAhead) {
    const size_t count = std::min(kAhead, hashes.count - begin);
    for (size_t i = 0; i < count; ++i) {
      keys[i] = hash_of(hashes[begin + i], hashes.name_space);
      table_.prefetch(keys[i]);
    }
    for (size_t i = 0; i < count; ++i) {
      // Nearly always the right one: two keys with the same tag in one part are rare.
      slots[i] = table_.find(keys[i], [](uint32_t) { return true; });
      if (slots[i] == kNone) continue;
      __builtin_prefetch(&chunks_[slots[i]]);
      __builtin_prefetch(&chunks_[slots[i]].one);
    }
    for (size_t i = 0; i < count; ++i) {
      const uint8_t *hash = hashes[begin + i];
      const auto same = [&](uint32_t slot) { return chunks_[slot].is(hash, hashes.name_space); };
      if (slots[i] != kNone && !same(slots[i])) slots[i] = table_.find(keys[i], same);
      if (!each(begin + i, slots[i])) return;
    }
  }
}

}  // namespace moonpool::index
