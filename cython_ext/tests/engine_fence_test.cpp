// SPDX-License-Identifier: Apache-2.0
//
// Cutting off an engine of the same process: what it had begun is over when the call returns. Other paths have such
// tests in tests/transfer_engine and tests/rdma.
#include <atomic>

#include "local_server_lane.hpp"
#include "support_engine.hpp"
#include "support_peek.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

constexpr uint64_t kBytes = 64u << 20;

class EngineFenceSlices : public ::testing::TestWithParam<uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Of, EngineFenceSlices, ::testing::Values(64u << 10, 32u << 20),
                         [](const auto &info) { return std::to_string(info.param >> 10) + "KiB"; });

TEST_P(EngineFenceSlices, NothingOfALocalPeerArrivesAfterwards) {
  const auto local = [](mp_config &config) {
    config.transports = "local";
    config.slice_bytes = GetParam();
  };
  // Before the engines, since registered memory has to outlive them.
  Bytes memory(kBytes, 1), remote_memory(kBytes, 0);
  TestEngine target(local), source(local);
  const RegionHandle remote_region = target.add(remote_memory, "kv"), region = source.add(memory, nullptr);
  const PeerHandle peer = source.connect(target);
  const mp_remote_region remote = look_up(peer, "kv");
  uint8_t incarnation[16];
  mp_engine_incarnation(source.get(), incarnation);
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(eventually([&] { return mp_peer_ensure(peer.get(), 0, nullptr, nullptr, nullptr) == MP_OK; }));
    const TransferHandle moving = submit(peer, MP_WRITE, region, remote, {{0, 0, kBytes}});
    ASSERT_TRUE(
        eventually([&] { return peek(remote_memory.data()) == 1 || mp_transfer_get_state(moving.get()) != 0; }));
    uint32_t sessions = 0;
    mp_error error;
    ASSERT_EQ(mp_engine_fence(target.get(), incarnation, &sessions, &error), MP_OK) << error.message;
    EXPECT_EQ(sessions, 1u);
    // It is the owner's again.
    std::fill(remote_memory.begin(), remote_memory.end(), uint8_t{0});
    const mp_transfer_state state = finish(moving);
    EXPECT_TRUE(state == MP_FAILED || state == MP_COMPLETED) << state;
    if (state == MP_FAILED) {
      EXPECT_EQ(error_of(moving).code, MP_PEER_LOST) << error_of(moving).message;
    }
    ASSERT_TRUE(remote_memory == Bytes(kBytes, 0)) << "round " << round;
  }
  // What is asked for afterwards is new.
  ASSERT_TRUE(eventually([&] { return mp_peer_ensure(peer.get(), 0, nullptr, nullptr, nullptr) == MP_OK; }));
  EXPECT_EQ(transfer(peer, MP_WRITE, region, remote, {{0, 0, kBytes}}), MP_COMPLETED);
  EXPECT_TRUE(memory == remote_memory);
}

TEST(EngineFence, ALocalLaneWaitsForTheCopyThatIsUnderWay) {
  LocalServerLane lane;
  ASSERT_TRUE(lane.begin_copy());
  std::atomic<bool> over{false};
  std::thread closing([&] {
    lane.close();
    EXPECT_TRUE(over.load());
  });
  EXPECT_TRUE(eventually([&] { return lane.closed(); }));
  EXPECT_FALSE(lane.begin_copy());
  over.store(true);
  lane.end_copy();
  closing.join();
  EXPECT_FALSE(lane.begin_copy());
  lane.close();
}

}  // namespace
}  // namespace moonpool
