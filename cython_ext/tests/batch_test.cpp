// SPDX-License-Identifier: Apache-2.0
//
// From a caller's arrays to descriptors: every bad item is named, neighbours merge, large items are split.
#include "batch.hpp"

#include <map>

#include "digest.hpp"
#include "support_core.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

constexpr uint64_t kLength = 1u << 20;
constexpr uint64_t kSlice = 64u << 10;

class BatchTest : public ::testing::Test {
 protected:
  BatchTest() {
    for (auto *remote : {&remote_, &weights_}) {
      std::memset(remote, 0, sizeof *remote);
      remote->length = kLength;
    }
    remote_.key = 77;
    remote_.flags = MP_REGION_WRITABLE;
    weights_.key = 78;
  }

  void add(int64_t local, int64_t remote, int64_t length, uint32_t local_index = 0, uint32_t remote_index = 0) {
    local_offsets_.push_back(local);
    remote_offsets_.push_back(remote);
    lengths_.push_back(length);
    local_index_.push_back(local_index);
    remote_index_.push_back(remote_index);
  }
  mp_batch raw() {
    return {lengths_.size(),
            local_offsets_.data(),
            1,
            remote_offsets_.data(),
            1,
            lengths_.data(),
            1,
            locals_,
            2,
            local_index_.data(),
            remotes_,
            2,
            remote_index_.data()};
  }
  Batch open() {
    raw_ = raw();
    Batch batch;
    const Error error = Batch::open(*quiet_.peer, raw_, &batch);
    EXPECT_FALSE(error) << error.message;
    return batch;
  }
  // The descriptors of all good items.
  std::vector<Desc> build(bool digest = false) {
    const Batch batch = open();
    transfer_ = std::make_shared<Transfer>(quiet_.peer, MP_READ, digest, kNever);
    DescBuilder builder(*transfer_, kSlice);
    for (size_t i = 0; i < batch.count(); ++i) {
      const Item item = batch.item(i);
      if (item.status == MP_OK) builder.add(static_cast<uint32_t>(i), item);
    }
    return transfer_->descs;
  }

  QuietEngine quiet_;
  mp_region kv_{quiet_.engine, quiet_.region("kv", kLength)};
  mp_region constant_{quiet_.engine, quiet_.region("constant", kLength, 0)};
  mp_region *locals_[2] = {&kv_, &constant_};
  mp_remote_region remote_, weights_;
  const mp_remote_region *remotes_[2] = {&remote_, &weights_};
  std::vector<int64_t> local_offsets_, remote_offsets_, lengths_;
  std::vector<uint32_t> local_index_, remote_index_;
  mp_batch raw_{};
  std::shared_ptr<Transfer> transfer_;
};

TEST_F(BatchTest, AGoodItemIsResolved) {
  add(10, 20, 30);
  add(0, kLength - 1, 1, 1, 1);
  const Batch batch = open();
  const Item item = batch.item(0);
  EXPECT_EQ(item.status, MP_OK);
  EXPECT_EQ(item.local, kv_.region->base + 10);
  EXPECT_EQ(item.key, 77u);
  EXPECT_EQ(item.offset, 20u);
  EXPECT_EQ(item.length, 30u);
  EXPECT_EQ(check_direction(item, MP_READ), MP_OK);
  EXPECT_EQ(check_direction(item, MP_WRITE), MP_OK);
  const Item read_only = batch.item(1);
  EXPECT_EQ(check_direction(read_only, MP_READ), MP_REGION_READ_ONLY) << "a read writes the local region";
  EXPECT_EQ(check_direction(read_only, MP_WRITE), MP_REGION_READ_ONLY) << "a write writes the remote region";
}

TEST_F(BatchTest, EveryBadItemIsNamedWithItsNumbers) {
  add(-1, 0, 10);
  add(0, -1, 10);
  add(0, 0, 0);
  add(0, 0, -5);
  add(kLength, 0, 1);
  add(0, kLength, 1);
  add(1, 0, kLength);
  add(0, 1, kLength);
  add(INT64_MAX, 0, INT64_MAX);
  add(0, INT64_MAX, 2);
  add(INT64_MIN, INT64_MIN, INT64_MIN);
  add(0, 0, 1, 2, 0);
  add(0, 0, 1, 0, UINT32_MAX);
  const Batch batch = open();
  for (size_t i = 0; i < batch.count(); ++i) {
    const auto status = static_cast<mp_status>(batch.item(i).status);
    EXPECT_EQ(status, i < 11 ? MP_OUT_OF_RANGE : MP_INVALID_ARGUMENT) << i;
    const Error error = batch.explain(i, status);
    EXPECT_EQ(error.code, status);
    EXPECT_EQ(error.item, static_cast<int64_t>(i));
    EXPECT_EQ(error.message.find("item " + std::to_string(i) + ":"), 0u) << error.message;
  }
  EXPECT_NE(batch.explain(5, MP_OUT_OF_RANGE).message.find("remote offset 1048576 + 1 bytes"), std::string::npos);
  EXPECT_NE(batch.explain(0, MP_OUT_OF_RANGE).message.find("local offset -1"), std::string::npos);
  EXPECT_NE(batch.explain(3, MP_OUT_OF_RANGE).message.find("length -5"), std::string::npos);
  EXPECT_NE(batch.explain(0, MP_OUT_OF_RANGE).message.find("outside region \"kv\" of"), std::string::npos);
}

