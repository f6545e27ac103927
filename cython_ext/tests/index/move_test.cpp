// SPDX-License-Identifier: Apache-2.0
//
// Moves: where readers are sent before, meanwhile and after, and what becomes of the room when something is lost.
#include <gtest/gtest.h>

#include "index.hpp"

namespace moonpool::index {
namespace {

constexpr uint32_t kOwner = 1, kSpace = 7;
constexpr uint64_t kLength = 1000, kSize = 1088;  // with the header, in units

class Moving : public ::testing::Test {
 protected:
  void SetUp() override {
    index_ = ChunkIndex::make("prefix", 1000, 1, 1);
    ASSERT_NE(index_, nullptr);
    for (uint32_t segment = 1; segment <= 3; ++segment) {
      ASSERT_EQ(index_->add_segment(segment, 20 * kSize, segment, 0, 0), Outcome::kOk);
    }
  }
  void TearDown() override {
    std::string wrong;
    EXPECT_EQ(index_->check(&wrong), Outcome::kOk);
    EXPECT_EQ(wrong, "");
  }

  static std::vector<uint8_t> names(uint8_t count) {
    std::vector<uint8_t> made(count * kHashBytes);
    for (uint8_t i = 0; i < count; ++i) made[i * kHashBytes] = static_cast<uint8_t>(i + 1);
    return made;
  }
  // All in segment 1 (and 2 with two replicas).
  void put(const std::vector<uint8_t> &names, uint32_t replicas = 1, uint32_t shard = 0, uint32_t shards = 1) {
    const size_t count = names.size() / kHashBytes;
    StartCall call{};
    call.owner = kOwner;
    call.hashes = {names.data(), count, kSpace};
    call.parents = {names.data(), 0};
    call.lengths = reinterpret_cast<const uint8_t *>(&kLength);
    call.one_length = true;
    call.shard = shard;
    call.shards = shards;
    call.replicas = replicas;
    call.avoid = {3};
    if (replicas == 1) call.avoid.push_back(2);
    call.deadline = 1000;
    std::vector<uint8_t> statuses(count), extents(count * replicas * kExtentBytes), generations(count * 8);
    ASSERT_EQ(index_->start(call, statuses.data(), extents.data()), Outcome::kOk);
    for (size_t i = 0; i < count; ++i) {
      ASSERT_EQ(statuses[i], 0);
      std::memcpy(&generations[i * 8], &extents[i * replicas * kExtentBytes], 8);
    }
    std::string slots, records, keys;
    index_->commit(kOwner, call.hashes, generations.data(), shard, nullptr, statuses.data(), &slots, &records);
    index_->publish(at(slots), slots.size() / 4, &keys);
  }

  // Of two; `name` has to live as long.
  static StartCall second_shard_of(const std::vector<uint8_t> &name) {
    StartCall call{};
    call.owner = kOwner;
    call.hashes = {name.data(), 1, kSpace};
    call.parents = {name.data(), 0};
    call.lengths = reinterpret_cast<const uint8_t *>(&kLength);
    call.one_length = true;
    call.shard = 1;
    call.shards = 2;
    call.replicas = 1;
    call.deadline = 1000;
    return call;
  }
  void lose(uint32_t segment) {
    index_->drop_segment(segment);
    std::string slots;
    bool complete = false;
    index_->sweep(100, &slots, &complete);
    EXPECT_EQ(slots, "");
  }
  static const uint8_t *at(const std::string &bytes) { return reinterpret_cast<const uint8_t *>(bytes.data()); }
  // The numbers of the moves that this begins.
  std::string out_of(uint32_t segment, uint32_t count = 1000, uint64_t room = UINT64_MAX) {
    MoveOutCall call{segment, 0, 1000, count, UINT64_MAX, room, {}, 0};
    std::string moves, ids;
    EXPECT_EQ(index_->move_out(call, &moves, &next_, &no_room_), Outcome::kOk);
    for (size_t i = 0; i < moves.size(); i += kMoveBytes) ids += moves.substr(i, 8);
    return ids;
  }
  std::vector<ItemStatus> commit(const std::string &ids) {
    std::vector<uint8_t> statuses(ids.size() / 8);
    std::string slots;
    records_.clear();
    EXPECT_EQ(index_->commit_moves(at(ids), ids.size() / 8, statuses.data(), &slots, &records_), Outcome::kOk);
    std::vector<ItemStatus> made;
    for (const uint8_t status : statuses) made.push_back(static_cast<ItemStatus>(status));
    return made;
  }
  uint64_t publish(const std::string &ids, int64_t now = 0) {
    uint64_t freed = 0;
    EXPECT_EQ(index_->publish_moves(at(ids), ids.size() / 8, now, &freed), Outcome::kOk);
    return freed;
  }
  uint64_t abort(const std::string &ids) {
    uint64_t freed = 0;
    EXPECT_EQ(index_->abort_moves(at(ids), ids.size() / 8, &freed), Outcome::kOk);
    return freed;
  }
  // The segment of the first replica; 0: there is none.
  uint32_t where(const uint8_t *name, int64_t lease = 0) {
    uint8_t status = 0;
    uint32_t replicas = 0;
    std::string extents;
    EXPECT_EQ(index_->locate({name, 1, kSpace}, 0, 0, lease, &status, &extents, &replicas), Outcome::kOk);
    return status == 0 ? load_u32(at(extents) + 24) : 0;
  }
  SegmentStats segment(uint32_t number) {
    SegmentStats stats{};
    EXPECT_EQ(index_->segment_stats(number, &stats), Outcome::kOk);
    return stats;
  }

