// SPDX-License-Identifier: Apache-2.0
//
// An index in use, for tests of what every call does.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>

#include "index.hpp"

namespace moonpool::index {

inline constexpr size_t kBatch = 6;
inline constexpr uint32_t kShards = 2, kReplicas = 2, kSegments = 3;
inline constexpr uint64_t kLength = 1000, kCapacity = 1 << 20;
inline constexpr int64_t kNow = 100, kDeadline = 1000, kLate = 5000;

// Nothing here takes memory: it would be refused too.
inline std::array<uint8_t, kBatch * kHashBytes> names(uint8_t batch) {
  std::array<uint8_t, kBatch * kHashBytes> made{};
  for (size_t i = 0; i < kBatch; ++i) {
    made[i * kHashBytes] = batch;
    made[i * kHashBytes + 1] = static_cast<uint8_t>(i + 1);
  }
  return made;
}

inline const uint8_t *bytes(const std::string &text) { return reinterpret_cast<const uint8_t *>(text.data()); }

// An index in use, and what its user knows.
class World {
 public:
  World() : index(ChunkIndex::make("prefix", 10'000, 1, 1)) {
    for (uint32_t segment = 1; segment <= kSegments; ++segment) index->add_segment(segment, kCapacity, segment, 0, 0);
  }

  Outcome start(uint32_t owner, uint8_t batch, uint32_t shard) {
    const auto its = names(batch);
    const uint8_t none[kHashBytes] = {9};
    StartCall call{};
    call.owner = owner;
    call.hashes = {its.data(), kBatch, 1};
    call.parents = {none, kHashBytes};
    call.lengths = reinterpret_cast<const uint8_t *>(&kLength);
    call.one_length = true;
    call.shard = shard;
    call.shards = kShards;
    call.replicas = kReplicas;
    call.now = kNow;
    call.deadline = kDeadline;
    uint8_t extents[kBatch * kReplicas * kExtentBytes];
    const Outcome outcome = index->start(call, statuses, extents);
    for (size_t i = 0; i < kBatch; ++i) std::memcpy(&generations[i * 8], extents + i * kReplicas * kExtentBytes, 8);
    return outcome;
  }
  Outcome commit(uint32_t owner, uint8_t batch, uint32_t shard, uint8_t written) {
    const auto its = names(batch);
    std::array<uint8_t, kBatch> masks;
    masks.fill(written);
    slots.clear();
    records.clear();
    return index->commit(owner, {its.data(), kBatch, 1}, generations, shard, masks.data(), statuses, &slots, &records);
  }
  Outcome publish() {
    std::string keys;
    return index->publish(bytes(slots), slots.size() / 4, &keys);
  }
  void put(uint8_t batch) {
    for (uint32_t shard = 0; shard < kShards; ++shard) {
      ASSERT_EQ(start(1, batch, shard), Outcome::kOk);
      ASSERT_EQ(commit(1, batch, shard, 0xff), Outcome::kOk);
      ASSERT_EQ(publish(), Outcome::kOk);
    }
  }
  Outcome pin(uint32_t owner, uint64_t number, uint8_t batch) {
    const auto its = names(batch);
    return index->pin(owner, number, {its.data(), kBatch, 1}, statuses);
  }
  Outcome abort(bool settled) {
    const auto its = names(2);
    return index->abort(2, {its.data(), kBatch, 1}, generations, 0, settled, statuses);
  }
  Outcome locate(int64_t lease) {
    const auto its = names(1);
    std::string extents;
    uint32_t replicas = 0;
    return index->locate({its.data(), kBatch, 1}, 0, kNow, lease, statuses, &extents, &replicas);
  }
  Outcome remove(uint8_t batch) {
    const auto its = names(batch);
    slots.clear();
    return index->remove({its.data(), kBatch, 1}, statuses, &slots);
  }
  Outcome reclaim(int64_t now) {
    uint64_t freed = 0;
    return index->reclaim(bytes(slots), slots.size() / 4, now, &freed);
  }
  // With a segment that is empty.
  void put_and_add() {
    put(1);
    index->add_segment(kSegments + 1, kCapacity, kSegments + 1, 0, 0);
  }
  Outcome move_to_it() {
    std::string moved;
    const auto its = names(1);
    const Outcome outcome = index->move_to({{its.data(), kBatch, 1}, kSegments + 1, 100, UINT64_MAX}, statuses, &moved);
    if (outcome == Outcome::kOk) keep_moves(moved);
    return outcome;
  }
  // The first replica of each chunk of the batch is spoilt.
  void put_and_find() {
    put(1);
    uint32_t replicas = 0;
    std::string extents;
    const auto its = names(1);
    index->locate({its.data(), kBatch, 1}, 0, kNow, 0, statuses, &extents, &replicas);
    for (size_t i = 0; i < kBatch; ++i) {
      std::memcpy(&spoilt[i * kExtentBytes], &extents[i * replicas * kExtentBytes], kExtentBytes);
    }
  }
  Outcome mend(bool replace) {
    std::string moved;
    const auto its = names(1);
    slots.clear();
    const Outcome outcome = index->mend({{its.data(), kBatch, 1}, 0, spoilt, replace, kNow}, statuses, &moved, &slots);
    if (outcome == Outcome::kOk) keep_moves(moved);
    return outcome;
  }
  Outcome move_out(uint32_t segment) {
    std::string moved;
    uint32_t next = 0;
    uint64_t no_room = 0;
    const Outcome outcome =
        index->move_out({segment, 0, 1000, 100, UINT64_MAX, UINT64_MAX, {}, kNow}, &moved, &next, &no_room);
    if (outcome == Outcome::kOk) keep_moves(moved);
    return outcome;
  }
  // A disk below each segment, and all that is put was used twice.
  void put_above_disks() {
    for (uint32_t segment = 1; segment <= kSegments; ++segment) {
      index->add_segment(10 + segment, kCapacity, segment, 0, 0, segment);
    }
    put(1);
    locate(0);
  }
  Outcome demote() {
    Evicted evicted;
    const Outcome outcome = index->evict(UINT64_MAX, kNow, {1, 100, UINT64_MAX, {}}, &evicted);
    slots = evicted.slots;
    keep_moves(evicted.moves);
    return outcome;
  }
  Outcome demote_more() {
    std::string moved;
    const Outcome outcome = index->demote_more(bytes(slots), slots.size() / 4, {1, 100, UINT64_MAX, {}}, &moved);
    if (outcome == Outcome::kOk) keep_moves(moved);
    return outcome;
  }
  // All of it is on disks only.
  void press_down() {
    put_above_disks();
    demote();
    for (uint32_t shard = 0; shard < kShards; ++shard) {
      commit_moves();
      publish_moves();
      demote_more();
    }
  }
  Outcome promote() {
    std::string moved;
    uint64_t no_room = 0;
    const auto its = names(1);
    const Outcome outcome = index->promote({{its.data(), kBatch, 1}, 0, 100, UINT64_MAX}, statuses, &moved, &no_room);
    if (outcome == Outcome::kOk) keep_moves(moved);
    return outcome;
  }
  void keep_moves(const std::string &moved) {
    moves_count = moved.size() / kMoveBytes;
    for (size_t i = 0; i < moves_count; ++i) std::memcpy(&moves[i * 8], moved.data() + i * kMoveBytes, 8);
  }
  Outcome commit_moves() {
    slots.clear();
    records.clear();
    return index->commit_moves(moves, moves_count, move_statuses, &slots, &records);
  }
  Outcome publish_moves() {
    uint64_t freed = 0;
    return index->publish_moves(moves, moves_count, kNow, &freed);
  }
  Outcome abort_moves() {
    uint64_t freed = 0;
    return index->abort_moves(moves, moves_count, &freed);
  }
  // Ends everything as its owners would; returns what is left then.
  std::string give_back() {
    std::string pairs, gone, more;
    uint64_t freed = 0;
    bool complete = false;
    publish();  // what was committed, if anything was
    publish_moves();
    abort_moves();
    for (uint32_t owner = 1; owner <= 3; ++owner) index->drop_owner(owner, &pairs);
    pairs.clear();
    index->to_fence(&pairs);
    for (size_t at = 0; at < pairs.size(); at += 8) {
      index->fenced(load_u32(bytes(pairs) + at), load_u32(bytes(pairs) + at + 4), &freed);
    }
    index->reclaim(bytes(slots), slots.size() / 4, kLate, &freed);
    for (uint8_t batch = 1; batch <= 3; ++batch) {
      remove(batch);
      index->reclaim(bytes(slots), slots.size() / 4, kLate, &freed);
    }
    // Chunks of which a shard is missing are found by nobody.
    Evicted evicted;
    index->evict(UINT64_MAX, kLate, {}, &evicted);
    gone += evicted.slots;
    index->sweep(1000, &gone, &complete);
    index->reclaim(bytes(gone), gone.size() / 4, kLate, &freed);
    IndexStats stats{};
    index->stats(&stats);
    if (stats.chunks != 0 || stats.writing != 0 || stats.pinned != 0) return "chunks, writes or pins are left";
    return stats.free_bytes == stats.capacity_bytes ? "" : "space is left";
  }
  std::vector<uint64_t> state() {
    IndexStats stats{};
    index->stats(&stats);
    return {stats.moving,
            stats.chunks,
            stats.writing,
            stats.pinned,
            stats.used_bytes,
            stats.free_bytes,
            stats.condemned_bytes,
            stats.evicted,
            stats.refused_records,
            stats.capacity_bytes,
            static_cast<uint64_t>(stats.leased_until_ms)};
  }
  std::string wrong() {
    std::string found;
    index->check(&found);
    return found;
  }

  std::unique_ptr<ChunkIndex> index;
  uint8_t statuses[kBatch], generations[kBatch * 8];
  uint8_t spoilt[kBatch * kExtentBytes];
  uint8_t moves[2 * kBatch * kShards * 8], move_statuses[2 * kBatch * kShards];
  size_t moves_count = 0;
  std::string slots, records;
};

}  // namespace moonpool::index
