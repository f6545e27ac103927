// SPDX-License-Identifier: Apache-2.0
//
// Queue pairs that cannot be made: the reason is told, another way is found, and attempts never become a storm.
#include "support_rdma.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;
using standin::Call;

constexpr uint32_t kAlways = 1'000'000;

class EngineRdmaConnect : public EngineRdma {
 protected:
  EngineRdmaConnect() : EngineRdma(1u << 20) {}
  explicit EngineRdmaConnect(uint64_t bytes) : EngineRdma(bytes) {}
  static void one_source(mp_config &config) { config.rdma_devices = "standin0"; }
  static void one_target(mp_config &config) { config.rdma_devices = "standin2"; }
  static void require(mp_config &config) { config.require = "rdma"; }
  void expect_both_ways() {
    for (const mp_op op : {MP_WRITE, MP_READ}) expect_moved(op, {{0, 0, static_cast<int64_t>(bytes_)}});
  }
  // It moves, over whatever path.
  bool moves_over_rdma() {
    const int64_t before = moved_by("rdma");
    expect_moved(MP_WRITE, {{0, 0, 4096}});
    return moved_by("rdma") > before;
  }
  mp_error refused_connection() {
    mp_peer *peer = nullptr;
    mp_error error{};
    EXPECT_NE(mp_peer_connect(source_->get(), target_->address().c_str(), 0, nullptr, nullptr, &peer, &error), MP_OK);
    peer_.reset(peer);
    return error;
  }
};

TEST_F(EngineRdmaConnect, RtrThatFailsNamesRailAndBothEnds) {
  standin::set_limits(2, {.mtu = IBV_MTU_1024});
  open_engines(one_source, one_target);
  add_regions();
  standin::fail_calls({.call = Call::kToRtr, .err = ENETUNREACH, .times = kAlways, .device = 0});
  connect();
  EXPECT_STREQ(info().path, "tcp");
  for (const char *part : {"rdma: rail standin0:1", "cannot bring a queue pair to RTR", "GID 10.0.0.1", "MTU 4096",
                           "the peer: GID 10.0.0.3", "MTU 1024", "Network is unreachable"}) {
    EXPECT_TRUE(contains(fallback(), part)) << part << " is not in " << fallback();
  }
  expect_both_ways();
  EXPECT_EQ(moved_by("rdma"), 0);
}

TEST_F(EngineRdmaConnect, UnderRequireItIsTheErrorOfConnect) {
  open_engines(
      [](mp_config &config) {
        require(config);
        one_source(config);
      },
      one_target);
  standin::fail_calls({.call = Call::kToRtr, .err = ETIMEDOUT, .times = kAlways, .device = 0});
  const mp_error error = refused_connection();
  EXPECT_EQ(error.code, MP_TRANSPORT_UNAVAILABLE);
  EXPECT_TRUE(contains(error.message, "the required transport \"rdma\" does not reach the peer")) << error.message;
  for (const char *part :
       {"rail standin0:1", "RTR", "GID 10.0.0.1", "GID 10.0.0.3", "MTU 4096", "Connection timed out"}) {
    EXPECT_TRUE(contains(error.cause, part)) << part << " is not in " << error.cause;
  }
}

TEST_F(EngineRdmaConnect, WhatThePeerMetIsTold) {
  open_engines(one_source, one_target);
  add_regions();
  standin::fail_calls({.call = Call::kToRtr, .err = EINVAL, .times = kAlways, .device = 2});
  connect();
  for (const char *part :
       {"rail standin0:1", "the peer has no queue pair for it", "rail standin2:1", "RTR", "GID 10.0.0.1"}) {
    EXPECT_TRUE(contains(fallback(), part)) << part << " is not in " << fallback();
  }
  expect_both_ways();
}

// ---------------------------------------------------------------- each step

struct Step {
  Call call;
  const char *name;
};
class EngineRdmaStep : public EngineRdmaConnect, public ::testing::WithParamInterface<std::tuple<Step, bool>> {};
INSTANTIATE_TEST_SUITE_P(
    Fails, EngineRdmaStep,
    ::testing::Combine(::testing::Values(Step{Call::kCreateChannel, "Channel"}, Step{Call::kCreateCq, "Completions"},
                                         Step{Call::kCreateQp, "QueuePair"}, Step{Call::kToInit, "Init"},
                                         Step{Call::kToRtr, "Rtr"}, Step{Call::kToRts, "Rts"}, Step{Call::kArm, "Arm"}),
                       ::testing::Bool()),
    [](const auto &info) {
      return std::string(std::get<0>(info.param).name) + (std::get<1>(info.param) ? "AtTarget" : "AtSource");
    });