  std::unique_ptr<ChunkIndex> index_;
  std::string records_;
  uint32_t next_ = 0;
  uint64_t no_room_ = 0;
};

TEST_F(Moving, ReadersAreSentToTheNewPlaceWhenItIsPublishedAndNotBefore) {
  const std::vector<uint8_t> name = names(1);
  put(name);
  const std::string ids = out_of(1);
  ASSERT_EQ(ids.size(), 8u);
  EXPECT_EQ(next_, kNone);
  EXPECT_EQ(where(name.data()), 1u);
  ASSERT_EQ(commit(ids), std::vector{ItemStatus::kOk});
  EXPECT_EQ(where(name.data()), 1u);
  EXPECT_EQ(publish(ids), kSize);
  EXPECT_GT(where(name.data()), 1u);
  EXPECT_EQ(segment(1).extents, 0u);
}

TEST_F(Moving, TheOldPlaceWaitsForItsReaders) {
  const std::vector<uint8_t> name = names(1);
  put(name);
  const std::string ids = out_of(1);
  EXPECT_EQ(where(name.data(), 100), 1u);
  commit(ids);
  EXPECT_EQ(publish(ids, 50), 0u);
  EXPECT_EQ(segment(1).waiting_bytes, kSize);
  uint64_t freed = 0;
  index_->reclaim(nullptr, 0, 99, &freed);
  EXPECT_EQ(freed, 0u);
  index_->reclaim(nullptr, 0, 100, &freed);
  EXPECT_EQ(freed, kSize);
}

TEST_F(Moving, AChunkMovesOnceAtATimeAndWhatFailsStaysWhereItWas) {
  const std::vector<uint8_t> name = names(1);
  put(name);
  const std::string ids = out_of(1);
  EXPECT_EQ(out_of(1), "");
  EXPECT_EQ(abort(ids), kSize);
  EXPECT_EQ(abort(ids), 0u);
  EXPECT_EQ(where(name.data()), 1u);
  EXPECT_EQ(commit(ids), std::vector{ItemStatus::kNotFound});
  EXPECT_EQ(out_of(1).size(), 8u);
}

TEST_F(Moving, TheNewPlaceOfARemovedChunkIsKeptUntilItsCopyIsOver) {
  const std::vector<uint8_t> name = names(1);
  put(name);
  const std::string ids = out_of(1);
  uint8_t status = 0;
  std::string slots;
  index_->remove({name.data(), 1, kSpace}, &status, &slots);
  uint64_t freed = 0;
  index_->reclaim(at(slots), 1, 0, &freed);
  EXPECT_EQ(freed, kSize);
  put(name);  // in the same slot
  EXPECT_EQ(segment(2).waiting_bytes + segment(3).waiting_bytes, kSize);
  EXPECT_EQ(commit(ids), std::vector{ItemStatus::kNotFound});
  EXPECT_EQ(segment(2).extents + segment(3).extents, 0u);
  EXPECT_EQ(where(name.data()), 1u);
}

TEST_F(Moving, TheNewPlaceIsKeptWhileARecordNamesItAlsoWhenTheChunkIsRemoved) {
  const std::vector<uint8_t> name = names(1);
  put(name);
  const std::string ids = out_of(1);
  commit(ids);
  uint8_t status = 0;
  std::string slots;
  index_->remove({name.data(), 1, kSpace}, &status, &slots);
  ASSERT_EQ(status, 0);
  EXPECT_EQ(publish(ids), 0u);
  EXPECT_EQ(segment(2).waiting_bytes + segment(3).waiting_bytes, kSize);
  uint64_t freed = 0;
  index_->reclaim(at(slots), 1, 0, &freed);
  EXPECT_EQ(freed, 2 * kSize);
}

TEST_F(Moving, NothingIsCommittedIntoALostSegment) {
  const std::vector<uint8_t> name = names(1);
  put(name);
  index_->set_segment(3, false, true);
  const std::string ids = out_of(1);
  ASSERT_EQ(ids.size(), 8u);
  index_->drop_segment(2);
  EXPECT_EQ(commit(ids), std::vector{ItemStatus::kNotFound});
  EXPECT_EQ(where(name.data()), 1u);
}

TEST_F(Moving, ReplicasStayOnDifferentHostsWhereThereIsAnother) {
  const std::vector<uint8_t> all = names(4);
  put(all, 2);
  const std::string ids = out_of(1);
  ASSERT_EQ(ids.size(), 4u * 8);
  commit(ids);
  publish(ids);
  EXPECT_EQ(segment(2).extents, 4u);
  EXPECT_EQ(segment(3).extents, 4u);
  // There is no segment that has none.
  index_->set_segment(1, false, true);
  EXPECT_EQ(out_of(2), "");
  EXPECT_EQ(no_room_, 4u);
}

TEST_F(Moving, WhatFindsNoRoomIsCounted) {
  const std::vector<uint8_t> all = names(20);
  put(all);
  index_->set_segment(3, false, true);
  ASSERT_EQ(out_of(1, 15).size(), 15u * 8);
  EXPECT_NE(next_, kNone);
  index_->set_segment(2, false, true);
  index_->add_segment(4, 2 * kSize, 4, 0, 0);
  EXPECT_EQ(out_of(1).size(), 2u * 8);
  EXPECT_EQ(no_room_, 3u);
  index_->set_segment(3, true, true);
  EXPECT_EQ(out_of(1, 1000, 3 * kSize - 1).size(), 2u * 8);
  EXPECT_EQ(no_room_, 1u);
}

// The chunk stays when what moves is lost: another replica is there, or another shard is being written.
TEST_F(Moving, AReplicaThatIsLostIsNotCommitted) {
  put(names(1), 2);
  const std::string ids = out_of(1);
  ASSERT_EQ(ids.size(), 8u);
  lose(1);
  EXPECT_EQ(commit(ids), std::vector{ItemStatus::kNotFound});
  EXPECT_EQ(segment(3).extents, 0u);
  EXPECT_EQ(segment(2).extents, 1u);
}

TEST_F(Moving, AShardThatIsLostWhileAnotherIsWrittenIsNotCommitted) {
  const std::vector<uint8_t> name = names(1);
  put(name, 1, 0, 2);
  const std::string ids = out_of(1);
  ASSERT_EQ(ids.size(), 8u);
  StartCall call = second_shard_of(name);
  call.avoid = {1};
  uint8_t status = 0, extents[kExtentBytes];
  index_->start(call, &status, extents);
  ASSERT_EQ(status, 0);
  lose(1);
  EXPECT_EQ(commit(ids), std::vector{ItemStatus::kNotFound});
  EXPECT_EQ(segment(2).extents + segment(3).extents, 1u);
}

TEST_F(Moving, AShardThatIsWrittenMeanwhileEndsTheMove) {
  const std::vector<uint8_t> name = names(1);
  put(name, 1, 0, 2);
  const std::string ids = out_of(1);
  ASSERT_EQ(ids.size(), 8u);
  const StartCall call = second_shard_of(name);
  uint8_t status = 0, extents[kExtentBytes];
  index_->start(call, &status, extents);
  ASSERT_EQ(status, 0);
  EXPECT_EQ(commit(ids), std::vector{ItemStatus::kWriting});
  index_->abort(kOwner, call.hashes, extents, 1, true, &status);
  // And the other way round: a record that is on its way is not contradicted by another.
  const std::string again = out_of(1);
  ASSERT_EQ(commit(again), std::vector{ItemStatus::kOk});
  index_->start(call, &status, extents);
  EXPECT_EQ(static_cast<ItemStatus>(status), ItemStatus::kWriting);
  publish(again);
  index_->start(call, &status, extents);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace moonpool::index
