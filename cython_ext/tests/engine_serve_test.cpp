// SPDX-License-Identifier: Apache-2.0
//
// An engine as a target of clients that are slow, wrong or hostile: each gets its answer, nobody else notices, and no
// byte goes where it should not.
#include <future>

#include "support_engine.hpp"
#include "support_raw.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

constexpr uint64_t kBytes = 8u << 20;

class EngineServe : public ::testing::Test {
 protected:
  void SetUp() override {
    region_ = target_.add(memory_, "kv");
    constant_region_ = target_.add(constant_, "constant", 0);
    ASSERT_TRUE(client_.open_control()) << client_.message();
    lane_ = client_.open_lane(1);
    ASSERT_TRUE(lane_) << client_.message();
    key_ = client_.key("kv");
  }
  int lane() const { return lane_.get(); }

  // Before the engines, since registered memory has to outlive them.
  Bytes memory_ = random_data(kBytes, 1), constant_ = random_data(4096, 2);
  TestEngine target_;
  RegionHandle region_, constant_region_;
  RawClient client_{target_.port()};
  Fd lane_;
  uint64_t key_ = 0;
};

TEST_F(EngineServe, ReadsAndWritesAsAsked) {
  ASSERT_TRUE(send_request(lane(), MP_READ, 5, {{key_, 100, 50}, {key_, kBytes - 1, 1}}));
  auto response = receive_response(lane());
  ASSERT_TRUE(response);
  EXPECT_EQ(response->header.id, 5u);
  EXPECT_TRUE(response->failed.empty());
  EXPECT_EQ(std::memcmp(response->payload.data(), memory_.data() + 100, 50), 0);
  EXPECT_EQ(response->payload.at(50), memory_.back());

  const Bytes payload = random_data(3000, 3);
  ASSERT_TRUE(send_request(lane(), MP_WRITE, 6, {{key_, 0, 1000}, {key_, 5000, 2000}}));
  ASSERT_TRUE(send_all(lane(), payload.data(), payload.size()));
  response = receive_response(lane());
  ASSERT_TRUE(response);
  EXPECT_EQ(response->header.id, 6u);
  EXPECT_TRUE(response->failed.empty());
  EXPECT_EQ(std::memcmp(memory_.data(), payload.data(), 1000), 0);
  EXPECT_EQ(std::memcmp(memory_.data() + 5000, payload.data() + 1000, 2000), 0);
}

TEST_F(EngineServe, EveryBadDescriptorGetsItsStatusAndTheOthersAreMoved) {
  const std::vector<wire::WireDesc> descs = {{key_ + 1, 0, 10},
                                             {key_, 0, 10},
                                             {key_, kBytes, 1},
                                             {key_, kBytes - 5, 10},
                                             {key_, UINT64_MAX, 10},
                                             {key_, 20, 10},
                                             {client_.key("constant"), 0, 10}};
  ASSERT_TRUE(send_request(lane(), MP_READ, 1, descs));
  auto response = receive_response(lane());
  ASSERT_TRUE(response);
  const auto failures = [&] {
    std::vector<std::pair<uint32_t, uint32_t>> out;
    for (const wire::FailedDesc &failed : response->failed) out.emplace_back(failed.desc, failed.status);
    return out;
  };
  using Failures = std::vector<std::pair<uint32_t, uint32_t>>;
  EXPECT_EQ(failures(),
            (Failures{{0, MP_REGION_UNKNOWN}, {2, MP_OUT_OF_RANGE}, {3, MP_OUT_OF_RANGE}, {4, MP_OUT_OF_RANGE}}));
  ASSERT_EQ(response->payload.size(), 30u);
  EXPECT_EQ(std::memcmp(response->payload.data() + 10, memory_.data() + 20, 10), 0);
  EXPECT_EQ(std::memcmp(response->payload.data() + 20, constant_.data(), 10), 0);

  // A write sends the payload of all; that of the bad ones goes nowhere.
  Bytes expected = memory_;
  const Bytes constant = constant_;
  const Bytes payload = random_data(61, 4);
  std::copy_n(payload.begin() + 10, 10, expected.begin());
  std::copy_n(payload.begin() + 41, 10, expected.begin() + 20);
  ASSERT_TRUE(send_request(lane(), MP_WRITE, 2, descs));
  ASSERT_TRUE(send_all(lane(), payload.data(), payload.size()));
  response = receive_response(lane());
  ASSERT_TRUE(response);
  EXPECT_EQ(failures(), (Failures{{0, MP_REGION_UNKNOWN},
                                  {2, MP_OUT_OF_RANGE},
                                  {3, MP_OUT_OF_RANGE},
                                  {4, MP_OUT_OF_RANGE},
                                  {6, MP_REGION_READ_ONLY}}));
  EXPECT_TRUE(memory_ == expected);
  EXPECT_EQ(constant_, constant);
  EXPECT_EQ(target_.stat({"serving", "requests_refused"}), 9);
  EXPECT_EQ(target_.stat({"serving", "read_bytes"}), 30) << "only what was moved counts";
  EXPECT_EQ(target_.stat({"serving", "written_bytes"}), 20);
}

