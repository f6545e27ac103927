// SPDX-License-Identifier: Apache-2.0
//
// Transfers that are stopped: who owns the bytes until when, and what the caller is told meanwhile.
#include "support_engine.hpp"
#include "support_peek.hpp"
#include "support_raw.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

constexpr uint64_t kBytes = 16u << 20;
constexpr uint64_t kSlice = 8u << 20;
// Long enough to be sure in a test that waits for nothing to happen, and no longer.
constexpr int64_t kMoment = 30 * kMillisecond;

class EngineCancel : public ::testing::Test {
 protected:
  explicit EngineCancel(uint32_t lanes = 2) : lanes_(lanes) {}
  void SetUp() override {
    region_ = source_.add(memory_, "local");
    peer_ = source_.connect(target_.address());
    remote_ = look_up(peer_, "kv");
  }
  TransferHandle start(mp_op op, int64_t bytes, const SubmitOptions &options = {}) {
    return submit(peer_, op, region_, remote_, {{0, 0, bytes}}, options);
  }
  // A write of a slice per lane to a target that does not read: every lane has sent a part of its own.
  TransferHandle start_stuck_write(const SubmitOptions &options = {}) {
    TransferHandle stuck = start(MP_WRITE, static_cast<int64_t>(lanes_ * kSlice), options);
    wire::RequestHeader header;
    for (size_t lane = 0; lane < lanes_; ++lane) EXPECT_TRUE(receive_struct(target_.lane(lane), &header));
    return stuck;
  }
  // What is left unsettled keeps its buffers.
  void expect_owned(const TransferHandle &transfer) {
    EXPECT_EQ(mp_transfer_get_state(transfer.get()), MP_UNSETTLED);
    EXPECT_EQ(mp_transfer_wait(transfer.get(), 0), MP_OK) << "it is no longer running";
    EXPECT_EQ(mp_transfer_wait_settled(transfer.get(), kMoment), MP_WAIT_TIMEOUT);
    EXPECT_EQ(mp_region_release(region_.get(), nullptr), MP_REGION_BUSY);
  }
  void expect_free() {
    mp_error error;
    EXPECT_EQ(mp_region_release(region_.get(), &error), MP_OK) << error.message;
  }
  // Answers the fences of all lanes.
  void fence() {
    for (size_t i = 0; i < lanes_; ++i) {
      ControlMessage message;
      ASSERT_TRUE(receive_message(target_.control(), &message));
      ASSERT_EQ(message.type, wire::kFence);
      ASSERT_TRUE(send_message(target_.control(), wire::kFenced, message.body));
    }
  }

  const uint32_t lanes_;
  // Before the engines, since registered memory has to outlive them.
  Bytes memory_ = random_data(kBytes, 1);
  RawServer target_{kBytes};
  TestEngine source_{[this](mp_config &config) {
    config.slice_bytes = kSlice;
    config.lanes = lanes_;
  }};
  RegionHandle region_;
  PeerHandle peer_;
  mp_remote_region remote_;
};

// With one lane it is known which one carries what.
class EngineCancelOneLane : public EngineCancel {
 protected:
  EngineCancelOneLane() : EngineCancel(1) {}
};

TEST_F(EngineCancel, AStuckWriteIsUnsettledUntilTheTargetHasFencedIt) {
  const TransferHandle stuck = start_stuck_write();
  EXPECT_EQ(mp_transfer_wait(stuck.get(), kMoment), MP_WAIT_TIMEOUT) << "a wait that ends ends nothing else";
  EXPECT_EQ(mp_transfer_get_state(stuck.get()), MP_RUNNING);
  EXPECT_EQ(mp_transfer_cancel(stuck.get(), kMoment), MP_WAIT_TIMEOUT);
  expect_owned(stuck);
  EXPECT_EQ(error_of(stuck).code, MP_CANCELLED);
  EXPECT_EQ(statuses(stuck), std::vector<uint8_t>{MP_PENDING});
  fence();
  EXPECT_EQ(finish(stuck), MP_STOPPED);
  EXPECT_EQ(error_of(stuck).code, MP_CANCELLED);
  EXPECT_EQ(statuses(stuck), std::vector<uint8_t>{MP_CANCELLED});
  expect_free();
  // The peer is still usable.
  EXPECT_EQ(source_.stat({"transfers_running"}), 0);
}

