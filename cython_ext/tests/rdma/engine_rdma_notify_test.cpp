// SPDX-License-Identifier: Apache-2.0
//
// A notification comes after its bytes, in the eyes of whoever takes it.
#include "support_rdma.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

std::string take(const TestEngine &engine, int64_t timeout_ns = kPatienceNs) {
  mp_notification got;
  if (mp_notification_take(engine.get(), timeout_ns, &got) != MP_OK) return {};
  std::string text(reinterpret_cast<const char *>(got.payload), got.payload_bytes);
  mp_notification_clear(&got);
  return text;
}

class EngineRdmaNotify : public EngineRdma {
 protected:
  EngineRdmaNotify() : EngineRdma(4u << 20) {}
  // One rail with one queue pair.
  void open_one() {
    const auto one = [](mp_config &config) { config.rdma_queue_pairs = 1; };
    open([&](mp_config &config) { one(config), config.rdma_devices = "standin0"; },
         [&](mp_config &config) { one(config), config.rdma_devices = "standin2"; });
  }
};

TEST_F(EngineRdmaNotify, BytesAreThereWhenItIs) {
  standin::set_deferred(true);
  open();
  std::mt19937 random(1);
  for (int round = 0; round < 150; ++round) {
    shuffle(static_cast<uint32_t>(round));
    std::vector<Item> items;
    const int64_t count = 1 + static_cast<int64_t>(random() % 40);
    const int64_t block = 1 + static_cast<int64_t>(random() % (bytes_ / static_cast<uint64_t>(count)));
    for (int64_t i = 0; i < count; ++i) items.push_back({i * block, (count - 1 - i) * block, block});
    SubmitOptions options;
    options.notify = "round " + std::to_string(round);
    const TransferHandle moving = start(MP_WRITE, items, options);
    // Nobody has waited for the transfer.
    ASSERT_EQ(take(*target_), options.notify);
    ASSERT_TRUE(same(items)) << options.notify;
    ASSERT_EQ(finish(moving), MP_COMPLETED) << text_of(moving);
  }
  EXPECT_GT(standin::counters().immediate, 0u);
  EXPECT_EQ(moved_by("tcp"), 0);
}

TEST_F(EngineRdmaNotify, ItWaitsForAMarkThatNobodyHasSeen) {
  open_one();
  standin::hold_completions(standin::Side::kReceive, true);
  SubmitOptions options;
  options.notify = "late";
  const TransferHandle moving = start(MP_WRITE, {{0, 0, 100'000}}, options);
  ASSERT_TRUE(eventually([] { return standin::counters().written_bytes == 100'000; }));
  EXPECT_EQ(take(*target_, 30 * kMillisecond), "");
  standin::hold_completions(standin::Side::kReceive, false);
  EXPECT_EQ(take(*target_), "late");
  EXPECT_TRUE(same({{0, 0, 100'000}}));
  EXPECT_EQ(finish(moving), MP_COMPLETED) << text_of(moving);
}

TEST_F(EngineRdmaNotify, MoreMarksThanTheOtherSideHasReceives) {
  for (const bool deferred : {false, true}) {
    SCOPED_TRACE(deferred);
    standin::set_deferred(deferred);
    open_one();
    standin::hold_completions(standin::Side::kReceive, true);
    std::vector<TransferHandle> moving;
    constexpr int64_t kCount = 200;
    for (int64_t i = 0; i < kCount; ++i) {
      SubmitOptions options;
      options.notify = std::to_string(i);
      moving.push_back(start(MP_WRITE, {{i * 8192, i * 4096, 4096}}, options));
    }
    ASSERT_TRUE(eventually([] { return standin::counters().waited > 0; }));
    EXPECT_EQ(take(*target_, 0), "");
    standin::hold_completions(standin::Side::kReceive, false);
    std::vector<bool> come(kCount);
    for (int64_t i = 0; i < kCount; ++i) {
      const std::string text = take(*target_);
      ASSERT_NE(text, "");
      const int64_t which = std::stoll(text);
      EXPECT_FALSE(come[static_cast<size_t>(which)]) << "twice";
      come[static_cast<size_t>(which)] = true;
      EXPECT_TRUE(same({{which * 8192, which * 4096, 4096}})) << which;
    }
    for (const TransferHandle &one : moving) EXPECT_EQ(finish(one), MP_COMPLETED) << text_of(one);
    moving.clear();
    close();
    standin::reset();
  }
}

TEST_F(EngineRdmaNotify, AFaultInTheMiddleDeliversItOnceAndAfterTheBytes) {
  standin::set_deferred(true);
  open();
  for (uint32_t round = 0; round < 20; ++round) {
    SCOPED_TRACE(round);
    shuffle(round);
    standin::fail_requests({.status = IBV_WC_RETRY_EXC_ERR, .skip = round % 5, .landed = round % 2 == 0});
    SubmitOptions options;
    options.notify = "round " + std::to_string(round);
    const std::vector<Item> items{{0, 0, static_cast<int64_t>(bytes_)}};
    const TransferHandle moving = start(MP_WRITE, items, options);
    ASSERT_EQ(take(*target_), options.notify);
    ASSERT_TRUE(same(items));
    ASSERT_EQ(finish(moving), MP_COMPLETED) << text_of(moving);
    EXPECT_EQ(take(*target_, 0), "");
    standin::clear_faults();
  }
}

TEST_F(EngineRdmaNotify, ACompletionQueueThatBreaksAtTheReceiverLosesNone) {
  open();
  for (int round = 0; round < 5; ++round) {
    SCOPED_TRACE(round);
    shuffle(static_cast<uint32_t>(round));
    standin::fail_calls({.call = standin::Call::kPoll, .err = EIO, .device = 2});
    standin::fail_calls({.call = standin::Call::kPoll, .err = EIO, .device = 3});
    SubmitOptions options;
    options.notify = "round " + std::to_string(round);
    const TransferHandle moving = start(MP_WRITE, {{0, 0, static_cast<int64_t>(bytes_)}}, options);
    ASSERT_EQ(take(*target_), options.notify);
    ASSERT_TRUE(same({{0, 0, static_cast<int64_t>(bytes_)}}));
    ASSERT_EQ(finish(moving), MP_COMPLETED) << text_of(moving);
  }
}

}  // namespace
}  // namespace moonpool
