// SPDX-License-Identifier: Apache-2.0
#include <barrier>

#include "support_engine.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

TEST(EngineMany, AHundredClientsAtOnce) {
  constexpr int kClients = 100;
  TestEngine target;
  Bytes remote_memory = random_data(kClients * 4096, 1);
  const RegionHandle remote_region = target.add(remote_memory, "kv");
  std::vector<std::unique_ptr<TestEngine>> sources;
  for (int i = 0; i < kClients; ++i) {
    sources.push_back(std::make_unique<TestEngine>([](mp_config &config) {
      config.listen = nullptr;
      config.io_threads = 1;
    }));
  }
  std::barrier together(kClients);
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < kClients; ++i) {
    threads.emplace_back([&, i] {
      TestEngine &source = *sources[static_cast<size_t>(i)];
      Bytes memory(4096);
      const RegionHandle region = source.add(memory, nullptr);
      together.arrive_and_wait();
      const PeerHandle peer = source.connect(target);
      const mp_remote_region remote = look_up(peer, "kv");
      EXPECT_EQ(transfer(peer, MP_READ, region, remote, {{0, i * 4096, 4096}}), MP_COMPLETED);
      EXPECT_EQ(std::memcmp(memory.data(), remote_memory.data() + i * 4096, 4096), 0) << "client " << i;
      together.arrive_and_wait();
      EXPECT_EQ(target.stat({"serving", "sessions"}), kClients);
      together.arrive_and_wait();
    });
  }
  for (std::thread &thread : threads) thread.join();
  sources.clear();
  EXPECT_TRUE(eventually([&] { return target.stat({"serving", "sessions"}) == 0; }));
  EXPECT_TRUE(eventually([&] { return target.stat({"serving", "lanes"}) == 0; }));
  EXPECT_EQ(target.stat({"serving", "handshakes_refused"}), 0);
}

}  // namespace
}  // namespace moonpool
