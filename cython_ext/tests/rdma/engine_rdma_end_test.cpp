// SPDX-License-Identifier: Apache-2.0
//
// Work that is under way when somebody ends it: nothing lands in memory that was given back.
#include <sys/wait.h>
#include <unistd.h>

#include "support_rdma.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

class EngineRdmaEnd : public EngineRdma {
 protected:
  EngineRdmaEnd() : EngineRdma(8u << 20) {}
  void SetUp() override {
    EngineRdma::SetUp();
    open();
    expect_moved(MP_WRITE, {{0, 0, 100}});
  }
  TransferHandle start_all(mp_op op, const SubmitOptions &options = {}) {
    return start(op, {{0, 0, static_cast<int64_t>(bytes_)}}, options);
  }
  // Posted, and not executed before somebody lets the requests go.
  TransferHandle start_held(mp_op op, const SubmitOptions &options = {}) {
    standin::hold_requests(true);
    TransferHandle held = start_all(op, options);
    EXPECT_TRUE(eventually([] { return standin::requests_waiting() > 0; }));
    return held;
  }
  // Its owner uses it for something else. What the device still has is executed; nothing of it may show.
  void expect_given_back(Bytes &memory) {
    std::fill(memory.begin(), memory.end(), 7);
    standin::hold_requests(false);
    ASSERT_TRUE(eventually([] { return standin::requests_waiting() == 0; }));
    EXPECT_TRUE(memory == Bytes(bytes_, 7));
  }
  // Both sides' memory is what the transfer's end gave back.
  Bytes &destination(mp_op op) { return op == MP_WRITE ? remote_memory_ : local_memory_; }
};

class EngineRdmaEndOf : public EngineRdmaEnd, public ::testing::WithParamInterface<mp_op> {};
INSTANTIATE_TEST_SUITE_P(A, EngineRdmaEndOf, ::testing::Values(MP_READ, MP_WRITE),
                         [](const auto &info) { return info.param == MP_READ ? "Read" : "Write"; });

TEST_P(EngineRdmaEndOf, ACancelThatIsSettledGivesMemoryBack) {
  const TransferHandle held = start_held(GetParam());
  ASSERT_EQ(mp_transfer_cancel(held.get(), kPatienceNs), MP_OK);
  EXPECT_EQ(mp_transfer_get_state(held.get()), MP_STOPPED);
  EXPECT_EQ(error_of(held).code, MP_CANCELLED);
  expect_given_back(destination(GetParam()));
  expect_moved(GetParam(), {{0, 0, static_cast<int64_t>(bytes_)}});
  EXPECT_EQ(moved_by("tcp"), 0);
}

TEST_P(EngineRdmaEndOf, ADeadlineGivesMemoryBack) {
  SubmitOptions options;
  options.deadline_ns = 50 * kMillisecond;
  const TransferHandle held = start_held(GetParam(), options);
  EXPECT_EQ(finish(held), MP_EXPIRED) << text_of(held);
  EXPECT_EQ(error_of(held).code, MP_DEADLINE);
  expect_given_back(destination(GetParam()));
  expect_moved(GetParam(), {{0, 0, static_cast<int64_t>(bytes_)}});
}

TEST_P(EngineRdmaEndOf, CancelsAtAnyMoment) {
  standin::set_deferred(true);
  Bytes &memory = destination(GetParam());
  int stopped = 0;
  for (uint32_t round = 0; round < rounds(48); ++round) {
    SCOPED_TRACE(round);
    const auto moved = [] { return standin::counters().written_bytes + standin::counters().read_bytes; };
    const uint64_t before = moved();
    // What a quick device has it may end by itself, so some are not executed at all.
    const bool held = round % 6 == 0;
    standin::hold_requests(held);
    const TransferHandle moving = start_all(GetParam());
    const uint64_t until = before + round * (bytes_ / rounds(48));
    while (!held && moved() < until && mp_transfer_get_state(moving.get()) == MP_RUNNING) std::this_thread::yield();
    ASSERT_EQ(mp_transfer_cancel(moving.get(), kPatienceNs), MP_OK);
    standin::hold_requests(false);
    const mp_transfer_state state = mp_transfer_get_state(moving.get());
    ASSERT_TRUE(state == MP_STOPPED || state == MP_COMPLETED) << state;
    stopped += state == MP_STOPPED ? 1 : 0;
    std::fill(memory.begin(), memory.end(), 7);
    ASSERT_TRUE(eventually([] { return standin::requests_waiting() == 0; }));
    ASSERT_TRUE(memory == Bytes(bytes_, 7));
  }
  EXPECT_GT(stopped, 0);
  expect_moved(GetParam(), {{0, 0, static_cast<int64_t>(bytes_)}});
}