TEST_F(EngineCancel, AStuckWriteSettlesWhenItsTargetDies) {
  const TransferHandle stuck = start_stuck_write();
  EXPECT_EQ(mp_transfer_cancel(stuck.get(), kMoment), MP_WAIT_TIMEOUT);
  expect_owned(stuck);
  target_.die();
  EXPECT_EQ(finish(stuck), MP_STOPPED);
  expect_free();
}

// The bound of a wait that gives none itself: deadline and progress time-out.
TEST_F(EngineCancel, NobodyWaitsForEverForATargetThatNeverAnswers) {
  ASSERT_GE(target_.lane(1), 0) << "both lanes of the other engine come first";
  TestEngine hasty([](mp_config &config) {
    config.lanes = 1;
    config.progress_timeout_ms = 20;
  });
  const RegionHandle region = hasty.add(memory_, nullptr);
  const PeerHandle peer = hasty.connect(target_.address());
  SubmitOptions options;
  options.deadline_ns = kMoment;
  const TransferHandle stuck = submit(peer, MP_WRITE, region, look_up(peer, "kv"), {{0, 0, kBytes}}, options);
  wire::RequestHeader header;
  ASSERT_TRUE(receive_struct(target_.lane(2), &header));
  EXPECT_EQ(mp_transfer_wait_settled(stuck.get(), -1), MP_WAIT_TIMEOUT);
  EXPECT_EQ(mp_transfer_cancel(stuck.get(), -1), MP_WAIT_TIMEOUT);
  EXPECT_EQ(mp_transfer_get_state(stuck.get()), MP_UNSETTLED);
}

TEST_F(EngineCancel, ADeadlineLeavesAStuckWriteUnsettledToo) {
  SubmitOptions options;
  options.deadline_ns = kMoment;
  const TransferHandle stuck = start_stuck_write(options);
  ASSERT_EQ(mp_transfer_wait(stuck.get(), kPatienceNs), MP_OK) << "the deadline ends the wait";
  expect_owned(stuck);
  EXPECT_EQ(error_of(stuck).code, MP_DEADLINE);
  EXPECT_EQ(mp_transfer_cancel(stuck.get(), kMoment), MP_WAIT_TIMEOUT);
  EXPECT_EQ(error_of(stuck).code, MP_DEADLINE) << "the first cause stays";
  fence();
  EXPECT_EQ(finish(stuck), MP_EXPIRED);
  expect_free();
}

TEST_F(EngineCancelOneLane, AWriteThatWasSentWholeEndsWithItsAnswer) {
  const TransferHandle sent = start(MP_WRITE, 4096);
  const auto request = receive_request(target_.lane(0));
  ASSERT_TRUE(request);
  EXPECT_EQ(mp_transfer_cancel(sent.get(), kMoment), MP_WAIT_TIMEOUT);
  expect_owned(sent);
  ASSERT_TRUE(answer(target_.lane(0), *request));
  EXPECT_EQ(finish(sent), MP_COMPLETED) << "the cancel came too late";
  expect_free();
}

TEST_F(EngineCancelOneLane, ACancelledReadLeavesItsBufferAlone) {
  constexpr int64_t kRead = 4 << 20;
  std::fill(memory_.begin(), memory_.end(), 0);
  const TransferHandle reading = start(MP_READ, kRead);
  const auto request = receive_request(target_.lane(0));
  ASSERT_TRUE(request);
  ASSERT_EQ(request->header.payload_bytes, static_cast<uint64_t>(kRead));
  const wire::ResponseHeader header{wire::kResponseMagic,         0, {}, 0, 0, request->header.id,
                                    request->header.payload_bytes};
  const Bytes payload(kRead, 1);
  ASSERT_TRUE(send_struct(target_.lane(0), header));
  ASSERT_TRUE(send_all(target_.lane(0), payload.data(), kRead / 2));
  ASSERT_TRUE(eventually([&] { return peek(&memory_[kRead / 2 - 1]) == 1; }));
  ASSERT_EQ(mp_transfer_cancel(reading.get(), kPatienceNs), MP_OK) << "a read settles at once";
  EXPECT_EQ(mp_transfer_get_state(reading.get()), MP_STOPPED);
  expect_free();
  std::fill(memory_.begin(), memory_.end(), 7);
  ASSERT_TRUE(send_all(target_.lane(0), payload.data() + kRead / 2, kRead / 2));

  // The lane goes on with the next answer.
  Bytes other(4096);
  const RegionHandle other_region = source_.add(other, nullptr);
  const TransferHandle next = submit(peer_, MP_READ, other_region, remote_, {{0, 0, 4096}});
  const auto next_request = receive_request(target_.lane(0));
  ASSERT_TRUE(next_request && answer(target_.lane(0), *next_request, 5));
  EXPECT_EQ(finish(next), MP_COMPLETED);
  EXPECT_EQ(other, Bytes(4096, 5));
  EXPECT_TRUE(memory_ == Bytes(kBytes, 7));
}

