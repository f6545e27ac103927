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
    const auto written_of = [&](size_t i) -> uint8_t { return written != nullptr ? written[i] : 0xff; };
    // Calls `each` for the first `count` that are OK.
    const auto each_ok = [&](size_t count, const auto &each) {
      for (size_t i = 0; i < count; ++i) {
        if (statuses[i] != static_cast<uint8_t>(ItemStatus::kOk)) continue;
        each(i, chunks_[find(hashes[i], hashes.name_space)].shard(shard));
      }
    };
    size_t done = 0;
    // Without their records they are not committed.
    Undo undo([&] { each_ok(done, [&](size_t, Shard &its) { writes_[its.write].commit = 0; }); });
    std::string record;
    for (; done < hashes.count; ++done) {
      const uint64_t generation = load_u64(generations + done * 8);
      const uint32_t slot = find(hashes[done], hashes.name_space);
      Shard *found = written_by(owner, slot, shard, generation);
      const ItemStatus status =
          found != nullptr ? may_commit(*found, written_of(done)) : commit_missing(slot, shard, generation);
      statuses[done] = static_cast<uint8_t>(status);
      if (status != ItemStatus::kOk) continue;
      record.clear();
      encode(record_of(slot, found, written_of(done), nullptr), slot, &record);
      append_u32(slots, slot);
      append_u32(records, static_cast<uint32_t>(record.size()));
      records->append(record);
      writes_[found->write].commit = ++commits_;
    }
    undo.keep();
    each_ok(done, [&](size_t i, Shard &its) { finish_commit(its, written_of(i)); });
    return Outcome::kOk;
  });
}

ItemStatus ChunkIndex::may_commit(Shard &shard, uint8_t written) {
  bool any = false, there = false;
  for (uint32_t r = 0; r < shard.replicas; ++r) {
    if ((written >> r & 1) == 0) continue;
    any = true;
    there = there || !segments_.lost(chunks_.place(shard, r));
  }
  if (!any) return ItemStatus::kInvalid;
  if (there) return ItemStatus::kOk;
  give_up(shard.write, false, nullptr);
  return ItemStatus::kNotOwner;
}

void ChunkIndex::finish_commit(Shard &shard, uint8_t written) {
  const uint32_t owner = writes_[shard.write].owner, reserved = shard.replicas;
  Place kept[kReplicasMax] = {};
  uint32_t count = 0, waiting = 0;
  for (uint32_t r = 0; r < shard.replicas; ++r) {
    const Place place = chunks_.place(shard, r);
    if (segments_.lost(place)) {
      segments_.give(place);
    } else if ((written >> r & 1) != 0) {
      kept[count++] = place;
    } else {
      // What was not written may still be on its way.
      condemned_.until_fenced(owner, shard.generation, place);
      segments_.set_waiting(place);
      ++waiting;
    }
  }
  condemned_.release(reserved - waiting);
  chunks_.set_places(shard, kept, count);
  writes_.committed(shard.write);
}

ItemStatus ChunkIndex::commit_missing(uint32_t slot, uint32_t shard, uint64_t generation) const {
  if (slot == kNone || shard >= chunks_[slot].shards) return ItemStatus::kNotOwner;
  const Shard &its = chunks_[slot].shard(shard);
  if (its.generation != generation) return ItemStatus::kNotOwner;
  return its.state == ShardState::kCommitted ? ItemStatus::kAlready : ItemStatus::kNotOwner;
}

