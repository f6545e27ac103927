// SPDX-License-Identifier: Apache-2.0
//
// Memory and the disks below it. A chunk is copied to the disk of its node before it leaves memory, and keeps that copy
// when it is read back, so leaving again costs no write. Readers are given extents in memory only.
#include <algorithm>
#include <shared_mutex>

#include "index.hpp"

namespace moonpool::index {

uint64_t units_in(const Segment &segment, uint64_t payload) {
  const uint64_t units = units_of(payload);
  return segment.disk ? (units + kBlockUnits - 1) / kBlockUnits * kBlockUnits : units;
}

// The disk in whose list a chunk belongs; kNone: something of it is in memory, or nothing is anywhere.
uint32_t ChunkIndex::cold_at(const Chunk &chunk) const {
  uint32_t disk = kNone;
  for (uint32_t i = 0; i < chunk.shards; ++i) {
    const Shard &shard = chunk.shard(i);
    for (uint32_t r = 0; r < shard.replicas; ++r) {
      const Place place = chunks_.place(shard, r);
      if (segments_.lost(place)) continue;
      if (!segments_.on_disk(place)) return kNone;
      if (disk == kNone) disk = place.segment;
    }
  }
  return disk;
}

// Where a chunk lies has changed: it is known to the policy of the memory, or to that of a disk.
void ChunkIndex::settle(uint32_t slot) {
  Chunk &chunk = chunks_[slot];
  if (!chunk.listed) return;
  const uint32_t disk = cold_at(chunk);
  if (chunk.cold ? disk == cold_.disk_of(slot) : disk == kNone) return;
  if (chunk.cold) {
    cold_.remove(slot);
  } else {
    policy_->on_remove(slot, true);
  }
  set_cold(slot, disk != kNone);
  if (chunk.cold) {
    cold_.add(slot, static_cast<uint16_t>(disk));
  } else {
    policy_->on_insert(slot, chunk.parent);
  }
}

void ChunkIndex::set_cold(uint32_t slot, bool cold) {
  Chunk &chunk = chunks_[slot];
  if (chunk.cold == cold) return;
  chunk.cold = cold;
  if (chunk.parent == kNone) return;
  Chunk &parent = chunks_[chunk.parent];
  if (!cold) {
    ++parent.warm_children;
  } else if (--parent.warm_children == 0 && parent.listed && !parent.cold) {
    policy_->on_leaf(chunk.parent, slot);
  }
}

void ChunkIndex::touch_one(uint32_t slot) {
  if (chunks_[slot].cold) {
    cold_.on_touch(slot);
  } else {
    policy_->on_touch(slot);
  }
}

uint32_t ChunkIndex::readable_in_memory(const Shard &shard) const {
  uint32_t count = 0;
  for (uint32_t r = 0; r < shard.replicas; ++r) {
    const Place place = chunks_.place(shard, r);
    count += segments_.readable(place) && !segments_.on_disk(place) ? 1 : 0;
  }
  return count;
}

bool ChunkIndex::readable_on_disk(const Shard &shard, Place *found) const {
  for (uint32_t r = 0; r < shard.replicas; ++r) {
    const Place place = chunks_.place(shard, r);
    if (!segments_.readable(place) || !segments_.on_disk(place)) continue;
    *found = place;
    return true;
  }
  return false;
}

// Its first extent in memory; there is one.
Place ChunkIndex::memory_of(const Chunk &chunk) const {
  for (uint32_t i = 0; i < chunk.shards; ++i) {
    for (uint32_t r = 0; r < chunk.shard(i).replicas; ++r) {
      const Place place = chunks_.place(chunk.shard(i), r);
      if (!segments_.lost(place) && !segments_.on_disk(place)) return place;
    }
  }
  return kNowhere;
}

// Shards that no disk has. Of what is not complete that is all.
uint32_t ChunkIndex::missing_on_disk(const Chunk &chunk) const {
  if (!chunk.complete()) return chunk.shards;
  uint32_t missing = 0;
  Place found = {};
  for (uint32_t i = 0; i < chunk.shards; ++i) missing += readable_on_disk(chunk.shard(i), &found) ? 0 : 1;
  return missing;
}

// ---------------------------------------------------------------- down

// Begin to have a chunk leave memory, by a copy of one more shard of it where one is missing on disk.
ChunkIndex::Chilled ChunkIndex::chill_one(uint32_t slot, const DemoteCall &call, std::string *moves, uint32_t *full) {
  if (!may_move(slot) || !chunks_[slot].complete()) return Chilled::kNot;
  const Chunk &chunk = chunks_[slot];
  const uint32_t missing = missing_on_disk(chunk);
  if (missing == 0) {
    const Place warm = memory_of(chunk);
    append_move(moves, begin_move(slot, 0, warm, kNowhere, MoveKind::kShed, moves), warm, segments_, chunk);
    return Chilled::kSheds;
  }
  // Of what was put under an earlier epoch nobody knows how often it was used.
  const bool counted = chunk.shard(0).generation >> 40 == epoch_;
  if (call.uses_min == 0 || (counted && missing == chunk.shards && policy_->uses(slot) < call.uses_min)) {
    return Chilled::kNot;
  }
  Place from = {}, to = {};
  uint32_t shard = 0;
  while (readable_on_disk(chunk.shard(shard), &from)) ++shard;
  const uint64_t units = units_of(chunk.shard(shard).length);
  Chilled outcome = Chilled::kNot;
  for (uint32_t r = 0; r < chunk.shard(shard).replicas && chunk.shard(shard).replicas < kReplicasMax; ++r) {
    from = chunks_.place(chunk.shard(shard), r);
    if (!segments_.readable(from) || segments_.on_disk(from)) continue;
    const uint32_t below = segments_[from.segment].partner;
    if (below == kNone || !segments_[below].writable) continue;
    Segment &disk = segments_[below];
    const uint64_t room = (units + kBlockUnits - 1) / kBlockUnits * kBlockUnits;
    if (room > disk.space.capacity()) continue;
    outcome = Chilled::kWaits;
    if (std::find(call.avoid.begin(), call.avoid.end(), disk.number) != call.avoid.end()) continue;
    const uint32_t piece = disk.space.take(room);
    if (piece == kNone) {
      *full = disk.number;
      continue;
    }
    to = {piece, static_cast<uint16_t>(below)};
    const MoveKind kind = missing == 1 ? MoveKind::kChill : MoveKind::kAdd;
    append_move(moves, begin_move(slot, shard, from, to, kind, moves), from, segments_, chunk);
    return Chilled::kCopied;
  }
  return outcome;
}

Outcome ChunkIndex::demote_more(const uint8_t *slots, size_t count, const DemoteCall &call,
                                std::string *moves) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    Undo undo([&, before = moves->size()] { take_back_moves(*moves, before); });
    for (size_t i = 0; i < count; ++i) {
      const uint32_t slot = load_u32(slots + i * 4);
      if (!chunks_.arena().used(slot)) continue;
      const Chunk &chunk = chunks_[slot];
      if (!chunk.listed || chunk.cold || chunk.shards == 1 || missing_on_disk(chunk) == chunk.shards) continue;
      uint32_t full = kNone;
      chill_one(slot, call, moves, &full);
    }
    undo.keep();
    return Outcome::kOk;
  });
}