TEST_F(EngineServe, AZeroLengthIsOutsideEveryRegion) {
  ASSERT_TRUE(send_request(lane(), MP_READ, 1, {{key_, 0, 0}, {key_, 0, 4}}));
  const auto response = receive_response(lane());
  ASSERT_TRUE(response);
  ASSERT_EQ(response->failed.size(), 1u);
  EXPECT_EQ(response->failed[0].status, MP_OUT_OF_RANGE);
  EXPECT_EQ(response->payload.size(), 4u);
}

TEST_F(EngineServe, MalformedRequestsEndTheirLaneOnly) {
  const Bytes before = memory_;
  std::vector<std::function<void(wire::RequestHead &)>> faults = {
      [](wire::RequestHead &h) { h.header.magic = 0; },
      [](wire::RequestHead &h) { h.header.op = 9; },
      [](wire::RequestHead &h) { h.header.flags = 0x40; },
      [](wire::RequestHead &h) { h.header.desc_count = 0; },
      [](wire::RequestHead &h) { h.header.desc_count = wire::kDescsPerFrameMax + 1; },
      [](wire::RequestHead &h) { h.header.payload_bytes = UINT64_MAX; },
      [](wire::RequestHead &h) { h.header.payload_bytes += 1; },
      [](wire::RequestHead &h) { h.first.length = UINT64_MAX; },
      [](wire::RequestHead &h) {
        h.header.flags = wire::kFlagDigest;  // one leaf at most
        h.first.length = h.header.payload_bytes = MP_DIGEST_LEAF_BYTES + 1;
      },
  };
  int64_t errors = 0;
  for (size_t i = 0; i < faults.size(); ++i) {
    const Fd bad = client_.open_lane(10 + i);
    ASSERT_TRUE(bad);
    wire::RequestHead head{{wire::kRequestMagic, MP_WRITE, 0, 0, 1, 0, 1, 8}, {key_, 0, 8}};
    faults[i](head);
    send_struct(bad.get(), head);
    EXPECT_TRUE(ends(bad.get())) << "fault " << i;
    EXPECT_EQ(target_.stat({"serving", "protocol_errors"}), ++errors) << "fault " << i;
  }
  ASSERT_TRUE(send_request(lane(), MP_READ, 1, {{key_, 0, 8}}));
  EXPECT_TRUE(receive_response(lane())) << "other lanes of the same client go on";
  EXPECT_TRUE(memory_ == before);
}

TEST_F(EngineServe, SumsThatWrapAroundAreRefused) {
  // Two lengths whose sum is 8 modulo 2^64.
  wire::RequestHeader header{wire::kRequestMagic, MP_WRITE, 0, 0, 2, 0, 1, 8};
  const wire::WireDesc descs[2] = {{key_, 0, UINT64_MAX - 7}, {key_, 0, 16}};
  ASSERT_TRUE(send_struct(lane(), header));
  ASSERT_TRUE(send_struct(lane(), descs));
  EXPECT_TRUE(ends(lane()));
}

