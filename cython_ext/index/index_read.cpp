// SPDX-License-Identifier: Apache-2.0
//
// Look-ups. They hold the lock together; what they touch goes to the policy with the next call that is alone.
#include <algorithm>
#include <shared_mutex>

#include "index.hpp"

namespace moonpool::index {

namespace {

using Shared = std::shared_lock<RwLock>;

// A batch of more does not keep everybody else out meanwhile.
constexpr size_t kAtOnce = 4096;

}  // namespace

Outcome ChunkIndex::exists(Hashes hashes, uint8_t *statuses) noexcept {
  for (size_t begin = 0; begin < hashes.count; begin += kAtOnce) {
    const Hashes some{hashes[begin], std::min(kAtOnce, hashes.count - begin), hashes.name_space};
    const Shared held(lock_);
    find_each(some, [&](size_t i, uint32_t slot) {
      const bool there = slot != kNone && whole(chunks_[slot]);
      statuses[begin + i] = static_cast<uint8_t>(there ? ItemStatus::kOk : ItemStatus::kNotFound);
      return true;
    });
  }
  return Outcome::kOk;
}

Outcome ChunkIndex::match_prefix(Hashes hashes, int64_t now, int64_t lease, size_t *matched) noexcept {
  return guarded([&] {
    std::vector<uint32_t> slots;
    slots.reserve(std::min(hashes.count, kAtOnce));
    bool crowded = false;
    {
      const Shared held(lock_);
      find_each(hashes, [&](size_t, uint32_t slot) {
        if (slot == kNone || !whole(chunks_[slot])) return false;
        slots.push_back(slot);
        return true;
      });
      crowded = touch(slots);
      give_leases(slots, now, lease);
    }
    *matched = slots.size();
    if (crowded) exclusive();
    return Outcome::kOk;
  });
}

// To those of `slots` that are not kNone.
void ChunkIndex::give_leases(const std::vector<uint32_t> &slots, int64_t now, int64_t lease) {
  if (lease <= 0) return;
  bool any = false;
  for (const uint32_t slot : slots) {
    if (slot == kNone) continue;
    chunks_[slot].lease(now + lease);
    any = true;
  }
  if (any) raise(leased_until_, now + lease);
}

Outcome ChunkIndex::locate(Hashes hashes, uint32_t shard, int64_t now, int64_t lease, uint8_t *statuses,
                           std::string *extents, uint32_t *replicas) noexcept {
  return guarded([&] {
    std::vector<uint32_t> found(hashes.count, kNone), touched;
    touched.reserve(hashes.count);
    bool crowded = false;
    {
      const Shared held(lock_);
      *replicas = 1;
      find_each(hashes, [&](size_t i, uint32_t slot) {
        ItemStatus status = ItemStatus::kNotFound;
        if (slot != kNone && chunks_[slot].complete()) {
          const Chunk &chunk = chunks_[slot];
          if (shard >= chunk.shards) {
            status = ItemStatus::kInvalid;
          } else if (readable(chunk.shard(shard))) {
            const uint32_t count = readable_in_memory(chunk.shard(shard));
            status = count > 0 ? ItemStatus::kOk : ItemStatus::kLoading;
            found[i] = slot;
            if (chunks_[slot].leased() <= now) touched.push_back(slot);
            *replicas = std::max<uint32_t>(*replicas, count);
            const Place first = chunks_.place(chunk.shard(shard), 0);
            if (!segments_.lost(first)) segments_[first.segment].space.prefetch(first.piece);
          }
        }
        statuses[i] = static_cast<uint8_t>(status);
        return true;
      });
      extents->resize(hashes.count * *replicas * kExtentBytes);
      auto *out = reinterpret_cast<uint8_t *>(extents->data());
      for (const uint32_t slot : found) {
        uint32_t written = 0;
        if (slot != kNone) written = write_extents(chunks_[slot].shard(shard), out);
        for (uint32_t r = written; r < *replicas; ++r) write_no_extent(out + r * kExtentBytes);
        out += *replicas * kExtentBytes;
      }
      crowded = touch(touched);
      give_leases(found, now, lease);
    }
    if (crowded) exclusive();
    return Outcome::kOk;
  });
}

// The replicas that can be read by others, first; returns how many.
uint32_t ChunkIndex::write_extents(const Shard &shard, uint8_t *out) const {
  uint32_t count = 0;
  for (uint32_t r = 0; r < shard.replicas; ++r) {
    const Place place = chunks_.place(shard, r);
    if (!segments_.readable(place) || segments_.on_disk(place)) continue;
    const Segment &segment = segments_[place.segment];
    write_extent(out + count++ * kExtentBytes, shard.generation, segment.space.offset(place.piece) * kUnit,
                 shard.length, segment.number);
  }
  return count;
}

Outcome ChunkIndex::pin(uint32_t owner, uint64_t pin, Hashes hashes, uint8_t *statuses) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    std::vector<Pinned> found;
    find_each(hashes, [&](size_t i, uint32_t slot) {
      ItemStatus status = ItemStatus::kNotFound;
      if (slot != kNone && visible(chunks_[slot])) {
        status = ItemStatus::kChunksMax;
        // As many as there may be chunks: a bound, and one that nobody meets who unpins.
        if (pins_.count() + found.size() < chunks_max_) {
          found.push_back({slot, chunks_[slot].birth});
          status = ItemStatus::kOk;
        }
      }
      statuses[i] = static_cast<uint8_t>(status);
      return true;
    });
    if (!found.empty()) pins_.add(owner, pin, found);
    for (const Pinned pinned : found) ++chunks_[pinned.slot].pins;
    return Outcome::kOk;
  });
}

// Whether it was still there.
bool ChunkIndex::unpin_one(Pinned pinned) {
  if (!chunks_.arena().used(pinned.slot)) return false;
  Chunk &chunk = chunks_[pinned.slot];
  // Another birth: it was lost, and the slot has another chunk.
  if (chunk.birth != pinned.birth || chunk.state != ChunkState::kLive) return false;
  --chunk.pins;
  return true;
}

Outcome ChunkIndex::unpin(uint32_t owner, uint64_t pin, size_t *count) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    *count = 0;
    for (const Pinned pinned : pins_.take(owner, pin)) *count += unpin_one(pinned) ? 1 : 0;
    return Outcome::kOk;
  });
}

}  // namespace moonpool::index
