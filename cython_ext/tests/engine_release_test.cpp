// SPDX-License-Identifier: Apache-2.0
//
// Once a region is released, or a lane fenced, nothing reads or writes the memory any more, whatever a peer was doing.
#include <future>

#include "support_engine.hpp"
#include "support_peek.hpp"
#include "support_raw.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

constexpr uint64_t kBytes = 8u << 20;
constexpr uint64_t kHalf = kBytes / 2;

class EngineRelease : public ::testing::Test {
 protected:
  void SetUp() override {
    region_ = target_.add(memory_, "kv");
    other_region_ = target_.add(other_, "other");
    ASSERT_TRUE(client_.open_control());
    lane_ = open_lane(1);
  }
  Fd open_lane(uint64_t id) {
    Fd lane = client_.open_lane(id);
    EXPECT_TRUE(lane) << client_.message();
    // What the client does not read stops the server soon.
    if (lane) set_buffers(lane.get(), 1 << 16);
    return lane;
  }
  // Sends a write to the whole region and the first half of its payload, and waits until that has been applied.
  void write_half(int lane) {
    ASSERT_EQ(peek(&memory_[kHalf - 1]), 0) << "set up for memory of zeros";
    ASSERT_TRUE(send_request(lane, MP_WRITE, 1, {{client_.key("kv"), 0, kBytes}}));
    ASSERT_TRUE(send_all(lane, ones_.data(), kHalf));
    ASSERT_TRUE(eventually([&] { return peek(&memory_[kHalf - 1]) == 1; }));
  }
  void send_rest(int lane) { send_all(lane, ones_.data() + kHalf, kBytes - kHalf); }
  // A release has no time-out of its own, so a test that fails must not hang: `unblock` lets it go on.
  bool released(const RegionHandle &region, const std::function<void()> &unblock) {
    auto result = std::async(std::launch::async, [&] { return mp_region_release(region.get(), nullptr); });
    const bool in_time = result.wait_for(std::chrono::nanoseconds(kPatienceNs)) == std::future_status::ready;
    if (!in_time) unblock();
    return result.get() == MP_OK && in_time;
  }
  // The memory is the owner's again: it is used for something else, and stays as it is.
  void reuse() { std::fill(memory_.begin(), memory_.end(), 7); }
  bool untouched() const { return memory_ == Bytes(kBytes, 7); }
  // Everything that was sent to the target has been looked at when this is answered.
  void round_trip() {
    const Fd lane = open_lane(1000);
    ASSERT_TRUE(send_request(lane.get(), MP_READ, 1, {{client_.key("other"), 0, 8}}));
    ASSERT_TRUE(receive_response(lane.get()));
  }

  // Before the engine, since registered memory has to outlive it.
  Bytes memory_ = Bytes(kBytes), other_ = random_data(kBytes, 2);
  TestEngine target_;
  const Bytes ones_ = Bytes(kBytes, 1);
  RegionHandle region_, other_region_;
  RawClient client_{target_.port()};
  Fd lane_;
};

TEST_F(EngineRelease, AWriteInTheMiddleGoesNowhereAfterIt) {
  write_half(lane_.get());
  ASSERT_TRUE(released(region_, [&] { lane_.reset(); }));
  reuse();
  send_rest(lane_.get());
  const auto response = receive_response(lane_.get());
  ASSERT_TRUE(response);
  ASSERT_EQ(response->failed.size(), 1u);
  EXPECT_EQ(response->failed[0].status, MP_REGION_RELEASED);
  EXPECT_TRUE(untouched());
  // The lane itself goes on.
  ASSERT_TRUE(send_request(lane_.get(), MP_READ, 2, {{client_.key("other"), 0, 8}}));
  EXPECT_TRUE(receive_response(lane_.get()));
}

TEST_F(EngineRelease, AWriteToTwoRegionsGoesOnInTheOther) {
  ASSERT_TRUE(
      send_request(lane_.get(), MP_WRITE, 1,
                   {{client_.key("kv"), 0, kBytes}, {client_.key("other"), 0, 1000}, {client_.key("kv"), 0, 10}}));
  ASSERT_TRUE(send_all(lane_.get(), ones_.data(), kHalf));
  ASSERT_TRUE(eventually([&] { return peek(&memory_[kHalf - 1]) == 1; }));
  ASSERT_TRUE(released(region_, [&] { lane_.reset(); }));
  reuse();
  send_rest(lane_.get());
  ASSERT_TRUE(send_all(lane_.get(), ones_.data(), 1010));
  const auto response = receive_response(lane_.get());
  ASSERT_TRUE(response);
  ASSERT_EQ(response->failed.size(), 2u);
  EXPECT_EQ(response->failed[0].desc, 0u);
  EXPECT_EQ(response->failed[1].desc, 2u);
  EXPECT_TRUE(untouched());
  EXPECT_EQ(Bytes(other_.begin(), other_.begin() + 1000), Bytes(1000, 1));
}

TEST_F(EngineRelease, AClientThatStopsInTheMiddleOfAWriteDoesNotHoldItUp) {
  write_half(lane_.get());
  EXPECT_TRUE(released(region_, [&] { lane_.reset(); }));
}

