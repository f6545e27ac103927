// SPDX-License-Identifier: Apache-2.0
//
// The beginning of a put, and its end without success.
#include <algorithm>

#include "index.hpp"

namespace moonpool::index {

namespace {

// For finding out that nobody becomes its own ancestor, in one call.
constexpr uint32_t kStepsMax = 1u << 16;

}  // namespace

uint32_t ChunkIndex::parent_of(const StartCall &call, size_t i) const {
  const Parents &parents = call.parents;
  const uint8_t *hash = nullptr;
  if (parents.bytes == call.hashes.count * kHashBytes) {
    hash = parents.data + i * kHashBytes;
  } else if (parents.bytes == kHashBytes) {
    hash = i == 0 ? parents.data : call.hashes[i - 1];
  } else {
    return kNone;
  }
  return is_no_hash(hash) ? kNone : find(hash, call.hashes.name_space);
}

Outcome ChunkIndex::start(const StartCall &call, uint8_t *statuses, uint8_t *extents) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    orphans_ = {};  // nothing is restored any more
    Placement placement(segments_, call.avoid, call.host, call.replicas, call.now, random_);
    uint32_t steps = kStepsMax;
    std::vector<uint32_t> used;
    used.reserve(call.shard == 0 ? call.hashes.count : 0);
    for (size_t i = 0; i < call.hashes.count * call.replicas; ++i) write_no_extent(extents + i * kExtentBytes);
    size_t done = 0;
    // Whoever hears of no memory has not heard of what it was given.
    Undo undo([&] { take_back(call, statuses, done); });
    find_each(call.hashes, [&](size_t i, uint32_t slot) {
      // It may have come with this very call.
      if (slot == kNone) slot = find(call.hashes[i], call.hashes.name_space);
      const ItemStatus status = start_one(call, i, &slot, placement, extents + i * call.replicas * kExtentBytes);
      statuses[i] = static_cast<uint8_t>(status);
      done = i + 1;
      if (status != ItemStatus::kOk && status != ItemStatus::kAlready) return true;
      // As in locate(): a use that is counted already holds a lease, and the first shard stands for all.
      if (status == ItemStatus::kAlready && call.shard == 0 && chunks_[slot].leased() <= call.now) used.push_back(slot);
      if (chunks_[slot].parent != kNone) return true;
      const uint32_t parent = parent_of(call, i);
      if (parent != kNone) family_.join(slot, parent, &steps);
      return true;
    });
    undo.keep();
    std::for_each(used.rbegin(), used.rend(), [&](uint32_t slot) { touch_one(slot); });
    return Outcome::kOk;
  });
}

// What the first `count` of this call were given.
void ChunkIndex::take_back(const StartCall &call, const uint8_t *statuses, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (statuses[i] != static_cast<uint8_t>(ItemStatus::kOk)) continue;
    const uint32_t slot = find(call.hashes[i], call.hashes.name_space);
    give_up(chunks_[slot].shard(call.shard).write, true, nullptr);
  }
}

