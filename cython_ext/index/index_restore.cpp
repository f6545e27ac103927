// SPDX-License-Identifier: Apache-2.0
#include "index.hpp"

namespace moonpool::index {

namespace {

std::string packed_key(uint32_t name_space, const uint8_t *hash) {
  std::string key;
  append_key(&key, name_space, hash);
  return key;
}

// Whether there are so many records, and nothing else.
bool framed(const uint8_t *records, size_t bytes, size_t count) {
  for (; count > 0; --count) {
    if (bytes < 4) return false;
    const uint32_t size = load_u32(records);
    if (size > bytes - 4) return false;
    records += 4 + size;
    bytes -= 4 + size;
  }
  return bytes == 0;
}

}  // namespace

Outcome ChunkIndex::restore(const uint8_t *slots, size_t count, const uint8_t *records, size_t records_bytes,
                            size_t *taken) noexcept {
  return guarded([&] {
    *taken = 0;
    if (!framed(records, records_bytes, count)) return Outcome::kDamaged;
    const Exclusive held = exclusive();
    for (size_t i = 0; i < count; ++i) {
      const uint32_t slot = load_u32(slots + i * 4), size = load_u32(records);
      if (restore_one(slot, records + 4, size)) {
        ++*taken;
      } else {
        refuse(slot);
      }
      records += 4 + size;
    }
    return Outcome::kOk;
  });
}

// The row is to be deleted: a sweep names it. Meanwhile nobody else has its slot.
void ChunkIndex::refuse(uint32_t slot) {
  if (!chunks_.arena().used(slot)) {
    refused_slots_.push_back(slot);
    Undo undo([&] { refused_slots_.pop_back(); });
    if (slot < chunks_max_) chunks_[chunks_.add(kNoHash, 0, 1, slot)].state = ChunkState::kRemoved;
    undo.keep();
  }
  ++refused_;
}

bool ChunkIndex::restore_one(uint32_t slot, const uint8_t *bytes, size_t size) {
  Record record;
  if (slot >= chunks_max_ || chunks_.arena().used(slot) || !decode(bytes, size, slot, &record)) return false;
  if (find(record.hash, record.name_space) != kNone) return false;
  const std::string key = packed_key(record.name_space, record.hash);
  chunks_.add(record.hash, record.name_space, record.shards, slot);
  Chunk &chunk = chunks_[slot];
  Undo drop_chunk([&] {
    for (uint32_t i = 0; i < chunk.shards; ++i) free_places(chunk.shard(i));
    chunks_.give(slot);
  });
  for (const RecordShard &from : record.present) {
    if (!restore_shard(from, chunk, slot)) return false;
  }
  const uint32_t parent = is_no_hash(record.parent) ? kNone : find(record.parent, record.name_space);
  auto orphan = orphans_.end();
  if (parent == kNone && !is_no_hash(record.parent)) {
    orphan = orphans_.emplace(packed_key(record.name_space, record.parent), slot);
  }
  Undo drop_orphan([&] {
    if (orphan != orphans_.end()) orphans_.erase(orphan);
  });
  table_.insert(hash_of(record.hash, record.name_space), slot);
  drop_orphan.keep();
  drop_chunk.keep();
  chunk.committed = static_cast<uint16_t>(record.present.size());
  uint32_t steps = UINT16_MAX;
  if (parent != kNone) family_.join(slot, parent, &steps);
  list(slot);
  const auto [first, last] = orphans_.equal_range(key);
  for (auto at = first; at != last; ++at) {
    // It may be gone again, or another chunk.
    if (chunks_.arena().used(at->second) && chunks_[at->second].state == ChunkState::kLive &&
        chunks_[at->second].parent == kNone) {
      family_.join(at->second, slot, &steps);
    }
  }
  orphans_.erase(first, last);
  return true;
}

bool ChunkIndex::restore_shard(const RecordShard &from, Chunk &chunk, uint32_t slot) {
  const uint64_t epoch = from.generation >> 40, number = from.generation & ((uint64_t{1} << 40) - 1);
  if (epoch > epoch_ || from.generation == 0) return false;
  Shard &shard = chunk.shard(from.shard);
  Place places[kReplicasMax] = {};
  uint32_t count = 0;
  Undo undo([&] {
    for (uint32_t r = 0; r < count; ++r) segments_.give(places[r]);
  });
  for (const RecordExtent &extent : from.extents) {
    const uint32_t at = segments_.find_or_make(extent.segment);
    if (at == kNone || segments_[at].dropped) return false;
    const uint32_t piece =
        segments_[at].space.take_at(extent.offset / kUnit, units_in(segments_[at], from.length), slot);
    if (piece == kNone) return false;
    segments_[at].space.set_committed(piece);
    places[count++] = {piece, static_cast<uint16_t>(at)};
  }
  chunks_.set_places(shard, places, count);
  undo.keep();
  shard.generation = from.generation;
  shard.length = from.length;
  shard.state = ShardState::kCommitted;
  if (epoch == epoch_ && number > generations_) generations_ = number;
  return true;
}

}  // namespace moonpool::index
