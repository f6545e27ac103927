// SPDX-License-Identifier: Apache-2.0
//
// Moves of replicas to other segments. A chunk has one at most. Its new place belongs to the move until the record that
// names it is durable; then it changes places with the old one, which is free when its readers are through. A copy that
// is spoilt moves too, with the bytes of another one; where that cannot be, it moves to nowhere.
#include <algorithm>

#include "index.hpp"

namespace moonpool::index {

void append_move(std::string *out, const Move &move, Place source, const Segments &segments, const Chunk &chunk) {
  const Segment &read = segments[source.segment];
  const Segment *to = move.nowhere() ? nullptr : &segments[move.to.segment];
  const Shard &shard = chunk.shard(move.shard);
  append_u64(out, move.id);
  append_u32(out, segments[move.from.segment].number);
  append_u32(out, to != nullptr ? to->number : kNone);
  append_u32(out, read.number);
  append_u32(out, chunk.name_space);
  append_u64(out, shard.generation);
  append_u64(out, read.space.offset(source.piece) * kUnit);
  append_u64(out, to != nullptr ? to->space.offset(move.to.piece) * kUnit : 0);
  append_u64(out, shard.length);
  append_u32(out, move.shard);
  append_u32(out, 0);
  out->append(reinterpret_cast<const char *>(chunk.hash), kHashBytes);
}

// Whether a move of it may begin.
bool ChunkIndex::may_move(uint32_t slot) {
  return chunks_[slot].state == ChunkState::kLive && chunks_[slot].writes == 0 && moves_.of(slot) == nullptr;
}

// Of a chunk that lies there. False: there is no such extent, or it may not move.
bool ChunkIndex::movable(uint32_t slot, Place from, uint32_t *shard) {
  if (!may_move(slot)) return false;
  const Chunk &chunk = chunks_[slot];
  for (uint32_t i = 0; i < chunk.shards; ++i) {
    if (chunk.shard(i).state != ShardState::kCommitted) continue;
    for (uint32_t r = 0; r < chunk.shard(i).replicas; ++r) {
      if (chunks_.place(chunk.shard(i), r) != from) continue;
      *shard = i;
      return true;
    }
  }
  return false;
}

Outcome ChunkIndex::move_out(const MoveOutCall &call, std::string *moves, uint32_t *next, uint64_t *no_room) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    *next = kNone;
    *no_room = 0;
    const Segment *segment = segments_.find(call.segment);
    if (segment == nullptr) return Outcome::kUnknownSegment;
    if (!segment->readable || segment->disk) return Outcome::kOk;
    const auto at = static_cast<uint16_t>(segments_.place_of(call.segment));
    std::vector<uint32_t> avoid = call.avoid;
    avoid.push_back(call.segment);
    Placement placement(segments_, avoid, 0, 1, call.now, random_);
    uint32_t count = 0, looks = call.looks_max;
    uint64_t bytes = 0;
    Undo undo([&, before = moves->size()] { take_back_moves(*moves, before); });
    *next = segment->space.each_from(call.begin, [&](uint32_t piece, uint32_t slot) {
      if (looks == 0 || count >= call.count_max || bytes >= call.bytes_max) return false;
      --looks;
      uint32_t shard = 0;
      const Place from{piece, at};
      if (slot == kNone || !movable(slot, from, &shard)) return true;
      Place to = {};
      if (bytes + segments_.bytes(from) > call.room ||
          !place_elsewhere(placement, chunks_[slot].shard(shard), from, &to)) {
        ++*no_room;
        return true;
      }
      const Move &made = begin_move(slot, shard, from, to, MoveKind::kMove, moves);
      append_move(moves, made, from, segments_, chunks_[slot]);
      bytes += segments_.bytes(to);
      ++count;
      return true;
    });
    undo.keep();
    return Outcome::kOk;
  });
}

bool ChunkIndex::place_elsewhere(Placement &placement, const Shard &shard, Place from, Place *to) {
  Place others[kReplicasMax] = {};
  const uint32_t count = others_of(shard, from, others);
  return placement.place_beside(segments_[from.segment].space.units(from.piece), others, count, to);
}

uint32_t ChunkIndex::others_of(const Shard &shard, Place from, Place *others) const {
  uint32_t count = 0;
  for (uint32_t r = 0; r < shard.replicas; ++r) {
    const Place place = chunks_.place(shard, r);
    if (place != from && !segments_.lost(place) && !segments_.on_disk(place)) others[count++] = place;
  }
  return count;
}

bool ChunkIndex::lies_elsewhere(const Shard &shard, Place from) const {
  for (uint32_t r = 0; r < shard.replicas; ++r) {
    const Place place = chunks_.place(shard, r);
    if (place != from && !segments_.lost(place)) return true;
  }
  return false;
}