TEST_P(EngineRdmaEndOf, ACancelLeavesOtherTransfersOfTheLaneWhole) {
  standin::hold_requests(true);
  shuffle(900);
  const int64_t half = static_cast<int64_t>(bytes_) / 2;
  const TransferHandle doomed = start(GetParam(), {{0, 0, half}});
  std::vector<TransferHandle> others;
  std::vector<Item> items;
  for (int64_t i = 0; i < 64; ++i) {
    items.push_back({half + i * 8192, half + i * 8192, 4096});
    others.push_back(start(i % 2 == 0 ? MP_READ : MP_WRITE, {items.back()}));
  }
  ASSERT_EQ(mp_transfer_cancel(doomed.get(), kPatienceNs), MP_OK);
  standin::hold_requests(false);
  for (const TransferHandle &one : others) EXPECT_EQ(finish(one), MP_COMPLETED) << text_of(one);
  EXPECT_TRUE(same(items));
}

TEST_P(EngineRdmaEndOf, ClosingTheSourceGivesMemoryBack) {
  const TransferHandle held = start_held(GetParam());
  source_->close();
  const mp_transfer_state state = mp_transfer_get_state(held.get());
  EXPECT_NE(state, MP_RUNNING);
  EXPECT_NE(state, MP_COMPLETED);
  EXPECT_EQ(error_of(held).code, MP_CLOSED) << text_of(held);
  // Its own memory at once; the target's when the target knows.
  if (GetParam() == MP_READ) expect_given_back(local_memory_);
  if (GetParam() == MP_WRITE) expect_given_back(remote_memory_);
}

TEST_P(EngineRdmaEndOf, ClosingThePeerWakesWhoWaits) {
  standin::hold_requests(true);
  const TransferHandle held = start(GetParam(), {{0, 0, 4096}});
  const int64_t before = now_ns();
  std::thread waiting([&] { EXPECT_NE(finish(held), MP_COMPLETED); });
  // Until it sleeps.
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(mp_peer_close(peer_.get(), nullptr), MP_OK);
  waiting.join();
  EXPECT_LT(now_ns() - before, kPatienceNs / 4) << "no deadline passed";
}

TEST_P(EngineRdmaEndOf, ClosingTheTargetGivesMemoryBack) {
  const TransferHandle held = start_held(GetParam());
  target_->close();
  // Reads of it do not fail: they say what is there.
  expect_given_back(remote_memory_);
  EXPECT_EQ(finish(held), MP_FAILED);
}

TEST_P(EngineRdmaEndOf, ClosingInTheMiddle) {
  const bool writes = GetParam() == MP_WRITE;
  for (uint32_t round = 0; round < rounds(24); ++round) {
    SCOPED_TRACE(round);
    standin::set_deferred(true);
    if (round > 0) open();
    const uint64_t before = standin::counters().written_bytes + standin::counters().read_bytes;
    TransferHandle moving = start_all(GetParam());
    if (round % 3 == 1) {
      ASSERT_TRUE(
          eventually([&] { return standin::counters().written_bytes + standin::counters().read_bytes > before; }));
    }
    TestEngine &closed = round % 2 == 0 ? *source_ : *target_;
    closed.close();
    Bytes &memory = round % 2 == 0 ? (writes ? remote_memory_ : local_memory_) : remote_memory_;
    std::fill(memory.begin(), memory.end(), 7);
    const mp_transfer_state state = finish(moving);
    EXPECT_TRUE(state == MP_FAILED || state == MP_COMPLETED || state == MP_STOPPED) << state;
    ASSERT_TRUE(memory == Bytes(bytes_, 7));
    moving.reset();
    close();
    standin::reset();
  }
}

TEST_P(EngineRdmaEndOf, AFenceAtTheTargetGivesItsMemoryBack) {
  const TransferHandle held = start_held(GetParam());
  uint8_t incarnation[16];
  mp_engine_incarnation(source_->get(), incarnation);
  uint32_t sessions = 0;
  mp_error error;
  ASSERT_EQ(mp_engine_fence(target_->get(), incarnation, &sessions, &error), MP_OK) << error.message;
  EXPECT_EQ(sessions, 1u);
  expect_given_back(remote_memory_);
  EXPECT_EQ(finish(held), MP_FAILED) << text_of(held);
  // What is asked for afterwards is new.
  EXPECT_TRUE(eventually([&] {
    mp_error why{};
    const TransferHandle again = submit(peer_, GetParam(), local_, remote_, {{0, 0, 4096}}, {}, &why);
    return again != nullptr && finish(again) == MP_COMPLETED;
  }));
  EXPECT_TRUE(same({{0, 0, 4096}}));
}

