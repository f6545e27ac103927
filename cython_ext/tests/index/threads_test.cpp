// SPDX-License-Identifier: Apache-2.0
//
// Many readers beside writers. With the thread sanitizer this says whether they are apart.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "index.hpp"

namespace moonpool::index {
namespace {

constexpr size_t kBatch = 32;

class Threads : public ::testing::TestWithParam<const char *> {
 protected:
  void SetUp() override {
    index_ = ChunkIndex::make(GetParam(), 100'000, 1, 1);
    ASSERT_NE(index_, nullptr);
    for (uint32_t segment = 1; segment <= 2; ++segment) {
      ASSERT_EQ(index_->add_segment(segment, 400 * 128, segment, 0, 0), Outcome::kOk);
    }
  }
  static std::vector<uint8_t> hashes(uint32_t batch) {
    std::vector<uint8_t> made(kBatch * kHashBytes);
    for (uint32_t i = 0; i < kBatch; ++i) {
      std::memcpy(&made[i * kHashBytes], &batch, 4);
      std::memcpy(&made[i * kHashBytes + 4], &i, 4);
    }
    return made;
  }
  void put(uint32_t batch) {
    const std::vector<uint8_t> names = hashes(batch);
    const uint64_t length = 64;
    StartCall call{};
    call.owner = 1;
    call.hashes = {names.data(), kBatch, 1};
    call.parents = {names.data(), 0};
    call.lengths = reinterpret_cast<const uint8_t *>(&length);
    call.one_length = true;
    call.shards = call.replicas = 1;
    call.deadline = 1000;
    uint8_t statuses[kBatch], extents[kBatch * kExtentBytes], generations[kBatch * 8];
    ASSERT_EQ(index_->start(call, statuses, extents), Outcome::kOk);
    for (size_t i = 0; i < kBatch; ++i) std::memcpy(generations + i * 8, extents + i * kExtentBytes, 8);
    std::string slots, records, keys;
    ASSERT_EQ(index_->commit(1, call.hashes, generations, 0, nullptr, statuses, &slots, &records), Outcome::kOk);
    index_->publish(reinterpret_cast<const uint8_t *>(slots.data()), slots.size() / 4, &keys);
  }

  std::unique_ptr<ChunkIndex> index_;
};

TEST_P(Threads, ReadersAreRightWhileChunksComeAndGo) {
  put(0);  // never evicted: it is pinned
  const std::vector<uint8_t> kept = hashes(0);
  uint8_t pinned[kBatch];
  ASSERT_EQ(index_->pin(9, 1, {kept.data(), kBatch, 1}, pinned), Outcome::kOk);
  std::atomic<bool> stop{false}, wrong{false};
  std::atomic<int> rounds{0};
  std::vector<std::thread> readers;
  for (uint32_t reader = 0; reader < 3; ++reader) {
    readers.emplace_back([&, reader] {
      uint8_t statuses[kBatch];
      std::string extents;
      for (uint32_t round = reader; !stop.load(); ++round) {
        const std::vector<uint8_t> others = hashes(1 + round % 30);
        size_t matched = 0;
        uint32_t replicas = 0;
        index_->match_prefix({kept.data(), kBatch, 1}, 0, 1, &matched);
        if (matched != kBatch) wrong = true;
        index_->exists({others.data(), kBatch, 1}, statuses);
        index_->locate({others.data(), kBatch, 1}, 0, 0, 0, statuses, &extents, &replicas);
        if (extents.size() != kBatch * replicas * kExtentBytes) wrong = true;
        ++rounds;
      }
    });
  }
  for (uint32_t batch = 1; batch < 200 || rounds.load() < 100; ++batch) {
    Evicted evicted;
    uint64_t bytes = 0;
    index_->evict(kBatch * 128, 0, {}, &evicted);
    const std::string &slots = evicted.slots;
    index_->reclaim(reinterpret_cast<const uint8_t *>(slots.data()), slots.size() / 4, 0, &bytes);
    put(1 + batch % 30);
  }
  stop = true;
  for (std::thread &reader : readers) reader.join();
  EXPECT_FALSE(wrong.load());
  std::string contradiction;
  EXPECT_EQ(index_->check(&contradiction), Outcome::kOk);
  EXPECT_EQ(contradiction, "");
}
INSTANTIATE_TEST_SUITE_P(All, Threads, ::testing::Values("lru", "s3fifo", "prefix"));

}  // namespace
}  // namespace moonpool::index