// Whether nothing on this disk can be evicted, ever: what is there is in memory too.
bool ChunkIndex::nothing_cold(uint32_t number) const {
  return cold_.empty(static_cast<uint16_t>(segments_.place_of(number)));
}

Outcome ChunkIndex::evict_disk(uint32_t number, uint64_t want, int64_t now, std::string *slots, std::string *keys,
                               uint64_t *bytes) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    *bytes = 0;
    const Segment *disk = segments_.find(number);
    if (disk == nullptr || !disk->disk) return Outcome::kUnknownSegment;
    const auto at = static_cast<uint16_t>(segments_.place_of(number));
    uint32_t looks = kLooksMax;
    const Policy::MayGo may_go_now = [&](uint32_t slot) {
      Chunk &chunk = chunks_[slot];
      return chunk.pins == 0 && chunk.writes == 0 && chunk.leased() <= now && moves_.of(slot) == nullptr;
    };
    while (*bytes < want) {
      const uint32_t slot = cold_.victim(at, may_go_now, &looks);
      if (slot == kNone) break;
      uint64_t its = 0;
      for (uint32_t i = 0; i < chunks_[slot].shards; ++i) {
        const Shard &shard = chunks_[slot].shard(i);
        for (uint32_t r = 0; r < shard.replicas; ++r) {
          const Place place = chunks_.place(shard, r);
          if (place.segment == at) its += segments_.bytes(place);
        }
      }
      if (!give_up_chunk(slot, slots, keys)) return slots->empty() ? Outcome::kNoMemory : Outcome::kOk;
      *bytes += its;
    }
    return Outcome::kOk;
  });
}

// ---------------------------------------------------------------- up

