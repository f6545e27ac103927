// SPDX-License-Identifier: Apache-2.0
//
// The limits that mooncake-bench compares with must move the same bytes as the engine, and fail as loudly.
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "limits_api.h"
#include "limits_share.hpp"
#include "limits_streams.hpp"

namespace {

using moonpool::limits::connections_used;
using moonpool::limits::Pieces;
using moonpool::limits::Samples;
using moonpool::limits::Share;
using moonpool::limits::share_of;
using moonpool::limits::Walk;

constexpr uint8_t kToken[MPL_TOKEN_BYTES] = {1, 2, 3};
constexpr uint32_t kTimeoutMs = 5000;

// Memory and descriptors of one side. Block i of the list lies at a place that only this side knows.
struct Side {
  Side(std::vector<int64_t> block_lengths, size_t batch, size_t streams, uint32_t seed)
      : lengths(std::move(block_lengths)), offsets(lengths.size()) {
    std::vector<size_t> order(lengths.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), std::mt19937(seed));
    int64_t at = 0;
    for (const size_t block : order) {
      offsets[block] = at;
      at += lengths[block];
    }
    memory.assign(static_cast<size_t>(at), 0);
    list = {memory.data(), memory.size(), offsets.data(), lengths.data(), lengths.size(), batch, streams};
    next.assign(streams, 0);
  }
  Side(const Side &) = delete;

  void fill(uint32_t seed) {
    std::mt19937_64 random(seed);
    for (size_t at = 0; at < memory.size(); at += sizeof(uint64_t)) {
      const uint64_t word = random();
      std::memcpy(memory.data() + at, &word, std::min(sizeof word, memory.size() - at));
    }
  }
  bool block_equals(size_t block, const Side &other) const {
    return std::memcmp(memory.data() + offsets[block], other.memory.data() + other.offsets[block],
                       static_cast<size_t>(lengths[block])) == 0;
  }
  bool block_is_zero(size_t block) const {
    const auto *begin = memory.data() + offsets[block];
    return std::all_of(begin, begin + lengths[block], [](uint8_t byte) { return byte == 0; });
  }

  std::vector<int64_t> lengths;
  std::vector<int64_t> offsets;
  std::vector<uint8_t> memory;
  mpl_list list{};
  std::vector<uint64_t> next;
};

struct Ends {
  explicit Ends(size_t connections, uint32_t timeout_ms = kTimeoutMs) {
    mpl_error error{};
    uint16_t port = 0;
    mpl_listener *listener = nullptr;
    EXPECT_EQ(mpl_listen("127.0.0.1", 0, &listener, &port, &error), MPL_OK) << error.message;
    std::thread accepting([&] {
      mpl_error problem{};
      EXPECT_EQ(mpl_accept(listener, kToken, connections, timeout_ms, &server, &problem), MPL_OK) << problem.message;
    });
    EXPECT_EQ(mpl_connect("127.0.0.1", port, kToken, connections, timeout_ms, &client, &error), MPL_OK)
        << error.message;
    accepting.join();
    mpl_listener_free(listener);
  }
  ~Ends() {
    mpl_link_free(client);
    mpl_link_free(server);
  }
  mpl_link *client = nullptr;
  mpl_link *server = nullptr;
};

std::vector<int64_t> random_lengths(size_t count, int64_t most, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int64_t> lengths(count);
  for (int64_t &length : lengths) length = 1 + static_cast<int64_t>(random() % static_cast<uint32_t>(most));
  return lengths;
}

TEST(LimitsShare, SharesTileEveryBatch) {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    const int64_t most = seed % 2 == 0 ? 3'000'000 : 9'000;
    Side side(random_lengths(24, most, seed), 1 + seed % 4 * (seed % 4 == 3 ? 1 : 2), 1, seed);
    side.list.batch = std::array<size_t, 4>{1, 3, 8, 24}[seed % 4];
    const Walk walk(side.list, 0);
    for (size_t used = 1; used <= 5; ++used) {
      for (uint64_t batch = 0; batch < walk.batches; ++batch) {
        std::vector<iovec> pieces;
        for (size_t index = 0; index < used; ++index) {
          Pieces share(side.list, share_of(walk, batch, index, used));
          share.fill(pieces);
          ASSERT_TRUE(share.empty());
        }
        // Glued together, the pieces are the descriptors of the batch: nothing twice, nothing missing, in order.
        size_t piece = 0, done = 0;
        for (size_t d = walk.batch_begin(batch); d < walk.batch_begin(batch) + side.list.batch; ++d) {
          for (size_t at = 0; at < static_cast<size_t>(side.lengths[d]); at += done, ++piece) {
            ASSERT_LT(piece, pieces.size()) << "seed " << seed;
            ASSERT_EQ(pieces[piece].iov_base, side.memory.data() + side.offsets[d] + at) << "seed " << seed;
            done = pieces[piece].iov_len;
          }
        }
        ASSERT_EQ(piece, pieces.size()) << "seed " << seed;
      }
    }
  }
}

