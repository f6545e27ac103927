// SPDX-License-Identifier: Apache-2.0
//
// What the calls have in common.
#include "index.hpp"

#include <sys/random.h>

#include <algorithm>

namespace moonpool::index {

namespace {

// Where keys are in the table is nobody's business: callers choose them.
uint64_t secret() {
  uint64_t drawn = 0;
  if (getrandom(&drawn, sizeof drawn, GRND_NONBLOCK) != sizeof drawn) drawn = 0x2545f4914f6cdd1d;
  return drawn;
}

constexpr size_t kTouchedMax = 1u << 16;

}  // namespace

std::unique_ptr<ChunkIndex> ChunkIndex::make(std::string_view policy, uint32_t chunks_max, uint64_t epoch,
                                             uint64_t seed) {
  std::unique_ptr<ChunkIndex> made;
  const Outcome outcome = guarded([&] {
    made.reset(new ChunkIndex(policy, chunks_max, epoch, seed));
    return Outcome::kOk;
  });
  return outcome == Outcome::kOk && made->policy_ != nullptr ? std::move(made) : nullptr;
}

ChunkIndex::ChunkIndex(std::string_view policy, uint32_t chunks_max, uint64_t epoch, uint64_t seed)
    : chunks_max_(chunks_max),
      table_seed_(secret()),
      epoch_(epoch),
      policy_(Policy::make(policy, chunks_, seed)),
      random_(seed) {}

ChunkIndex::Exclusive ChunkIndex::exclusive() {
  Exclusive held(lock_);
  // No reader is in, so nobody adds to it; the lock tells the sanitizer.
  const std::lock_guard touching(touched_lock_);
  constexpr size_t kAhead = 8;
  const size_t count = touched_.size();
  for (size_t i = 0; i < count; ++i) {
    // A list's neighbours are anywhere in memory: first the chunk, then they.
    if (i + 2 * kAhead < count) __builtin_prefetch(&chunks_[touched_[i + 2 * kAhead]].one, 1);
    if (i + kAhead < count) {
      const Chunk &soon = chunks_[touched_[i + kAhead]];
      if (soon.before != kNone) __builtin_prefetch(&chunks_[soon.before].one, 1);
      if (soon.after != kNone) __builtin_prefetch(&chunks_[soon.after].one, 1);
    }
    touch_one(touched_[i]);
  }
  touched_.clear();
  return held;
}

// By a reader that still holds its lock, so that the slots are what they were. A chain is touched from its end.
bool ChunkIndex::touch(const std::vector<uint32_t> &slots) {
  const std::lock_guard touching(touched_lock_);
  touched_.insert(touched_.end(), slots.rbegin(), slots.rend());
  return touched_.size() > kTouchedMax;
}

uint32_t ChunkIndex::find(const uint8_t *hash, uint32_t name_space) const {
  return table_.find(hash_of(hash, name_space), [&](uint32_t slot) { return chunks_[slot].is(hash, name_space); });
}

bool ChunkIndex::lost(const Shard &shard) const {
  for (uint32_t r = 0; r < shard.replicas; ++r) {
    if (!segments_.lost(chunks_.place(shard, r))) return false;
  }
  return true;
}

// Nothing of it is in memory, and no disk that has it is there: it is written anew when it is put.
bool ChunkIndex::abandoned(const Shard &shard) const {
  for (uint32_t r = 0; r < shard.replicas; ++r) {
    const Place place = chunks_.place(shard, r);
    if (!segments_.lost(place) && (!segments_.on_disk(place) || segments_.readable(place))) return false;
  }
  return true;
}

bool ChunkIndex::readable(const Shard &shard) const {
  for (uint32_t r = 0; r < shard.replicas; ++r) {
    if (segments_.readable(chunks_.place(shard, r))) return true;
  }
  return false;
}

bool ChunkIndex::visible(const Chunk &chunk) const {
  if (!chunk.complete()) return false;
  if (segments_.all_readable()) return true;
  for (uint32_t i = 0; i < chunk.shards; ++i) {
    if (lost(chunk.shard(i))) return false;
  }
  return true;
}

bool ChunkIndex::whole(const Chunk &chunk) const {
  if (!chunk.complete()) return false;
  if (segments_.all_readable()) return true;
  for (uint32_t i = 0; i < chunk.shards; ++i) {
    if (!readable(chunk.shard(i))) return false;
  }
  return true;
}

void ChunkIndex::drop_lost_places(Shard &shard) {
  Place kept[kReplicasMax] = {};
  uint32_t count = 0;
  for (uint32_t r = 0; r < shard.replicas; ++r) {
    const Place place = chunks_.place(shard, r);
    if (segments_.lost(place)) {
      segments_.give(place);
    } else {
      kept[count++] = place;
    }
  }
  if (count != shard.replicas) chunks_.set_places(shard, kept, count);
}

uint64_t ChunkIndex::free_places(Shard &shard) {
  uint64_t bytes = 0;
  for (uint32_t r = 0; r < shard.replicas; ++r) bytes += segments_.give(chunks_.place(shard, r));
  chunks_.set_places(shard, nullptr, 0);
  return bytes;
}

void ChunkIndex::list(uint32_t slot) {
  Chunk &chunk = chunks_[slot];
  if (chunk.listed) return;
  chunk.listed = true;
  ++listed_;
  policy_->on_insert(slot, chunk.parent);
  settle(slot);
}

void ChunkIndex::leave_family(uint32_t slot) {
  const uint32_t parent = chunks_[slot].parent;
  family_.leave(slot);
  if (parent == kNone || !chunks_[parent].listed) return;
  if (!chunks_[parent].cold) {
    if (!chunks_[slot].cold && chunks_[parent].warm_children == 0) policy_->on_leaf(parent, slot);
  } else if (chunks_[parent].child == kNone) {
    cold_.on_leaf(parent);
  }
}

// As many as fit into what can be written, at the size that they have by now.
void ChunkIndex::tell_capacity() {
  uint64_t capacity = 0, used = 0;
  segments_.each_writable([&](const Segment &segment, uint32_t) {
    capacity += segment.space.capacity();
    used += segment.space.used();
  });
  if (used == 0) return;
  const double each =
      static_cast<double>(used) / static_cast<double>(std::max<size_t>(1, table_.count() - cold_.count()));
  const double chunks = static_cast<double>(capacity) / each;
  policy_->set_capacity(static_cast<size_t>(std::min(chunks + 0.5, static_cast<double>(chunks_max_))));
}

void ChunkIndex::detach(uint32_t slot, bool evicted) {
  Chunk &chunk = chunks_[slot];
  leave_move(slot);
  for (uint32_t i = 0; i < chunk.shards; ++i) {
    Shard &shard = chunk.shard(i);
    drop_lost_places(shard);
    for (uint32_t r = 0; r < shard.replicas; ++r) segments_.set_waiting(chunks_.place(shard, r));
  }
  if (chunk.listed) {
    if (chunk.cold) {
      cold_.remove(slot);
    } else {
      policy_->on_remove(slot, evicted);
    }
    chunk.listed = false;
    --listed_;
  }
  leave_family(slot);
  table_.erase(chunk.name(table_seed_), slot);
  chunk.state = ChunkState::kRemoved;
}

void ChunkIndex::forget(uint32_t slot) {
  Chunk &chunk = chunks_[slot];
  leave_family(slot);
  table_.erase(chunk.name(table_seed_), slot);
  chunks_.give(slot);
}

void ChunkIndex::forget_if_empty(uint32_t slot) {
  const Chunk &chunk = chunks_[slot];
  if (chunk.state == ChunkState::kLive && chunk.committed == 0 && chunk.writes == 0 && !chunk.listed) forget(slot);
}

}  // namespace moonpool::index