TEST_F(BatchTest, AReleasedRegionConcernsItsOwnItemsOnly) {
  ASSERT_TRUE(constant_.region->try_release());
  add(0, 0, 10, 0, 0);
  add(0, 0, 10, 1, 0);
  Batch batch = open();
  EXPECT_EQ(batch.item(0).status, MP_OK);
  EXPECT_EQ(batch.item(1).status, MP_REGION_RELEASED);
  EXPECT_EQ(batch.explain(1, MP_REGION_RELEASED).code, MP_REGION_RELEASED);
  locals_[1] = nullptr;
  batch = open();
  EXPECT_EQ(batch.item(1).status, MP_REGION_RELEASED) << "no handle stands for a released region";
}

TEST_F(BatchTest, StridesOfZeroRepeatAndMissingIndexesMeanTheFirstRegion) {
  const int64_t offset = 100, length = 7;
  const int64_t remote_offsets[3] = {0, 1000, 2000};
  mp_batch raw{};
  raw.count = 3;
  raw.local_offsets = &offset;
  raw.remote_offsets = remote_offsets;
  raw.remote_offsets_stride = 1;
  raw.lengths = &length;
  raw.locals = locals_;
  raw.locals_count = 2;
  raw.remotes = remotes_;
  raw.remotes_count = 2;
  Batch batch;
  ASSERT_FALSE(Batch::open(*quiet_.peer, raw, &batch));
  for (size_t i = 0; i < 3; ++i) {
    const Item item = batch.item(i);
    EXPECT_EQ(item.status, MP_OK);
    EXPECT_EQ(item.local, kv_.region->base + 100);
    EXPECT_EQ(item.offset, i * 1000);
    EXPECT_EQ(item.length, 7u);
    EXPECT_EQ(item.key, 77u);
  }
}

TEST_F(BatchTest, CallsThatCannotBeMeantAreRefusedWhole) {
  add(0, 0, 1);
  const auto refused = [&](auto change) {
    mp_batch batch = raw();
    change(batch);
    Batch out;
    return Batch::open(*quiet_.peer, batch, &out).code;
  };
  EXPECT_EQ(refused([](mp_batch &) {}), MP_OK);
  EXPECT_EQ(refused([](mp_batch &b) { b.count = 0; }), MP_INVALID_ARGUMENT);
  EXPECT_EQ(refused([](mp_batch &b) { b.count = size_t{UINT32_MAX} + 1; }), MP_LIMIT);
  EXPECT_EQ(refused([](mp_batch &b) { b.lengths = nullptr; }), MP_INVALID_ARGUMENT);
  EXPECT_EQ(refused([](mp_batch &b) { b.local_offsets = nullptr; }), MP_INVALID_ARGUMENT);
  EXPECT_EQ(refused([](mp_batch &b) { b.remote_offsets = nullptr; }), MP_INVALID_ARGUMENT);
  EXPECT_EQ(refused([](mp_batch &b) { b.locals_count = 0; }), MP_INVALID_ARGUMENT);
  EXPECT_EQ(refused([](mp_batch &b) { b.remotes = nullptr; }), MP_INVALID_ARGUMENT);
  const mp_remote_region *missing[2] = {&remote_, nullptr};
  EXPECT_EQ(refused([&](mp_batch &b) { b.remotes = missing; }), MP_INVALID_ARGUMENT);
  remote_.incarnation[3] = 1;
  EXPECT_EQ(refused([](mp_batch &) {}), MP_REGION_STALE);
  remote_.incarnation[3] = 0;
  QuietEngine other;
  mp_region foreign{other.engine, other.region("foreign", kLength)};
  locals_[0] = &foreign;
  EXPECT_EQ(refused([](mp_batch &) {}), MP_INVALID_ARGUMENT);
}

TEST_F(BatchTest, NeighboursMergeUpToASlice) {
  for (int i = 0; i < 32; ++i) add(i * 4096, 8192 + i * 4096, 4096);
  const std::vector<Desc> descs = build();
  ASSERT_EQ(descs.size(), 2u) << "two slices of 64 KiB";
  EXPECT_EQ(descs[0].items, 16u);
  EXPECT_EQ(descs[1].item, 16u);
  EXPECT_EQ(descs[1].length, kSlice);
  EXPECT_EQ(transfer_->bytes, 32u * 4096);
}

