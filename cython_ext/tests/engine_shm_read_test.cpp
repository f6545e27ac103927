// SPDX-License-Identifier: Apache-2.0
//
// Registered memory that a client reads where it lies: a region that goes meanwhile is never believed, and what this
// process cannot read is copied by its owner.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "shm_table.hpp"
#include "support_engine.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

constexpr uint64_t kBytes = 4u << 20;

void over_shm(mp_config &config) { config.transports = "shm"; }

class EngineShmRead : public ::testing::Test {
 protected:
  void SetUp() override {
    local_ = source_.allocate(kBytes);
    peer_ = source_.connect(target_);
  }
  RegionHandle add(void *memory, uint64_t nbytes, const char *name) {
    mp_region *raw = nullptr;
    EXPECT_EQ(mp_region_register(target_.get(), memory, nbytes, name, MP_REGION_WRITABLE, &raw, nullptr), MP_OK);
    return RegionHandle(raw);
  }
  int64_t copied_by_owner() const { return target_.stat({"serving", "read_bytes"}); }

  // Before the engines, since registered memory has to outlive them.
  Bytes memory_ = Bytes(kBytes);
  TestEngine target_{over_shm}, source_{over_shm};
  RegionHandle local_;
  PeerHandle peer_;
};

class EngineShmReadRelease : public EngineShmRead, public ::testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(Digests, EngineShmReadRelease, ::testing::Bool(),
                         [](const auto &info) { return info.param ? "WithDigests" : "Without"; });

// The memory is used for something else the moment that the release returns, and registered again after that.
TEST_P(EngineShmReadRelease, WhatIsReadWhileTheRegionGoesIsRightOrRefused) {
  const RegionHandle other = target_.allocate(kBytes, "other");
  const mp_remote_region to_other = look_up(peer_, "other");
  std::atomic<int> refused{0};
  for (int round = 0; round < 40; ++round) {
    const auto byte = static_cast<uint8_t>(round + 1);
    std::fill(memory_.begin(), memory_.end(), byte);
    const std::string name = "going-" + std::to_string(round);
    const RegionHandle going = target_.add(memory_, name.c_str());
    const mp_remote_region remote = look_up(peer_, name.c_str());
    std::atomic<int> read{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&, i] {
        const RegionHandle local = source_.allocate(kBytes);
        const auto items = static_cast<int64_t>(i == 0 ? 1 : 64 * i), each = static_cast<int64_t>(kBytes) / items;
        std::vector<Item> all;
        for (int64_t item = 0; item < items; ++item) all.push_back({item * each, item * each, each});
        for (;;) {
          mp_error error{};
          const TransferHandle moving =
              submit(peer_, MP_READ, local, remote, all, {kPatienceNs, {}, GetParam()}, &error);
          if (moving == nullptr) {
            EXPECT_EQ(error.code, MP_REGION_RELEASED);
            return;
          }
          const mp_transfer_state state = finish(moving);
          const std::vector<uint8_t> ended = statuses(moving);
          for (size_t item = 0; item < ended.size(); ++item) {
            if (ended[item] != MP_OK) {
              EXPECT_EQ(ended[item], MP_REGION_RELEASED);
              continue;
            }
            const uint8_t *bytes = bytes_of(local) + all[item].local;
            ASSERT_TRUE(std::all_of(bytes, bytes + each, [&](uint8_t one) { return one == byte; }));
          }
          if (state != MP_COMPLETED) {
            refused.fetch_add(1);
            return;
          }
          read.fetch_add(1);
          // A transfer with items of several regions loses only those of the one that goes.
          EXPECT_EQ(transfer(peer_, MP_READ, local, to_other, {{0, 0, 4096}}), MP_COMPLETED);
        }
      });
    }
    EXPECT_TRUE(eventually([&] { return read.load() > round % 5; }));
    EXPECT_EQ(mp_region_release(going.get(), nullptr), MP_OK);
    std::fill(memory_.begin(), memory_.end(), uint8_t{0xee});
    for (std::thread &thread : threads) thread.join();
  }
  EXPECT_GT(refused.load(), 0);
  EXPECT_EQ(copied_by_owner(), 0);
  EXPECT_EQ(source_.stat({"paths_failed"}), 0);
}

TEST_F(EngineShmRead, AtTheSameAddressUnderTheSameNameItIsAnotherRegion) {
  uint64_t old_key = 0;
  for (int round = 0; round < 30; ++round) {
    std::fill(memory_.begin(), memory_.end(), static_cast<uint8_t>(round));
    const RegionHandle region = target_.add(memory_, "kv");
    mp_remote_region remote{};
    ASSERT_TRUE(eventually(
        [&] { return mp_peer_find_region(peer_.get(), "kv", 0, &remote, nullptr) == MP_OK && remote.key != old_key; }));
    old_key = remote.key;
    ASSERT_EQ(transfer(peer_, MP_READ, local_, remote, {{0, 0, kBytes}}), MP_COMPLETED);
    ASSERT_TRUE(std::memcmp(bytes_of(local_), memory_.data(), kBytes) == 0);
    ASSERT_EQ(mp_region_release(region.get(), nullptr), MP_OK);
    const TransferHandle late = submit(peer_, MP_READ, local_, remote, {{0, 0, 64}});
    if (late == nullptr) continue;
    EXPECT_EQ(finish(late), MP_FAILED);
    EXPECT_EQ(statuses(late), std::vector<uint8_t>{MP_REGION_RELEASED});
  }
  EXPECT_EQ(copied_by_owner(), 0);
}