// With room in `moves` for what is to be said of it.
Move &ChunkIndex::begin_move(uint32_t slot, uint32_t shard, Place from, Place to, MoveKind kind, std::string *moves) {
  Undo give_place([&] {
    if (to != kNowhere) segments_.give(to);
  });
  moves->reserve(moves->size() + kMoveBytes);
  Move &made = moves_.add(slot, shard, from, to, kind);
  give_place.keep();
  return made;
}

// Those that `moves` names from there on: nobody has heard of them.
void ChunkIndex::take_back_moves(const std::string &moves, size_t from) {
  for (size_t at = from; at < moves.size(); at += kMoveBytes) {
    end_move(*moves_.find(load_u64(reinterpret_cast<const uint8_t *>(moves.data()) + at)));
  }
}

Outcome ChunkIndex::move_to(const MoveToCall &call, uint8_t *statuses, std::string *moves) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    Segment *target = segments_.find(call.segment);
    if (target == nullptr) return Outcome::kUnknownSegment;
    const auto at = static_cast<uint16_t>(segments_.place_of(call.segment));
    uint32_t count = 0;
    uint64_t bytes = 0;
    Undo undo([&, before = moves->size()] { take_back_moves(*moves, before); });
    find_each(call.hashes, [&](size_t i, uint32_t slot) {
      const bool enough = count >= call.count_max || bytes >= call.bytes_max;
      const Move *move = nullptr;
      const ItemStatus status = move_one(slot, *target, at, enough, moves, &move);
      statuses[i] = static_cast<uint8_t>(status);
      if (status != ItemStatus::kOk) return true;
      append_move(moves, *move, move->from, segments_, chunks_[slot]);
      bytes += segments_.bytes(move->to);
      ++count;
      return true;
    });
    undo.keep();
    return Outcome::kOk;
  });
}

ItemStatus ChunkIndex::move_one(uint32_t slot, Segment &target, uint16_t at, bool enough, std::string *moves,
                                const Move **made) {
  if (slot == kNone || !visible(chunks_[slot])) return ItemStatus::kNotFound;
  const Chunk &chunk = chunks_[slot];
  uint32_t shard = 0;
  while (shard < chunk.shards && lies_in(chunk.shard(shard), at)) ++shard;
  if (shard == chunk.shards) return ItemStatus::kAlready;
  if (enough || !may_move(slot)) return ItemStatus::kWriting;
  Place from = {};
  if (!source_of(chunk.shard(shard), target, &from)) return ItemStatus::kNotFound;
  const uint64_t units = segments_[from.segment].space.units(from.piece);
  if (units > target.space.capacity()) return ItemStatus::kTooLarge;
  const uint32_t piece = target.writable ? target.space.take(units) : kNone;
  if (piece == kNone) return ItemStatus::kNoSpace;
  *made = &begin_move(slot, shard, from, {piece, at}, MoveKind::kMove, moves);
  return ItemStatus::kOk;
}

bool ChunkIndex::lies_in(const Shard &shard, uint16_t segment) const {
  for (uint32_t r = 0; r < shard.replicas; ++r) {
    if (chunks_.place(shard, r).segment == segment) return true;
  }
  return false;
}

// The replica that goes: one on the target's own host, so that the others stay on different ones; else one that lies
// where nothing new is put; else the first. Only what can be read can be copied.
bool ChunkIndex::source_of(const Shard &shard, const Segment &target, Place *from) const {
  int best = -1;
  for (uint32_t r = 0; r < shard.replicas; ++r) {
    const Place place = chunks_.place(shard, r);
    const Segment &segment = segments_[place.segment];
    if (segment.disk) continue;
    if (segment.host == target.host && !segment.dropped && !segment.readable) return false;
    if (!segment.readable) continue;
    const int worth = segment.host == target.host ? 2 : segment.writable ? 0 : 1;
    if (worth > best) *from = place;
    best = std::max(best, worth);
  }
  return best >= 0;
}

Outcome ChunkIndex::mend(const MendCall &call, uint8_t *statuses, std::string *moves, std::string *slots) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    // What it will name, at most: what is detached has to be told.
    slots->reserve(slots->size() + call.hashes.count * 4);
    Placement placement(segments_, {}, 0, 1, call.now, random_);
    std::vector<uint32_t> gone;
    Undo undo([&, before = moves->size()] { take_back_moves(*moves, before); });
    find_each(call.hashes, [&](size_t i, uint32_t slot) {
      bool last = false;
      statuses[i] = static_cast<uint8_t>(mend_one(call, i, slot, placement, moves, &last));
      if (last) gone.push_back(slot);
      return true;
    });
    undo.keep();
    for (const uint32_t slot : gone) {
      if (chunks_[slot].state != ChunkState::kLive) continue;  // it was named twice
      detach(slot, false);
      append_u32(slots, slot);
    }
    return Outcome::kOk;
  });
}

