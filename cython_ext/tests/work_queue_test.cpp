// SPDX-License-Identifier: Apache-2.0
//
// Slices cover every descriptor exactly once, and small work does not wait behind large.
#include "work_queue.hpp"

#include <algorithm>
#include <map>
#include <thread>

#include "support.hpp"

namespace moonpool {
namespace {

constexpr uint32_t kDescsMax = 10;
constexpr uint64_t kSlice = 1000;

std::shared_ptr<Transfer> transfer_of(const std::vector<uint64_t> &lengths, int64_t deadline_ns = kNever) {
  auto transfer = std::make_shared<Transfer>(nullptr, MP_READ, false, deadline_ns);
  uint64_t offset = 0;
  for (const uint64_t length : lengths) {
    transfer->descs.push_back({nullptr, 1, offset, length, static_cast<uint32_t>(transfer->descs.size()), 1});
    transfer->bytes += length;
    offset += length;
  }
  transfer->count = lengths.size();
  return transfer;
}

std::shared_ptr<Transfer> small() { return transfer_of({100}); }
std::shared_ptr<Transfer> large(size_t slices) { return transfer_of(std::vector<uint64_t>(slices, kSlice)); }

uint64_t bytes_of(const Work &work) {
  uint64_t bytes = 0;
  for (uint32_t i = work.begin; i < work.end; ++i) bytes += work.transfer->descs[i].length;
  return bytes;
}

TEST(WorkQueue, SlicesCoverEveryDescriptorExactlyOnce) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    WorkQueue queue(1 + random() % 20);
    const uint32_t descs_max = 20;
    const uint64_t slice = 1 + random() % 5000;
    std::vector<std::shared_ptr<Transfer>> transfers;
    std::map<const Transfer *, std::vector<int>> taken;
    for (unsigned i = 0; i < 1 + random() % 5; ++i) {
      std::vector<uint64_t> lengths(1 + random() % 60);
      // As from a batch: no descriptor is larger than a slice.
      for (uint64_t &length : lengths) length = 1 + random() % slice;
      transfers.push_back(transfer_of(lengths));
      taken[transfers.back().get()].assign(lengths.size(), 0);
      ASSERT_TRUE(queue.push(transfers.back(), slice));
    }
    Work work;
    while (queue.pull(&work)) {
      ASSERT_LT(work.begin, work.end) << "seed " << seed;
      EXPECT_LE(work.end - work.begin, descs_max) << "seed " << seed;
      EXPECT_LE(work.bytes, slice) << "seed " << seed;
      EXPECT_EQ(work.bytes, bytes_of(work)) << "seed " << seed;
      EXPECT_EQ(work.attempts, 0u);
      for (uint32_t i = work.begin; i < work.end; ++i) ++taken[work.transfer.get()][i];
      // A lane breaks now and then and gives its slice back, to be taken once more.
      if (random() % 10 == 0) {
        for (uint32_t i = work.begin; i < work.end; ++i) --taken[work.transfer.get()][i];
        Work again = work;
        ASSERT_TRUE(queue.push_front(std::move(again), kSlice));
      }
    }
    EXPECT_TRUE(queue.empty());
    for (const auto &[transfer, counts] : taken) {
      EXPECT_EQ(std::count(counts.begin(), counts.end(), 1), static_cast<std::ptrdiff_t>(counts.size()))
          << "seed " << seed;
    }
  }
}

TEST(WorkQueue, SlicesAreAsLargeAsTheyMayBe) {
  WorkQueue queue(kDescsMax);
  ASSERT_TRUE(queue.push(transfer_of({400, 400, 400, 1000, 600, 400}), kSlice));
  std::vector<std::pair<uint32_t, uint32_t>> got;
  Work work;
  while (queue.pull(&work)) got.emplace_back(work.begin, work.end);
  const std::vector<std::pair<uint32_t, uint32_t>> expected = {{0, 2}, {2, 3}, {3, 4}, {4, 6}};
  EXPECT_EQ(got, expected);
}

TEST(WorkQueue, ASliceHoldsABoundedNumberOfDescriptors) {
  WorkQueue queue(kDescsMax);
  ASSERT_TRUE(queue.push(transfer_of(std::vector<uint64_t>(25, 1)), kSlice));
  Work work;
  std::vector<uint32_t> sizes;
  while (queue.pull(&work)) sizes.push_back(work.end - work.begin);
  EXPECT_EQ(sizes, (std::vector<uint32_t>{10, 10, 5}));
}

TEST(WorkQueue, SmallOvertakesLargeButNeverMoreThanFourInARow) {
  WorkQueue queue(kDescsMax);
  const auto big = large(3);
  ASSERT_TRUE(queue.push(big, kSlice));
  for (int i = 0; i < 14; ++i) ASSERT_TRUE(queue.push(small(), kSlice));
  std::string order;
  Work work;
  while (queue.pull(&work)) order += work.transfer == big ? 'L' : 's';
  EXPECT_EQ(order, "ssssLssssLssssLss");
}

