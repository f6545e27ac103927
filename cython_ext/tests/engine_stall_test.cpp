// SPDX-License-Identifier: Apache-2.0
//
// Targets that stall, die or answer nonsense: a transfer ends with the first cause, and never with a wrong success.
#include "status.hpp"
#include "support_engine.hpp"
#include "support_raw.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

constexpr uint64_t kBytes = 4u << 20;

class EngineStall : public ::testing::Test {
 protected:
  // One lane, so that it is known which one carries what.
  void connect(uint32_t progress_timeout_ms, uint64_t slice_bytes = 0) {
    source_ = std::make_unique<TestEngine>([=](mp_config &config) {
      config.lanes = 1;
      config.slice_bytes = slice_bytes;
      config.progress_timeout_ms = progress_timeout_ms;
    });
    region_ = source_->add(memory_, "local");
    peer_ = source_->connect(target_.address());
    remote_ = look_up(peer_, "kv");
  }
  TransferHandle start(mp_op op, int64_t bytes = 4096) { return submit(peer_, op, region_, remote_, {{0, 0, bytes}}); }

  // Long enough for an answer that is given at once, on a machine with other things to do.
  static constexpr uint32_t kPatient = 500;
  static constexpr uint32_t kNever = static_cast<uint32_t>(kPatienceNs / kMillisecond);
  // Before the engines, since registered memory has to outlive them.
  Bytes memory_ = random_data(kBytes, 1);
  RawServer target_{kBytes};
  std::unique_ptr<TestEngine> source_;
  RegionHandle region_;
  PeerHandle peer_;
  mp_remote_region remote_;
};

TEST_F(EngineStall, ALaneWithoutProgressIsReplacedAndTheReadAskedForAgain) {
  connect(kPatient);
  const TransferHandle reading = start(MP_READ);
  ASSERT_TRUE(receive_request(target_.lane(0)));  // and no answer
  const auto again = receive_request(target_.lane(1));
  ASSERT_TRUE(again);
  ASSERT_TRUE(answer(target_.lane(1), *again, 5));
  EXPECT_EQ(finish(reading), MP_COMPLETED);
  EXPECT_EQ(Bytes(memory_.begin(), memory_.begin() + 4096), Bytes(4096, 5));
  EXPECT_TRUE(ends(target_.lane(0)));
  EXPECT_EQ(source_->stat({"retries"}), 1);
}

TEST_F(EngineStall, AWriteIsSentAgainOnlyAfterTheOldLaneIsFenced) {
  connect(kPatient);
  const TransferHandle writing = start(MP_WRITE);
  ASSERT_TRUE(receive_request(target_.lane(0)));
  const uint64_t lane_id = target_.lane_id(0);
  ControlMessage message;
  ASSERT_TRUE(receive_message(target_.control(), &message));
  ASSERT_EQ(message.type, wire::kFence);
  EXPECT_EQ(message.body, body_of(lane_id));
  ASSERT_GE(target_.lane(1), 0) << "the lane itself is replaced at once";
  EXPECT_EQ(source_->stat({"retries"}), 0);
  ASSERT_TRUE(send_message(target_.control(), wire::kFenced, message.body));
  const auto again = receive_request(target_.lane(1));
  ASSERT_TRUE(again);
  EXPECT_EQ(again->payload, Bytes(memory_.begin(), memory_.begin() + 4096));
  ASSERT_TRUE(answer(target_.lane(1), *again));
  EXPECT_EQ(finish(writing), MP_COMPLETED);
  EXPECT_EQ(source_->stat({"retries"}), 1);
}

// The socket stays readable, so a lane that only waited until it can send on would look at it without end.
TEST_F(EngineStall, AnAnswerBeforeTheRequestIsThereEndsTheLane) {
  connect(kNever, kBytes);
  const TransferHandle writing = start(MP_WRITE, kBytes);
  wire::RequestHead head;
  ASSERT_TRUE(receive_struct(target_.lane(0), &head));  // and nothing of the payload, which is more than sockets hold
  const wire::ResponseHeader early{wire::kResponseMagic, 0, {}, 0, 0, head.header.id, 0};
  ASSERT_TRUE(send_struct(target_.lane(0), early));
  EXPECT_GE(target_.lane(1), 0) << "the lane is replaced";
  EXPECT_EQ(source_->stat({"lane_errors"}), 1);
}

TEST_F(EngineStall, AnAnswerToAnotherFenceChangesNothing) {
  connect(kPatient);
  const TransferHandle writing = start(MP_WRITE);
  ControlMessage message;
  ASSERT_TRUE(receive_message(target_.control(), &message));
  ASSERT_TRUE(send_message(target_.control(), wire::kFenced, body_of(uint64_t{999})));
  ASSERT_TRUE(send_message(target_.control(), wire::kFenced, message.body));
  ASSERT_TRUE(send_message(target_.control(), wire::kFenced, message.body));
  const auto again = receive_request(target_.lane(1));
  ASSERT_TRUE(again && answer(target_.lane(1), *again));
  EXPECT_EQ(finish(writing), MP_COMPLETED);
  EXPECT_EQ(source_->stat({"retries"}), 1);
}

TEST_F(EngineStall, ATargetThatNeverAnswersIsGivenUpWithTheCause) {
  connect(20);
  const TransferHandle reading = start(MP_READ);
  EXPECT_EQ(finish(reading), MP_FAILED);
  const mp_error error = error_of(reading);
  EXPECT_EQ(error.code, MP_DEADLINE);
  EXPECT_NE(std::string(error.message).find("no byte moved"), std::string::npos) << error.message;
  EXPECT_NE(std::string(error.peer).find("raw target"), std::string::npos) << error.peer;
  EXPECT_EQ(error.retryable, 1);
  EXPECT_EQ(source_->stat({"retries"}), 5);
}