ItemStatus ChunkIndex::mend_one(const MendCall &call, size_t i, uint32_t slot, Placement &placement, std::string *moves,
                                bool *last) {
  if (slot == kNone || call.shard >= chunks_[slot].shards) return ItemStatus::kNotFound;
  const Shard &shard = chunks_[slot].shard(call.shard);
  const uint8_t *extent = call.extents + i * kExtentBytes;
  if (shard.state != ShardState::kCommitted || shard.generation != load_u64(extent)) return ItemStatus::kNotFound;
  Place from = kNowhere;
  for (uint32_t r = 0; r < shard.replicas; ++r) {
    const Place place = chunks_.place(shard, r);
    const Segment &segment = segments_[place.segment];
    if (segment.dropped || segment.disk || segment.number != load_u32(extent + 24)) continue;
    if (segment.space.offset(place.piece) * kUnit == load_u64(extent + 8)) from = place;
  }
  if (from == kNowhere) return ItemStatus::kNotFound;
  if (!may_move(slot)) return ItemStatus::kWriting;
  Place others[kReplicasMax] = {}, to = kNowhere;
  *last = !lies_elsewhere(shard, from);
  if (*last) return ItemStatus::kOk;
  const uint32_t count = others_of(shard, from, others);
  const Place *source = std::find_if(others, others + count, [&](Place place) { return segments_.readable(place); });
  // In the segment that it leaves, too: that host has none of the others.
  if (!call.replace || source == others + count ||
      !placement.place_beside(segments_[from.segment].space.units(from.piece), others, count, &to)) {
    to = kNowhere;
    source = &from;
  }
  const MoveKind kind = to == kNowhere ? MoveKind::kDrop : MoveKind::kMove;
  append_move(moves, begin_move(slot, call.shard, from, to, kind, moves), *source, segments_, chunks_[slot]);
  return ItemStatus::kOk;
}

Outcome ChunkIndex::commit_moves(const uint8_t *ids, size_t count, uint8_t *statuses, std::string *slots,
                                 std::string *records) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    size_t done = 0, reserved = 0;
    // Without their records they are not committed.
    Undo undo([&] {
      for (size_t i = 0; i < done; ++i) {
        if (statuses[i] != static_cast<uint8_t>(ItemStatus::kOk)) continue;
        Move *move = moves_.find(load_u64(ids + i * 8));
        move->committed = false;
        move->leaves = 0;
      }
      condemned_.release_reads(reserved);
    });
    std::string record;
    for (; done < count; ++done) {
      Move *move = moves_.find(load_u64(ids + done * 8));
      ItemStatus status = ItemStatus::kNotFound;
      if (move != nullptr && !move->committed) {
        status = commit_move(*move);
        if (status == ItemStatus::kOk) {
          record.clear();
          encode(record_of(move->slot, nullptr, 0, move), move->slot, &record);
          append_u32(slots, move->slot);
          append_u32(records, static_cast<uint32_t>(record.size()));
          records->append(record);
          // What it leaves may have readers, and publishing must not need memory.
          const uint32_t leaves = leaves_of(*move);
          condemned_.reserve_reads(leaves);
          reserved += leaves;
          if (move->kind == MoveKind::kAdd) chunks_.reserve_places();
          move->leaves = leaves;
          move->committed = true;
        } else {
          end_move(*move);
        }
      }
      statuses[done] = static_cast<uint8_t>(status);
    }
    undo.keep();
    return Outcome::kOk;
  });
}

// Whether the chunk is still what was copied, and may be told to be elsewhere.
ItemStatus ChunkIndex::commit_move(const Move &move) const {
  if (move.slot == kNone) return ItemStatus::kNotFound;
  const Chunk &chunk = chunks_[move.slot];
  if (move.kind == MoveKind::kShed) {
    if (chunk.writes != 0) return ItemStatus::kWriting;
    return missing_on_disk(chunk) == 0 ? ItemStatus::kOk : ItemStatus::kNotFound;
  }
  if (segments_.lost(move.from)) return ItemStatus::kNotFound;
  if (!move.nowhere() && segments_.lost(move.to)) return ItemStatus::kNotFound;
  // Records of puts under way name the old place. Which of them comes last in the store would be left to chance.
  if (chunk.writes != 0) return ItemStatus::kWriting;
  // Of the other shards there is one on a disk that is lost meanwhile.
  if (move.kind == MoveKind::kChill && missing_on_disk(chunk) > 1) return ItemStatus::kNotFound;
  const Shard &shard = chunk.shard(move.shard);
  // The last copy does not go to nowhere.
  if (move.nowhere() && !lies_elsewhere(shard, move.from)) return ItemStatus::kNotFound;
  for (uint32_t r = 0; r < shard.replicas; ++r) {
    if (chunks_.place(shard, r) == move.from) return ItemStatus::kOk;
  }
  return ItemStatus::kNotFound;
}

