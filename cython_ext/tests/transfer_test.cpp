// SPDX-License-Identifier: Apache-2.0
//
// How a transfer ends: every descriptor reported once, one terminal state, everybody who waits woken.
#include "transfer.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "digest.hpp"
#include "support_core.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

class TransferTest : public ::testing::Test {
 protected:
  // Items of one descriptor each, running.
  std::shared_ptr<Transfer> start(uint32_t items, int64_t deadline_ns = kNever, bool digest = false) {
    auto transfer = std::make_shared<Transfer>(quiet_.peer, MP_WRITE, digest, deadline_ns);
    transfer->count = items;
    for (uint32_t i = 0; i < items; ++i) transfer->descs.push_back({nullptr, 1, i * 10, 10, i, 1});
    transfer->bytes = items * 10;
    if (region_->begin_use()) transfer->locals.push_back(region_);
    return transfer;
  }
  void run(const std::shared_ptr<Transfer> &transfer) {
    transfer->arm();
    quiet_.engine->running.add(transfer);
  }
  static std::vector<uint8_t> statuses(const Transfer &transfer) {
    std::vector<uint8_t> out(transfer.count, 0xff);
    transfer.item_status(out.data(), out.size());
    return out;
  }

  QuietEngine quiet_;
  const std::shared_ptr<Region> region_ = quiet_.region("kv", 4096);
  const Error refused_ = make_error(MP_REGION_RELEASED, "gone");
  const Error cancelled_ = make_error(MP_CANCELLED, "cancelled");
  const Error expired_ = make_error(MP_DEADLINE, "too late");
};

TEST_F(TransferTest, CompletesWithTheLastDescriptor) {
  const auto transfer = start(3);
  run(transfer);
  transfer->descs_done(2, 3, nullptr);
  transfer->descs_done(0, 1, nullptr);
  EXPECT_EQ(transfer->state(), MP_RUNNING);
  EXPECT_EQ(statuses(*transfer), (std::vector<uint8_t>(3, MP_PENDING)));
  EXPECT_FALSE(region_->try_release()) << "its bytes are owned until it ends";
  transfer->descs_done(1, 2, nullptr);
  EXPECT_EQ(transfer->state(), MP_COMPLETED);
  EXPECT_EQ(statuses(*transfer), (std::vector<uint8_t>(3, MP_OK)));
  EXPECT_FALSE(transfer->error());
  EXPECT_EQ(quiet_.engine->running.size(), 0u);
  EXPECT_TRUE(region_->try_release());
}

TEST_F(TransferTest, OneBadItemDoesNotHideTheOthers) {
  const auto transfer = start(4);
  run(transfer);
  transfer->descs_done(0, 2, nullptr);
  transfer->descs_failed(2, 3, refused_);
  transfer->descs_done(3, 4, nullptr);
  EXPECT_EQ(transfer->state(), MP_FAILED);
  EXPECT_EQ(statuses(*transfer), (std::vector<uint8_t>{MP_OK, MP_OK, MP_REGION_RELEASED, MP_OK}));
  EXPECT_EQ(transfer->error().code, MP_REGION_RELEASED);
  EXPECT_EQ(transfer->error().item, 2);
}

TEST_F(TransferTest, TheFirstCauseStays) {
  const auto transfer = start(3);
  run(transfer);
  transfer->descs_failed(1, 2, make_error(MP_PEER_LOST, "first"));
  transfer->descs_failed(0, 1, make_error(MP_CLOSED, "second"));
  transfer->descs_done(2, 3, nullptr);
  EXPECT_EQ(transfer->error().message, "first");
  EXPECT_EQ(transfer->error().item, 1);
  EXPECT_EQ(statuses(*transfer), (std::vector<uint8_t>{MP_CLOSED, MP_PEER_LOST, MP_OK}));
}