TEST_F(EngineShmRead, DescriptorsOutsideOfARegionAreRefusedOneByOne) {
  std::fill(memory_.begin(), memory_.end(), uint8_t{3});
  const RegionHandle region = add(memory_.data(), kBytes / 2, "kv");
  mp_remote_region forged = look_up(peer_, "kv");
  forged.length = kBytes;
  const auto half = static_cast<int64_t>(kBytes / 2);
  const TransferHandle moving =
      submit(peer_, MP_READ, local_, forged, {{0, 0, 100}, {200, half - 1, 2}, {400, half, 1}, {600, half - 100, 100}});
  EXPECT_EQ(finish(moving), MP_FAILED);
  EXPECT_EQ(statuses(moving), (std::vector<uint8_t>{MP_OK, MP_OUT_OF_RANGE, MP_OUT_OF_RANGE, MP_OK}));
  EXPECT_EQ(bytes_of(local_)[0], 3);
  EXPECT_EQ(bytes_of(local_)[200], 0);
  EXPECT_EQ(bytes_of(local_)[400], 0);
  EXPECT_EQ(bytes_of(local_)[699], 3);
}

// The owner is asked, who says the same of every item that it cannot read either.
TEST_F(EngineShmRead, MemoryThatIsNotThereAnyMoreFailsAlone) {
  auto *space = static_cast<uint8_t *>(mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(space, MAP_FAILED);
  std::memset(space, 4, 8192);
  const RegionHandle region = add(space, 8192, "torn");
  const mp_remote_region remote = look_up(peer_, "torn");
  ASSERT_EQ(transfer(peer_, MP_READ, local_, remote, {{0, 0, 8192}}), MP_COMPLETED);
  ASSERT_EQ(munmap(space + 4096, 4096), 0);
  for (int round = 0; round < 3; ++round) {
    std::memset(bytes_of(local_), 0, 8192);
    const TransferHandle moving = submit(peer_, MP_READ, local_, remote, {{0, 0, 64}, {100, 4090, 64}, {200, 64, 64}});
    EXPECT_EQ(finish(moving), MP_FAILED);
    EXPECT_EQ(statuses(moving), (std::vector<uint8_t>{MP_OK, MP_SYSTEM, MP_OK}));
    EXPECT_EQ(bytes_of(local_)[63], 4);
    EXPECT_EQ(bytes_of(local_)[263], 4);
  }
  EXPECT_EQ(source_.stat({"paths_failed"}), 0);
  ASSERT_EQ(mp_region_release(region.get(), nullptr), MP_OK);
  munmap(space, 4096);
}

// Pages that no other process gets hold of, as those of a device.
TEST_F(EngineShmRead, MemoryThatOnlyItsOwnerCanReadIsCopiedByIt) {
  constexpr long kMemfdSecret = 447;
  const int fd = static_cast<int>(syscall(kMemfdSecret, 0));
  if (fd < 0) GTEST_SKIP() << "this kernel has no memfd_secret()";
  ASSERT_EQ(ftruncate(fd, 65536), 0);
  void *space = mmap(nullptr, 65536, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (space == MAP_FAILED) GTEST_SKIP() << "no memory may be locked here";
  std::memset(space, 6, 65536);
  const RegionHandle secret = add(space, 65536, "secret"), plain = target_.add(memory_, "plain");
  const mp_remote_region remote = look_up(peer_, "secret");
  for (const bool digest : {false, true}) {
    std::memset(bytes_of(local_), 0, 65536);
    ASSERT_EQ(transfer(peer_, MP_READ, local_, remote, {{0, 0, 65536}}, {kPatienceNs, {}, digest}), MP_COMPLETED);
    EXPECT_TRUE(std::all_of(bytes_of(local_), bytes_of(local_) + 65536, [](uint8_t one) { return one == 6; }));
  }
  EXPECT_EQ(copied_by_owner(), 2 * 65536);
  // What can be read still is.
  ASSERT_EQ(transfer(peer_, MP_READ, local_, look_up(peer_, "plain"), {{0, 0, 65536}}), MP_COMPLETED);
  EXPECT_EQ(copied_by_owner(), 2 * 65536);
  ASSERT_EQ(mp_region_release(secret.get(), nullptr), MP_OK);
  munmap(space, 65536);
}

// Regions that are read take no more than their share of the table.
TEST_F(EngineShmRead, MoreRegionsThanCanBeReadLeaveRoomForThoseThatCanBeMapped) {
  constexpr size_t kReadable = UseTable::kSlots / 2, kRegions = kReadable + 10;
  std::vector<RegionHandle> regions;
  for (size_t i = 0; i < kRegions; ++i) {
    memory_[i * 64] = static_cast<uint8_t>(i % 251);
    regions.push_back(add(&memory_[i * 64], 64, std::to_string(i).c_str()));
  }
  for (size_t i = 0; i < kRegions; ++i) {
    const mp_remote_region remote = look_up(peer_, std::to_string(i).c_str());
    ASSERT_EQ(transfer(peer_, MP_READ, local_, remote, {{0, 0, 64}}), MP_COMPLETED);
    ASSERT_EQ(bytes_of(local_)[0], i % 251);
  }
  EXPECT_EQ(copied_by_owner(), 10 * 64);
  const RegionHandle allocated = target_.allocate(4096, "allocated");
  ASSERT_EQ(transfer(peer_, MP_READ, local_, look_up(peer_, "allocated"), {{0, 0, 64}}), MP_COMPLETED);
  EXPECT_EQ(source_.stat({"regions_mapped"}), 1);
  EXPECT_EQ(source_.stat({"regions_not_mapped"}), static_cast<int64_t>(kRegions));
  mp_peer_info info;
  mp_peer_get_info(peer_.get(), &info);
  EXPECT_STREQ(info.fallback, "");
}

}  // namespace
}  // namespace moonpool
