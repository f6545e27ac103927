// SPDX-License-Identifier: Apache-2.0
//
// The end of a put: commit, and when the record is durable, publish. Commits of one slot are published in their order;
// a record has what the commits before it have, so whichever of their records is durable, what is published is in it.
#include "index.hpp"

namespace moonpool::index {

Outcome ChunkIndex::commit(uint32_t owner, Hashes hashes, const uint8_t *generations, uint32_t shard,
                           const uint8_t *written, uint8_t *statuses, std::string *slots,
                           std::string *records) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    std::string record;
    for (size_t i = 0; i < hashes.count; ++i) {
      const uint64_t generation = load_u64(generations + i * 8);
      const uint32_t slot = find(hashes[i], hashes.name_space);
      Shard *found = written_by(owner, slot, shard, generation);
      const ItemStatus status = found != nullptr ? commit_one(*found, written != nullptr ? written[i] : 0xff)
                                                 : commit_missing(slot, shard, generation);
      statuses[i] = static_cast<uint8_t>(status);
      if (status != ItemStatus::kOk) continue;
      record.clear();
      encode(record_of(slot), slot, &record);
      append_u32(slots, slot);
      append_u32(records, static_cast<uint32_t>(record.size()));
      records->append(record);
    }
    return Outcome::kOk;
  });
}

ItemStatus ChunkIndex::commit_one(Shard &shard, uint8_t written) {
  const uint32_t write = shard.write, owner = writes_[write].owner;
  Place kept[kReplicasMax] = {}, rest[kReplicasMax] = {};
  uint32_t count = 0, rest_count = 0;
  bool any = false;
  for (uint32_t r = 0; r < shard.replicas; ++r) {
    const Place place = chunks_.place(shard, r);
    const bool here = (written >> r & 1) != 0;
    any = any || here;
    (here && !segments_.lost(place) ? kept[count++] : rest[rest_count++]) = place;
  }
  if (!any) return ItemStatus::kInvalid;
  if (count == 0) {
    Pairs pairs;
    give_up(write, false, &pairs);
    return ItemStatus::kNotOwner;
  }
  // What was not written may still be on its way.
  for (uint32_t r = 0; r < rest_count; ++r) {
    if (segments_.lost(rest[r])) {
      segments_.give(rest[r]);
    } else {
      condemned_.until_fenced(owner, shard.generation, rest[r]);
      segments_.set_waiting(rest[r]);
    }
  }
  chunks_.set_places(shard, kept, count);
  writes_.commit(write, ++commits_);
  return ItemStatus::kOk;
}

ItemStatus ChunkIndex::commit_missing(uint32_t slot, uint32_t shard, uint64_t generation) const {
  if (slot == kNone || shard >= chunks_[slot].shards) return ItemStatus::kNotOwner;
  const Shard &its = chunks_[slot].shard(shard);
  if (its.generation != generation) return ItemStatus::kNotOwner;
  return its.state == ShardState::kCommitted ? ItemStatus::kAlready : ItemStatus::kNotOwner;
}

Record ChunkIndex::record_of(uint32_t slot, const Move *move) const {
  const Chunk &chunk = chunks_[slot];
  Record record{};
  std::memcpy(record.hash, chunk.hash, kHashBytes);
  if (chunk.parent != kNone) std::memcpy(record.parent, chunks_[chunk.parent].hash, kHashBytes);
  record.name_space = chunk.name_space;
  record.shards = chunk.shards;
  for (uint32_t i = 0; i < chunk.shards; ++i) {
    const Shard &shard = chunk.shard(i);
    if (shard.state == ShardState::kAbsent || shard.replicas == 0) continue;
    if (shard.state == ShardState::kWriting && writes_.arena()[shard.write].commit == 0) continue;
    RecordShard &made = record.present.emplace_back();
    made = {static_cast<uint16_t>(i), shard.generation, shard.length, {}};
    for (uint32_t r = 0; r < shard.replicas; ++r) {
      Place place = chunks_.place(shard, r);
      if (move != nullptr && move->shard == i && place == move->from) place = move->to;
      if (segments_.lost(place)) continue;
      made.extents.push_back(
          {segments_[place.segment].number, segments_[place.segment].space.offset(place.piece) * kUnit});
    }
    if (made.extents.empty()) record.present.pop_back();
  }
  return record;
}

// The writes of the oldest commit of this slot, and the number of the one after it or 0.
std::vector<uint32_t> ChunkIndex::oldest_commit(uint32_t slot, uint64_t *next) {
  std::vector<uint32_t> oldest;
  *next = 0;
  if (!chunks_.arena().used(slot) || chunks_[slot].state != ChunkState::kLive) return oldest;
  Chunk &chunk = chunks_[slot];
  uint64_t number = 0;
  for (uint32_t i = 0; i < chunk.shards && chunk.writes > 0; ++i) {
    const uint32_t write = chunk.shard(i).write;
    const uint64_t its = write == kNone ? 0 : writes_[write].commit;
    if (its == 0) continue;
    if (number == 0 || its < number) {
      *next = number;
      number = its;
      oldest.clear();
    } else if (its > number && (*next == 0 || its < *next)) {
      *next = its;
    }
    if (its == number) oldest.push_back(write);
  }
  return oldest;
}

Outcome ChunkIndex::publish(const uint8_t *slots, size_t count, std::string *keys) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    tell_capacity();
    for (size_t i = 0; i < count; ++i) {
      const uint32_t slot = load_u32(slots + i * 4);
      uint64_t next = 0;
      const std::vector<uint32_t> oldest = oldest_commit(slot, &next);
      if (oldest.empty()) continue;
      Chunk &chunk = chunks_[slot];
      for (const uint32_t write : oldest) {
        chunk.shard(writes_[write].shard).state = ShardState::kCommitted;
        end_write(write);
        ++chunk.committed;
      }
      list(slot);
      if (visible(chunk)) append_key(keys, chunk);
    }
    return Outcome::kOk;
  });
}

Outcome ChunkIndex::revoke(const uint8_t *slots, size_t count) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    Pairs pairs;
    for (size_t i = 0; i < count; ++i) {
      const uint32_t slot = load_u32(slots + i * 4);
      uint64_t next = 0;
      for (const uint32_t write : oldest_commit(slot, &next)) {
        if (next != 0) {
          // The next record names these extents too, and it may be durable: they share its fate.
          writes_[write].commit = next;
        } else {
          // Its owner had finished: nothing can be written there any more.
          give_up(write, true, &pairs);
        }
      }
    }
    return Outcome::kOk;
  });
}

}  // namespace moonpool::index