TEST_F(EngineServe, ADigestThatDiffersIsReportedPerDescriptor) {
  const Bytes payload = random_data(3000, 5);
  uint64_t digests[3];
  for (size_t i = 0; i < 3; ++i) digests[i] = mp_digest(payload.data() + i * 1000, 1000);
  digests[1] ^= 1;
  ASSERT_TRUE(
      send_request(lane(), MP_WRITE, 1, {{key_, 0, 1000}, {key_, 1000, 1000}, {key_, 2000, 1000}}, wire::kFlagDigest));
  ASSERT_TRUE(send_all(lane(), payload.data(), payload.size()));
  ASSERT_TRUE(send_struct(lane(), digests));
  const auto response = receive_response(lane());
  ASSERT_TRUE(response);
  ASSERT_EQ(response->failed.size(), 1u);
  EXPECT_EQ(response->failed[0].desc, 1u);
  EXPECT_EQ(response->failed[0].status, MP_DIGEST);
}

TEST_F(EngineServe, ManyRequestsMayBeUnderWay) {
  for (uint64_t id = 0; id < 500; ++id) {
    const auto op = id % 3 == 0 ? MP_WRITE : MP_READ;
    ASSERT_TRUE(send_request(lane(), op, id, {{key_, id * 8, 8}, {0, 0, 4}}));
    const char payload[12] = "eight...---";
    if (op == MP_WRITE) {
      ASSERT_TRUE(send_struct(lane(), payload));
    }
  }
  for (uint64_t id = 0; id < 500; ++id) {
    const auto response = receive_response(lane());
    ASSERT_TRUE(response);
    EXPECT_EQ(response->header.id, id) << "answers come in the order of the requests";
    ASSERT_EQ(response->failed.size(), 1u);
    EXPECT_EQ(response->failed[0].desc, 1u);
  }
}

// ---------------------------------------------------------------- who may open what

TEST_F(EngineServe, ALaneNeedsTheSessionOfItsClient) {
  EXPECT_FALSE(client_.open(wire::kLane, random_id(), 2)) << "no such session";
  EXPECT_EQ(client_.status(), MP_PEER_LOST);
  RawClient other(target_.port());
  ASSERT_TRUE(other.open_control());
  RawClient thief(target_.port());
  EXPECT_FALSE(thief.open(wire::kLane, other.session(), 2)) << "another incarnation";
  EXPECT_EQ(thief.status(), MP_PEER_LOST);
}

TEST_F(EngineServe, ALaneOfATransportThatIsNotUsedIsRefusedWithTheReason) {
  EXPECT_FALSE(client_.open(wire::kRdma, client_.session(), 2));
  EXPECT_EQ(client_.status(), MP_TRANSPORT_UNAVAILABLE);
  EXPECT_EQ(client_.message(), "this engine does not use rdma");
  ASSERT_TRUE(send_request(lane(), MP_READ, 1, {{key_, 0, 8}}));
  EXPECT_TRUE(receive_response(lane())) << "the other lanes go on";
}

TEST_F(EngineServe, ASessionHasABoundedNumberOfLanesAndTheOldestGoFirst) {
  std::vector<Fd> lanes;
  for (uint64_t id = 2; id <= 130; ++id) {
    lanes.push_back(client_.open_lane(id));
    ASSERT_TRUE(lanes.back());
  }
  EXPECT_TRUE(ends(lane())) << "lane 1";
  EXPECT_TRUE(ends(lanes[0].get())) << "lane 2";
  EXPECT_TRUE(eventually([&] { return target_.stat({"serving", "lanes"}) == 128; }));
  ASSERT_TRUE(send_request(lanes.back().get(), MP_READ, 1, {{key_, 0, 8}}));
  EXPECT_TRUE(receive_response(lanes.back().get()));
}

TEST_F(EngineServe, ALaneEndsWithItsSession) {
  ASSERT_TRUE(send_request(lane(), MP_WRITE, 1, {{key_, 0, 1000}}));
  client_.close_control();
  EXPECT_TRUE(ends(lane()));
  EXPECT_TRUE(eventually([&] { return target_.stat({"serving", "sessions"}) == 0; }));
  EXPECT_TRUE(eventually([&] { return target_.stat({"serving", "lanes"}) == 0; }));
}

TEST_F(EngineServe, AClientThatComesBackReplacesItsSession) {
  const Fd old_lane = std::move(lane_);
  ASSERT_TRUE(send_request(old_lane.get(), MP_WRITE, 1, {{key_, 0, 1000}}));
  ASSERT_TRUE(client_.open_control()) << "the same peer id and incarnation again";
  EXPECT_EQ(target_.stat({"serving", "sessions"}), 1);
  EXPECT_TRUE(ends(old_lane.get()));
}

