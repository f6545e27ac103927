// SPDX-License-Identifier: Apache-2.0
//
// Bytes between engines through the C face: over every path, in one piece and scattered, with digests and
// notifications.
#include "support_engine.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

constexpr uint64_t kBytes = 24u << 20;

// All of them must behave alike. "shm" copies registered memory, "shm_mapped" memory that the target allocated.
class EngineTransfer : public ::testing::TestWithParam<const char *> {
 protected:
  EngineTransfer() {
    remote_memory_ = random_data(kBytes, 1);
    local_memory_ = random_data(kBytes, 2);
    if (mapped()) {
      remote_region_ = target_.allocate(kBytes, "kv");
      std::memcpy(bytes_of(remote_region_), remote_memory_.data(), kBytes);
    } else {
      remote_region_ = target_.add(remote_memory_, "kv");
    }
    local_region_ = source_.add(local_memory_, nullptr);
    peer_ = source_.connect(target_);
    remote_ = look_up(peer_, "kv");
  }
  static bool mapped() { return std::string(GetParam()) == "shm_mapped"; }
  static const char *path() { return mapped() ? "shm" : GetParam(); }
  static void allow(mp_config &config) { config.transports = config.require = path(); }
  uint8_t *remote_data() { return bytes_of(remote_region_); }
  Bytes remote_bytes() { return {remote_data(), remote_data() + kBytes}; }

  mp_transfer_state move(mp_op op, const std::vector<Item> &items, const SubmitOptions &options = {}) {
    return transfer(peer_, op, local_region_, remote_, items, options);
  }
  // What must have changed after `items` were moved.
  static void apply(mp_op op, const std::vector<Item> &items, Bytes *local, Bytes *remote) {
    for (const Item &item : items) {
      auto *here = local->data() + item.local, *there = remote->data() + item.remote;
      std::memcpy(op == MP_READ ? here : there, op == MP_READ ? there : here, static_cast<size_t>(item.length));
    }
  }

  // Before the engines, since registered memory has to outlive them.
  Bytes remote_memory_, local_memory_;
  TestEngine target_{[](mp_config &config) {
    allow(config);
    config.name = "target";
  }};
  TestEngine source_{[](mp_config &config) { allow(config); }};
  RegionHandle remote_region_, local_region_;
  PeerHandle peer_;
  mp_remote_region remote_;
};

INSTANTIATE_TEST_SUITE_P(Over, EngineTransfer, ::testing::Values("tcp", "local", "shm", "shm_mapped"),
                         [](const auto &info) { return std::string(info.param); });

TEST_P(EngineTransfer, UsesTheRequiredPath) {
  mp_peer_info info;
  mp_peer_get_info(peer_.get(), &info);
  EXPECT_STREQ(info.path, path());
  EXPECT_EQ(info.state, MP_PEER_READY);
  EXPECT_STREQ(info.name, "target");
  uint8_t incarnation[16];
  mp_engine_incarnation(target_.get(), incarnation);
  EXPECT_EQ(std::memcmp(info.incarnation, incarnation, sizeof incarnation), 0);
}

TEST_P(EngineTransfer, ReadsAndWritesOfAnySize) {
  for (const mp_op op : {MP_READ, MP_WRITE}) {
    for (const int64_t length : {int64_t{1}, int64_t{4096}, int64_t{1} << 20, (int64_t{17} << 20) + 13}) {
      Bytes local = local_memory_, remote = remote_bytes();
      const std::vector<Item> items = {{7, 3, length}};
      apply(op, items, &local, &remote);
      ASSERT_EQ(move(op, items), MP_COMPLETED) << op << " " << length;
      EXPECT_TRUE(local_memory_ == local) << op << " " << length;
      EXPECT_TRUE(remote_bytes() == remote) << op << " " << length;
    }
  }
}

TEST_P(EngineTransfer, ScatteredItemsLandInTheirPlaces) {
  for (uint32_t seed = 0; seed < 6; ++seed) {
    std::mt19937 random(seed);
    // Blocks of their own on both sides, in random order.
    const size_t count = 1 + random() % 3000;
    const int64_t block = static_cast<int64_t>(kBytes / count);
    std::vector<size_t> order(count);
    for (size_t i = 0; i < count; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    std::vector<Item> items;
    for (size_t i = 0; i < count; ++i) {
      const int64_t length = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(std::min<int64_t>(block, 9000)));
      items.push_back({static_cast<int64_t>(i) * block, static_cast<int64_t>(order[i]) * block, length});
    }
    for (const mp_op op : {MP_READ, MP_WRITE}) {
      SubmitOptions options;
      options.digest = seed % 2 == 1;
      Bytes local = local_memory_, remote = remote_bytes();
      apply(op, items, &local, &remote);
      ASSERT_EQ(move(op, items, options), MP_COMPLETED) << "seed " << seed;
      EXPECT_TRUE(local_memory_ == local) << "seed " << seed;
      EXPECT_TRUE(remote_bytes() == remote) << "seed " << seed;
    }
  }
}

