// SPDX-License-Identifier: Apache-2.0
#include <unordered_set>

#include "index.hpp"

namespace moonpool::index {

namespace {

// Chunks that one call of evict() looks at: it ends also where nearly everything is in use.
constexpr uint32_t kLooksMax = 100'000;

// Whether a committed shard has such a generation.
template <class Is>
bool any_generation(const Chunk &chunk, Is is) {
  for (uint32_t i = 0; i < chunk.shards; ++i) {
    if (chunk.shard(i).state == ShardState::kCommitted && is(chunk.shard(i).generation)) return true;
  }
  return false;
}

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
  if (chunk.pins != 0 || chunk.writes != 0 || chunk.child != kNone || chunk.leased() > now) return false;
  return writable_bytes(chunk) != 0;
}

uint64_t ChunkIndex::writable_bytes(const Chunk &chunk) const {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < chunk.shards; ++i) {
    const Shard &shard = chunk.shard(i);
    for (uint32_t r = 0; r < shard.replicas; ++r) {
      const Place place = chunks_.place(shard, r);
      if (segments_[place.segment].writable) bytes += segments_.bytes(place);
    }
  }
  return bytes;
}

Outcome ChunkIndex::evict(uint64_t want, int64_t now, std::string *slots, std::string *keys, uint64_t *bytes,
                          const Spared &spared) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    *bytes = 0;
    uint32_t looks = kLooksMax;
    tell_capacity();
    std::unordered_set<uint32_t> kept;
    for (size_t i = 0; i < spared.hashes.count; ++i) kept.insert(find(spared.hashes[i], spared.hashes.name_space));
    std::vector<std::pair<uint64_t, uint64_t>> ranges(spared.count);
    for (size_t i = 0; i < spared.count; ++i) {
      ranges[i] = {load_u64(spared.ranges + i * 16), load_u64(spared.ranges + i * 16 + 8)};
    }
    std::sort(ranges.begin(), ranges.end());
    const auto in_range = [&](uint64_t generation) {
      const auto after = std::upper_bound(ranges.begin(), ranges.end(), std::pair{generation, UINT64_MAX});
      return after != ranges.begin() && std::prev(after)->second >= generation;
    };
    const auto is_spared = [&](uint32_t slot) {
      return kept.contains(slot) || (!ranges.empty() && any_generation(chunks_[slot], in_range));
    };
    const Policy::MayGo may_go_now = [&](uint32_t slot) { return may_go(slot, now) && !is_spared(slot); };
    while (*bytes < want) {
      const uint32_t slot = policy_->victim(may_go_now, &looks);
      const auto too_new = [&](uint64_t generation) { return generation > spared.newest; };
      if (slot == kNone || any_generation(chunks_[slot], too_new)) break;
      try {
        slots->reserve(slots->size() + 4);
        keys->reserve(keys->size() + 4 + kHashBytes);
      } catch (const std::bad_alloc &) {
        // The caller has to hear of those that are given up already.
        if (slots->empty()) throw;
        break;
      }
      *bytes += writable_bytes(chunks_[slot]);
      append_u32(slots, slot);
      append_key(keys, chunks_[slot]);
      detach(slot, true);
      ++evicted_;
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