TEST_P(EngineRdmaStep, AnotherPathServesAndRdmaComesBack) {
  const int device = std::get<1>(GetParam()) ? kTargetDevice : kSourceDevice;
  open_engines(one_source, one_target);
  add_regions();
  standin::fail_calls({.call = std::get<0>(GetParam()).call, .err = ENOMEM, .times = kAlways, .device = device});
  connect();
  EXPECT_STREQ(info().path, "tcp");
  EXPECT_TRUE(contains(fallback(), "Cannot allocate memory")) << fallback();
  expect_both_ways();
  // The target keeps nothing of an attempt once its socket has ended.
  EXPECT_TRUE(eventually([] { return standin::alive().queue_pairs == 0 && standin::alive().channels == 0; }))
      << standin::text_of(standin::alive());
  standin::clear_faults();
  EXPECT_TRUE(eventually([&] { return moves_over_rdma(); })) << fallback();
  EXPECT_EQ(fallback(), "");
}

TEST_F(EngineRdmaConnect, APostThatFailsIsNoEnd) {
  for (const int device : {0, 2}) {
    for (const Call call : {Call::kPostSend, Call::kPostReceive, Call::kPoll}) {
      SCOPED_TRACE(std::to_string(device) + ", call " + std::to_string(static_cast<int>(call)));
      open_engines(one_source, one_target);
      add_regions();
      standin::fail_calls({.call = call, .err = ENOMEM, .device = device});
      connect();
      expect_both_ways();
      EXPECT_TRUE(eventually([&] { return moves_over_rdma(); })) << fallback();
      close();
      standin::reset();
    }
  }
}

TEST_F(EngineRdmaConnect, OneRailThatFailsLeavesTheOther) {
  open_engines();
  add_regions();
  standin::fail_calls({.call = Call::kToRtr, .err = EINVAL, .times = kAlways, .device = 0});
  connect();
  EXPECT_STREQ(info().path, "rdma") << fallback();
  expect_both_ways();
  EXPECT_EQ(rail(*source_, 0, "written_bytes"), 0);
  EXPECT_EQ(rail(*source_, 1, "written_bytes"), static_cast<int64_t>(bytes_));
  standin::clear_faults();
  EXPECT_TRUE(eventually([&] {
    expect_moved(MP_WRITE, {{0, 0, static_cast<int64_t>(bytes_)}});
    return rail(*source_, 0, "written_bytes") > 0;
  })) << "it comes back";
}

// ---------------------------------------------------------------- devices and ports

TEST_F(EngineRdmaConnect, ADeviceThatCannotBeOpened) {
  standin::fail_calls({.call = Call::kOpen, .err = EACCES, .device = 0});
  open();
  expect_both_ways();
  EXPECT_EQ(standin::calls(Call::kCreateQp, 0), 0u);
  EXPECT_EQ(moved_by("tcp"), 0);
}

TEST_F(EngineRdmaConnect, NoDeviceThatCanBeOpened) {
  standin::fail_calls({.call = Call::kOpen, .err = EACCES, .device = 0});
  open(one_source);
  EXPECT_TRUE(contains(fallback(), "device standin0: cannot be opened: Permission denied")) << fallback();
  expect_both_ways();
}

TEST_F(EngineRdmaConnect, APortThatIsDownIsNeverTried) {
  standin::set_port(0, false);
  standin::set_port(1, false);
  open();
  EXPECT_STREQ(info().path, "tcp");
  EXPECT_TRUE(contains(fallback(), "standin0:1: the port is down")) << fallback();
  EXPECT_TRUE(contains(fallback(), "standin1:1: the port is down")) << fallback();
  expect_both_ways();
  EXPECT_EQ(standin::calls(Call::kCreateQp), 0u);
}

TEST_F(EngineRdmaConnect, APortOfThePeerThatIsDownIsNeverTried) {
  standin::set_port(2, false);
  standin::set_port(3, false);
  open();
  EXPECT_TRUE(contains(fallback(), "the peer has no active port of the same link layer")) << fallback();
  expect_both_ways();
  EXPECT_EQ(standin::calls(Call::kCreateQp), 0u);
}

TEST_F(EngineRdmaConnect, UnderRequireAPortThatIsDownIsAnErrorAtOnce) {
  standin::set_port(0, false);
  open_engines(
      [](mp_config &config) {
        require(config);
        one_source(config);
      },
      one_target);
  const int64_t before = now_ns();
  const mp_error error = refused_connection();
  EXPECT_LT(now_ns() - before, kPatienceNs / 4) << "no time-out passed: they are all of kPatienceNs";
  EXPECT_EQ(error.code, MP_TRANSPORT_UNAVAILABLE);
  EXPECT_TRUE(contains(error.cause, "the port is down")) << error.cause;
}

TEST_F(EngineRdmaConnect, OnePortThatIsDownJoinsWhenItIsUp) {
  standin::set_port(0, false);
  open();
  EXPECT_STREQ(info().path, "rdma") << fallback();
  expect_both_ways();
  EXPECT_EQ(rail(*source_, 0, "written_bytes"), 0);
  standin::set_port(0, true);
  EXPECT_TRUE(eventually([&] {
    expect_moved(MP_WRITE, {{0, 0, static_cast<int64_t>(bytes_)}});
    return rail(*source_, 0, "written_bytes") > 0;
  }));
}

