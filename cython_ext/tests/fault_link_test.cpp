// SPDX-License-Identifier: Apache-2.0
//
// Engines with injected faults keep every promise that a transfer makes.
#include <algorithm>

#include "moonpool/testing.h"
#include "support_engine.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

constexpr uint64_t kBytes = 4u << 20;

class FaultLinkTest : public ::testing::TestWithParam<const char *> {
 protected:
  FaultLinkTest() {
    mp_faults_init(&faults_);
    mp_config config;
    mp_config_init(&config);
    config.transports = GetParam();
    EXPECT_EQ(mp_testing_open(&config, &faults_, &source_, nullptr), MP_OK);
    mp_region *raw = nullptr;
    EXPECT_EQ(mp_region_register(source_, local_memory_.data(), kBytes, nullptr, MP_REGION_WRITABLE, &raw, nullptr),
              MP_OK);
    local_region_.reset(raw);
    mp_peer *peer = nullptr;
    EXPECT_EQ(mp_peer_connect(source_, target_.address().c_str(), 0, nullptr, nullptr, &peer, nullptr), MP_OK);
    peer_.reset(peer);
    remote_ = look_up(peer_, "kv");
  }
  ~FaultLinkTest() override {
    peer_.reset();
    local_region_.reset();
    mp_engine_free(source_);
  }

  // Sets one of the probabilities to 1.
  void always(double mp_faults::*fault) {
    faults_.*fault = 1.0;
    ASSERT_EQ(mp_testing_set_faults(source_, &faults_, nullptr), MP_OK);
  }
  TransferHandle begin(mp_op op, const std::vector<Item> &items, const SubmitOptions &options = {}) {
    return submit(peer_, op, local_region_, remote_, items, options);
  }
  mp_faults_made made() const {
    mp_faults_made made{};
    EXPECT_EQ(mp_testing_faults_made(source_, &made, nullptr), MP_OK);
    return made;
  }
  size_t notifications_at_target() {
    size_t count = 0;
    mp_notification taken;
    while (mp_notification_take(target_.get(), 0, &taken) == MP_OK) {
      mp_notification_clear(&taken);
      ++count;
    }
    return count;
  }

  Bytes remote_memory_ = random_data(kBytes, 1), local_memory_ = random_data(kBytes, 2);
  TestEngine target_{[](mp_config &config) { config.transports = GetParam(); }};
  RegionHandle remote_region_ = target_.add(remote_memory_, "kv");
  mp_faults faults_{};
  mp_engine *source_ = nullptr;
  RegionHandle local_region_;
  PeerHandle peer_;
  mp_remote_region remote_;
};

INSTANTIATE_TEST_SUITE_P(Over, FaultLinkTest, ::testing::Values("tcp", "local"),
                         [](const auto &info) { return std::string(info.param); });

const std::vector<Item> kScattered = {{0, 64, 4096}, {8192, 16384, 4096}, {65536, 131072, 4096}, {1 << 20, 0, 64}};

TEST_P(FaultLinkTest, WithoutFaultsEverythingIsMoved) {
  for (const mp_op op : {MP_READ, MP_WRITE}) {
    for (const bool digest : {false, true}) {
      SubmitOptions options;
      options.digest = digest;
      options.notify = "arrived";
      EXPECT_EQ(finish(begin(op, {{0, 0, kBytes}}, options)), MP_COMPLETED);
      EXPECT_TRUE(local_memory_ == remote_memory_);
      EXPECT_EQ(notifications_at_target(), 1u);
    }
    // In place: the memory is registered.
    std::ranges::copy(random_data(kBytes, 3), local_memory_.begin());
  }
}

TEST_P(FaultLinkTest, AnErrorFailsTheWholeTransferAndMovesNothing) {
  faults_.error_status = MP_CONNECT;
  always(&mp_faults::error);
  const Bytes before = remote_memory_;
  SubmitOptions options;
  options.notify = "never";
  const TransferHandle transfer = begin(MP_WRITE, kScattered, options);
  EXPECT_EQ(finish(transfer), MP_FAILED);
  EXPECT_EQ(statuses(transfer), std::vector<uint8_t>(kScattered.size(), MP_CONNECT));
  EXPECT_EQ(error_of(transfer).code, MP_CONNECT);
  EXPECT_STREQ(error_of(transfer).path, GetParam());
  EXPECT_TRUE(remote_memory_ == before);
  EXPECT_EQ(notifications_at_target(), 0u);
  EXPECT_EQ(made().failed, 1u);
}