TEST_F(EngineCancel, WhatNoLaneHasTakenIsDroppedAtOnce) {
  const TransferHandle stuck = start_stuck_write();
  // Behind the stuck one on both lanes.
  Bytes other(4096);
  const RegionHandle other_region = source_.add(other, nullptr);
  const TransferHandle waiting = submit(peer_, MP_WRITE, other_region, remote_, {{0, 0, 4096}});
  EXPECT_EQ(mp_transfer_cancel(waiting.get(), kPatienceNs), MP_OK);
  EXPECT_EQ(mp_transfer_get_state(waiting.get()), MP_STOPPED);
  EXPECT_EQ(mp_region_release(other_region.get(), nullptr), MP_OK);
  EXPECT_EQ(mp_transfer_get_state(stuck.get()), MP_RUNNING);
}

TEST_F(EngineCancelOneLane, ANotificationThatIsNotTakenCanBeCancelled) {
  SubmitOptions options;
  options.notify = "hello";
  const TransferHandle moving = start(MP_WRITE, 4096, options);
  const auto request = receive_request(target_.lane(0));
  ASSERT_TRUE(request && answer(target_.lane(0), *request));
  ControlMessage message;
  ASSERT_TRUE(receive_message(target_.control(), &message));
  EXPECT_EQ(message.type, wire::kNotify);
  EXPECT_EQ(mp_transfer_get_state(moving.get()), MP_RUNNING) << "it is complete when the peer has the notification";
  EXPECT_EQ(mp_transfer_cancel(moving.get(), kPatienceNs), MP_OK);
  EXPECT_EQ(mp_transfer_get_state(moving.get()), MP_STOPPED);
  EXPECT_EQ(statuses(moving), std::vector<uint8_t>{MP_OK}) << "the bytes had arrived";
  expect_free();
}

TEST_F(EngineCancel, ManyThreadsMayCancelTheSameTransfer) {
  const TransferHandle stuck = start_stuck_write();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] { EXPECT_EQ(mp_transfer_cancel(stuck.get(), kPatienceNs), MP_OK); });
  }
  fence();
  for (std::thread &thread : threads) thread.join();
  EXPECT_EQ(mp_transfer_get_state(stuck.get()), MP_STOPPED);
}

TEST_F(EngineCancel, ADeadlineThatHasPassedMovesNothing) {
  SubmitOptions options;
  options.deadline_ns = -1;
  const TransferHandle late = start(MP_WRITE, 4096, options);
  EXPECT_EQ(finish(late), MP_EXPIRED);
  EXPECT_EQ(error_of(late).code, MP_DEADLINE);
  EXPECT_EQ(statuses(late), std::vector<uint8_t>{MP_DEADLINE});
  expect_free();
}

TEST_F(EngineCancel, ClosingThePeerEndsItsTransfers) {
  const TransferHandle stuck = start_stuck_write();
  EXPECT_EQ(mp_peer_close(peer_.get(), nullptr), MP_OK);
  ASSERT_NE(finish(stuck), MP_RUNNING);
  EXPECT_NE(mp_transfer_get_state(stuck.get()), MP_COMPLETED);
  EXPECT_EQ(error_of(stuck).code, MP_CLOSED);
  expect_free();
}

}  // namespace
}  // namespace moonpool