TEST_F(TransferTest, ItemsThatWereRejectedAtOnceMakeItFail) {
  const auto transfer = start(2);
  transfer->count = 3;
  transfer->rejected = {MP_OK, MP_OK, MP_OUT_OF_RANGE};
  transfer->rejection = make_error(MP_OUT_OF_RANGE, "item 2");
  run(transfer);
  EXPECT_EQ(statuses(*transfer), (std::vector<uint8_t>{MP_PENDING, MP_PENDING, MP_OUT_OF_RANGE}));
  transfer->descs_done(0, 2, nullptr);
  EXPECT_EQ(transfer->state(), MP_FAILED);
  EXPECT_EQ(statuses(*transfer), (std::vector<uint8_t>{MP_OK, MP_OK, MP_OUT_OF_RANGE}));
  EXPECT_EQ(transfer->error().message, "item 2");
}

TEST_F(TransferTest, AStoppedOneIsUnsettledUntilItsLastDescriptorIsKnown) {
  for (const auto &[cause, state] : {std::pair{cancelled_, MP_STOPPED}, std::pair{expired_, MP_EXPIRED}}) {
    const auto transfer = start(2);
    run(transfer);
    transfer->stop(cause);
    EXPECT_EQ(transfer->state(), MP_UNSETTLED);
    EXPECT_EQ(transfer->wait(0, false), MP_OK);
    EXPECT_EQ(transfer->wait(1, true), MP_WAIT_TIMEOUT);
    EXPECT_EQ(transfer->error().code, cause.code);
    EXPECT_FALSE(region_->try_release()) << "the far side may still use its bytes";
    transfer->descs_done(0, 1, nullptr);
    transfer->descs_failed(1, 2, make_error(MP_PEER_LOST, "a consequence"));
    EXPECT_EQ(transfer->state(), state);
    EXPECT_EQ(transfer->error().code, cause.code) << "the stop is the first cause";
    EXPECT_EQ(statuses(*transfer), (std::vector<uint8_t>{MP_OK, MP_PEER_LOST}));
  }
}

TEST_F(TransferTest, AStopThatComesTooLateChangesNothing) {
  const auto late = start(1);
  run(late);
  late->stop(cancelled_);
  late->descs_done(0, 1, nullptr);
  EXPECT_EQ(late->state(), MP_COMPLETED) << "all its bytes arrived";

  const auto ended = start(1);
  run(ended);
  ended->descs_done(0, 1, nullptr);
  ended->stop(cancelled_);
  EXPECT_EQ(ended->state(), MP_COMPLETED);
  EXPECT_FALSE(ended->error());
}

TEST_F(TransferTest, TheEventfdIsWrittenOnceWhenItLeavesRunning) {
  const Fd event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  const auto signalled = [&] {
    uint64_t count = 0;
    return read(event.get(), &count, sizeof count) == sizeof count ? count : 0;
  };
  const auto transfer = start(2);
  run(transfer);
  transfer->set_eventfd(event.get());
  transfer->descs_done(0, 1, nullptr);
  EXPECT_EQ(signalled(), 0u);
  transfer->descs_done(1, 2, nullptr);
  EXPECT_EQ(signalled(), 1u);
  transfer->set_eventfd(event.get());
  EXPECT_EQ(signalled(), 1u) << "it has ended already";

  const auto taken_back = start(1);
  run(taken_back);
  taken_back->set_eventfd(event.get());
  taken_back->set_eventfd(-1);
  taken_back->descs_done(0, 1, nullptr);
  EXPECT_EQ(signalled(), 0u);
}

TEST_F(TransferTest, DigestsAreCombinedPerItem) {
  const auto transfer = start(0, kNever, true);
  transfer->count = 3;
  // Two leaves, one leaf, and one item that fails.
  transfer->descs = {{nullptr, 1, 0, kDigestLeafBytes, 0, 1},
                     {nullptr, 1, kDigestLeafBytes, 100, 0, 1},
                     {nullptr, 1, 0, 50, 1, 1},
                     {nullptr, 1, 0, 50, 2, 1}};
  run(transfer);
  const uint64_t leaves[4] = {11, 22, 33, 44};
  transfer->descs_done(1, 3, leaves + 1);
  transfer->descs_failed(3, 4, make_error(MP_DIGEST, "flipped"));
  transfer->descs_done(0, 1, leaves);
  uint64_t digests[3] = {1, 1, 1};
  transfer->digests(digests, 3);
  EXPECT_EQ(digests[0], combine_leaves(leaves, 2));
  EXPECT_EQ(digests[1], 33u);
  EXPECT_EQ(digests[2], 0u);
}