TEST_P(EngineTransfer, DigestsAreThoseOfTheBytes) {
  const std::vector<Item> items = {{0, 0, 1}, {100, 5000, 300'000}, {1 << 20, 2 << 20, 5 << 20}};
  for (const mp_op op : {MP_READ, MP_WRITE}) {
    SubmitOptions options;
    options.digest = true;
    const TransferHandle moved = submit(peer_, op, local_region_, remote_, items, options);
    ASSERT_EQ(finish(moved), MP_COMPLETED);
    uint64_t digests[3];
    ASSERT_EQ(mp_transfer_digests(moved.get(), digests, 3), MP_OK);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(digests[i], mp_digest(local_memory_.data() + items[i].local, static_cast<uint64_t>(items[i].length)))
          << op << " item " << i;
    }
  }
  const TransferHandle without = submit(peer_, MP_READ, local_region_, remote_, items);
  ASSERT_EQ(finish(without), MP_COMPLETED);
  uint64_t digest = 0;
  EXPECT_EQ(mp_transfer_digests(without.get(), &digest, 1), MP_INVALID_ARGUMENT);
}

TEST_P(EngineTransfer, ANotificationComesAfterItsBytes) {
  for (int round = 0; round < 200; ++round) {
    const Item item = {round * 1000, round * 2000, 1000};
    SubmitOptions options;
    options.notify = "round " + std::to_string(round);
    const TransferHandle moved = submit(peer_, MP_WRITE, local_region_, remote_, {item}, options);
    mp_notification got;
    ASSERT_EQ(mp_notification_take(target_.get(), kPatienceNs, &got), MP_OK) << round;
    // Looked at before the sender knows that it is complete.
    EXPECT_EQ(std::memcmp(remote_data() + item.remote, local_memory_.data() + item.local, 1000), 0) << round;
    EXPECT_EQ(std::string(reinterpret_cast<char *>(got.payload), got.payload_bytes), options.notify);
    mp_notification_clear(&got);
    ASSERT_EQ(finish(moved), MP_COMPLETED);
  }
}

// A waiter drives the lane of a small transfer itself, but the last word comes over the control connection.
TEST_P(EngineTransfer, AWaiterHearsOfANotificationThatWasTaken) {
  SubmitOptions options;
  options.notify = "done";
  for (int round = 0; round < 100; ++round) {
    const TransferHandle moved = submit(peer_, MP_WRITE, local_region_, remote_, {{0, 0, 4096}}, options);
    ASSERT_EQ(mp_transfer_wait(moved.get(), kPatienceNs), MP_OK) << round;
    ASSERT_EQ(mp_transfer_get_state(moved.get()), MP_COMPLETED);
  }
}

// Little enough that a waiter drives a lane itself, and more descriptors than one frame holds.
TEST_P(EngineTransfer, AWaiterHearsOfAnEndOnAnotherLane) {
  std::vector<Item> items;
  for (int64_t i = 0; i < 5000; ++i) items.push_back({i * 64, i * 128, 64});
  for (int round = 0; round < 30; ++round) {
    const TransferHandle moved = submit(peer_, round % 2 == 0 ? MP_READ : MP_WRITE, local_region_, remote_, items);
    ASSERT_EQ(mp_transfer_wait(moved.get(), kPatienceNs), MP_OK) << round;
    ASSERT_EQ(mp_transfer_get_state(moved.get()), MP_COMPLETED);
  }
}

TEST_P(EngineTransfer, PlansArePostedWholeAndInParts) {
  std::vector<Item> items;
  for (int64_t i = 0; i < 50; ++i) items.push_back({i * 4096, (49 - i) * 8192, 4096});
  mp_region *locals[1] = {local_region_.get()};
  const mp_remote_region *remotes[1] = {&remote_};
  mp_batch batch{};
  batch.count = items.size();
  batch.local_offsets = &items[0].local;
  batch.remote_offsets = &items[0].remote;
  batch.lengths = &items[0].length;
  batch.local_offsets_stride = batch.remote_offsets_stride = batch.lengths_stride = 3;
  batch.locals = locals;
  batch.remotes = remotes;
  batch.locals_count = batch.remotes_count = 1;
  mp_plan *raw = nullptr;
  mp_error error;
  ASSERT_EQ(mp_plan_create(peer_.get(), &batch, &raw, &error), MP_OK) << error.message;
  const PlanHandle plan(raw);
  EXPECT_EQ(mp_plan_count(plan.get()), 50u);

  const auto post = [&](mp_op op, const std::vector<int64_t> &indices) {
    mp_transfer *out = nullptr;
    const mp_status status =
        mp_plan_post(plan.get(), op, indices.empty() ? nullptr : indices.data(), indices.size(), nullptr, &out, &error);
    EXPECT_EQ(status, MP_OK) << error.message;
    return TransferHandle(out);
  };
  Bytes local = local_memory_, remote = remote_bytes();
  apply(MP_WRITE, items, &local, &remote);
  ASSERT_EQ(finish(post(MP_WRITE, {})), MP_COMPLETED);
  EXPECT_TRUE(remote_bytes() == remote);

  const std::vector<int64_t> some = {3, 4, 5, 49, 0};
  const Bytes fresh = random_data(kBytes, 77);
  std::copy(fresh.begin(), fresh.end(), remote_data());
  Bytes fresh_remote = fresh;
  for (const int64_t index : some) apply(MP_READ, {items[static_cast<size_t>(index)]}, &local, &fresh_remote);
  ASSERT_EQ(finish(post(MP_READ, some)), MP_COMPLETED);
  EXPECT_TRUE(local_memory_ == local);

  const TransferHandle with_bad = post(MP_READ, {1, 50, -1, 2});
  EXPECT_EQ(finish(with_bad), MP_FAILED);
  EXPECT_EQ(statuses(with_bad), (std::vector<uint8_t>{MP_OK, MP_OUT_OF_RANGE, MP_OUT_OF_RANGE, MP_OK}));
}

TEST_P(EngineTransfer, TransfersOfSeveralThreadsAllComplete) {
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const int64_t base = t * (4 << 20);
      for (int64_t i = 0; i < 60; ++i) {
        const int64_t length = i % 10 == 0 ? 3 << 20 : 4096;
        const mp_op op = i % 3 == 0 ? MP_WRITE : MP_READ;
        EXPECT_EQ(move(op, {{base, base, length}}), MP_COMPLETED);
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  EXPECT_TRUE(std::equal(local_memory_.begin(), local_memory_.begin() + (1 << 20), remote_data()));
}

TEST_P(EngineTransfer, CountsWhatItMoved) {
  const std::string over = path();
  ASSERT_EQ(move(MP_READ, {{0, 0, 1000}}), MP_COMPLETED);
  ASSERT_EQ(move(MP_WRITE, {{0, 0, 3000}}), MP_COMPLETED);
  EXPECT_EQ(source_.stat({"paths", over, "completed"}), 2);
  EXPECT_EQ(source_.stat({"paths", over, "read_bytes"}), 1000);
  EXPECT_EQ(source_.stat({"paths", over, "written_bytes"}), 3000);
  EXPECT_EQ(source_.stat({"transfers_running"}), 0);
  EXPECT_EQ(target_.stat({"serving", "sessions"}), 1);
}

// From C and from Python, so without the words of one of the two.
TEST(EngineCalls, WhatIsImpossibleIsRefusedWithWhatToDo) {
  const TestEngine engine;
  uint8_t byte = 0;
  mp_region *region = nullptr;
  mp_error error;
  const auto refused = [&](mp_status status, const std::string &message) {
    EXPECT_EQ(status, MP_INVALID_ARGUMENT) << message;
    EXPECT_EQ(region, nullptr);
    EXPECT_NE(std::string(error.message).find(message), std::string::npos) << error.message;
    EXPECT_STRNE(error.hint, "") << message;
    EXPECT_EQ(std::string(error.hint).find("None"), std::string::npos) << error.hint;
  };
  refused(mp_region_register(engine.get(), &byte, 1, nullptr, 64, &region, &error), "unknown region flags");
  refused(mp_region_register(engine.get(), &byte, 1, "", 0, &region, &error), "a region name has");
  mp_allocation allocation;
  mp_allocation_init(&allocation);
  allocation.flags = MP_REGION_SHARED;
  refused(mp_region_allocate(engine.get(), 1, nullptr, &allocation, &region, &error), "unknown region flags");
  mp_allocation_init(&allocation);
  allocation.huge_pages = 7;
  refused(mp_region_allocate(engine.get(), 1, nullptr, &allocation, &region, &error), "huge_pages");
}

}  // namespace
}  // namespace moonpool