// However late its turn comes: a thread may have been stopped since somebody looked at the clock.
TEST(WorkQueue, NothingIsBegunAfterItsDeadline) {
  WorkQueue queue(kDescsMax);
  const auto late_small = transfer_of({100}, now_ns()), late_large = transfer_of({kSlice, kSlice}, now_ns());
  const auto in_time_small = small(), in_time_large = large(2);
  for (const auto &transfer : {late_small, late_large, in_time_large, in_time_small}) queue.push(transfer, kSlice);
  Work work;
  std::vector<const Transfer *> begun;
  while (queue.pull(&work)) begun.push_back(work.transfer.get());
  EXPECT_EQ(begun, (std::vector<const Transfer *>{in_time_small.get(), in_time_large.get(), in_time_large.get()}));
  // They stay for whoever ends them.
  EXPECT_EQ(queue.remove(*late_small).size(), 1u);
  EXPECT_EQ(queue.remove(*late_large).size(), 1u);
  EXPECT_TRUE(queue.empty());
}

TEST(WorkQueue, ATransferWithLittleTimeIsBegunInParts) {
  WorkQueue queue(kDescsMax);
  const int64_t deadline = now_ns() + 20 * kMillisecond;
  const auto transfer = transfer_of({kSlice, kSlice}, deadline);
  queue.push(transfer, kSlice);
  Work work;
  ASSERT_TRUE(queue.pull(&work));
  while (now_ns() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_FALSE(queue.pull(&work));
  const std::vector<Work> rest = queue.remove(*transfer);
  ASSERT_EQ(rest.size(), 1u);
  EXPECT_EQ(rest[0].begin, 1u);
}

TEST(WorkQueue, TransfersOfAKindComeInTheirOrder) {
  WorkQueue queue(kDescsMax);
  std::vector<std::shared_ptr<Transfer>> pushed;
  for (int i = 0; i < 5; ++i) {
    pushed.push_back(small());
    ASSERT_TRUE(queue.push(pushed.back(), kSlice));
  }
  Work work;
  for (const auto &transfer : pushed) {
    ASSERT_TRUE(queue.pull(&work));
    EXPECT_EQ(work.transfer, transfer);
  }
}

TEST(WorkQueue, WhatABrokenLaneGivesBackGoesFirstAndKeepsItsAttempts) {
  WorkQueue queue(kDescsMax);
  ASSERT_TRUE(queue.push(small(), kSlice));
  const auto broken = large(4);
  ASSERT_TRUE(queue.push_front({broken, 1, 3, 2 * kSlice, 2}, 2 * kSlice));
  Work work;
  ASSERT_TRUE(queue.pull(&work));
  EXPECT_EQ(work.transfer, broken);
  EXPECT_EQ(work.begin, 1u);
  EXPECT_EQ(work.end, 3u) << "it goes out whole, as it did before";
  EXPECT_EQ(work.bytes, 2 * kSlice);
  EXPECT_EQ(work.attempts, 2u);
}

TEST(WorkQueue, RemoveTakesWhatIsLeftOfOneTransfer) {
  WorkQueue queue(kDescsMax);
  const auto gone = large(4);
  const auto stays = large(2);
  ASSERT_TRUE(queue.push(gone, kSlice));
  ASSERT_TRUE(queue.push(stays, kSlice));
  Work work;
  ASSERT_TRUE(queue.pull(&work));
  ASSERT_TRUE(queue.push_front(work, kSlice));
  std::vector<int> removed(gone->descs.size());
  for (const Work &piece : queue.remove(*gone)) {
    EXPECT_EQ(piece.transfer, gone);
    for (uint32_t i = piece.begin; i < piece.end; ++i) ++removed[i];
  }
  EXPECT_EQ(removed, std::vector<int>(4, 1));
  EXPECT_TRUE(queue.remove(*gone).empty());
  size_t left = 0;
  while (queue.pull(&work)) {
    EXPECT_EQ(work.transfer, stays);
    ++left;
  }
  EXPECT_EQ(left, 2u);
}

TEST(WorkQueue, CloseGivesEverythingBackAndRefusesMore) {
  WorkQueue queue(kDescsMax);
  ASSERT_TRUE(queue.push(large(2), kSlice));
  ASSERT_TRUE(queue.push(small(), kSlice));
  EXPECT_EQ(queue.close().size(), 2u);
  Work work;
  EXPECT_FALSE(queue.pull(&work));
  EXPECT_FALSE(queue.push(small(), kSlice));
  EXPECT_FALSE(queue.push_front({small(), 0, 1, 100, 0}, kSlice));
  EXPECT_TRUE(queue.empty());
}

TEST(WorkQueue, SeveralLanesNeverTakeTheSameDescriptor) {
  WorkQueue queue(kDescsMax);
  const auto transfer = large(4000);
  std::vector<std::atomic<int>> taken(transfer->descs.size());
  ASSERT_TRUE(queue.push(transfer, kSlice));
  std::vector<std::thread> lanes;
  for (int i = 0; i < 4; ++i) {
    lanes.emplace_back([&] {
      Work work;
      while (queue.pull(&work)) {
        for (uint32_t d = work.begin; d < work.end; ++d) taken[d].fetch_add(1);
      }
    });
  }
  for (std::thread &lane : lanes) lane.join();
  for (const auto &count : taken) ASSERT_EQ(count.load(), 1);
}

}  // namespace
}  // namespace moonpool