TEST_F(BatchTest, NeighboursOnOneSideOnlyDoNotMerge) {
  add(0, 0, 100);
  add(100, 200, 100);     // neighbours here, not there
  add(300, 300, 100);     // neighbours there, not here
  add(400, 400, 100);     // neighbours of the one before
  add(500, 500, 100, 1);  // another local region
  add(600, 600, 100, 1, 1);
  const std::vector<Desc> descs = build();
  ASSERT_EQ(descs.size(), 5u);
  EXPECT_EQ(descs[2].item, 2u);
  EXPECT_EQ(descs[2].items, 2u);
}

TEST_F(BatchTest, ABadItemBetweenNeighboursKeepsThemApart) {
  add(0, 0, 100);
  add(0, kLength, 100);
  add(100, 100, 100);
  const std::vector<Desc> descs = build();
  ASSERT_EQ(descs.size(), 2u) << "or the status of the second would be given to the bad one";
  EXPECT_EQ(descs[1].item, 2u);
}

TEST_F(BatchTest, LargeItemsAreSplitWithoutGaps) {
  add(5, 9, 3 * kSlice + 10);
  const std::vector<Desc> descs = build();
  ASSERT_EQ(descs.size(), 4u);
  uint64_t at = 0;
  for (const Desc &desc : descs) {
    EXPECT_EQ(desc.local, kv_.region->base + 5 + at);
    EXPECT_EQ(desc.offset, 9 + at);
    EXPECT_EQ(desc.item, 0u);
    at += desc.length;
  }
  EXPECT_EQ(at, 3 * kSlice + 10);
}

TEST_F(BatchTest, WithDigestsADescriptorIsOneLeafOfOneItem) {
  add(0, 0, kDigestLeafBytes + 1);
  add(kDigestLeafBytes + 1, kDigestLeafBytes + 1, 100);
  const std::vector<Desc> descs = build(true);
  ASSERT_EQ(descs.size(), 3u);
  EXPECT_EQ(descs[0].length, kDigestLeafBytes);
  EXPECT_EQ(descs[1].length, 1u);
  EXPECT_EQ(descs[2].item, 1u) << "neighbours stay apart";
}

// Against a plain model: every byte of every item is moved exactly once, from and to its place.
TEST_F(BatchTest, DescriptorsCoverExactlyTheItems) {
  for (uint32_t seed = 0; seed < 100; ++seed) {
    std::mt19937 random(seed);
    local_offsets_.clear();
    remote_offsets_.clear();
    lengths_.clear();
    local_index_.clear();
    remote_index_.clear();
    int64_t local = 0, remote = 0;
    while (local < static_cast<int64_t>(kLength) / 2) {
      const int64_t length = 1 + random() % (random() % 8 == 0 ? 200'000 : 2000);
      if (random() % 3 == 0) local += random() % 3000;
      if (random() % 3 == 0) remote += random() % 3000;
      if (local + length > static_cast<int64_t>(kLength) || remote + length > static_cast<int64_t>(kLength)) break;
      add(local, remote, length);
      local += length;
      remote += length;
    }
    const std::vector<Desc> descs = build(seed % 2 == 1);
    std::map<uint64_t, uint64_t> to_remote;  // local offset of a byte -> remote offset
    for (const Desc &desc : descs) {
      EXPECT_LE(desc.length, seed % 2 == 1 ? kDigestLeafBytes : kSlice);
      const auto first = static_cast<uint64_t>(desc.local - kv_.region->base);
      for (uint64_t i = 0; i < desc.length; i += 97) to_remote[first + i] = desc.offset + i;
      to_remote[first + desc.length - 1] = desc.offset + desc.length - 1;
    }
    uint64_t bytes = 0, covered = 0;
    for (size_t i = 0; i < lengths_.size(); ++i) {
      const auto begin = to_remote.lower_bound(static_cast<uint64_t>(local_offsets_[i]));
      const auto end = to_remote.lower_bound(static_cast<uint64_t>(local_offsets_[i] + lengths_[i]));
      for (auto it = begin; it != end; ++it) {
        ASSERT_EQ(it->second - it->first, static_cast<uint64_t>(remote_offsets_[i] - local_offsets_[i])) << seed;
      }
      bytes += static_cast<uint64_t>(lengths_[i]);
    }
    for (const Desc &desc : descs) covered += desc.length;
    EXPECT_EQ(covered, bytes) << "seed " << seed;
    EXPECT_EQ(transfer_->bytes, bytes);
  }
}

}  // namespace
}  // namespace moonpool