Record ChunkIndex::record_of(uint32_t slot, const Shard *committing, uint8_t written, const Move *move) const {
  const Chunk &chunk = chunks_[slot];
  Record record{};
  std::memcpy(record.hash, chunk.hash, kHashBytes);
  if (chunk.parent != kNone) std::memcpy(record.parent, chunks_[chunk.parent].hash, kHashBytes);
  record.name_space = chunk.name_space;
  record.shards = chunk.shards;
  for (uint32_t i = 0; i < chunk.shards; ++i) {
    const Shard &shard = chunk.shard(i);
    const bool now = &shard == committing;
    if (shard.state == ShardState::kAbsent || shard.replicas == 0) continue;
    if (!now && shard.state == ShardState::kWriting && writes_.arena()[shard.write].commit == 0) continue;
    RecordShard &made = record.present.emplace_back();
    made = {static_cast<uint16_t>(i), shard.generation, shard.length, {}};
    for (uint32_t r = 0; r < shard.replicas; ++r) {
      const Place place = chunks_.place(shard, r);
      if (segments_.lost(place) || (now && (written >> r & 1) == 0)) continue;
      const bool goes = move != nullptr && leaves(*move, i, place);
      if (!goes || move->kind == MoveKind::kMove) made.extents.push_back(record_of(goes ? move->to : place));
    }
    if (move != nullptr && move->shard == i && move->adds()) made.extents.push_back(record_of(move->to));
    if (made.extents.empty()) record.present.pop_back();
  }
  return record;
}

RecordExtent ChunkIndex::record_of(Place place) const {
  const Segment &segment = segments_[place.segment];
  return {segment.number, segment.space.offset(place.piece) * kUnit};
}

uint64_t ChunkIndex::oldest_commit(uint32_t slot, uint64_t *next) {
  *next = 0;
  if (!chunks_.arena().used(slot) || chunks_[slot].state != ChunkState::kLive) return 0;
  Chunk &chunk = chunks_[slot];
  uint64_t oldest = 0;
  for (uint32_t i = 0; i < chunk.shards && chunk.writes > 0; ++i) {
    const uint32_t write = chunk.shard(i).write;
    const uint64_t its = write == kNone ? 0 : writes_[write].commit;
    if (its == 0 || its == oldest) continue;
    if (oldest == 0 || its < oldest) {
      *next = oldest;
      oldest = its;
    } else if (*next == 0 || its < *next) {
      *next = its;
    }
  }
  return oldest;
}

template <class Each>
void ChunkIndex::each_of_commit(uint32_t slot, uint64_t number, Each each) {
  const auto of_it = [&](uint32_t write) { return write != kNone && writes_[write].commit == number; };
  uint32_t left = 0;
  for (uint32_t i = 0; i < chunks_[slot].shards; ++i) left += of_it(chunks_[slot].shard(i).write) ? 1 : 0;
  // With the last of them the chunk may go.
  for (uint32_t i = 0; left > 0; ++i) {
    const uint32_t write = chunks_[slot].shard(i).write;
    if (!of_it(write)) continue;
    --left;
    each(write);
  }
}

Outcome ChunkIndex::publish(const uint8_t *slots, size_t count, std::string *keys) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    // From here on nothing throws: what is durable has to become visible as a whole.
    keys->reserve(keys->size() + count * (4 + kHashBytes));
    tell_capacity();
    for (size_t i = 0; i < count; ++i) {
      const uint32_t slot = load_u32(slots + i * 4);
      uint64_t next = 0;
      const uint64_t oldest = oldest_commit(slot, &next);
      if (oldest == 0) continue;
      Chunk &chunk = chunks_[slot];
      each_of_commit(slot, oldest, [&](uint32_t write) {
        Shard &shard = chunk.shard(writes_[write].shard);
        shard.state = ShardState::kCommitted;
        for (uint32_t r = 0; r < shard.replicas; ++r) segments_.set_committed(chunks_.place(shard, r));
        end_write(write);
        ++chunk.committed;
      });
      list(slot);
      settle(slot);
      if (visible(chunk)) append_key(keys, chunk);
    }
    return Outcome::kOk;
  });
}

Outcome ChunkIndex::revoke(const uint8_t *slots, size_t count) noexcept {
  return guarded([&] {
    const Exclusive held = exclusive();
    for (size_t i = 0; i < count; ++i) {
      const uint32_t slot = load_u32(slots + i * 4);
      uint64_t next = 0;
      const uint64_t oldest = oldest_commit(slot, &next);
      if (oldest == 0) continue;
      each_of_commit(slot, oldest, [&](uint32_t write) {
        if (next != 0) {
          // The next record names these extents too, and it may be durable: they share its fate.
          writes_[write].commit = next;
        } else {
          // Its owner had finished: nothing can be written there any more.
          give_up(write, true, nullptr);
        }
      });
    }
    return Outcome::kOk;
  });
}

}  // namespace moonpool::index