TEST_P(FaultLinkTest, ADroppedTransferEndsByItsDeadline) {
  always(&mp_faults::drop);
  SubmitOptions options;
  options.deadline_ns = 50'000'000;
  const TransferHandle transfer = begin(MP_WRITE, kScattered, options);
  EXPECT_EQ(finish(transfer), MP_EXPIRED);
  EXPECT_EQ(error_of(transfer).code, MP_DEADLINE);
}

TEST_P(FaultLinkTest, ADroppedTransferOwnsItsBuffersUntilItIsCancelled) {
  always(&mp_faults::drop);
  const TransferHandle transfer = begin(MP_READ, kScattered);
  EXPECT_EQ(mp_transfer_wait(transfer.get(), 10'000'000), MP_WAIT_TIMEOUT);
  EXPECT_EQ(mp_region_release(local_region_.get(), nullptr), MP_REGION_BUSY);
  EXPECT_EQ(mp_transfer_cancel(transfer.get(), kPatienceNs), MP_OK);
  EXPECT_EQ(mp_transfer_get_state(transfer.get()), MP_STOPPED);
  EXPECT_EQ(mp_region_release(local_region_.get(), nullptr), MP_OK);
}

TEST_P(FaultLinkTest, ADroppedTransferEndsWithItsPeerAndItsEngine) {
  always(&mp_faults::drop);
  const TransferHandle first = begin(MP_READ, kScattered);
  EXPECT_EQ(mp_peer_close(peer_.get(), nullptr), MP_OK);
  EXPECT_NE(finish(first), MP_RUNNING);
  mp_peer *peer = nullptr;
  ASSERT_EQ(mp_peer_connect(source_, target_.address().c_str(), 0, nullptr, nullptr, &peer, nullptr), MP_OK);
  peer_.reset(peer);
  const TransferHandle second = begin(MP_READ, kScattered);
  EXPECT_EQ(mp_engine_close(source_, nullptr), MP_OK);
  EXPECT_EQ(finish(second), MP_STOPPED);
}

TEST_P(FaultLinkTest, ADelayedTransferIsMovedLater) {
  faults_.delay_min_us = 20'000;
  faults_.delay_max_us = 30'000;
  always(&mp_faults::delay);
  const int64_t start = now_ns();
  EXPECT_EQ(finish(begin(MP_READ, {{0, 0, kBytes}})), MP_COMPLETED);
  EXPECT_GE(now_ns() - start, 20'000'000);
  EXPECT_TRUE(local_memory_ == remote_memory_);
  EXPECT_EQ(made().delayed, 1u);
}

TEST_P(FaultLinkTest, ADelayedTransferCanBeCancelled) {
  faults_.delay_min_us = faults_.delay_max_us = 3'600'000'000u;
  always(&mp_faults::delay);
  const Bytes before = local_memory_;
  const TransferHandle transfer = begin(MP_READ, {{0, 0, kBytes}});
  EXPECT_EQ(mp_transfer_cancel(transfer.get(), kPatienceNs), MP_OK);
  EXPECT_EQ(mp_transfer_get_state(transfer.get()), MP_STOPPED);
  EXPECT_TRUE(local_memory_ == before);
}

TEST_P(FaultLinkTest, APartialTransferMovesTheRestAndSaysWhich) {
  faults_.partial_status = MP_REGION_RELEASED;
  always(&mp_faults::partial);
  SubmitOptions options;
  options.notify = "never";
  for (const mp_op op : {MP_READ, MP_WRITE}) {
    const Bytes local = local_memory_, remote = remote_memory_;
    const TransferHandle transfer = begin(op, kScattered, options);
    EXPECT_EQ(finish(transfer), MP_FAILED);
    const std::vector<uint8_t> status = statuses(transfer);
    size_t failed = 0;
    for (size_t i = 0; i < kScattered.size(); ++i) {
      const Item &item = kScattered[i];
      const uint8_t *from = op == MP_READ ? remote.data() + item.remote : local.data() + item.local;
      const uint8_t *now = op == MP_READ ? local_memory_.data() + item.local : remote_memory_.data() + item.remote;
      const uint8_t *old = op == MP_READ ? local.data() + item.local : remote.data() + item.remote;
      failed += status[i] == MP_REGION_RELEASED;
      EXPECT_TRUE(status[i] == MP_OK || status[i] == MP_REGION_RELEASED) << int{status[i]};
      EXPECT_EQ(std::memcmp(now, status[i] == MP_OK ? from : old, static_cast<size_t>(item.length)), 0) << i;
    }
    EXPECT_GE(failed, 1u);
  }
  EXPECT_EQ(notifications_at_target(), 0u);
  EXPECT_EQ(made().partial, 2u);
}

size_t bits_that_differ(const Bytes &a, const Bytes &b) {
  size_t bits = 0;
  for (size_t i = 0; i < a.size(); ++i) bits += static_cast<size_t>(__builtin_popcount(a[i] ^ b[i]));
  return bits;
}