Outcome ChunkIndex::promote(const PromoteCall &call, uint8_t *statuses, std::string *moves,
                            uint64_t *no_room) noexcept {
  return guarded([&] {
    *no_room = 0;
    {
      const std::shared_lock<RwLock> held(lock_);
      bool any = false;
      find_each(call.hashes, [&](size_t i, uint32_t slot) {
        Place from = {};
        const ItemStatus status = promotable(slot, call.shard, &from);
        any = any || status == ItemStatus::kOk;
        statuses[i] = static_cast<uint8_t>(status);
        return true;
      });
      if (!any) return Outcome::kOk;
    }
    const Exclusive held = exclusive();
    uint32_t count = 0;
    uint64_t bytes = 0;
    Undo undo([&, before = moves->size()] { take_back_moves(*moves, before); });
    find_each(call.hashes, [&](size_t i, uint32_t slot) {
      Place from = {};
      ItemStatus status = promotable(slot, call.shard, &from);
      if (status == ItemStatus::kOk) {
        status = count < call.count_max && bytes < call.bytes_max ? promote_one(slot, call.shard, from, moves)
                                                                  : ItemStatus::kWriting;
      }
      if (status == ItemStatus::kOk || status == ItemStatus::kNoSpace) {
        const uint64_t its = extent_bytes(chunks_[slot].shard(call.shard).length);
        count += status == ItemStatus::kOk ? 1 : 0;
        (status == ItemStatus::kOk ? bytes : *no_room) += its;
      }
      statuses[i] = static_cast<uint8_t>(status);
      return true;
    });
    undo.keep();
    return Outcome::kOk;
  });
}

// kOk: it lies on a disk only, at `from`, and can be copied.
ItemStatus ChunkIndex::promotable(uint32_t slot, uint32_t shard, Place *from) const {
  if (slot == kNone || !chunks_[slot].complete()) return ItemStatus::kNotFound;
  const Chunk &chunk = chunks_[slot];
  if (shard >= chunk.shards) return ItemStatus::kInvalid;
  if (readable_in_memory(chunk.shard(shard)) > 0) return ItemStatus::kAlready;
  return readable_on_disk(chunk.shard(shard), from) ? ItemStatus::kOk : ItemStatus::kNotFound;
}

ItemStatus ChunkIndex::promote_one(uint32_t slot, uint32_t shard, Place from, std::string *moves) {
  if (!may_move(slot)) return ItemStatus::kWriting;
  const Shard &its = chunks_[slot].shard(shard);
  const uint32_t above = segments_[from.segment].partner;
  if (above == kNone || !segments_[above].writable || its.replicas >= kReplicasMax) return ItemStatus::kNotFound;
  const uint64_t units = units_of(its.length);
  if (units > segments_[above].space.capacity()) return ItemStatus::kTooLarge;
  const uint32_t piece = segments_[above].space.take(units);
  if (piece == kNone) return ItemStatus::kNoSpace;
  const Place to{piece, static_cast<uint16_t>(above)};
  append_move(moves, begin_move(slot, shard, from, to, MoveKind::kAdd, moves), from, segments_, chunks_[slot]);
  return ItemStatus::kOk;
}

Outcome ChunkIndex::spoilt(const uint8_t *ids, size_t count, std::string *slots, std::string *keys) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    for (size_t i = 0; i < count; ++i) {
      const Move *move = moves_.find(load_u64(ids + i * 8));
      if (move == nullptr || move->committed || move->slot == kNone || move->kind != MoveKind::kAdd) continue;
      const uint32_t slot = move->slot;
      // Whoever writes it anew, or has another copy of it, loses nothing.
      if (!segments_.on_disk(move->from) || chunks_[slot].writes != 0) continue;
      if (readable_in_memory(chunks_[slot].shard(move->shard)) > 0) continue;
      if (!give_up_chunk(slot, slots, keys)) return slots->empty() ? Outcome::kNoMemory : Outcome::kOk;
    }
    return Outcome::kOk;
  });
}

// It is gone, and the caller told. False: there is no memory for that, and nothing has changed.
bool ChunkIndex::give_up_chunk(uint32_t slot, std::string *slots, std::string *keys) {
  try {
    slots->reserve(slots->size() + 4);
    keys->reserve(keys->size() + 4 + kHashBytes);
  } catch (const std::bad_alloc &) {
    return false;
  }
  append_u32(slots, slot);
  append_key(keys, chunks_[slot]);
  detach(slot, true);
  return true;
}

}  // namespace moonpool::index
