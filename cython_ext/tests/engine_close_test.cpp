// SPDX-License-Identifier: Apache-2.0
//
// Closing with everything under way: every transfer ends, nothing lands afterwards, no descriptor is left.
#include <filesystem>
#include <latch>

#include "support_engine.hpp"
#include "support_raw.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

constexpr uint64_t kBytes = 8u << 20;

size_t open_descriptors() {
  size_t n = 0;
  for ([[maybe_unused]] const auto &entry : std::filesystem::directory_iterator("/proc/self/fd")) ++n;
  return n;
}

TEST(EngineClose, EndsTransfersOfManyThreads) {
  for (int round = 0; round < 10; ++round) {
    TestEngine target, source;
    // A part of its own for each thread.
    Bytes remote_memory = random_data(3 * kBytes, 1), memory = random_data(3 * kBytes, 2);
    const RegionHandle remote_region = target.add(remote_memory, "kv"), region = source.add(memory, nullptr);
    const PeerHandle peer = source.connect(target);
    const mp_remote_region remote = look_up(peer, "kv");
    std::latch under_way(3);
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        for (int n = 0;; ++n) {
          mp_error error;
          const int64_t at = t * int64_t{kBytes}, length = n % 5 == 0 ? int64_t{kBytes} : 4096;
          const TransferHandle moving =
              submit(peer, t == 0 ? MP_WRITE : MP_READ, region, remote, {{at, at, length}}, {}, &error);
          if (n == 3) under_way.count_down();
          if (moving == nullptr) {
            EXPECT_EQ(error.code, MP_CLOSED) << error.message;
            break;
          }
          const mp_transfer_state state = finish(moving);
          EXPECT_NE(state, MP_RUNNING);
          if (state != MP_COMPLETED) {
            EXPECT_EQ(error_of(moving).code, MP_CLOSED) << error_of(moving).message;
          }
        }
      });
    }
    under_way.wait();
    // Twice at once: both return when it is down.
    std::thread also([&] { source.close(); });
    source.close();
    also.join();
    std::fill(memory.begin(), memory.end(), 7);
    for (std::thread &thread : threads) thread.join();
    EXPECT_TRUE(memory == Bytes(3 * kBytes, 7)) << "nothing lands after a close";
    EXPECT_EQ(source.stat({"transfers_running"}), 0);
  }
}

TEST(EngineClose, EndsTransfersToAClosingTarget) {
  TestEngine source;
  const RegionHandle region = source.allocate(kBytes);
  for (int round = 0; round < 5; ++round) {
    TestEngine target;
    const RegionHandle remote_region = target.allocate(kBytes, "kv");
    const PeerHandle peer = source.connect(target);
    const mp_remote_region remote = look_up(peer, "kv");
    std::vector<TransferHandle> moving;
    for (int64_t i = 0; i < 8; ++i) {
      constexpr int64_t kPart = kBytes / 8;
      moving.push_back(submit(peer, i % 2 == 0 ? MP_READ : MP_WRITE, region, remote, {{i * kPart, i * kPart, kPart}}));
    }
    target.close();
    for (const TransferHandle &one : moving) ASSERT_NE(finish(one), MP_RUNNING);
  }
  mp_error error;
  EXPECT_EQ(mp_region_release(region.get(), &error), MP_OK) << error.message;
}

TEST(EngineClose, SettlesWhatWasUnsettled) {
  RawServer stalled(kBytes);
  TestEngine source([](mp_config &config) {
    config.slice_bytes = kBytes;
    config.lanes = 1;
  });
  const RegionHandle region = source.allocate(kBytes, "local");
  const PeerHandle peer = source.connect(stalled.address());
  const TransferHandle stuck = submit(peer, MP_WRITE, region, look_up(peer, "kv"), {{0, 0, kBytes}});
  wire::RequestHeader header;
  ASSERT_TRUE(receive_struct(stalled.lane(0), &header));
  EXPECT_EQ(mp_transfer_cancel(stuck.get(), 10 * kMillisecond), MP_WAIT_TIMEOUT);
  source.close();
  EXPECT_EQ(mp_transfer_get_state(stuck.get()), MP_STOPPED);
  EXPECT_EQ(error_of(stuck).code, MP_CANCELLED) << "the first cause";
}

TEST(EngineClose, EndsConnectsAndLookUpsOfOtherThreads) {
  TestEngine target, source;
  const PeerHandle peer = source.connect(target);
  uint16_t port = 0;
  const Fd silent = listen_on_loopback(&port);
  std::thread connecting([&] {
    mp_peer *out = nullptr;
    const std::string address = "127.0.0.1:" + std::to_string(port);
    EXPECT_NE(mp_peer_connect(source.get(), address.c_str(), 0, nullptr, nullptr, &out, nullptr), MP_OK);
  });
  std::thread looking([&] {
    mp_remote_region region;
    EXPECT_NE(mp_peer_find_region(peer.get(), "never", -1, &region, nullptr), MP_OK);
  });
  std::thread taking([&] {
    mp_notification notification;
    EXPECT_EQ(mp_notification_take(source.get(), -1, &notification), MP_CLOSED);
  });
  EXPECT_TRUE(eventually([&] { return source.stat({"peers"}) == 2; }));
  source.close();
  connecting.join();
  looking.join();
  taking.join();
}

TEST(EngineClose, KeepsNoDescriptor) {
  const size_t before = open_descriptors();
  TestEngine target, source;
  const RegionHandle remote_region = target.allocate(kBytes, "kv"), region = source.allocate(kBytes);
  const PeerHandle peer = source.connect(target);
  const TransferHandle moved = submit(peer, MP_READ, region, look_up(peer, "kv"), {{0, 0, 4096}});
  EXPECT_EQ(finish(moved), MP_COMPLETED);
  EXPECT_GT(open_descriptors(), before);
  source.close();
  target.close();
  EXPECT_EQ(open_descriptors(), before) << "although handles are still held";
  mp_error error;
  EXPECT_EQ(submit(peer, MP_READ, region, mp_remote_region{}, {{0, 0, 1}}, {}, &error), nullptr);
  EXPECT_EQ(error.code, MP_CLOSED);
}

TEST(EngineClose, HandlesMayBeFreedInAnyOrder) {
  for (int order = 0; order < 6; ++order) {
    TestEngine target;
    const RegionHandle remote_region = target.allocate(kBytes, "kv");
    auto source = std::make_unique<TestEngine>();
    RegionHandle region = source->allocate(kBytes);
    PeerHandle peer = source->connect(target);
    const mp_remote_region remote = look_up(peer, "kv");
    TransferHandle moving = submit(peer, MP_WRITE, region, remote, {{0, 0, kBytes}});
    const std::function<void()> drops[4] = {[&] { peer.reset(); }, [&] { region.reset(); }, [&] { moving.reset(); },
                                            [&] { source.reset(); }};
    for (int i = 0; i < 4; ++i) drops[(i * (order % 2 == 0 ? 1 : 3) + order) % 4]();
  }
}

}  // namespace
}  // namespace moonpool