TEST_P(FaultLinkTest, ACorruptedBitIsSilentWithoutADigest) {
  always(&mp_faults::corrupt);
  for (const mp_op op : {MP_READ, MP_WRITE}) {
    const Bytes source = op == MP_READ ? remote_memory_ : local_memory_;
    EXPECT_EQ(finish(begin(op, {{0, 0, kBytes}})), MP_COMPLETED);
    EXPECT_EQ(bits_that_differ(local_memory_, remote_memory_), 1u);
    EXPECT_TRUE((op == MP_READ ? remote_memory_ : local_memory_) == source);
  }
}

TEST_P(FaultLinkTest, ACorruptedBitIsFoundByTheDigest) {
  always(&mp_faults::corrupt);
  SubmitOptions options;
  options.digest = true;
  options.notify = "never";
  for (const mp_op op : {MP_READ, MP_WRITE}) {
    const TransferHandle transfer = begin(op, kScattered, options);
    EXPECT_EQ(finish(transfer), MP_FAILED);
    const std::vector<uint8_t> status = statuses(transfer);
    EXPECT_EQ(std::count(status.begin(), status.end(), MP_DIGEST), 1);
    EXPECT_EQ(std::count(status.begin(), status.end(), MP_OK), static_cast<ptrdiff_t>(kScattered.size()) - 1);
  }
  EXPECT_EQ(notifications_at_target(), 0u);
}

TEST_P(FaultLinkTest, TheSeedDecides) {
  faults_.partial = faults_.error = faults_.corrupt = 0.4;
  faults_.drop = 0.0;
  const auto run = [&](uint64_t seed) {
    faults_.seed = seed;
    EXPECT_EQ(mp_testing_set_faults(source_, &faults_, nullptr), MP_OK);
    std::vector<std::vector<uint8_t>> outcome;
    for (int i = 0; i < 40; ++i) {
      const TransferHandle transfer = begin(MP_READ, kScattered);
      EXPECT_NE(finish(transfer), MP_RUNNING);
      outcome.push_back(statuses(transfer));
    }
    return outcome;
  };
  const auto first = run(1);
  EXPECT_EQ(run(1), first);
  EXPECT_NE(run(2), first);
}

TEST_P(FaultLinkTest, EverythingAtOnceEndsAndGivesItsBuffersBack) {
  faults_.delay = faults_.partial = faults_.corrupt = 0.3;
  faults_.drop = faults_.error = 0.1;
  ASSERT_EQ(mp_testing_set_faults(source_, &faults_, nullptr), MP_OK);
  std::mt19937 random(7);
  for (int round = 0; round < 20; ++round) {
    std::vector<TransferHandle> transfers;
    for (int i = 0; i < 16; ++i) {
      SubmitOptions options;
      options.deadline_ns = 200'000'000;
      options.digest = random() % 2 == 0;
      if (random() % 2 == 0) options.notify = "n";
      transfers.push_back(begin(random() % 2 == 0 ? MP_READ : MP_WRITE, {{i * 65536, i * 65536, 65536}}, options));
    }
    for (size_t i = 0; i < transfers.size(); i += 3) mp_transfer_cancel(transfers[i].get(), 0);
    for (const TransferHandle &transfer : transfers) EXPECT_NE(finish(transfer), MP_RUNNING);
  }
  EXPECT_EQ(mp_region_release(local_region_.get(), nullptr), MP_OK);
}

TEST(FaultRules, AreStrict) {
  mp_faults faults;
  mp_config config;
  mp_config_init(&config);
  const auto refused = [&](auto change) {
    mp_faults_init(&faults);
    change();
    mp_engine *engine = nullptr;
    EXPECT_EQ(mp_testing_open(&config, &faults, &engine, nullptr), MP_CONFIG);
  };
  refused([&] { faults.abi_version = 0; });
  refused([&] { faults.delay = -0.1; });
  refused([&] { faults.corrupt = 1.1; });
  refused([&] { faults.drop = __builtin_nan(""); });
  refused([&] { faults.delay_min_us = 20'000; });
  refused([&] { faults.error_status = MP_OK; });
  refused([&] { faults.partial_status = MP_WAIT_TIMEOUT; });
}

TEST(FaultRules, AreNotForOtherEngines) {
  TestEngine engine;
  mp_faults faults;
  mp_faults_init(&faults);
  mp_faults_made made;
  EXPECT_EQ(mp_testing_set_faults(engine.get(), &faults, nullptr), MP_INVALID_ARGUMENT);
  EXPECT_EQ(mp_testing_faults_made(engine.get(), &made, nullptr), MP_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace moonpool
