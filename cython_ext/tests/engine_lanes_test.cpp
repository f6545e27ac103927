// SPDX-License-Identifier: Apache-2.0
//
// Lanes that break in the middle: the transfer completes over other lanes, with the right bytes.
#include "support_engine.hpp"
#include "support_proxy.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

constexpr uint64_t kBytes = 16u << 20;

class EngineLanes : public ::testing::Test {
 protected:
  explicit EngineLanes(uint32_t lanes = 2) : lanes_(lanes) {}
  void SetUp() override {
    remote_region_ = target_.add(remote_memory_, "kv");
    local_region_ = source_.add(local_memory_, nullptr);
    peer_ = source_.connect(proxy_.address());
    remote_ = look_up(peer_, "kv");
    ASSERT_TRUE(eventually([&] { return proxy_.lanes() == lanes_; }));
  }

  const uint32_t lanes_;
  // Before the engines, since registered memory has to outlive them.
  Bytes remote_memory_ = random_data(kBytes, 1), local_memory_ = random_data(kBytes, 2);
  TestEngine target_;
  Proxy proxy_{target_.port()};
  TestEngine source_{[this](mp_config &config) { config.lanes = lanes_; }};
  RegionHandle remote_region_, local_region_;
  PeerHandle peer_;
  mp_remote_region remote_;
};

TEST_F(EngineLanes, ReadsAndWritesSurviveCuts) {
  for (uint32_t seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const mp_op op = seed % 2 == 0 ? MP_READ : MP_WRITE;
    std::vector<Item> items;
    if (seed % 3 == 0) {
      items = {{0, 0, static_cast<int64_t>(kBytes)}};
    } else {
      // Blocks that change places.
      const int64_t block = 1 << (12 + random() % 6);
      const int64_t count = static_cast<int64_t>(kBytes) / block;
      for (int64_t i = 0; i < count; ++i) items.push_back({i * block, (count - 1 - i) * block, block});
    }
    const Bytes fresh = random_data(kBytes, 100 + seed);
    Bytes &from = op == MP_READ ? remote_memory_ : local_memory_;
    std::copy(fresh.begin(), fresh.end(), from.begin());
    SubmitOptions options;
    options.digest = seed % 4 >= 2;
    options.notify = "arrived";
    const int before = proxy_.cuts_made();
    // Fewer than the five times that a piece is sent again.
    proxy_.cut_lanes(3, 1000, 3'000'000, seed);
    const TransferHandle moving = submit(peer_, op, local_region_, remote_, items, options);
    ASSERT_EQ(finish(moving), MP_COMPLETED) << error_of(moving).message << ": " << error_of(moving).cause;
    EXPECT_GT(proxy_.cuts_made(), before) << "or nothing was tested";
    for (const Item &item : items) {
      ASSERT_EQ(std::memcmp(local_memory_.data() + item.local, remote_memory_.data() + item.remote,
                            static_cast<size_t>(item.length)),
                0);
    }
    EXPECT_TRUE(from == fresh);
    mp_notification got;
    ASSERT_EQ(mp_notification_take(target_.get(), kPatienceNs, &got), MP_OK);
    mp_notification_clear(&got);
  }
  EXPECT_GT(source_.stat({"retries"}), 0);
}

TEST_F(EngineLanes, SmallTransfersSurviveCuts) {
  proxy_.cut_lanes(20, 1, 200'000, 5);
  for (int64_t i = 0; i < 600; ++i) {
    const mp_op op = i % 2 == 0 ? MP_READ : MP_WRITE;
    const TransferHandle moving = submit(peer_, op, local_region_, remote_, {{i * 4096, i * 8192, 4096}});
    ASSERT_EQ(finish(moving), MP_COMPLETED) << i << ": " << error_of(moving).message << ": " << error_of(moving).cause;
    EXPECT_EQ(std::memcmp(local_memory_.data() + i * 4096, remote_memory_.data() + i * 8192, 4096), 0);
  }
  EXPECT_GT(proxy_.cuts_made(), 5);
}

TEST_F(EngineLanes, OneLaneThatIsLeftCarriesEverything) {
  proxy_.refuse_lanes(true);
  // In the middle of transfers, so that the lane has something to give back.
  for (int round = 0; round < 10; ++round) {
    const TransferHandle moving = submit(peer_, MP_READ, local_region_, remote_, {{0, 0, kBytes}});
    if (round == 3) proxy_.cut_lane(0);
    ASSERT_EQ(finish(moving), MP_COMPLETED) << "round " << round << ": " << error_of(moving).message;
    ASSERT_EQ(transfer(peer_, MP_WRITE, local_region_, remote_, {{0, 0, 100}}), MP_COMPLETED) << round;
  }
  EXPECT_GT(source_.stat({"lane_errors"}), 0);
}

class EngineFourLanes : public EngineLanes {
 protected:
  EngineFourLanes() : EngineLanes(4) {}
};

TEST_F(EngineFourLanes, LanesThatAreGoneAreNotWaitedFor) {
  proxy_.refuse_lanes(true);
  for (int i = 0; i < 3; ++i) proxy_.cut_lane(0);
  ASSERT_TRUE(eventually([&] { return source_.stat({"lane_errors"}) >= 6; })) << "they broke and cannot come back";
  // Two slices each, for two lanes of the four in turn.
  for (int round = 0; round < 8; ++round) {
    ASSERT_EQ(transfer(peer_, MP_READ, local_region_, remote_, {{0, 0, 3 << 19}}), MP_COMPLETED) << round;
    ASSERT_EQ(transfer(peer_, MP_WRITE, local_region_, remote_, {{0, 0, 100}}), MP_COMPLETED) << round;
  }
}

TEST_F(EngineLanes, IdleLanesThatBreakAreReplaced) {
  proxy_.cut_lane(0);
  proxy_.cut_lane(0);
  EXPECT_TRUE(eventually([&] { return source_.stat({"lane_errors"}) >= 2 && proxy_.lanes() == 2; }));
  EXPECT_EQ(transfer(peer_, MP_READ, local_region_, remote_, {{0, 0, kBytes}}), MP_COMPLETED);
}

TEST_F(EngineLanes, WithoutAnyLaneATransferWaitsForItsDeadlineAndSaysWhy) {
  proxy_.refuse_lanes(true);
  proxy_.cut_lane(0);
  proxy_.cut_lane(0);
  ASSERT_TRUE(eventually([&] { return source_.stat({"lane_errors"}) >= 2; }));
  SubmitOptions options;
  options.deadline_ns = 50 * kMillisecond;
  const TransferHandle waiting = submit(peer_, MP_WRITE, local_region_, remote_, {{0, 0, 100}}, options);
  EXPECT_EQ(finish(waiting), MP_EXPIRED);
  EXPECT_NE(std::string(error_of(waiting).cause).find("none of its lanes"), std::string::npos)
      << error_of(waiting).cause;
  proxy_.refuse_lanes(false);
  EXPECT_EQ(transfer(peer_, MP_WRITE, local_region_, remote_, {{0, 0, 100}}), MP_COMPLETED) << "they come back";
}

}  // namespace
}  // namespace moonpool