TEST_F(EngineStall, ATargetThatDiesIsNeverASuccess) {
  for (const mp_op op : {MP_READ, MP_WRITE}) {
    RawServer target(kBytes);
    TestEngine source([](mp_config &config) { config.lanes = 1; });
    const RegionHandle local = source.allocate(kBytes);
    const PeerHandle peer = source.connect(target.address());
    const mp_remote_region remote = look_up(peer, "kv");
    const TransferHandle moving = submit(peer, op, local, remote, {{0, 0, 4096}});
    // All of it has arrived there, but nobody has said so.
    ASSERT_TRUE(receive_request(target.lane(0)));
    target.die();
    EXPECT_EQ(finish(moving), MP_FAILED) << op;
    EXPECT_EQ(error_of(moving).code, MP_PEER_LOST) << error_of(moving).message;
    mp_peer_info info;
    mp_peer_get_info(peer.get(), &info);
    EXPECT_EQ(info.state, MP_PEER_LOST_STATE);
  }
}

TEST_F(EngineStall, NonsenseInsteadOfAnAnswerIsAProtocolError) {
  connect(kNever);
  const std::vector<std::function<void(wire::ResponseHeader &)>> faults = {
      [](wire::ResponseHeader &h) { h.magic = 0; },
      [](wire::ResponseHeader &h) { h.id += 1; },
      [](wire::ResponseHeader &h) { h.failed_count = 2; },
      [](wire::ResponseHeader &h) { h.payload_bytes = 4095; },
      [](wire::ResponseHeader &h) { h.payload_bytes = 4097; },
      [](wire::ResponseHeader &h) { h.payload_bytes = UINT64_MAX; },
  };
  size_t lane = 0;
  for (size_t fault = 0; fault < faults.size(); ++fault) {
    const Bytes before = memory_;
    const TransferHandle reading = start(MP_READ);
    // Asked for once and then five times more.
    for (int attempt = 0; attempt < 6; ++attempt, ++lane) {
      const auto request = receive_request(target_.lane(lane));
      ASSERT_TRUE(request);
      wire::ResponseHeader header{wire::kResponseMagic, 0, {}, 0, 0, request->header.id, 4096};
      faults[fault](header);
      const wire::FailedDesc failed[2] = {{0, MP_OUT_OF_RANGE}, {1, MP_OUT_OF_RANGE}};
      send_struct(target_.lane(lane), header);
      if (header.failed_count > 0) send_struct(target_.lane(lane), failed);
      EXPECT_TRUE(ends(target_.lane(lane)));
    }
    EXPECT_EQ(finish(reading), MP_FAILED) << "fault " << fault;
    EXPECT_EQ(error_of(reading).code, MP_PROTOCOL) << "fault " << fault << ": " << error_of(reading).message;
    EXPECT_TRUE(memory_ == before) << "fault " << fault;
  }
}

TEST_F(EngineStall, AFailureThatIsNoFailureIsAProtocolError) {
  connect(kNever);
  for (const uint32_t status : {uint32_t{MP_OK}, uint32_t{MP_PENDING}, uint32_t{kLastStatus + 1}, UINT32_MAX}) {
    const TransferHandle reading = start(MP_READ);
    const auto request = receive_request(target_.lane(0));
    ASSERT_TRUE(request);
    const wire::ResponseHeader header{wire::kResponseMagic, 0, {}, 1, 0, request->header.id, 0};
    ASSERT_TRUE(send_struct(target_.lane(0), header));
    ASSERT_TRUE(send_struct(target_.lane(0), wire::FailedDesc{0, status}));
    EXPECT_EQ(finish(reading), MP_FAILED);
    EXPECT_EQ(statuses(reading), std::vector<uint8_t>{MP_PROTOCOL}) << status;
  }
}

TEST_F(EngineStall, MalformedControlMessagesLoseThePeer) {
  const std::vector<std::pair<wire::Message, std::string>> bad = {{wire::kOffer, "?"},
                                                                  {wire::kRegions, "?"},
                                                                  {wire::kRegionGone, "?"},
                                                                  {wire::kNotifyAck, "?"},
                                                                  {wire::kFenced, "?"},
                                                                  {wire::kNotify, ""},
                                                                  {wire::kFence, ""},
                                                                  {static_cast<wire::Message>(0), ""},
                                                                  {static_cast<wire::Message>(77), "?"}};
  for (const auto &[type, body] : bad) {
    RawServer target(kBytes);
    TestEngine source;
    const PeerHandle peer = source.connect(target.address());
    ASSERT_TRUE(send_message(target.control(), type, body));
    EXPECT_TRUE(ends(target.control())) << "message " << type;
    EXPECT_TRUE(eventually([&] {
      mp_peer_info info;
      mp_peer_get_info(peer.get(), &info);
      return info.state == MP_PEER_LOST_STATE || info.state == MP_PEER_CONNECTING;
    })) << "message "
        << type;
  }
}

// A peer that is stopped must not hold up transfers to others.
TEST_F(EngineStall, AStalledPeerDelaysNobodyElse) {
  connect(kNever);
  TestEngine good;
  const RegionHandle remote_region = good.allocate(kBytes, "kv");
  const PeerHandle peer = source_->connect(good);
  const mp_remote_region remote = look_up(peer, "kv");
  const TransferHandle stuck = start(MP_WRITE, kBytes);
  const RegionHandle local = source_->allocate(kBytes);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(transfer(peer, MP_WRITE, local, remote, {{0, 0, 100'000}}), MP_COMPLETED);
  EXPECT_EQ(mp_transfer_get_state(stuck.get()), MP_RUNNING);
}

}  // namespace
}  // namespace moonpool
