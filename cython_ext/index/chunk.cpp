// SPDX-License-Identifier: Apache-2.0
#include "chunk.hpp"

#include <algorithm>
#include <memory>

#include "undo.hpp"

namespace moonpool::index {

namespace {

constexpr Shard kAbsentShard{0, 0, kNone, kNone, kNone, 0, ShardState::kAbsent, 0};

}  // namespace

Chunks::~Chunks() {
  for (uint32_t slot = chunks_.next_used(0); slot < chunks_.end(); slot = chunks_.next_used(slot + 1)) {
    if (chunks_[slot].shards > 1) delete[] chunks_[slot].many;
  }
}

uint32_t Chunks::add(const uint8_t *hash, uint32_t name_space, uint32_t shards, uint32_t at) {
  std::unique_ptr<Shard[]> many;
  if (shards > 1) {
    many = std::make_unique<Shard[]>(shards);
    std::fill_n(many.get(), shards, kAbsentShard);
  }
  uint32_t slot = at;
  if (at == kNone) {
    slot = chunks_.take();
  } else if (!chunks_.take(at)) {
    return kNone;
  }
  Undo undo([&] { chunks_.give(slot); });
  ++spaces_[name_space];
  undo.keep();
  Chunk &chunk = chunks_[slot];
  std::memcpy(chunk.hash, hash, kHashBytes);
  chunk.name_space = name_space;
  chunk.shards = static_cast<uint16_t>(shards);
  chunk.birth = ++births_;
  shards_ += shards;
  chunk.parent = chunk.child = chunk.older = chunk.younger = chunk.before = chunk.after = kNone;
  if (shards > 1) {
    chunk.many = many.release();
    many_bytes_ += shards * sizeof(Shard);
  } else {
    chunk.one = kAbsentShard;
  }
  return slot;
}

void Chunks::give(uint32_t slot) {
  Chunk &chunk = chunks_[slot];
  for (uint32_t i = 0; i < chunk.shards; ++i) set_places(chunk.shard(i), nullptr, 0);
  if (chunk.shards > 1) {
    delete[] chunk.many;
    many_bytes_ -= chunk.shards * sizeof(Shard);
  }
  shards_ -= chunk.shards;
  if (const auto its = spaces_.find(chunk.name_space); --its->second == 0) spaces_.erase(its);
  chunks_.give(slot);
}

void Chunks::set_places(Shard &shard, const Place *places, uint32_t count) {
  MorePlaces rest{};
  if (count > 1) {
    std::copy_n(places + 1, count - 1, rest.places);
    if (shard.more == kNone) shard.more = more_.take();
    more_[shard.more] = rest;
  } else if (shard.more != kNone) {
    more_.give(shard.more);
    shard.more = kNone;
  }
  shard.replicas = static_cast<uint8_t>(count);
  shard.piece = count > 0 ? places[0].piece : kNone;
  shard.segment = count > 0 ? places[0].segment : 0;
}

}  // namespace moonpool::index