// `slot`: kNone when there is no such chunk yet; when this makes it, it is there afterwards.
ItemStatus ChunkIndex::start_one(const StartCall &call, size_t i, uint32_t *slot, Placement &placement,
                                 uint8_t *extents) {
  const uint64_t length = load_u64(call.lengths + (call.one_length ? 0 : i * 8));
  if (length == 0 || call.shard >= call.shards) return ItemStatus::kInvalid;
  if (length > kUnitsMax * kUnit || units_of(length) > kUnitsMax) return ItemStatus::kTooLarge;
  if (*slot != kNone) {
    Chunk &chunk = chunks_[*slot];
    if (chunk.shards != call.shards) return chunk.committed > 0 ? ItemStatus::kConflict : ItemStatus::kWriting;
    Shard &shard = chunk.shard(call.shard);
    if (shard.state == ShardState::kWriting) return ItemStatus::kWriting;
    if (shard.state == ShardState::kCommitted && !abandoned(shard)) {
      if (shard.length != length) return ItemStatus::kConflict;
      write_extent(extents, shard.generation, 0, 0, kNone);
      return ItemStatus::kAlready;
    }
    const Move *move = moves_.of(*slot);
    // The record of this chunk that is on its way says nothing of this put.
    if (move != nullptr && move->committed) return ItemStatus::kWriting;
    if (shard.state == ShardState::kCommitted) {
      if (move != nullptr && move->shard == call.shard) leave_move(*slot);
      // It is written anew, and its record in the store with it.
      free_places(shard);
      shard.state = ShardState::kAbsent;
      --chunk.committed;
    }
  } else if (chunks_.shards() + call.shards > chunks_max_) {
    return ItemStatus::kChunksMax;
  }
  Place places[kReplicasMax] = {};
  uint32_t count = 0;
  switch (placement.place(units_of(length), places, &count)) {
    case Placement::Result::kNoSpace:
      return ItemStatus::kNoSpace;
    case Placement::Result::kTooLarge:
      return ItemStatus::kTooLarge;
    case Placement::Result::kPlaced:
      break;
  }
  begin_write(call, i, slot, places, count);
  const Shard &shard = chunks_[*slot].shard(call.shard);
  for (uint32_t r = 0; r < count; ++r) {
    Segment &segment = segments_[places[r].segment];
    segment.space.set_slot(places[r].piece, *slot);
    write_extent(extents + r * kExtentBytes, shard.generation, segment.space.offset(places[r].piece) * kUnit, length,
                 segment.number);
  }
  return ItemStatus::kOk;
}

void ChunkIndex::begin_write(const StartCall &call, size_t i, uint32_t *slot, const Place *places, uint32_t count) {
  Undo give_places([&] {
    for (uint32_t r = 0; r < count; ++r) segments_.give(places[r]);
  });
  const bool fresh = *slot == kNone;
  const uint32_t at = fresh ? chunks_.add(call.hashes[i], call.hashes.name_space, call.shards) : *slot;
  Undo drop_chunk([&] {
    if (fresh) chunks_.give(at);
  });
  Chunk &chunk = chunks_[at];
  Shard &shard = chunk.shard(call.shard);
  chunks_.set_places(shard, places, count);
  Undo drop_places([&] { chunks_.set_places(shard, nullptr, 0); });
  // It may be given up, and that must not need memory.
  condemned_.reserve(count);
  Undo release([&] { condemned_.release(count); });
  const uint32_t write = writes_.add(call.owner, at, call.shard, call.deadline);
  Undo drop_write([&] { writes_.remove(write); });
  if (fresh) table_.insert(hash_of(call.hashes[i], call.hashes.name_space), at);
  give_places.keep();
  drop_chunk.keep();
  drop_places.keep();
  release.keep();
  drop_write.keep();
  shard.generation = epoch_ << 40 | ++generations_;
  shard.length = load_u64(call.lengths + (call.one_length ? 0 : i * 8));
  shard.state = ShardState::kWriting;
  shard.write = write;
  ++chunk.writes;
  *slot = at;
}

// The shard that this owner writes under this generation, and has not committed; null: there is none.
Shard *ChunkIndex::written_by(uint32_t owner, uint32_t slot, uint32_t shard, uint64_t generation) {
  if (slot == kNone || shard >= chunks_[slot].shards) return nullptr;
  Shard &its = chunks_[slot].shard(shard);
  if (its.state != ShardState::kWriting || its.generation != generation) return nullptr;
  const Write &write = writes_[its.write];
  return write.owner == owner && write.commit == 0 ? &its : nullptr;
}

void ChunkIndex::end_write(uint32_t write) {
  Chunk &chunk = chunks_[writes_[write].slot];
  chunk.shard(writes_[write].shard).write = kNone;
  --chunk.writes;
  writes_.remove(write);
}

void ChunkIndex::give_up(uint32_t write, bool settled, Pairs *pairs) {
  const uint32_t slot = writes_[write].slot, owner = writes_[write].owner;
  Shard &shard = chunks_[slot].shard(writes_[write].shard);
  const uint32_t reserved = writes_[write].commit == 0 ? shard.replicas : 0;
  uint32_t waiting = 0;
  drop_lost_places(shard);
  if (settled) {
    free_places(shard);
  } else {
    for (; waiting < shard.replicas; ++waiting) {
      const Place place = chunks_.place(shard, waiting);
      condemned_.until_fenced(owner, shard.generation, place);
      segments_.set_waiting(place);
      if (pairs != nullptr) pairs->emplace_back(owner, place.segment);
    }
    chunks_.set_places(shard, nullptr, 0);
  }
  condemned_.release(reserved - waiting);
  shard.state = ShardState::kAbsent;
  end_write(write);
  forget_if_empty(slot);
}