Outcome ChunkIndex::publish_moves(const uint8_t *ids, size_t count, int64_t now, uint64_t *bytes) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    *bytes = 0;
    for (size_t i = 0; i < count; ++i) {
      const Move *move = moves_.find(load_u64(ids + i * 8));
      // One whose chunk was removed meanwhile waits for reclaim() with it.
      if (move == nullptr || !move->committed || chunks_[move->slot].state != ChunkState::kLive) continue;
      const uint32_t slot = move->slot;
      *bytes += change_places(*move, now);
      moves_.remove(*move);
      settle(slot);
    }
    return Outcome::kOk;
  });
}

// What room was reserved for by `leaves` is used, or released.
uint64_t ChunkIndex::change_places(const Move &move, int64_t now) {
  Chunk &chunk = chunks_[move.slot];
  uint32_t reserved = move.leaves;
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < chunk.shards; ++i) {
    if (i != move.shard && !move.sheds()) continue;
    Shard &shard = chunk.shard(i);
    Place kept[kReplicasMax] = {}, left[kReplicasMax] = {};
    uint32_t kept_count = 0, left_count = 0;
    for (uint32_t r = 0; r < shard.replicas; ++r) {
      const Place place = chunks_.place(shard, r);
      const bool goes = leaves(move, i, place);
      if (goes) left[left_count++] = place;
      if (!goes || move.kind == MoveKind::kMove) kept[kept_count++] = goes ? move.to : place;
    }
    if (i == move.shard && move.adds()) kept[kept_count++] = move.to;
    chunks_.set_places(shard, kept, kept_count);
    for (uint32_t r = 0; r < left_count; ++r) bytes += give_when_read(left[r], chunk.leased(), now, &reserved);
  }
  condemned_.release_reads(reserved);
  if (!move.nowhere()) {
    if (!segments_.lost(move.to)) segments_[move.to.segment].space.set_slot(move.to.piece, move.slot);
    segments_.set_committed(move.to);
  }
  return bytes;
}

// Whether this extent of a shard is given up when the move is published.
bool ChunkIndex::leaves(const Move &move, uint32_t shard, Place place) const {
  if (move.sheds()) return !segments_.on_disk(place);
  return !move.adds() && shard == move.shard && place == move.from;
}

uint32_t ChunkIndex::leaves_of(const Move &move) const {
  const Chunk &chunk = chunks_[move.slot];
  uint32_t count = 0;
  for (uint32_t i = 0; i < chunk.shards; ++i) {
    const Shard &shard = chunk.shard(i);
    for (uint32_t r = 0; r < shard.replicas; ++r) count += leaves(move, i, chunks_.place(shard, r)) ? 1 : 0;
  }
  return count;
}

// Now, or with the last lease, for which one of `reserved` is used. Returns the bytes that are free now.
uint64_t ChunkIndex::give_when_read(Place place, int64_t until, int64_t now, uint32_t *reserved) {
  if (until <= now || segments_.lost(place)) return segments_.give(place);
  condemned_.until_read(until, place);
  --*reserved;
  segments_.set_waiting(place);
  return 0;
}

Outcome ChunkIndex::abort_moves(const uint8_t *ids, size_t count, uint64_t *bytes) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    *bytes = 0;
    for (size_t i = 0; i < count; ++i) {
      if (const Move *move = moves_.find(load_u64(ids + i * 8)); move != nullptr) *bytes += end_move(*move);
    }
    return Outcome::kOk;
  });
}

uint64_t ChunkIndex::end_move(const Move &move) {
  const Place to = move.to;
  condemned_.release_reads(move.leaves);
  moves_.remove(move);
  return to == kNowhere ? 0 : segments_.give(to);
}

// The chunk, or this shard of it, is gone. Its new place is still written to, or named by a record.
void ChunkIndex::leave_move(uint32_t slot) {
  Move *move = moves_.of(slot);
  if (move == nullptr) return;
  if (!move->nowhere()) {
    segments_.set_waiting(move->to);
    if (!move->committed) moves_.leave(*move);
  } else if (!move->committed) {
    end_move(*move);
  }
}

}  // namespace moonpool::index
