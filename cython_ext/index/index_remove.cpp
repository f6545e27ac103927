// SPDX-License-Identifier: Apache-2.0
#include <unordered_set>

#include "index.hpp"

namespace moonpool::index {

namespace {

// Whether a committed shard has such a generation.
template <class Is>
bool any_generation(const Chunk &chunk, Is is) {
  for (uint32_t i = 0; i < chunk.shards; ++i) {
    if (chunk.shard(i).state == ShardState::kCommitted && is(chunk.shard(i).generation)) return true;
  }
  return false;
}

// Spared, as it is looked up.
class SparedChunks {
 public:
  SparedChunks(const Spared &spared, std::unordered_set<uint32_t> slots)
      : slots_(std::move(slots)), ranges_(spared.count), newest_(spared.newest) {
    for (size_t i = 0; i < spared.count; ++i) {
      ranges_[i] = {load_u64(spared.ranges + i * 16), load_u64(spared.ranges + i * 16 + 8)};
    }
    std::sort(ranges_.begin(), ranges_.end());
  }
  bool has(uint32_t slot, const Chunk &chunk) const {
    const auto in_range = [&](uint64_t generation) {
      const auto after = std::upper_bound(ranges_.begin(), ranges_.end(), std::pair{generation, UINT64_MAX});
      return after != ranges_.begin() && std::prev(after)->second >= generation;
    };
    return slots_.contains(slot) || (!ranges_.empty() && any_generation(chunk, in_range));
  }
  bool too_new(const Chunk &chunk) const {
    return any_generation(chunk, [&](uint64_t generation) { return generation > newest_; });
  }

 private:
  std::unordered_set<uint32_t> slots_;
  std::vector<std::pair<uint64_t, uint64_t>> ranges_;
  uint64_t newest_;
};

}  // namespace

Outcome ChunkIndex::remove(Hashes hashes, uint8_t *statuses, std::string *slots, const uint8_t *generations) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    slots->reserve(slots->size() + hashes.count * 4);
    for (size_t i = 0; i < hashes.count; ++i) {
      const uint32_t slot = find(hashes[i], hashes.name_space);
      ItemStatus status = ItemStatus::kNotFound;
      const auto is_meant = [&](uint64_t generation) { return generation == load_u64(generations + i * 8); };
      if (slot != kNone && visible(chunks_[slot]) &&
          (generations == nullptr || any_generation(chunks_[slot], is_meant))) {
        status = chunks_[slot].pins != 0 ? ItemStatus::kInUse : ItemStatus::kOk;
        if (status == ItemStatus::kOk) {
          detach(slot, false);
          append_u32(slots, slot);
        }
      }
      statuses[i] = static_cast<uint8_t>(status);
    }
    return Outcome::kOk;
  });
}

Outcome ChunkIndex::remove_prefix(uint32_t name_space, const uint8_t *hash, std::string *slots,
                                  size_t *pinned) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    *pinned = 0;
    const uint32_t root = find(hash, name_space);
    if (root == kNone) return Outcome::kOk;
    std::vector<uint32_t> family{root};
    for (size_t i = 0; i < family.size(); ++i) {
      for (uint32_t child = chunks_[family[i]].child; child != kNone; child = chunks_[child].older) {
        family.push_back(child);
      }
    }
    slots->reserve(slots->size() + family.size() * 4);
    for (const uint32_t slot : family) {
      const Chunk &chunk = chunks_[slot];
      if (chunk.pins != 0) {
        ++*pinned;
      } else if (chunk.listed && chunk.writes == 0) {
        // What is still written stays: its record may be on its way.
        detach(slot, false);
        append_u32(slots, slot);
      }
    }
    return Outcome::kOk;
  });
}

// Eviction makes room where something can be written; what lies elsewhere is not given up for nothing.
bool ChunkIndex::may_go(uint32_t slot, int64_t now) {
  Chunk &chunk = chunks_[slot];
  if (chunk.pins != 0 || chunk.writes != 0 || chunk.warm_children != 0 || chunk.leased() > now) return false;
  // Its extents in memory are given up as soon as the record says so.
  if (const Move *move = moves_.of(slot);
      move != nullptr && (move->kind == MoveKind::kShed || (move->sheds() && move->committed))) {
    return false;
  }
  return writable_bytes(chunk) != 0;
}

