// SPDX-License-Identifier: Apache-2.0
#include "index.hpp"

namespace moonpool::index {

Outcome ChunkIndex::stats(IndexStats *stats) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    *stats = {};
    stats->chunks = listed_;
    stats->chunks_max = chunks_max_;
    stats->on_disk = cold_.count();
    stats->writing = writes_.count();
    stats->moving = moves_.count();
    stats->pinned = pins_.count();
    stats->leased_until_ms = leased_until_.load();
    stats->evicted = evicted_;
    stats->refused_records = refused_;
    stats->generation = epoch_ << 40 | generations_;
    segments_.each_writable([&](const Segment &segment, uint32_t) {
      const Allocator &space = segment.space;
      stats->capacity_bytes += space.capacity() * kUnit;
      stats->used_bytes += space.used() * kUnit;
      stats->condemned_bytes += space.waiting() * kUnit;
      stats->free_bytes += space.free() * kUnit;
    });
    stats->memory_bytes = sizeof *this + chunks_.bytes() + table_.bytes() + segments_.bytes() + writes_.bytes() +
                          pins_.bytes() + condemned_.bytes() + moves_.bytes() + policy_->bytes() +
                          touched_.capacity() * 4 + orphans_.size() * 128;
    return Outcome::kOk;
  });
}

Outcome ChunkIndex::namespaces(std::string *numbers) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    for (const auto &[number, count] : chunks_.spaces()) append_u32(numbers, number);
    return Outcome::kOk;
  });
}

// ---------------------------------------------------------------- for tests

std::string ChunkIndex::check_chunk(uint32_t slot) const {
  const Chunk &chunk = chunks_[slot];
  uint32_t committed = 0, writes = 0;
  for (uint32_t i = 0; i < chunk.shards; ++i) {
    const Shard &shard = chunk.shard(i);
    committed += shard.state == ShardState::kCommitted ? 1 : 0;
    writes += shard.write != kNone ? 1 : 0;
    if ((shard.state == ShardState::kWriting) != (shard.write != kNone)) return "a shard and its write disagree";
    if (shard.write != kNone && (!writes_.arena().used(shard.write) || writes_.arena()[shard.write].slot != slot)) {
      return "a write is not of its chunk";
    }
    if (shard.state == ShardState::kAbsent && shard.replicas != 0) return "a shard that is absent has extents";
    for (uint32_t r = 0; r < shard.replicas; ++r) {
      const Place place = chunks_.place(shard, r);
      if (place.segment >= segments_.end() || !segments_.used(place.segment)) return "an extent in no segment";
      if (segments_.lost(place)) continue;
      const Allocator &space = segments_[place.segment].space;
      if (space.slot(place.piece) != slot) return "an extent is not of its chunk";
      if (space.units(place.piece) < units_of(shard.length)) return "an extent is too small";
      const bool found = shard.state == ShardState::kCommitted && chunk.state == ChunkState::kLive;
      if (space.committed(place.piece) != found) return "an extent is counted wrongly";
    }
  }
  if (committed != chunk.committed && chunk.state == ChunkState::kLive) return "the count of shards is wrong";
  if (writes != chunk.writes) return "the count of writes is wrong";
  if (chunk.state != ChunkState::kLive) return chunk.listed || chunk.child != kNone ? "a removed chunk is listed" : "";
  if (find(chunk.hash, chunk.name_space) != slot) return "a chunk is not in the table";
  if (!chunk.listed && committed == 0 && writes == 0) return "an empty chunk is kept";
  uint32_t warm = 0;
  for (uint32_t child = chunk.child; child != kNone; child = chunks_[child].older) {
    if (chunks_[child].parent != slot) return "a child has another parent";
    warm += chunks_[child].cold ? 0 : 1;
  }
  if (warm != chunk.warm_children) return "the count of children in memory is wrong";
  if (chunk.cold && !chunk.listed) return "a chunk on a disk is not listed";
  return "";
}

std::string ChunkIndex::check_sums() {
  std::vector<size_t> places(segments_.end());
  size_t live = 0, listed = 0, writes = 0, extents = 0, reserved = 0;
  const Arena<Chunk> &all = chunks_.arena();
  for (uint32_t slot = all.next_used(0); slot < all.end(); slot = all.next_used(slot + 1)) {
    if (const std::string wrong = check_chunk(slot); !wrong.empty()) return wrong;
    const Chunk &chunk = all[slot];
    live += chunk.state == ChunkState::kLive ? 1 : 0;
    listed += chunk.listed ? 1 : 0;
    writes += chunk.writes;
    for (uint32_t i = 0; i < chunk.shards; ++i) {
      const Shard &shard = chunk.shard(i);
      for (uint32_t r = 0; r < shard.replicas; ++r) ++places[chunks_.place(shard, r).segment];
      if (shard.write != kNone && writes_.arena()[shard.write].commit == 0) reserved += shard.replicas;
    }
  }
  if (live != table_.count()) return "the table has other chunks than there are";
  if (listed != listed_) return "the count of chunks is wrong";
  if (writes != writes_.count()) return "a write has no chunk";
  if (reserved != condemned_.reserved()) return "a write can not be given up, or room for that is lost";
  size_t leaving = 0;
  moves_.each([&](const Move &move) {
    if (!move.nowhere()) ++places[move.to.segment];
    leaving += move.leaves;
  });
  if (leaving != condemned_.reads_reserved()) return "a move can not be published, or room for that is lost";
  size_t expected = condemned_.count(), lost = 0;
  for (uint32_t at = 0; at < segments_.end(); ++at) {
    if (!segments_.used(at)) continue;
    if (segments_[at].dropped) {
      if (places[at] > segments_[at].left) return "a lost segment is forgotten too early";
      lost += segments_[at].left;
      expected += places[at];
      continue;
    }
    if (const char *wrong = segments_[at].space.check(); *wrong != 0) return wrong;
    extents += segments_[at].space.extents();
    expected += places[at];
  }
  return expected == extents + lost ? "" : "an extent belongs to nobody";
}

Outcome ChunkIndex::check(std::string *wrong) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    *wrong = check_sums();
    return Outcome::kOk;
  });
}

}  // namespace moonpool::index