TEST_F(EngineRdmaConnect, APortThatLosesItsAddressIsLeftAndComesBack) {
  open(one_source, one_target);
  expect_both_ways();
  standin::set_gids(0, {});
  ASSERT_TRUE(eventually([&] {
    expect_both_ways();
    return contains(fallback(), "the port has no GID");
  })) << fallback();
  EXPECT_GT(moved_by("tcp"), 0);
  standin::set_gids(0, {{5, IBV_GID_TYPE_ROCE_V2, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 99}}});
  EXPECT_TRUE(eventually([&] { return moves_over_rdma(); })) << fallback();
}

TEST_F(EngineRdmaConnect, APathThatDropsPacketsIsFoundBeforeTheFirstTransfer) {
  // As if everything that the source's device sends were dropped, and the device gave up.
  open_engines(one_source, one_target);
  add_regions();
  standin::fail_requests({.status = IBV_WC_RETRY_EXC_ERR, .times = kAlways, .device = 0, .empty = true});
  connect();
  EXPECT_STREQ(info().path, "tcp");
  EXPECT_TRUE(contains(fallback(), "transport retry counter exceeded")) << fallback();
  expect_both_ways();
}

TEST_F(EngineRdmaConnect, ADeviceThatNeverGivesUpIsNotWaitedForBeyondTheDeadline) {
  open_engines(
      [](mp_config &config) {
        one_source(config);
        config.connect_timeout_ms = 500;
      },
      one_target);
  add_regions();
  standin::hold_requests(true);
  mp_peer *peer = nullptr;
  mp_error error{};
  // Of its own it has more time than its lanes.
  EXPECT_EQ(mp_peer_connect(source_->get(), target_->address().c_str(), kPatienceNs / kMillisecond, nullptr, nullptr,
                            &peer, &error),
            MP_OK)
      << error.message << error.cause;
  peer_.reset(peer);
  EXPECT_TRUE(contains(fallback(), "a lane was not ready within the connect deadline")) << fallback();
  remote_ = look_up(peer_, "kv");
  expect_both_ways();
}

TEST_F(EngineRdmaConnect, ADeviceThatGivesUpLateLeavesTcpItsTime) {
  const auto late = [](mp_config &config) { config.connect_timeout_ms = 1000; };
  open_engines(late);
  add_regions();
  standin::hold_requests(true);
  connect();
  EXPECT_STREQ(info().path, "tcp");
  for (const char *part : {"rdma: rail standin", ":1 to 10.0.", "a lane was not ready within the connect deadline",
                           "packets may not pass", "(cable, VLAN, firewall)", "rdma_devices"}) {
    EXPECT_TRUE(contains(fallback(), part)) << part << " is not in " << fallback();
  }
  expect_both_ways();
  EXPECT_EQ(moved_by("rdma"), 0);
  standin::hold_requests(false);
  EXPECT_TRUE(eventually([&] { return moves_over_rdma(); })) << fallback();
  EXPECT_STREQ(info().path, "rdma");
  EXPECT_EQ(fallback(), "");
}

TEST_F(EngineRdmaConnect, UnderRequireADeviceThatGivesUpLateIsTheErrorOfConnect) {
  open_engines([](mp_config &config) {
    require(config);
    config.connect_timeout_ms = 1000;
  });
  standin::hold_requests(true);
  const mp_error error = refused_connection();
  EXPECT_EQ(error.code, MP_TRANSPORT_UNAVAILABLE) << error.message;
  for (const char *part : {"rdma: rail standin", ":1 to 10.0.", "a lane was not ready within the connect deadline",
                           "packets may not pass", "(cable, VLAN, firewall)", "rdma_devices"}) {
    EXPECT_TRUE(contains(error.cause, part)) << part << " is not in " << error.cause;
  }
}

// ---------------------------------------------------------------- back-off

TEST_F(EngineRdmaConnect, ALaneThatCannotBeConnectedBacksOff) {
  open(one_source, one_target);
  expect_both_ways();
  const auto attempts = [] { return standin::calls(Call::kToRtr, kSourceDevice); };
  standin::fail_calls({.call = Call::kToRtr, .err = ENETUNREACH, .times = kAlways, .device = kSourceDevice});
  standin::fail_requests({.status = IBV_WC_RETRY_EXC_ERR, .vendor_code = 129, .times = 2, .device = kSourceDevice});
  const uint64_t before = attempts();
  const int64_t until = now_ns() + 1000 * kMillisecond;
  std::string first;
  while (now_ns() < until) {
    // Work all the time, which must not make it try more often.
    expect_moved(MP_WRITE, {{0, 0, 4096}});
    if (first.empty()) first = fallback();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const uint64_t made = attempts() - before;
  // Two lanes wait 0, 50, 100, 200, 400 ms.
  EXPECT_GE(made, 2u);
  EXPECT_LE(made, 2u * 6);
  EXPECT_NE(first, "");
  EXPECT_EQ(fallback(), first) << "the first cause stays";
  standin::clear_faults();
  EXPECT_TRUE(eventually([&] { return moves_over_rdma(); })) << fallback();
}

}  // namespace
}  // namespace moonpool