TEST_F(EngineRelease, AClientThatDoesNotReadDoesNotHoldItUp) {
  ASSERT_TRUE(send_request(lane_.get(), MP_READ, 1, {{client_.key("kv"), 0, kBytes}}));
  wire::ResponseHeader header;
  ASSERT_TRUE(receive_struct(lane_.get(), &header));
  EXPECT_TRUE(released(region_, [&] { lane_.reset(); }));
  EXPECT_TRUE(ends(lane_.get())) << "what cannot be sent any more cannot be left out either";
}

TEST_F(EngineRelease, ARegionWhoseBytesWereSentIsFreeAlthoughTheAnswerGoesOn) {
  ASSERT_TRUE(send_request(lane_.get(), MP_READ, 1, {{client_.key("kv"), 0, 8}, {client_.key("other"), 0, kBytes}}));
  wire::ResponseHeader header;
  uint64_t first = 1;
  ASSERT_TRUE(receive_struct(lane_.get(), &header));
  ASSERT_TRUE(receive_struct(lane_.get(), &first));
  EXPECT_EQ(first, 0u);
  ASSERT_TRUE(released(region_, [&] { lane_.reset(); }));
  Bytes rest(kBytes);
  ASSERT_TRUE(receive_all(lane_.get(), rest.data(), rest.size())) << "the other region is still being read";
  EXPECT_TRUE(rest == other_);
}

TEST_F(EngineRelease, AFencedLaneWritesNothingMore) {
  write_half(lane_.get());
  ASSERT_TRUE(send_message(client_.control(), wire::kFence, body_of(uint64_t{1})));
  ControlMessage message;
  ASSERT_TRUE(receive_message(client_.control(), &message));
  EXPECT_EQ(message.type, wire::kFenced);
  EXPECT_EQ(message.body, body_of(uint64_t{1}));
  const uint8_t reached = peek(&memory_[kHalf]);
  EXPECT_EQ(reached, 0);
  reuse();
  send_rest(lane_.get());
  EXPECT_TRUE(ends(lane_.get()));
  round_trip();
  EXPECT_TRUE(untouched());
}

// The fence travels on another connection than the lane, so it can be the first to arrive.
TEST_F(EngineRelease, AFenceHoldsForALaneThatIsStillOnItsWay) {
  ASSERT_TRUE(send_message(client_.control(), wire::kFence, body_of(uint64_t{2})));
  ControlMessage message;
  ASSERT_TRUE(receive_message(client_.control(), &message));
  ASSERT_EQ(message.type, wire::kFenced);
  reuse();
  const Fd late = client_.open_lane(2);
  if (late) {
    send_request(late.get(), MP_WRITE, 1, {{client_.key("kv"), 0, 100}});
    send_all(late.get(), ones_.data(), 100);
    EXPECT_TRUE(ends(late.get()));
  }
  round_trip();
  EXPECT_TRUE(untouched());
}

TEST_F(EngineRelease, TwoLanesOfOneNumberDoNotEscapeIt) {
  write_half(lane_.get());
  const Fd again = open_lane(1);
  ASSERT_TRUE(released(region_, [&] { lane_.reset(); }));
  reuse();
  send_rest(lane_.get());
  round_trip();
  EXPECT_TRUE(untouched());
}

TEST_F(EngineRelease, TwoLanesOfOneNumberDoNotOutliveTheirSession) {
  write_half(lane_.get());
  const Fd again = open_lane(1);
  client_.close_control();
  EXPECT_TRUE(ends(again.get()));
  EXPECT_TRUE(ends(lane_.get()));
}

TEST_F(EngineRelease, ClosingTheEngineEndsEverything) {
  write_half(lane_.get());
  target_.close();
  reuse();
  send_rest(lane_.get());
  EXPECT_TRUE(ends(lane_.get()));
  EXPECT_TRUE(untouched());
}

TEST_F(EngineRelease, AReleasedKeyIsAnsweredAsReleasedAndAnnouncedAsGone) {
  const uint64_t key = client_.key("kv");
  ASSERT_TRUE(released(region_, [] {}));
  ControlMessage message;
  ASSERT_TRUE(receive_message(client_.control(), &message));
  EXPECT_EQ(message.type, wire::kRegionGone);
  EXPECT_EQ(message.body, body_of(key));
  ASSERT_TRUE(send_request(lane_.get(), MP_READ, 1, {{key, 0, 8}}));
  const auto response = receive_response(lane_.get());
  ASSERT_TRUE(response);
  ASSERT_EQ(response->failed.size(), 1u);
  EXPECT_EQ(response->failed[0].status, MP_REGION_RELEASED);
}

TEST_F(EngineRelease, ItIsRefusedWhileATransferOfItsOwnEngineUsesIt) {
  RawServer stalled(kBytes);
  const PeerHandle peer = target_.connect(stalled.address());
  const mp_remote_region remote = look_up(peer, "kv");
  const TransferHandle moving = submit(peer, MP_READ, region_, remote, {{0, 0, 4096}});
  mp_error error;
  EXPECT_EQ(mp_region_release(region_.get(), &error), MP_REGION_BUSY);
  EXPECT_NE(std::string(error.message).find("\"kv\""), std::string::npos) << error.message;
  EXPECT_EQ(mp_transfer_cancel(moving.get(), kPatienceNs), MP_OK);
  EXPECT_EQ(mp_region_release(region_.get(), &error), MP_OK) << error.message;
  EXPECT_EQ(mp_region_release(region_.get(), &error), MP_OK) << "it is idempotent";
}

}  // namespace
}  // namespace moonpool
