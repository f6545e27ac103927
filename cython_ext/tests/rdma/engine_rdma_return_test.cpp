// SPDX-License-Identifier: Apache-2.0
//
// A port that comes back, for peers that had no lane when it did.
#include "support_rdma.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;
using standin::Call;

constexpr uint32_t kAlways = 1'000'000;

class EngineRdmaReturn : public EngineRdma {
 protected:
  EngineRdmaReturn() : EngineRdma(1u << 20) {}
  static void one_lane(mp_config &config) {
    config.rdma_devices = "standin0";
    config.require = "rdma";
    config.rdma_queue_pairs = config.rdma_queue_pairs_max = 1;
  }
  bool moves_over_rdma() {
    const int64_t before = moved_by("rdma");
    expect_moved(MP_WRITE, {{0, 0, 4096}});
    return moved_by("rdma") > before;
  }
  mp_transfer_state write(const PeerHandle &peer, const mp_remote_region &remote) {
    return transfer(peer, MP_WRITE, local_, remote, {{0, 0, 4096}});
  }
};

class EngineRdmaReturnOf : public EngineRdmaReturn, public ::testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(APort, EngineRdmaReturnOf, ::testing::Bool(),
                         [](const auto &info) { return info.param ? "Here" : "There"; });

TEST_P(EngineRdmaReturnOf, APeerThatWasConnectedWhileNoPortWasUpIsReachedOverRdmaLater) {
  const std::vector<int> ports = GetParam() ? std::vector<int>{0, 1} : std::vector<int>{2, 3};
  for (const int port : ports) standin::set_port(port, false);
  open();
  EXPECT_STREQ(info().path, "tcp");
  EXPECT_TRUE(contains(fallback(), "rdma: ")) << fallback();
  expect_moved(MP_WRITE, {{0, 0, 4096}});
  for (const int port : ports) standin::set_port(port, true);
  EXPECT_TRUE(eventually([&] { return moves_over_rdma(); })) << fallback();
  EXPECT_STREQ(info().path, "rdma");
  EXPECT_EQ(fallback(), "");
}

TEST_P(EngineRdmaReturnOf, APeerThatCameBackWhileNoPortWasUpIsReachedOverRdmaLater) {
  const std::vector<int> ports = GetParam() ? std::vector<int>{0, 1} : std::vector<int>{2, 3};
  open();
  EXPECT_TRUE(moves_over_rdma());
  for (const int port : ports) standin::set_port(port, false);
  uint8_t incarnation[16];
  mp_engine_incarnation(source_->get(), incarnation);
  ASSERT_EQ(mp_engine_fence(target_->get(), incarnation, nullptr, nullptr), MP_OK);
  ASSERT_TRUE(eventually([&] {
    return mp_peer_ensure(peer_.get(), 0, nullptr, nullptr, nullptr) == MP_OK && write(peer_, remote_) == MP_COMPLETED;
  }));
  EXPECT_STREQ(info().path, "tcp");
  for (const int port : ports) standin::set_port(port, true);
  EXPECT_TRUE(eventually([&] { return moves_over_rdma(); })) << fallback();
}

// The target's second port never answers. With its first one down that is all there is to try.
TEST_F(EngineRdmaReturn, ARailThatWorkedIsTriedBeforeOneThatNeverDid) {
  open(one_lane);
  EXPECT_EQ(write(peer_, remote_), MP_COMPLETED);
  const auto in_vain = [] { return standin::calls(Call::kToRtr, 3); };
  const auto attempts = [] { return standin::calls(Call::kCreateQp, kSourceDevice); };
  standin::fail_calls({.call = Call::kToRtr, .err = ENETUNREACH, .times = kAlways, .device = 3});
  uint64_t after = 0;
  constexpr int kFlaps = 4;
  for (int flap = 0; flap < kFlaps; ++flap) {
    SCOPED_TRACE(flap);
    standin::set_port(2, false);
    EXPECT_NE(write(peer_, remote_), MP_COMPLETED);
    // Until the latest attempt was at the port that is down, so that it would be the other one's turn.
    ASSERT_TRUE(eventually([&] {
      const uint64_t made = attempts(), others = in_vain();
      if (!eventually([&] { return attempts() > made; })) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      return in_vain() == others;
    }));
    const uint64_t before = in_vain();
    standin::set_port(2, true);
    ASSERT_TRUE(eventually([&] { return write(peer_, remote_) == MP_COMPLETED; })) << fallback();
    after += in_vain() - before;
    for (int i = 0; i < 10; ++i) EXPECT_EQ(write(peer_, remote_), MP_COMPLETED) << fallback();
  }
  // One may have been under way already.
  EXPECT_LT(after, uint64_t{kFlaps});
}

// One queue pair for two peers: each gives it up for the other, and hears of ports while it has none.
TEST_F(EngineRdmaReturn, PeersThatShareAQueuePairAreAllReachedAgain) {
  open(one_lane);
  TestEngine second_target([](mp_config &config) { use(config, "standin2,standin3"); });
  Bytes second_memory(bytes_);
  const RegionHandle second_region = second_target.add(second_memory, "kv");
  const PeerHandle second = source_->connect(second_target);
  const mp_remote_region second_remote = look_up(second, "kv");
  standin::fail_calls({.call = Call::kToRtr, .err = ENETUNREACH, .times = kAlways, .device = 3});
  const auto both = [&] {
    const mp_transfer_state one = write(peer_, remote_), other = write(second, second_remote);
    return one == MP_COMPLETED && other == MP_COMPLETED;
  };
  ASSERT_TRUE(eventually(both));
  const auto attempts = [] { return standin::calls(Call::kToRtr, 3); };
  for (int flap = 0; flap < 3; ++flap) {
    SCOPED_TRACE(flap);
    standin::set_port(2, false);
    ASSERT_TRUE(eventually([&] { return !both(); }));
    standin::set_port(2, true);
    ASSERT_TRUE(eventually(both));
    const uint64_t up = attempts();
    for (int i = 0; i < 10; ++i) EXPECT_TRUE(both()) << i;
    EXPECT_EQ(attempts(), up) << "the rail that never worked";
  }
}

}  // namespace
}  // namespace moonpool