TEST_F(TransferTest, SeveralLanesAndAStopAtOnceEndItOnce) {
  for (int round = 0; round < 200; ++round) {
    const auto transfer = start(40);
    run(transfer);
    std::vector<std::thread> threads;
    for (uint32_t lane = 0; lane < 2; ++lane) {
      threads.emplace_back([&, lane] {
        for (uint32_t i = lane; i < 40; i += 2) {
          if (i % 10 == 3) {
            transfer->descs_failed(i, i + 1, refused_);
          } else {
            transfer->descs_done(i, i + 1, nullptr);
          }
        }
      });
    }
    threads.emplace_back([&] { transfer->stop(cancelled_); });
    threads.emplace_back([&] { EXPECT_EQ(transfer->wait(-1, true), MP_OK); });
    for (std::thread &thread : threads) thread.join();
    EXPECT_TRUE(transfer->state() == MP_STOPPED || transfer->state() == MP_FAILED) << transfer->state();
    const std::vector<uint8_t> got = statuses(*transfer);
    for (uint32_t i = 0; i < 40; ++i) EXPECT_EQ(got[i], i % 10 == 3 ? MP_REGION_RELEASED : MP_OK) << i;
    EXPECT_EQ(quiet_.engine->running.size(), 0u);
  }
}

TEST_F(TransferTest, ARunningOneLivesWithoutItsHandle) {
  std::weak_ptr<Transfer> weak;
  {
    const auto transfer = start(1);
    run(transfer);
    weak = transfer;
  }
  ASSERT_FALSE(weak.expired());
  weak.lock()->descs_done(0, 1, nullptr);
  EXPECT_TRUE(weak.expired());
  EXPECT_TRUE(region_->try_release());
}

TEST(TransferList, KnowsWhatRunsAndWhatIsLate) {
  TransferList list;
  const auto make = [](int64_t deadline) { return std::make_shared<Transfer>(nullptr, MP_READ, false, deadline); };
  const auto early = make(100), middle = make(200), late = make(300);
  for (const auto &transfer : {early, middle, late}) list.add(transfer);
  EXPECT_EQ(list.size(), 3u);
  EXPECT_EQ(list.all().size(), 3u);
  int64_t next = 0;
  EXPECT_TRUE(list.expired(99, &next).empty());
  EXPECT_EQ(next, 100);
  const auto expired = list.expired(200, &next);
  EXPECT_EQ(expired.size(), 2u);
  EXPECT_EQ(next, 300);
  EXPECT_EQ(list.remove(*middle), middle);
  EXPECT_EQ(list.remove(*middle), nullptr) << "it is taken out once";
  EXPECT_EQ(list.expired(200, &next), (std::vector<std::shared_ptr<Transfer>>{early}));
  EXPECT_EQ(list.remove(*late), late);
  EXPECT_EQ(list.remove(*early), early);
  EXPECT_TRUE(list.expired(1000, &next).empty());
  EXPECT_EQ(next, kNever);
  EXPECT_EQ(list.size(), 0u);
}

TEST(TransferList, TransfersComeAndGoFromManyThreads) {
  TransferList list;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < 2000; ++n) {
        const auto transfer = std::make_shared<Transfer>(nullptr, MP_READ, false, n);
        list.add(transfer);
        EXPECT_EQ(list.remove(*transfer), transfer);
      }
    });
  }
  int64_t next = 0;
  for (int n = 0; n < 500; ++n) list.expired(1000, &next);
  for (std::thread &thread : threads) thread.join();
  EXPECT_EQ(list.size(), 0u);
}

}  // namespace
}  // namespace moonpool