TEST(LimitsShare, LargeBlockIsCutEvenlyAndSmallBatchStaysOnOneConnection) {
  Side large({16 << 20, 16 << 20}, 1, 1, 1);
  EXPECT_EQ(connections_used(large.list, 4), 4U);
  for (size_t index = 0; index < 4; ++index)
    EXPECT_EQ(share_of(Walk(large.list, 0), 0, index, 4).bytes, uint64_t{4} << 20);
  Side small(std::vector<int64_t>(8, 4096), 8, 1, 1);
  EXPECT_EQ(connections_used(small.list, 4), 1U);
}

TEST(LimitsShare, PiecesComeIovMaxAtATime) {
  Side side(std::vector<int64_t>(3000, 8), 3000, 1, 1);
  Pieces pieces(side.list, share_of(Walk(side.list, 0), 0, 0, 1));
  std::vector<iovec> some;
  std::vector<size_t> counts;
  while (!pieces.empty()) {
    some.clear();
    pieces.fill(some);
    counts.push_back(some.size());
  }
  EXPECT_EQ(counts, (std::vector<size_t>{1024, 1024, 952}));
}

TEST(LimitsSamples, KeepsAnEvenSelectionWhenTheRoomIsSmall) {
  Samples samples(8);
  for (int64_t i = 0; i < 100; ++i) samples.add(i);
  EXPECT_EQ(samples.kept(), (std::vector<int64_t>{0, 16, 32, 48, 64, 80, 96}));
}

struct Shape {
  mpl_op op;
  mpl_mode mode;
  size_t connections;
  size_t streams;
};

class LimitsRun : public testing::TestWithParam<Shape> {};

