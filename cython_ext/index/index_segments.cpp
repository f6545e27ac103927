// SPDX-License-Identifier: Apache-2.0
#include <unordered_set>

#include "index.hpp"

namespace moonpool::index {

Outcome ChunkIndex::add_segment(uint32_t number, uint64_t capacity, uint32_t host, int64_t ramp_up, int64_t now,
                                uint32_t memory) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    const Segment *partner = memory == kNone ? nullptr : segments_.find(memory);
    if (memory != kNone && (partner == nullptr || partner->disk)) return Outcome::kUnknownSegment;
    const uint32_t at = segments_.find_or_make(number);
    if (at == kNone) return Outcome::kTooManySegments;
    Segment &segment = segments_[at];
    if (segment.dropped) return Outcome::kLostSegment;
    if (partner != nullptr && !make_disk(at)) return Outcome::kUnknownSegment;
    if (!segment.space.set_capacity(capacity / kUnit)) return Outcome::kTooSmall;
    segment.host = host;
    if (!segment.added) {
      segment.added_ms = now;
      segment.ramp_up_ms = ramp_up;
    }
    segment.added = true;
    if (partner != nullptr) segments_.pair(at, segments_.place_of(memory));
    segments_.set(segment, true, true);
    return Outcome::kOk;
  });
}

Outcome ChunkIndex::know_disk(uint32_t number) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    const uint32_t at = segments_.find_or_make(number);
    if (at == kNone) return Outcome::kTooManySegments;
    return make_disk(at) ? Outcome::kOk : Outcome::kLostSegment;
  });
}

// False: it is memory, or dropped.
bool ChunkIndex::make_disk(uint32_t at) {
  Segment &segment = segments_[at];
  if (segment.dropped || (!segment.disk && (segment.added || segment.space.extents() != 0))) return false;
  cold_.open(static_cast<uint16_t>(at));
  segment.disk = true;
  return true;
}

Outcome ChunkIndex::set_segment(uint32_t number, bool writable, bool readable) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    Segment *segment = segments_.find(number);
    if (segment == nullptr || !segment->added) return Outcome::kUnknownSegment;
    segments_.set(*segment, writable, readable);
    return Outcome::kOk;
  });
}

Outcome ChunkIndex::drop_segment(uint32_t number) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    const uint32_t at = segments_.place_of(number);
    if (at == kNone || segments_[at].dropped) return Outcome::kUnknownSegment;
    // Nobody can write there any more either.
    condemned_.take_segment(static_cast<uint16_t>(at), [&](Place place) { segments_.give(place); });
    segments_.drop(at);
    return Outcome::kOk;
  });
}

Outcome ChunkIndex::drop_unknown(const std::vector<uint32_t> &known) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    const std::unordered_set<uint32_t> kept(known.begin(), known.end());
    for (uint32_t at = 0; at < segments_.end(); ++at) {
      if (!segments_.used(at) || segments_[at].added || kept.contains(segments_[at].number)) continue;
      // Nobody was given anything there since the restart, so nothing waits for a fence.
      segments_.drop(at);
    }
    return Outcome::kOk;
  });
}

Outcome ChunkIndex::sweep(uint32_t count_max, std::string *slots, bool *complete) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    const Arena<Chunk> &all = chunks_.arena();
    // What it will name, at most: from here on nothing throws.
    slots->reserve(slots->size() + (refused_slots_.size() + std::min<size_t>(count_max, all.count())) * 4);
    for (const uint32_t slot : refused_slots_) append_u32(slots, slot);
    refused_slots_ = {};
    uint32_t at = all.next_used(sweep_at_);
    for (uint32_t count = 0; at < all.end() && count < count_max; at = all.next_used(at + 1), ++count) {
      Chunk &chunk = chunks_[at];
      if (chunk.state != ChunkState::kLive) continue;
      if (const Move *move = moves_.of(at); move != nullptr) {
        if (move->committed) continue;  // it names an extent, and may save the chunk
        // Its old place goes now, and perhaps the segment's number with it: it must not be asked for any more.
        if (segments_.lost(move->from)) leave_move(at);
      }
      bool gone = chunk.committed == 0;
      for (uint32_t i = 0; i < chunk.shards; ++i) {
        Shard &shard = chunk.shard(i);
        if (shard.state == ShardState::kWriting) continue;  // `written` of its commit counts the replicas
        drop_lost_places(shard);
        gone = gone || (shard.state == ShardState::kCommitted && shard.replicas == 0);
      }
      if (!gone || chunk.writes != 0) {
        settle(at);
        continue;
      }
      detach(at, false);
      append_u32(slots, at);
    }
    *complete = at >= all.end();
    sweep_at_ = *complete ? 0 : at;
    return Outcome::kOk;
  });
}

Outcome ChunkIndex::chunks_in(uint32_t number, uint32_t count_max, std::string *keys) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    Segment *segment = segments_.find(number);
    if (segment == nullptr) return Outcome::kUnknownSegment;
    std::unordered_set<uint32_t> seen;
    segment->space.each([&](uint32_t, uint32_t slot) {
      if (seen.size() >= count_max) return false;
      if (slot != kNone && visible(chunks_[slot]) && seen.insert(slot).second) append_key(keys, chunks_[slot]);
      return true;
    });
    return Outcome::kOk;
  });
}

Outcome ChunkIndex::segment_stats(uint32_t number, SegmentStats *stats) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    Segment *segment = segments_.find(number);
    if (segment == nullptr) return Outcome::kUnknownSegment;
    Allocator &space = segment->space;
    const bool known = segment->added;
    *stats = {known ? space.capacity() * kUnit : 0,     space.used() * kUnit, space.waiting() * kUnit,
              known ? space.largest_free() * kUnit : 0, space.extents(),      space.committed(),
              known ? space.free_pieces() : 0};
    return Outcome::kOk;
  });
}

}  // namespace moonpool::index