uint64_t ChunkIndex::writable_bytes(const Chunk &chunk) const {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < chunk.shards; ++i) {
    const Shard &shard = chunk.shard(i);
    for (uint32_t r = 0; r < shard.replicas; ++r) {
      const Place place = chunks_.place(shard, r);
      if (segments_[place.segment].writable && !segments_.on_disk(place)) bytes += segments_.bytes(place);
    }
  }
  return bytes;
}

Outcome ChunkIndex::evict(uint64_t want, int64_t now, const DemoteCall &demote, Evicted *evicted,
                          const Spared &spared) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    uint32_t looks = kLooksMax, copies = 0;
    uint64_t copied = 0;
    tell_capacity();
    std::unordered_set<uint32_t> kept;
    for (size_t i = 0; i < spared.hashes.count; ++i) kept.insert(find(spared.hashes[i], spared.hashes.name_space));
    const SparedChunks are_spared(spared, std::move(kept));
    const Policy::MayGo may_go_now = [&](uint32_t slot) {
      // What is being copied already is passed over by who would copy it; who needs room now takes it.
      return may_go(slot, now) && (demote.uses_min == 0 || moves_.of(slot) == nullptr) &&
             !are_spared.has(slot, chunks_[slot]);
    };
    while (evicted->bytes < want) {
      const uint32_t slot = policy_->victim(may_go_now, &looks);
      if (slot == kNone || are_spared.too_new(chunks_[slot])) break;
      const uint64_t bytes = writable_bytes(chunks_[slot]);
      // The caller has to hear of those that are given up already.
      const Outcome no_memory = evicted->slots.empty() && evicted->moves.empty() ? Outcome::kNoMemory : Outcome::kOk;
      Chilled chilled = Chilled::kNot;
      try {
        chilled = chill_one(slot, demote, &evicted->moves, &evicted->full);
      } catch (const std::bad_alloc &) {
        return no_memory;
      }
      const bool hopeless = evicted->full != kNone && nothing_cold(evicted->full);
      if (hopeless) evicted->full = kNone;
      if (chilled == Chilled::kWaits && !hopeless) break;
      if (chilled == Chilled::kNot || chilled == Chilled::kWaits) {
        if (!give_up_chunk(slot, &evicted->slots, &evicted->keys)) return no_memory;
        evicted->lost_bytes += bytes;
        ++evicted_;
      } else if (chilled == Chilled::kCopied) {
        copied += bytes;
        ++copies;
      }
      evicted->bytes += bytes;
      if (copies > 0 && (copies >= demote.count_max || copied >= demote.bytes_max)) break;
    }
    return Outcome::kOk;
  });
}

Outcome ChunkIndex::reclaim(const uint8_t *slots, size_t count, int64_t now, uint64_t *bytes) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    *bytes = 0;
    const auto removed = [&](uint32_t slot) {
      return chunks_.arena().used(slot) && chunks_[slot].state == ChunkState::kRemoved;
    };
    size_t reads = 0;
    for (size_t i = 0; i < count; ++i) {
      const uint32_t slot = load_u32(slots + i * 4);
      if (!removed(slot) || chunks_[slot].leased() <= now) continue;
      for (uint32_t s = 0; s < chunks_[slot].shards; ++s) reads += chunks_[slot].shard(s).replicas;
    }
    condemned_.reserve_reads(reads);
    for (size_t i = 0; i < count; ++i) {
      const uint32_t slot = load_u32(slots + i * 4);
      if (!removed(slot)) continue;
      Chunk &chunk = chunks_[slot];
      const int64_t until = chunk.leased();
      for (uint32_t s = 0; s < chunk.shards; ++s) {
        Shard &shard = chunk.shard(s);
        if (until <= now) {
          *bytes += free_places(shard);
          continue;
        }
        for (uint32_t r = 0; r < shard.replicas; ++r, --reads) condemned_.until_read(until, chunks_.place(shard, r));
      }
      // Its new place, named by a record that the removal has taken away.
      if (const Move *move = moves_.of(slot); move != nullptr) *bytes += end_move(*move);
      chunks_.give(slot);
    }
    condemned_.release_reads(reads);  // when a slot was named twice
    Place place = {};
    while (condemned_.take_read(now, &place)) *bytes += segments_.give(place);
    return Outcome::kOk;
  });
}

}  // namespace moonpool::index