TEST_F(EngineServe, ANotificationDoesNotWaitForMarksThatCannotCome) {
  std::string body;
  wire::Writer writer(&body);
  wire::encode_notify(writer, {9, {{1, 5, 0}, {77, 1, 0}}, "over tcp, and over a lane that has ended"});
  ASSERT_TRUE(send_message(client_.control(), wire::kNotify, body));
  ControlMessage answer;
  ASSERT_TRUE(receive_message(client_.control(), &answer));
  EXPECT_EQ(answer.type, wire::kNotifyAck);
}

TEST_F(EngineServe, MalformedControlMessagesEndTheSession) {
  std::string oversized, overmarked, reserved;
  const std::string payload(wire::kNotifyBytesMax + 1, 'n');
  wire::Writer writer(&oversized), other(&overmarked), third(&reserved);
  wire::encode_notify(writer, {1, {}, payload});
  wire::encode_notify(other, {1, std::vector<wire::Mark>(wire::kNotifyMarksMax + 1), "n"});
  wire::encode_notify(third, {1, {{77, 1, 1}}, "n"});
  const std::vector<std::pair<wire::Message, std::string>> bad = {
      {wire::kNotify, "?"},      {wire::kNotify, oversized},          {wire::kNotify, overmarked},
      {wire::kNotify, reserved}, {wire::kFence, "1234567"},           {wire::kFence, "123456789"},
      {wire::kRegions, ""},      {static_cast<wire::Message>(99), ""}};
  int64_t errors = 0;
  for (const auto &[type, body] : bad) {
    RawClient client(target_.port());
    ASSERT_TRUE(client.open_control());
    ASSERT_TRUE(send_message(client.control(), type, body));
    EXPECT_TRUE(ends(client.control())) << "message " << type;
    EXPECT_EQ(target_.stat({"serving", "protocol_errors"}), ++errors) << "counted before it ends";
  }
  ASSERT_TRUE(send_request(lane(), MP_READ, 1, {{key_, 0, 8}}));
  EXPECT_TRUE(receive_response(lane())) << "other sessions go on";
}

TEST(EngineServeBounds, MorePeersThanAllowedAreRefusedWithTheReason) {
  TestEngine target([](mp_config &config) { config.peers_max = 2; });
  RawClient one(target.port()), two(target.port()), three(target.port());
  ASSERT_TRUE(one.open_control());
  ASSERT_TRUE(two.open_control());
  EXPECT_FALSE(three.open_control());
  EXPECT_EQ(three.status(), MP_LIMIT);
  EXPECT_NE(three.message().find("peers_max"), std::string::npos) << three.message();
  ASSERT_TRUE(one.open_control()) << "who comes back is not one more";
  two.close_control();
  EXPECT_TRUE(eventually([&] { return three.open_control(); }));
}

TEST(EngineServeBounds, NotificationsBeyondTheBoundAreRefusedToTheirSender) {
  TestEngine target([](mp_config &config) { config.notifications_max = 2; });
  TestEngine source;
  const RegionHandle remote_region = target.allocate(4096, "kv"), local = source.allocate(4096);
  const PeerHandle peer = source.connect(target);
  const mp_remote_region remote = look_up(peer, "kv");
  SubmitOptions options;
  options.notify = "n";
  for (int i = 0; i < 2; ++i) EXPECT_EQ(transfer(peer, MP_WRITE, local, remote, {{0, 0, 8}}, options), MP_COMPLETED);
  const TransferHandle refused = submit(peer, MP_WRITE, local, remote, {{0, 0, 8}}, options);
  EXPECT_EQ(finish(refused), MP_FAILED);
  EXPECT_EQ(error_of(refused).code, MP_NOTIFY_FULL);
  EXPECT_EQ(statuses(refused), std::vector<uint8_t>{MP_OK}) << "the bytes are there";
  EXPECT_EQ(target.stat({"notifications", "queued"}), 2);
  EXPECT_EQ(target.stat({"notifications", "refused"}), 1);
}

}  // namespace
}  // namespace moonpool
