// SPDX-License-Identifier: Apache-2.0
//
// Bytes over the rdma transport: every shape of transfer arrives as it was, over every rail, in as few requests as it
// takes.
#include <unistd.h>

#include <barrier>
#include <deque>

#include "support_rdma.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

constexpr int64_t kMiB = 1 << 20;

// Blocks that change places: nothing is adjacent.
std::vector<Item> scattered(int64_t count, int64_t block, int64_t stride) {
  std::vector<Item> items;
  for (int64_t i = 0; i < count; ++i) items.push_back({i * stride, (count - 1 - i) * stride + 3, block});
  return items;
}

class EngineRdmaShapes : public EngineRdma, public ::testing::WithParamInterface<bool> {
 protected:
  void SetUp() override {
    EngineRdma::SetUp();
    standin::set_deferred(GetParam());
  }
  void both_ways(const std::vector<Item> &items) {
    for (const mp_op op : {MP_WRITE, MP_READ}) expect_moved(op, items);
    EXPECT_EQ(moved_by("tcp"), 0);
  }
  // Pieces end at multiples of their size from a page on, and the memory begins somewhere in one.
  static int64_t pieces_of(const Bytes &memory, uint64_t piece_bytes) {
    const uint64_t begin = reinterpret_cast<uintptr_t>(memory.data()) % static_cast<uint64_t>(getpagesize());
    return static_cast<int64_t>((begin + memory.size() + piece_bytes - 1) / piece_bytes);
  }
};
INSTANTIATE_TEST_SUITE_P(Executed, EngineRdmaShapes, ::testing::Bool(),
                         [](const auto &info) { return info.param ? "Later" : "AtOnce"; });

TEST_P(EngineRdmaShapes, Everything) {
  open();
  EXPECT_STREQ(info().path, "rdma");
  EXPECT_STREQ(info().fallback, "");
  both_ways({{0, 0, static_cast<int64_t>(bytes_)}});
  EXPECT_EQ(moved_by("rdma"), static_cast<int64_t>(2 * bytes_));
  EXPECT_EQ(standin::counters().written_bytes, bytes_);
  EXPECT_EQ(standin::counters().read_bytes, bytes_);
}

TEST_P(EngineRdmaShapes, OneByteAndOddPlaces) {
  open();
  both_ways({{5, 77777, 1}});
  both_ways({{1, 2, 3 * kMiB + 17}});
  both_ways({{static_cast<int64_t>(bytes_) - 1, 0, 1}, {0, static_cast<int64_t>(bytes_) - 9, 9}});
}

TEST_P(EngineRdmaShapes, ThousandsOfPieces) {
  open();
  both_ways(scattered(5000, 1000, 3000));
}

TEST_P(EngineRdmaShapes, MoreThanTheSmallestQueueHolds) {
  open([](mp_config &config) { config.rdma_queue_depth = 16; });
  both_ways(scattered(3000, 700, 4096));
  both_ways({{0, 0, static_cast<int64_t>(bytes_)}});
}

TEST_P(EngineRdmaShapes, ADeviceWithLittleRoom) {
  for (int device = 0; device < standin::kDevices; ++device) {
    standin::set_limits(device, {.qp_wr_max = 16, .sge_max = 1, .inline_max = 0, .reads_max = 1});
  }
  open();
  both_ways(scattered(2000, 100, 4096));
  both_ways({{0, 0, 8 * kMiB}});
  EXPECT_EQ(standin::counters().inlined, 0u);
}

TEST_P(EngineRdmaShapes, DevicesThatDiffer) {
  standin::set_limits(0, {.reads_max = 1, .mtu = IBV_MTU_1024});
  standin::set_limits(3, {.reads_max = 4, .mtu = IBV_MTU_2048});
  open();
  both_ways({{0, 0, static_cast<int64_t>(bytes_)}});
}

TEST_P(EngineRdmaShapes, LargerThanARegistration) {
  // 3 MiB is no multiple of a huge page, so pieces of 2.
  for (const int device : {0, 1, 3}) standin::set_limits(device, {.mr_bytes_max = 3 * kMiB});
  open();
  const int64_t pieces = pieces_of(local_memory_, 2 * kMiB) + pieces_of(remote_memory_, 2 * kMiB);
  EXPECT_EQ(standin::alive().registrations, 2 * pieces);
  both_ways({{0, 0, static_cast<int64_t>(bytes_)}});
  both_ways({{2 * kMiB - 10, 4 * kMiB - 30, 50}, {6 * kMiB - 1, 10 * kMiB - 5000, 10000}});
  both_ways(scattered(15, 1'000'000, kMiB));
}

TEST_P(EngineRdmaShapes, RegisteredInPiecesAsSet) {
  open([](mp_config &config) { config.rdma_registration_bytes_max = 4 * kMiB; });
  EXPECT_EQ(standin::alive().registrations, 2 * pieces_of(local_memory_, 4 * kMiB) + 2);
  both_ways({{0, 0, static_cast<int64_t>(bytes_)}});
  both_ways({{3 * kMiB, 5, 9 * kMiB}});
}