Outcome ChunkIndex::abort(uint32_t owner, Hashes hashes, const uint8_t *generations, uint32_t shard, bool settled,
                          uint8_t *statuses) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    for (size_t i = 0; i < hashes.count; ++i) {
      const uint64_t generation = load_u64(generations + i * 8);
      const Shard *found = written_by(owner, find(hashes[i], hashes.name_space), shard, generation);
      ItemStatus status = ItemStatus::kOk;
      if (found != nullptr) {
        give_up(found->write, settled, nullptr);
      } else {
        // It was given up before, and only now is known that nothing can be written any more.
        status = ItemStatus::kNotOwner;
        if (settled) {
          condemned_.take_settled(owner, generation, [&](Place place) {
            segments_.give(place);
            status = ItemStatus::kOk;
          });
        }
      }
      statuses[i] = static_cast<uint8_t>(status);
    }
    return Outcome::kOk;
  });
}

// Room for what these writes may come to wait for.
class ChunkIndex::GivenUp {
 public:
  explicit GivenUp(ChunkIndex &index) : index_(index) {}
  void count(const Write &write) { count_ += index_.chunks_[write.slot].shard(write.shard).replicas; }
  // Throws std::bad_alloc; nothing after it does.
  void reserve(std::string *out) {
    pairs.reserve(count_);
    out->reserve(out->size() + count_ * 8);
  }
  Pairs pairs;

 private:
  ChunkIndex &index_;
  size_t count_ = 0;
};

Outcome ChunkIndex::expire(int64_t now, std::string *pairs) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    GivenUp given_up(*this);
    writes_.each_expired(now, [&](const Write &write) { given_up.count(write); });
    given_up.reserve(pairs);
    for (uint32_t write = writes_.expired(now); write != kNone; write = writes_.expired(now)) {
      give_up(write, false, &given_up.pairs);
    }
    append_pairs(std::move(given_up.pairs), pairs);
    return Outcome::kOk;
  });
}

Outcome ChunkIndex::drop_owner(uint32_t owner, std::string *pairs) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    GivenUp given_up(*this);
    writes_.each_of_owner(owner, [&](const Write &write) { given_up.count(write); });
    given_up.reserve(pairs);
    pins_.take_owner(owner, [&](Pinned pinned) { unpin_one(pinned); });
    for (uint32_t write = writes_.of_owner(owner); write != kNone; write = writes_.of_owner(owner)) {
      give_up(write, false, &given_up.pairs);
    }
    append_pairs(std::move(given_up.pairs), pairs);
    return Outcome::kOk;
  });
}

void ChunkIndex::append_pair(uint32_t owner, uint16_t segment, std::string *out) const {
  append_u32(out, owner);
  append_u32(out, segments_[segment].number);
}

void ChunkIndex::append_pairs(Pairs pairs, std::string *out) const {
  std::sort(pairs.begin(), pairs.end());
  pairs.erase(std::unique(pairs.begin(), pairs.end()), pairs.end());
  for (const auto &[owner, segment] : pairs) append_pair(owner, segment, out);
}

Outcome ChunkIndex::to_fence(std::string *pairs) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    condemned_.each_pair([&](uint32_t owner, uint16_t segment) { append_pair(owner, segment, pairs); });
    return Outcome::kOk;
  });
}

Outcome ChunkIndex::fenced(uint32_t owner, uint32_t number, uint64_t *bytes) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    *bytes = 0;
    const uint32_t at = segments_.place_of(number);
    if (at == kNone) return Outcome::kOk;
    condemned_.take_fenced(owner, static_cast<uint16_t>(at), [&](Place place) { *bytes += segments_.give(place); });
    return Outcome::kOk;
  });
}

}  // namespace moonpool::index