TEST_P(LimitsRun, MovesEveryBlockOfTheBatchesItCounts) {
  const Shape shape = GetParam();
  // Many small blocks and some that are cut: more than IOV_MAX per batch, and shares inside a block.
  std::vector<int64_t> lengths = random_lengths(6000, 700, 7);
  for (size_t i = 0; i < lengths.size(); i += 750) lengths[i] = 1'100'000;
  Side client(lengths, 1500, shape.streams, 1), server(lengths, 1500, shape.streams, 2);
  (shape.op == MPL_WRITE ? client : server).fill(3);
  const Ends ends(shape.connections);

  constexpr uint32_t kRuns = 2;
  std::thread serving([&] {
    mpl_error error{};
    EXPECT_EQ(mpl_server_run(ends.server, &server.list, shape.op, shape.mode, kRuns, server.next.data(), &error),
              MPL_OK)
        << error.message;
  });
  std::array<int64_t, 64> samples{};
  mpl_result result{};
  for (uint32_t run = 0; run < kRuns; ++run) {
    const std::vector<uint64_t> before = client.next;
    result = {};
    result.samples_ns = samples.data();
    result.samples_capacity = samples.size();
    mpl_error error{};
    ASSERT_EQ(mpl_client_run(ends.client, &client.list, shape.op, shape.mode, 0, nullptr, client.next.data(), &result,
                             &error),
              MPL_OK)
        << error.message;
    uint64_t batches = 0;
    for (size_t i = 0; i < shape.streams; ++i) batches += client.next[i] - before[i];
    EXPECT_EQ(result.batches, batches);
    EXPECT_GE(batches, shape.streams);
    EXPECT_GT(result.window_ns, 0);
    EXPECT_EQ(result.samples_count, shape.mode == MPL_ACKED ? batches : 0);
  }
  serving.join();
  EXPECT_EQ(server.next, client.next);

  const Side &destination = shape.op == MPL_WRITE ? server : client;
  const Side &source = shape.op == MPL_WRITE ? client : server;
  for (size_t stream = 0; stream < shape.streams; ++stream) {
    const Walk walk(client.list, stream);
    for (size_t block = 0; block < walk.batches * client.list.batch; ++block) {
      const size_t d = walk.first + block;
      if (block < client.next[stream] * client.list.batch)
        ASSERT_TRUE(destination.block_equals(d, source)) << d;
      else
        ASSERT_TRUE(destination.block_is_zero(d)) << d;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, LimitsRun,
                         testing::Values(Shape{MPL_WRITE, MPL_ACKED, 1, 1}, Shape{MPL_WRITE, MPL_ACKED, 3, 1},
                                         Shape{MPL_WRITE, MPL_ACKED, 4, 2}, Shape{MPL_READ, MPL_ACKED, 1, 1},
                                         Shape{MPL_READ, MPL_ACKED, 3, 1}, Shape{MPL_READ, MPL_ACKED, 5, 2},
                                         Shape{MPL_WRITE, MPL_STREAM, 1, 1}, Shape{MPL_WRITE, MPL_STREAM, 3, 2},
                                         Shape{MPL_READ, MPL_STREAM, 1, 1}, Shape{MPL_READ, MPL_STREAM, 4, 2}));

TEST(LimitsRun, CountsBytesOverWholeCycles) {
  Side client({100, 200, 300, 400}, 1, 1, 1), server({100, 200, 300, 400}, 1, 1, 1);
  const Ends ends(1);
  std::thread serving([&] {
    mpl_error error{};
    EXPECT_EQ(mpl_server_run(ends.server, &server.list, MPL_WRITE, MPL_ACKED, 1, server.next.data(), &error), MPL_OK);
  });
  mpl_result result{};
  mpl_error error{};
  ASSERT_EQ(mpl_client_run(ends.client, &client.list, MPL_WRITE, MPL_ACKED, 20'000'000, nullptr, client.next.data(),
                           &result, &error),
            MPL_OK);
  serving.join();
  uint64_t expected = 0;
  for (uint64_t i = 0; i < result.batches; ++i) expected += static_cast<uint64_t>(client.lengths[i % 4]);
  EXPECT_EQ(result.bytes, expected);
}

TEST(LimitsRun, StopEndsAnEndlessRunBetweenBatches) {
  for (const mpl_mode mode : {MPL_ACKED, MPL_STREAM}) {
    Side client({4096}, 1, 1, 1), server({4096}, 1, 1, 1);
    const Ends ends(1);
    int32_t stop = 0;
    std::thread serving([&] {
      mpl_error error{};
      EXPECT_EQ(mpl_server_run(ends.server, &server.list, MPL_WRITE, mode, 1, server.next.data(), &error), MPL_OK);
    });
    std::thread stopping([&] { __atomic_store_n(&stop, 1, __ATOMIC_RELAXED); });
    mpl_result result{};
    mpl_error error{};
    EXPECT_EQ(mpl_client_run(ends.client, &client.list, MPL_WRITE, mode, INT64_MAX / 4, &stop, client.next.data(),
                             &result, &error),
              MPL_OK)
        << error.message;
    serving.join();
    stopping.join();
    EXPECT_GE(result.batches, 1U);
  }
}

TEST(LimitsRun, EndsWhenTheOtherSideGoesAway) {
  Side client({4096}, 1, 1, 1);
  Ends ends(2);
  mpl_link_free(ends.server);
  ends.server = nullptr;
  mpl_result result{};
  mpl_error error{};
  EXPECT_EQ(
      mpl_client_run(ends.client, &client.list, MPL_READ, MPL_ACKED, 1, nullptr, client.next.data(), &result, &error),
      MPL_CLOSED)
      << error.message;
}

TEST(LimitsRun, EndsWhenTheOtherSideIsSilent) {
  Side client({4096}, 1, 1, 1);
  const Ends ends(1, 50);
  mpl_result result{};
  mpl_error error{};
  EXPECT_EQ(
      mpl_client_run(ends.client, &client.list, MPL_READ, MPL_ACKED, 1, nullptr, client.next.data(), &result, &error),
      MPL_TIMEOUT);
  EXPECT_STREQ(error.message, "receive: the other side made no progress within the time-out");
}

TEST(LimitsRun, AbortEndsAServerThatWaits) {
  Side server({8 << 20}, 1, 1, 1);
  const Ends ends(3);
  mpl_error error{};
  std::thread aborting([&] { mpl_link_abort(ends.server); });
  EXPECT_EQ(mpl_server_run(ends.server, &server.list, MPL_WRITE, MPL_ACKED, 1, server.next.data(), &error),
            MPL_ABORTED);
  aborting.join();
}

TEST(LimitsRun, SidesWithDifferentWorkFindOut) {
  Side client({4096}, 1, 1, 1), server({4096}, 1, 1, 1);
  const Ends ends(1);
  mpl_error server_error{};
  std::thread serving([&] {
    EXPECT_EQ(mpl_server_run(ends.server, &server.list, MPL_READ, MPL_ACKED, 1, server.next.data(), &server_error),
              MPL_PROTOCOL);
  });
  mpl_result result{};
  mpl_error error{};
  EXPECT_EQ(
      mpl_client_run(ends.client, &client.list, MPL_WRITE, MPL_ACKED, 1, nullptr, client.next.data(), &result, &error),
      MPL_CLOSED);
  serving.join();
  EXPECT_STREQ(server_error.message, "the client asked for op 2 batch 0 where op 1 batch 0 is due");
}

TEST(LimitsRun, RefusesListsThatCannotBe) {
  const Ends ends(1);
  mpl_result result{};
  uint64_t next[MPL_STREAMS_MAX] = {};
  auto run = [&](const mpl_list &list) {
    mpl_error error{};
    return mpl_client_run(ends.client, &list, MPL_WRITE, MPL_ACKED, 1, nullptr, next, &result, &error);
  };
  Side side({4096, 4096, 4096, 4096}, 1, 1, 1);
  mpl_list list = side.list;
  list.batch = 3;
  EXPECT_EQ(run(list), MPL_INVALID) << "does not divide";
  list = side.list;
  list.memory_bytes -= 1;
  EXPECT_EQ(run(list), MPL_INVALID) << "ends outside";
  list = side.list;
  list.streams = 2;
  EXPECT_EQ(run(list), MPL_INVALID) << "more streams than connections";
  side.lengths[2] = 0;
  EXPECT_EQ(run(side.list), MPL_INVALID) << "zero length";
  side.lengths[2] = INT64_MAX;
  EXPECT_EQ(run(side.list), MPL_INVALID) << "overflows";
  side.lengths[2] = 4096;
  side.offsets[1] = -1;
  EXPECT_EQ(run(side.list), MPL_INVALID) << "negative offset";
}

TEST(LimitsConnect, StrangersAreTurnedAwayAndTheRightOneIsServed) {
  mpl_error error{};
  uint16_t port = 0;
  mpl_listener *listener = nullptr;
  ASSERT_EQ(mpl_listen("127.0.0.1", 0, &listener, &port, &error), MPL_OK) << error.message;
  mpl_link *server = nullptr, *client = nullptr, *stranger = nullptr;
  std::thread accepting([&] {
    mpl_error problem{};
    EXPECT_EQ(mpl_accept(listener, kToken, 2, kTimeoutMs, &server, &problem), MPL_OK) << problem.message;
  });
  const uint8_t wrong[MPL_TOKEN_BYTES] = {9};
  EXPECT_EQ(mpl_connect("127.0.0.1", port, wrong, 2, kTimeoutMs, &stranger, &error), MPL_CLOSED);
  EXPECT_EQ(mpl_connect("127.0.0.1", port, kToken, 7, kTimeoutMs, &stranger, &error), MPL_CLOSED) << "another count";
  EXPECT_EQ(mpl_connect("127.0.0.1", port, kToken, 2, kTimeoutMs, &client, &error), MPL_OK) << error.message;
  accepting.join();
  mpl_link_free(client);
  mpl_link_free(server);
  mpl_listener_free(listener);
}

TEST(LimitsConnect, EndsWhenNobodyComes) {
  mpl_error error{};
  uint16_t port = 0;
  mpl_listener *listener = nullptr;
  ASSERT_EQ(mpl_listen("127.0.0.1", 0, &listener, &port, &error), MPL_OK);
  mpl_link *link = nullptr;
  EXPECT_EQ(mpl_accept(listener, kToken, 1, 20, &link, &error), MPL_TIMEOUT);
  std::thread aborting([&] { mpl_listener_abort(listener); });
  EXPECT_EQ(mpl_accept(listener, kToken, 1, kTimeoutMs, &link, &error), MPL_ABORTED);
  aborting.join();
  mpl_listener_free(listener);
  EXPECT_EQ(mpl_connect("127.0.0.1", port, kToken, 1, kTimeoutMs, &link, &error), MPL_SYSTEM);
  EXPECT_EQ(error.sys_errno, ECONNREFUSED);
  EXPECT_EQ(mpl_connect("not-an-address", 1, kToken, 1, kTimeoutMs, &link, &error), MPL_INVALID);
  EXPECT_EQ(mpl_connect("127.0.0.1", port, kToken, 0, kTimeoutMs, &link, &error), MPL_INVALID);
}

TEST(LimitsCopy, CopiesEveryBlockOfTheBatchesItCounts) {
  for (const size_t threads : {2, 6}) {
    std::vector<int64_t> lengths = random_lengths(400, 5000, 5);
    for (size_t i = 0; i < lengths.size(); i += 10) lengths[i] = 1'200'000;
    Side source(lengths, 10, 2, 1), destination(lengths, 10, 2, 2);
    source.fill(4);
    mpl_result result{};
    mpl_error error{};
    std::array<int64_t, 16> samples{};
    result.samples_ns = samples.data();
    result.samples_capacity = samples.size();
    ASSERT_EQ(mpl_copy_run(&destination.list, &source.list, threads, 0, nullptr, source.next.data(), &result, &error),
              MPL_OK)
        << error.message;
    EXPECT_EQ(result.batches, 2U);
    EXPECT_EQ(result.samples_count, 2U);
    EXPECT_EQ(source.next, (std::vector<uint64_t>{1, 1}));
    for (size_t block = 0; block < lengths.size(); ++block) {
      const bool copied = block % 200 < 10;
      EXPECT_TRUE(copied ? destination.block_equals(block, source) : destination.block_is_zero(block)) << block;
    }
  }
}

TEST(LimitsCopy, RefusesListsThatAreNotCutAlike) {
  Side source({8, 8, 8, 8}, 2, 1, 1), destination({8, 8, 8, 8}, 1, 1, 1), other({8, 8, 8, 16}, 2, 1, 1);
  mpl_result result{};
  mpl_error error{};
  for (Side *wrong : {&destination, &other})
    EXPECT_EQ(mpl_copy_run(&wrong->list, &source.list, 1, 0, nullptr, source.next.data(), &result, &error),
              MPL_INVALID);
  EXPECT_EQ(mpl_copy_run(&source.list, &source.list, 0, 0, nullptr, source.next.data(), &result, &error), MPL_INVALID);
}

TEST(LimitsProcess, MovesEveryBlockOfTheBatchesItCounts) {
  for (const mpl_op op : {MPL_READ, MPL_WRITE}) {
    for (const size_t threads : {2, 6}) {
      // More blocks in a batch than one call takes, and some that are cut over threads.
      std::vector<int64_t> lengths = random_lengths(4'800, 900, 5);
      for (size_t i = 0; i < lengths.size(); i += 600) lengths[i] = 1'200'000;
      Side own(lengths, 1'200, 2, 1), other(lengths, 1'200, 2, 2);
      Side &source = op == MPL_READ ? other : own, &destination = op == MPL_READ ? own : other;
      source.fill(4);
      mpl_result result{};
      mpl_error error{};
      std::array<int64_t, 16> samples{};
      result.samples_ns = samples.data();
      result.samples_capacity = samples.size();
      ASSERT_EQ(
          mpl_process_run(getpid(), &own.list, &other.list, op, threads, 0, nullptr, own.next.data(), &result, &error),
          MPL_OK)
          << error.message;
      EXPECT_EQ(result.batches, 2U);
      EXPECT_EQ(result.samples_count, 2U);
      EXPECT_EQ(own.next, (std::vector<uint64_t>{1, 1}));
      for (size_t block = 0; block < lengths.size(); ++block) {
        const bool moved = block % 2'400 < 1'200;
        EXPECT_TRUE(moved ? destination.block_equals(block, source) : destination.block_is_zero(block)) << block;
      }
    }
  }
}

TEST(LimitsProcess, MemoryThatIsNotThereIsAnError) {
  Side own({8, 8, 8, 8}, 2, 1, 1), other({8, 8, 8, 8}, 2, 1, 1);
  mpl_result result{};
  mpl_error error{};
  auto run = [&](const mpl_list &list, int op) {
    return mpl_process_run(getpid(), &own.list, &list, static_cast<mpl_op>(op), 1, 0, nullptr, own.next.data(), &result,
                           &error);
  };
  EXPECT_EQ(run(other.list, 0), MPL_INVALID);
  mpl_list list = other.list;
  list.batch = 1;
  EXPECT_EQ(run(list, MPL_READ), MPL_INVALID) << "not cut alike";
  // The first page of a process is never mapped. The first block is on it.
  list = other.list;
  list.memory = reinterpret_cast<void *>(8);
  EXPECT_EQ(run(list, MPL_READ), MPL_SYSTEM);
  EXPECT_EQ(error.sys_errno, EFAULT);
}

}  // namespace