// The devices of a forked child are those of its parent: one queue pair destroyed there is destroyed here.
TEST_F(EngineRdmaEnd, AForkedChildTouchesNoQueuePair) {
  uint8_t incarnation[16];
  mp_engine_incarnation(source_->get(), incarnation);
  expect_moved(MP_WRITE, {{0, 0, 4096}});
  const standin::Alive before = standin::alive();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool forked = mp_engine_fence(target_->get(), incarnation, nullptr, nullptr) == MP_FORKED &&
                        mp_region_release(remote_region_.get(), nullptr) == MP_FORKED &&
                        mp_peer_close(peer_.get(), nullptr) == MP_FORKED;
    mp_engine_close(target_->get(), nullptr);
    mp_engine_free(source_->get());
    _exit(forked && standin::alive() == before ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  expect_moved(MP_WRITE, {{0, 0, 4096}});
}

TEST_F(EngineRdmaEnd, AFenceInTheMiddleOfWrites) {
  standin::set_deferred(true);
  uint8_t incarnation[16];
  mp_engine_incarnation(source_->get(), incarnation);
  for (uint32_t round = 0; round < rounds(24); ++round) {
    SCOPED_TRACE(round);
    const uint64_t before = standin::counters().written_bytes;
    const TransferHandle moving = start_all(MP_WRITE);
    if (round % 3 != 0) {
      eventually([&] {
        return standin::counters().written_bytes > before || mp_transfer_get_state(moving.get()) != MP_RUNNING;
      });
    }
    ASSERT_EQ(mp_engine_fence(target_->get(), incarnation, nullptr, nullptr), MP_OK);
    std::fill(remote_memory_.begin(), remote_memory_.end(), 7);
    const mp_transfer_state state = finish(moving);
    EXPECT_TRUE(state == MP_FAILED || state == MP_COMPLETED) << state;
    ASSERT_TRUE(remote_memory_ == Bytes(bytes_, 7));
    mp_error error{};
    ASSERT_TRUE(eventually([&] { return mp_peer_ensure(peer_.get(), 0, nullptr, nullptr, &error) == MP_OK; }))
        << error.message;
    ASSERT_TRUE(eventually([&] {
      mp_error why{};
      const TransferHandle again = submit(peer_, MP_WRITE, local_, remote_, {{0, 0, 4096}}, {}, &why);
      return again != nullptr && finish(again) == MP_COMPLETED;
    }));
  }
}

TEST_F(EngineRdmaEnd, NobodyWhoIsNotToldOfCompletionsWaitsForEver) {
  // Bytes arrive, and the device does not say so.
  standin::hold_completions(standin::Side::kSend, true);
  const TransferHandle moving = start_all(MP_WRITE);
  ASSERT_TRUE(eventually([&] { return standin::counters().written_bytes > 0; }));
  ASSERT_EQ(mp_transfer_cancel(moving.get(), kPatienceNs), MP_OK);
  EXPECT_EQ(mp_transfer_get_state(moving.get()), MP_STOPPED);
  standin::hold_completions(standin::Side::kSend, false);
  expect_moved(MP_WRITE, {{0, 0, static_cast<int64_t>(bytes_)}});
}

TEST_F(EngineRdma, ALaneOnWhichNothingCompletesIsCut) {
  open([](mp_config &config) { config.progress_timeout_ms = 200; });
  expect_moved(MP_WRITE, {{0, 0, 100}});
  shuffle(901);
  const Bytes expected = local_memory_;
  const int64_t before = source_->stat({"lane_errors"});
  standin::hold_requests(true);
  const TransferHandle moving = start(MP_WRITE, {{0, 0, static_cast<int64_t>(bytes_)}});
  ASSERT_TRUE(eventually([&] { return source_->stat({"lane_errors"}) > before; }));
  standin::hold_requests(false);
  ASSERT_EQ(finish(moving), MP_COMPLETED) << text_of(moving);
  EXPECT_TRUE(remote_memory_ == expected);
}

}  // namespace
}  // namespace moonpool