TEST_P(EngineRdmaShapes, ManyAtOnce) {
  open();
  shuffle(7);
  const Bytes expected = local_memory_;
  std::vector<std::thread> threads;
  constexpr int64_t kPart = 4 * kMiB;
  for (int64_t part = 0; part < 4; ++part) {
    threads.emplace_back([this, part] {
      for (int64_t at = part * kPart; at < (part + 1) * kPart; at += 16384) {
        const TransferHandle moving = start(MP_WRITE, {{at, at, 16384}});
        if (finish(moving) != MP_COMPLETED) ADD_FAILURE() << at << ": " << text_of(moving);
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  EXPECT_TRUE(remote_memory_ == expected);
}

// ---------------------------------------------------------------- how

TEST_F(EngineRdma, BothRailsCarryALargeTransfer) {
  open();
  standin::hold_requests(true);
  const TransferHandle moving = start(MP_WRITE, {{0, 0, static_cast<int64_t>(bytes_)}});
  EXPECT_TRUE(eventually([] { return standin::requests_waiting(0) > 0 && standin::requests_waiting(1) > 0; }));
  standin::hold_requests(false);
  ASSERT_EQ(finish(moving), MP_COMPLETED) << text_of(moving);
  const int64_t first = rail(*source_, 0, "written_bytes"), second = rail(*source_, 1, "written_bytes");
  EXPECT_GT(first, 0);
  EXPECT_GT(second, 0);
  EXPECT_EQ(first + second, static_cast<int64_t>(bytes_));
}

TEST_F(EngineRdma, AdjacentPiecesShareARequest) {
  open();
  std::vector<Item> items;
  for (int64_t i = 0; i < 960; ++i) items.push_back({i * 8192, i * 4096, 4096});
  for (const mp_op op : {MP_WRITE, MP_READ}) {
    const standin::Counters before = standin::counters();
    expect_moved(op, items);
    const standin::Counters after = standin::counters();
    EXPECT_EQ(after.pieces - before.pieces, 960u);
    // 16 in each; a few more where slices end.
    EXPECT_LE(after.requests - before.requests, 960u / 16 + 16);
  }
}

TEST_F(EngineRdma, OneCompletionForAChain) {
  open();
  const standin::Counters before = standin::counters();
  expect_moved(MP_WRITE, scattered(1024, 300, 4096));
  const standin::Counters after = standin::counters();
  EXPECT_EQ(after.requests - before.requests, 1024u);
  EXPECT_EQ(after.signalled - before.signalled, after.posts - before.posts);
  EXPECT_LE(after.posts - before.posts, 1024u / 32 * 2);
}

struct Inlined {
  uint32_t setting, device;
  int64_t length;
  bool expected;
};
class EngineRdmaInline : public EngineRdma, public ::testing::WithParamInterface<Inlined> {};
INSTANTIATE_TEST_SUITE_P(Bytes, EngineRdmaInline,
                         ::testing::Values(Inlined{128, 256, 127, true}, Inlined{128, 256, 128, true},
                                           Inlined{128, 256, 129, false}, Inlined{0, 256, 1, false},
                                           Inlined{4, 256, 4, true}, Inlined{4, 256, 5, false},
                                           // More than the device takes: none at all.
                                           Inlined{128, 64, 1, false}),
                         [](const auto &info) {
                           return std::to_string(info.param.length) + "Of" + std::to_string(info.param.setting) + "On" +
                                  std::to_string(info.param.device);
                         });

TEST_P(EngineRdmaInline, UpToTheLimit) {
  for (const int device : {0, 1}) standin::set_limits(device, {.inline_max = GetParam().device});
  open([](mp_config &config) { config.rdma_inline_bytes = GetParam().setting; });
  expect_moved(MP_WRITE, {{3, 5, GetParam().length}});
  EXPECT_EQ(standin::counters().inlined, GetParam().expected ? 1u : 0u);
  expect_moved(MP_READ, {{3, 5, GetParam().length}});
  EXPECT_EQ(standin::counters().inlined, GetParam().expected ? 1u : 0u) << "reads never are";
}

TEST_F(EngineRdma, AnIdleEngineArmsNothing) {
  open();
  expect_moved(MP_WRITE, {{0, 0, static_cast<int64_t>(bytes_)}});
  // Lanes that were roused for the transfer may still be connecting.
  EXPECT_TRUE(eventually([] {
    const standin::Counters before = standin::counters();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const standin::Counters after = standin::counters();
    return after.arms == before.arms && after.events == before.events;
  }));
}

// ---------------------------------------------------------------- many peers

// A source with one rail, and targets that it cannot all have queue pairs to at once.
class EngineRdmaPeers : public EngineRdma {
 protected:
  static constexpr size_t kPeers = 5;
  static constexpr int64_t kAllowed = 3;
  EngineRdmaPeers() : EngineRdma(kPeers * kMiB) {}
  void SetUp() override {
    EngineRdma::SetUp();
    local_memory_ = random_data(bytes_, 49);
    source_ = std::make_unique<TestEngine>([](mp_config &config) {
      use(config, "standin0");
      config.rdma_queue_pairs_max = kAllowed;
    });
    local_ = source_->add(local_memory_, nullptr);
    for (uint32_t i = 0; i < kPeers; ++i) {
      memories_.push_back(random_data(kMiB, 50 + i));
      targets_.push_back(std::make_unique<TestEngine>([](mp_config &config) { use(config, "standin2"); }));
      regions_.push_back(targets_.back()->add(memories_.back(), "kv"));
      peers_.push_back(source_->connect(*targets_.back()));
      remotes_.push_back(look_up(peers_.back(), "kv"));
      mp_peer_info info;
      mp_peer_get_info(peers_.back().get(), &info);
      EXPECT_STREQ(info.path, "rdma") << info.fallback;
    }
  }
  void TearDown() override {
    EXPECT_EQ(moved_by("tcp"), 0);
    peers_.clear();
    regions_.clear();
    targets_.clear();
    EngineRdma::TearDown();
  }
  TransferHandle start_with(size_t peer, mp_op op, int64_t bytes, int64_t at = 0) {
    return submit(peers_[peer], op, local_, remotes_[peer], {{static_cast<int64_t>(peer) * kMiB + at, 0, bytes}});
  }

  std::vector<Bytes> memories_;
  std::vector<std::unique_ptr<TestEngine>> targets_;
  std::vector<RegionHandle> regions_;
  std::vector<PeerHandle> peers_;
  std::vector<mp_remote_region> remotes_;
};

TEST_F(EngineRdmaPeers, MoreThanQueuePairs) {
  for (int round = 0; round < 10; ++round) {
    std::vector<TransferHandle> moving;
    const mp_op op = round % 2 == 0 ? MP_READ : MP_WRITE;
    for (size_t i = 0; i < kPeers; ++i) {
      moving.push_back(start_with(i, op, kMiB));
      EXPECT_LE(source_->stat({"rails", "queue_pairs"}), kAllowed);
    }
    for (const TransferHandle &one : moving) ASSERT_EQ(finish(one), MP_COMPLETED) << text_of(one);
    for (size_t i = 0; i < kPeers; ++i) {
      ASSERT_EQ(std::memcmp(local_memory_.data() + i * kMiB, memories_[i].data(), kMiB), 0) << round;
    }
    const Bytes fresh = random_data(bytes_, static_cast<uint32_t>(round) + 100);
    if (op == MP_READ) std::copy(fresh.begin(), fresh.end(), local_memory_.begin());
  }
}

// A lane that gives up its queue pair for another peer, just when it is given work.
TEST_F(EngineRdmaPeers, NoWorkIsForgottenByALaneThatRests) {
  std::vector<std::thread> threads;
  std::barrier together(kPeers);
  std::atomic<bool> failed{false};
  for (size_t peer = 0; peer < kPeers; ++peer) {
    threads.emplace_back([this, peer, &together, &failed] {
      std::mt19937 random(static_cast<uint32_t>(peer));
      for (int round = 0; round < 150; ++round) {
        together.arrive_and_wait();
        if (failed.load()) continue;
        for (auto spins = random() % 2000; spins > 0; --spins) std::atomic_signal_fence(std::memory_order_seq_cst);
        const TransferHandle moving = start_with(peer, MP_READ, 64);
        if (finish(moving) == MP_COMPLETED) continue;
        ADD_FAILURE() << "round " << round << ", peer " << peer << ": " << text_of(moving);
        failed.store(true);
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
}

// Lanes that are never idle give their queue pairs up after a while all the same.
TEST_F(EngineRdmaPeers, PeersThatAreAlwaysAtWorkTakeTurns) {
  std::vector<std::thread> threads;
  std::atomic<size_t> served{0};
  std::atomic<bool> failed{false};
  for (size_t peer = 0; peer < kPeers; ++peer) {
    threads.emplace_back([this, peer, &served, &failed] {
      std::deque<TransferHandle> moving;
      // Each has a place of its own, since two at once may come over different queue pairs.
      constexpr int64_t kAtOnce = 3, kPart = kMiB / kAtOnce;
      int64_t begun = 0;
      for (int done = 0; served.load() < kPeers && !failed.load(); ++done) {
        while (moving.size() < kAtOnce) {
          moving.push_back(start_with(peer, MP_READ, kPart, begun++ % kAtOnce * kPart));
        }
        if (done == 10) served.fetch_add(1);
        if (finish(moving.front()) != MP_COMPLETED) {
          ADD_FAILURE() << "peer " << peer << ", after " << done << ": " << text_of(moving.front());
          failed.store(true);
        }
        moving.pop_front();
      }
      for (const TransferHandle &one : moving) finish(one);
    });
  }
  for (std::thread &thread : threads) thread.join();
  EXPECT_LE(source_->stat({"rails", "queue_pairs"}), kAllowed);
}

}  // namespace
}  // namespace moonpool
