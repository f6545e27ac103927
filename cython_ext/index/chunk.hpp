// SPDX-License-Identifier: Apache-2.0
//
// What there is once per chunk. Two lines of cache: the first answers whether it is there, the second where.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <unordered_map>

#include "arena.hpp"
#include "key.hpp"

namespace moonpool::index {

constexpr uint32_t kReplicasMax = 8;  // the bits of `written`
constexpr uint32_t kShardsMax = 1024;

// An extent: which piece of which segment (its place in Segments, not its number).
struct Place {
  uint32_t piece;
  uint16_t segment;

  bool operator==(const Place &) const = default;
};

enum class ShardState : uint8_t { kAbsent, kWriting, kCommitted };

struct Shard {
  uint64_t generation;
  uint64_t length;  // bytes of payload
  uint32_t write;   // in Writes, while it is written
  uint32_t more;    // where the replicas but the first are
  uint32_t piece;
  uint16_t segment;
  ShardState state;
  uint8_t replicas;
};
static_assert(sizeof(Shard) == 32);

// To at least `value`; several may do it at the same time.
template <class Atomic>
void raise(Atomic &most, int64_t value) {
  int64_t seen = most.load(std::memory_order_relaxed);
  while (seen < value && !most.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

enum class ChunkState : uint8_t { kLive, kRemoved };  // removed: gone for every call, its slot waits for `reclaim`

struct alignas(64) Chunk {
  uint8_t hash[kHashBytes];
  uint32_t name_space;
  uint16_t shards, committed;
  int64_t leased_until;  // ms; readers raise it, so only through lease() and leased()
  uint32_t pins;
  uint32_t birth;  // tells a chunk from an earlier one in the same slot
  ChunkState state;
  bool listed : 1;         // a policy knows it, and there may be a record of it
  bool cold : 1;           // its bytes are on disks only, and the policy that knows it is that of a disk
  uint16_t writes;         // shards that are written
  uint32_t warm_children;  // children that are not cold

  union {
    Shard one;    // shards == 1
    Shard *many;  // otherwise
  };
  uint32_t parent, child;   // slots; `child` is the first of a list
  uint32_t older, younger;  // the siblings
  uint32_t before, after;   // in a list of the policy
  uint32_t policy_b, policy_c;

  Shard &shard(uint32_t i) { return shards == 1 ? one : many[i]; }
  const Shard &shard(uint32_t i) const { return shards == 1 ? one : many[i]; }
  uint64_t name(uint64_t seed) const { return key_hash(hash, name_space, seed); }
  bool complete() const { return state == ChunkState::kLive && committed == shards; }
  bool is(const uint8_t *other, uint32_t other_space) const {
    return name_space == other_space && std::memcmp(hash, other, kHashBytes) == 0;
  }

  int64_t leased() { return std::atomic_ref(leased_until).load(std::memory_order_relaxed); }
  void lease(int64_t until) {
    std::atomic_ref held(leased_until);
    raise(held, until);
  }
};
static_assert(sizeof(Chunk) == 128);

struct MorePlaces {
  Place places[kReplicasMax - 1];
};

// All chunks, and what hangs on them.
class Chunks {
 public:
  ~Chunks();

  // A new chunk with so many absent shards, at the lowest free slot or at `at`; kNone: `at` is taken. Throws
  // std::bad_alloc, before anything has changed.
  uint32_t add(const uint8_t *hash, uint32_t name_space, uint32_t shards, uint32_t at = kNone);
  void give(uint32_t slot);

  Chunk &operator[](uint32_t slot) { return chunks_[slot]; }
  const Chunk &operator[](uint32_t slot) const { return chunks_[slot]; }
  const Arena<Chunk> &arena() const { return chunks_; }
  // Shards of all chunks, whatever their state: what memory is taken for.
  size_t shards() const { return shards_; }
  // How many there are of each namespace, whatever their state.
  const std::unordered_map<uint32_t, uint32_t> &spaces() const { return spaces_; }

  Place place(const Shard &shard, uint32_t replica) const {
    return replica == 0 ? Place{shard.piece, shard.segment} : more_[shard.more].places[replica - 1];
  }
  void set_places(Shard &shard, const Place *places, uint32_t count);
  // One shard can have a second place without std::bad_alloc, unless others come before it.
  void reserve_places() { more_.reserve(1); }
  size_t bytes() const { return chunks_.bytes() + more_.bytes() + many_bytes_; }

 private:
  Arena<Chunk> chunks_;
  Arena<MorePlaces> more_;
  size_t many_bytes_ = 0, shards_ = 0;
  uint32_t births_ = 0;
  std::unordered_map<uint32_t, uint32_t> spaces_;
};

}  // namespace moonpool::index
