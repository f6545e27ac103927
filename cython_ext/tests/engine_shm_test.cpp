// SPDX-License-Identifier: Apache-2.0
//
// Two engines over shm: every byte in its place, whoever copies it, and regions that go while they are used.
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "shm_table.hpp"
#include "support_engine.hpp"
#include "support_peek.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

constexpr uint64_t kBytes = 4u << 20;

void over_shm(mp_config &config) { config.transports = "shm"; }

RegionHandle allocate_read_only(const TestEngine &engine, uint64_t nbytes, const char *name) {
  mp_allocation wanted;
  mp_allocation_init(&wanted);
  wanted.flags = 0;
  mp_region *region = nullptr;
  EXPECT_EQ(mp_region_allocate(engine.get(), nbytes, name, &wanted, &region, nullptr), MP_OK);
  return RegionHandle(region);
}

void fill(const RegionHandle &region, const Bytes &data) { std::memcpy(bytes_of(region), data.data(), data.size()); }
bool holds(const RegionHandle &region, const Bytes &data) {
  return std::memcmp(bytes_of(region), data.data(), data.size()) == 0;
}

class EngineShm : public ::testing::Test {
 protected:
  void SetUp() override {
    mapped_ = target_.allocate(kBytes, "mapped");
    fill(mapped_, random_data(kBytes, 1));
    copied_ = target_.add(memory_, "copied");
    local_ = source_.allocate(kBytes);
    peer_ = source_.connect(target_);
    to_mapped_ = look_up(peer_, "mapped");
    to_copied_ = look_up(peer_, "copied");
  }

  // Before the engines, since registered memory has to outlive them.
  Bytes memory_ = random_data(kBytes, 2), local_memory_ = Bytes(kBytes);
  TestEngine target_{over_shm}, source_{over_shm};
  RegionHandle mapped_, copied_, local_;
  PeerHandle peer_;
  mp_remote_region to_mapped_, to_copied_;
};

TEST_F(EngineShm, ARegionIsMappedOnceAndForgottenWithItsRelease) {
  for (int round = 0; round < 20; ++round) {
    ASSERT_EQ(transfer(peer_, MP_READ, local_, to_mapped_, {{0, 0, kBytes}}), MP_COMPLETED);
    ASSERT_EQ(transfer(peer_, MP_WRITE, local_, to_mapped_, {{0, 0, 64}}), MP_COMPLETED);
  }
  EXPECT_TRUE(holds(local_, random_data(kBytes, 1)));
  EXPECT_EQ(source_.stat({"regions_mapped"}), 1);
  EXPECT_EQ(source_.stat({"regions_not_mapped"}), 0);
  EXPECT_EQ(target_.stat({"serving", "read_bytes"}), 0) << "its owner had nothing to do";
  ASSERT_EQ(mp_region_release(mapped_.get(), nullptr), MP_OK);
  EXPECT_TRUE(eventually([&] { return source_.stat({"regions_mapped"}) == 0; }));
}

// Although this engine has nothing to do that would wake its threads.
TEST_F(EngineShm, TheEndOfTheOwnerEndsItsMappings) {
  ASSERT_EQ(transfer(peer_, MP_READ, local_, to_mapped_, {{0, 0, kBytes}}), MP_COMPLETED);
  ASSERT_EQ(source_.stat({"regions_mapped"}), 1);
  target_.close();
  EXPECT_TRUE(eventually([&] { return source_.stat({"regions_mapped"}) == 0; }));
}

TEST_F(EngineShm, RegisteredMemoryIsReadFromHereAndWrittenByItsOwner) {
  ASSERT_EQ(transfer(peer_, MP_READ, local_, to_copied_, {{0, 0, kBytes}}), MP_COMPLETED);
  EXPECT_TRUE(holds(local_, memory_));
  fill(local_, random_data(kBytes, 3));
  ASSERT_EQ(transfer(peer_, MP_WRITE, local_, to_copied_, {{0, 0, kBytes}}), MP_COMPLETED);
  EXPECT_TRUE(memory_ == random_data(kBytes, 3));
  EXPECT_EQ(source_.stat({"regions_mapped"}), 0);
  EXPECT_EQ(source_.stat({"regions_not_mapped"}), 1);
  EXPECT_EQ(target_.stat({"serving", "read_bytes"}), 0);
  EXPECT_EQ(target_.stat({"serving", "written_bytes"}), static_cast<int64_t>(kBytes));
}

struct Kinds {
  bool remote_allocated, local_allocated, digest;
};
class EngineShmKinds : public EngineShm, public ::testing::WithParamInterface<Kinds> {};

INSTANTIATE_TEST_SUITE_P(Memory, EngineShmKinds,
                         ::testing::Values(Kinds{true, true, false}, Kinds{true, true, true}, Kinds{true, false, false},
                                           Kinds{true, false, true}, Kinds{false, true, false},
                                           Kinds{false, true, true}, Kinds{false, false, false},
                                           Kinds{false, false, true}),
                         [](const auto &info) {
                           const Kinds &kinds = info.param;
                           return std::string(kinds.remote_allocated ? "Allocated" : "Registered") + "To" +
                                  (kinds.local_allocated ? "Allocated" : "Registered") +
                                  (kinds.digest ? "WithDigests" : "");
                         });

// Random pieces that do not overlap, from one byte to several leaves, in random order.
TEST_P(EngineShmKinds, EveryByteOfARandomBatchAndNoOther) {
  const RegionHandle registered = source_.add(local_memory_, nullptr);
  const RegionHandle &local = GetParam().local_allocated ? local_ : registered;
  const RegionHandle &region = GetParam().remote_allocated ? mapped_ : copied_;
  const mp_remote_region &remote = GetParam().remote_allocated ? to_mapped_ : to_copied_;
  const SubmitOptions options{kPatienceNs, {}, GetParam().digest};
  std::mt19937 random(4);
  for (const mp_op op : {MP_READ, MP_WRITE}) {
    for (int round = 0; round < 6; ++round) {
      std::vector<Item> items;
      const int64_t longest = round % 3 == 0 ? 100 : round % 3 == 1 ? 5000 : 700'000;
      int64_t at = 0;
      for (;;) {
        const int64_t length = 1 + static_cast<int64_t>(random() % static_cast<uint32_t>(longest));
        at += static_cast<int64_t>(random() % 50);
        if (at + length > static_cast<int64_t>(kBytes) || items.size() == 3000) break;
        items.push_back({at, 0, length});
        at += length;
      }
      std::vector<size_t> order(items.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = i;
      std::shuffle(order.begin(), order.end(), random);
      int64_t there = 0;
      for (const size_t i : order) {
        items[i].remote = there;
        there += items[i].length;
      }
      const Bytes ours = random_data(kBytes, random()), theirs = random_data(kBytes, random());
      fill(local, ours);
      fill(region, theirs);
      Bytes wanted = op == MP_READ ? ours : theirs;
      for (const Item &item : items) {
        if (op == MP_READ) std::memcpy(&wanted[item.local], &theirs[item.remote], item.length);
        if (op == MP_WRITE) std::memcpy(&wanted[item.remote], &ours[item.local], item.length);
      }
      const TransferHandle moving = submit(peer_, op, local, remote, items, options);
      ASSERT_EQ(finish(moving), MP_COMPLETED) << error_of(moving).message;
      ASSERT_TRUE(holds(op == MP_READ ? local : region, wanted));
      ASSERT_TRUE(holds(op == MP_READ ? region : local, op == MP_READ ? theirs : ours));
      if (!GetParam().digest) continue;
      std::vector<uint64_t> digests(items.size());
      ASSERT_EQ(mp_transfer_digests(moving.get(), digests.data(), digests.size()), MP_OK);
      for (size_t i = 0; i < items.size(); ++i) {
        const uint8_t *source = op == MP_READ ? &theirs[items[i].remote] : &ours[items[i].local];
        ASSERT_EQ(digests[i], mp_digest(source, static_cast<uint64_t>(items[i].length))) << i;
      }
    }
  }
}

// One transfer, some of whose items this side copies and some the other.
TEST_F(EngineShm, BothKindsOfRegionsInOneBatch) {
  std::vector<int64_t> offsets;
  std::vector<uint32_t> which;
  for (int64_t i = 0; i < 64; ++i) {
    offsets.push_back(i * 65536);
    which.push_back(static_cast<uint32_t>(i % 2));
  }
  const int64_t length = 65536;
  mp_region *locals[1] = {local_.get()};
  const mp_remote_region *remotes[2] = {&to_mapped_, &to_copied_};
  const mp_batch batch{offsets.size(), offsets.data(), 1, offsets.data(), 1, &length, 0, locals, 1,
                       nullptr,        remotes,        2, which.data()};
  for (const mp_op op : {MP_READ, MP_WRITE}) {
    for (const int32_t digest : {0, 1}) {
      fill(local_, random_data(kBytes, 7));
      const Bytes mapped_before(bytes_of(mapped_), bytes_of(mapped_) + kBytes), copied_before = memory_;
      mp_options options{};
      options.digest = digest;
      mp_transfer *out = nullptr;
      ASSERT_EQ(mp_submit(peer_.get(), op, &batch, &options, &out, nullptr), MP_OK);
      ASSERT_EQ(finish(TransferHandle(out)), MP_COMPLETED);
      for (size_t i = 0; i < offsets.size(); ++i) {
        const uint8_t *ours = bytes_of(local_) + offsets[i];
        const uint8_t *theirs = (which[i] == 0 ? bytes_of(mapped_) : memory_.data()) + offsets[i];
        EXPECT_EQ(std::memcmp(ours, theirs, 65536), 0) << i;
        const uint8_t *others = (which[i] == 0 ? memory_.data() : bytes_of(mapped_)) + offsets[i];
        const Bytes &untouched = which[i] == 0 ? copied_before : mapped_before;
        EXPECT_EQ(std::memcmp(others, untouched.data() + offsets[i], 65536), 0) << i;
      }
    }
  }
}

TEST_F(EngineShm, ARegionThatPeersMayOnlyReadIsNotWritten) {
  const RegionHandle constant = allocate_read_only(target_, kBytes, "constant");
  fill(constant, random_data(kBytes, 5));
  const mp_remote_region remote = look_up(peer_, "constant");
  ASSERT_EQ(transfer(peer_, MP_READ, local_, remote, {{0, 0, kBytes}}), MP_COMPLETED);
  EXPECT_TRUE(holds(local_, random_data(kBytes, 5)));
  EXPECT_EQ(source_.stat({"regions_mapped"}), 1);
  mp_error error;
  EXPECT_EQ(submit(peer_, MP_WRITE, local_, remote, {{0, 0, 8}}, {}, &error), nullptr);
  EXPECT_EQ(error.code, MP_REGION_READ_ONLY);
  // A client that takes it for writable is refused as well, and not by a fault.
  mp_remote_region forged = remote;
  forged.flags |= MP_REGION_WRITABLE;
  const TransferHandle moving = submit(peer_, MP_WRITE, local_, forged, {{0, 0, 8}, {8, 8, 1 << 20}});
  EXPECT_EQ(finish(moving), MP_FAILED);
  EXPECT_EQ(statuses(moving), (std::vector<uint8_t>{MP_REGION_READ_ONLY, MP_REGION_READ_ONLY}));
  EXPECT_TRUE(holds(constant, random_data(kBytes, 5)));
}

TEST_F(EngineShm, ARegionThatIsReleasedAndThereAgainUnderItsName) {
  for (int round = 0; round < 30; ++round) {
    const bool allocated = round % 3 != 2;
    ASSERT_EQ(mp_region_release(mapped_.get(), nullptr), MP_OK);
    const TransferHandle old = submit(peer_, MP_READ, local_, to_mapped_, {{0, 0, 64}});
    EXPECT_EQ(finish(old), MP_FAILED);
    EXPECT_EQ(statuses(old), std::vector<uint8_t>{MP_REGION_RELEASED});
    const uint64_t old_key = to_mapped_.key;
    mapped_ = allocated ? target_.allocate(kBytes, "mapped") : target_.add(local_memory_, "mapped");
    const Bytes content = random_data(kBytes, static_cast<uint32_t>(round));
    fill(mapped_, content);
    ASSERT_TRUE(eventually([&] {
      mp_remote_region found{};
      const bool there = mp_peer_find_region(peer_.get(), "mapped", 0, &found, nullptr) == MP_OK;
      if (there) to_mapped_ = found;
      return there && found.key != old_key;
    }));
    ASSERT_EQ(transfer(peer_, MP_READ, local_, to_mapped_, {{0, 0, kBytes}}), MP_COMPLETED);
    ASSERT_TRUE(holds(local_, content));
  }
  EXPECT_TRUE(eventually([&] { return source_.stat({"regions_mapped"}) <= 1; }));
}

class EngineShmRelease : public EngineShm, public ::testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(Memory, EngineShmRelease, ::testing::Bool(),
                         [](const auto &info) { return info.param ? "Allocated" : "Registered"; });

TEST_P(EngineShmRelease, NothingIsWrittenAfterItAndTheOthersGoOn) {
  const bool allocated = GetParam();
  for (int round = 0; round < 15; ++round) {
    Bytes memory(kBytes, 0);
    // A name of its own: the peer hears of the last one's end a moment later.
    const std::string name = "going-" + std::to_string(round);
    const RegionHandle going = allocated ? target_.allocate(kBytes, name.c_str()) : target_.add(memory, name.c_str());
    const mp_remote_region remote = look_up(peer_, name.c_str());
    std::memset(bytes_of(local_), 0xee, kBytes);
    std::vector<Item> items;
    for (int64_t at = 0; at < static_cast<int64_t>(kBytes); at += 65536) items.push_back({at, at, 65536});
    std::vector<TransferHandle> moving;
    // Each writes bytes of its own: what several write at once is a race of the application.
    constexpr size_t kTransfers = 8;
    const size_t each = items.size() / kTransfers;
    for (size_t i = 0; i < kTransfers; ++i) {
      const auto first = items.begin() + static_cast<ptrdiff_t>(i * each);
      const auto at = static_cast<int64_t>(4096 * i);
      moving.push_back(submit(peer_, MP_WRITE, local_, remote, {first, first + static_cast<ptrdiff_t>(each)}));
      moving.push_back(submit(peer_, MP_WRITE, local_, to_copied_, {{at, at, 4096}}));
      moving.push_back(submit(peer_, MP_WRITE, local_, to_mapped_, {{at, at, 4096}}));
    }
    // At another moment in each round: after some of it is there.
    const size_t reached = static_cast<size_t>(round) * (kBytes / 16);
    ASSERT_TRUE(eventually([&] { return peek(bytes_of(going) + reached) == 0xee; }));
    ASSERT_EQ(mp_region_release(going.get(), nullptr), MP_OK);
    std::memset(bytes_of(going), 7, kBytes);
    for (size_t i = 0; i < moving.size(); ++i) {
      const mp_transfer_state state = finish(moving[i]);
      if (i % 3 != 0) {
        EXPECT_EQ(state, MP_COMPLETED) << error_of(moving[i]).message;
        continue;
      }
      EXPECT_NE(state, MP_RUNNING);
      for (const uint8_t status : statuses(moving[i])) {
        EXPECT_TRUE(status == MP_OK || status == MP_REGION_RELEASED) << int{status};
      }
    }
    const uint8_t *bytes = bytes_of(going);
    EXPECT_TRUE(std::all_of(bytes, bytes + kBytes, [](uint8_t byte) { return byte == 7; }));
  }
}

// With more regions than the table has slots the rest is copied by its owner.
TEST_F(EngineShm, MoreRegionsThanCanBeMapped) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlim_t before = limit.rlim_cur;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  constexpr size_t kRegions = UseTable::kSlots + 20;
  if (limit.rlim_cur < 2 * kRegions + 1000) GTEST_SKIP() << "needs " << 2 * kRegions + 1000 << " descriptors";
  std::vector<RegionHandle> regions;
  std::vector<mp_remote_region> remotes(kRegions);
  for (size_t i = 0; i < kRegions; ++i) {
    regions.push_back(target_.allocate(4096, ("many-" + std::to_string(i)).c_str()));
    std::memset(bytes_of(regions.back()), static_cast<int>(i % 251), 4096);
  }
  std::vector<const mp_remote_region *> pointers;
  std::vector<uint32_t> which;
  std::vector<int64_t> offsets;
  for (size_t i = 0; i < kRegions; ++i) {
    remotes[i] = look_up(peer_, ("many-" + std::to_string(i)).c_str());
    pointers.push_back(&remotes[i]);
    which.push_back(static_cast<uint32_t>(i));
    offsets.push_back(static_cast<int64_t>(i * 64));
  }
  const int64_t zero = 0, length = 64;
  mp_region *locals[1] = {local_.get()};
  {
    // The first use of many in one transfer, in turns: looking at all of them for each answer would take minutes.
    std::vector<uint32_t> turns;
    std::vector<int64_t> places;
    for (int64_t i = 0; i < 60'000; ++i) {
      turns.push_back(static_cast<uint32_t>(i % 4000));
      places.push_back(i * 64);
    }
    const mp_batch batch{turns.size(), places.data(),   1,        &zero,       0, &length, 0, locals, 1,
                         nullptr,      pointers.data(), kRegions, turns.data()};
    mp_transfer *out = nullptr;
    ASSERT_EQ(mp_submit(peer_.get(), MP_READ, &batch, nullptr, &out, nullptr), MP_OK);
    ASSERT_EQ(finish(TransferHandle(out)), MP_COMPLETED);
    for (size_t i = 0; i < turns.size(); ++i) ASSERT_EQ(bytes_of(local_)[i * 64 + 63], turns[i] % 251) << i;
  }
  for (int round = 0; round < 2; ++round) {
    // One by one, since a transfer that needs one copied by its owner has all of them copied.
    for (size_t i = 0; i < kRegions; ++i) {
      const mp_batch batch{1,      &offsets[i], 0,       &zero,           0,        &length,  0,
                           locals, 1,           nullptr, pointers.data(), kRegions, &which[i]};
      mp_transfer *out = nullptr;
      ASSERT_EQ(mp_submit(peer_.get(), MP_READ, &batch, nullptr, &out, nullptr), MP_OK);
      ASSERT_EQ(finish(TransferHandle(out)), MP_COMPLETED);
    }
    for (size_t i = 0; i < kRegions; ++i) ASSERT_EQ(bytes_of(local_)[i * 64 + 63], i % 251) << i;
    std::memset(bytes_of(local_), 0, kBytes);
  }
  EXPECT_EQ(source_.stat({"regions_mapped"}), UseTable::kSlots);
  EXPECT_EQ(source_.stat({"regions_not_mapped"}), 20);
  // Slots are given out again.
  for (size_t i = 0; i < 100; ++i) ASSERT_EQ(mp_region_release(regions[i].get(), nullptr), MP_OK);
  EXPECT_TRUE(eventually([&] { return source_.stat({"regions_mapped"}) == UseTable::kSlots - 100; }));
  const RegionHandle late = target_.allocate(4096, "late");
  ASSERT_EQ(transfer(peer_, MP_READ, local_, look_up(peer_, "late"), {{0, 0, 64}}), MP_COMPLETED);
  EXPECT_EQ(source_.stat({"regions_mapped"}), UseTable::kSlots - 99);
  limit.rlim_cur = before;
  setrlimit(RLIMIT_NOFILE, &limit);
}

// No room in the address space for the peer's memory: the peer copies, and nobody notices.
TEST_F(EngineShm, WhatCannotBeMappedIsCopiedByItsOwner) {
  constexpr uint64_t kLarge = uint64_t{64} << 30;  // of which three pages are touched
  const RegionHandle large = target_.allocate(kLarge, "large");
  const mp_remote_region remote = look_up(peer_, "large");
  std::memset(bytes_of(large) + kLarge - 4096, 5, 4096);
  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  rlimit before{}, limit{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  limit = before;
  limit.rlim_cur = pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) + (uint64_t{8} << 30);
  ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
  const mp_transfer_state state =
      transfer(peer_, MP_READ, local_, remote, {{0, static_cast<int64_t>(kLarge - 4096), 4096}});
  ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
  EXPECT_EQ(state, MP_COMPLETED);
  EXPECT_EQ(bytes_of(local_)[4095], 5);
  EXPECT_EQ(source_.stat({"regions_mapped"}), 0);
  EXPECT_EQ(source_.stat({"regions_not_mapped"}), 1);
  EXPECT_EQ(source_.stat({"paths_failed"}), 0);
  mp_peer_info info;
  mp_peer_get_info(peer_.get(), &info);
  EXPECT_STREQ(info.path, "shm");
  EXPECT_NE(std::string(info.fallback).find("Cannot allocate memory"), std::string::npos) << info.fallback;
}

TEST_F(EngineShm, CancelledAndExpiredTransfersLeaveTheirBuffersAlone) {
  constexpr uint64_t kLong = 32u << 20;
  const RegionHandle large = target_.allocate(kLong, "large"), local = source_.allocate(kLong);
  std::memset(bytes_of(large), 0xee, kLong);
  const mp_remote_region remote = look_up(peer_, "large");
  int stopped = 0;
  for (int round = 0; round < 20; ++round) {
    const bool expires = round % 2 == 1;
    const int64_t deadline = expires ? kMillisecond : kPatienceNs;
    const TransferHandle moving = submit(peer_, MP_READ, local, remote, {{0, 0, kLong}}, {deadline, {}, round % 4 < 2});
    if (!expires) {
      EXPECT_EQ(mp_transfer_cancel(moving.get(), kPatienceNs), MP_OK);
    }
    const mp_transfer_state state = finish(moving);
    EXPECT_TRUE(state == MP_COMPLETED || state == (expires ? MP_EXPIRED : MP_STOPPED)) << state;
    std::memset(bytes_of(local), 7, kLong);
    ASSERT_EQ(transfer(peer_, MP_WRITE, local_, to_mapped_, {{0, 0, 1 << 20}}), MP_COMPLETED);
    // Every byte is that before it.
    const uint8_t *bytes = bytes_of(local);
    EXPECT_TRUE(bytes[0] == 7 && std::memcmp(bytes, bytes + 1, kLong - 1) == 0);
    stopped += state == MP_COMPLETED ? 0 : 1;
  }
  EXPECT_GT(stopped, 0);
}

enum class End { kPeer, kSource, kTarget };
class EngineShmEnd : public EngineShm, public ::testing::WithParamInterface<End> {};
INSTANTIATE_TEST_SUITE_P(Whose, EngineShmEnd, ::testing::Values(End::kPeer, End::kSource, End::kTarget),
                         [](const auto &info) {
                           return info.param == End::kPeer     ? "ThePeer"
                                  : info.param == End::kSource ? "TheClientsEngine"
                                                               : "TheOwnersEngine";
                         });

// When it returns, nothing is touched any more: the memory is taken away at once, and a late copy would fault.
TEST_P(EngineShmEnd, IsClosedWhileThreadsMoveBytes) {
  constexpr uint64_t kLong = 64u << 20;
  const bool owners = GetParam() == End::kTarget;
  for (int round = 0; round < 12; ++round) {
    void *space = mmap(nullptr, kLong, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(space, MAP_FAILED);
    // Long slices, so that a close meets one in the middle.
    const auto long_slices = [](mp_config &config) {
      config.transports = "shm";
      config.slice_bytes = 32u << 20;
    };
    TestEngine source(long_slices), target(long_slices);
    TestEngine &owner = owners ? target : source;
    mp_region *raw = nullptr;
    ASSERT_EQ(mp_region_register(owner.get(), space, kLong, "kv", MP_REGION_WRITABLE, &raw, nullptr), MP_OK);
    const RegionHandle registered(raw);
    const RegionHandle theirs = target.allocate(kLong, "theirs"), ours = source.allocate(kLong);
    const PeerHandle peer = source.connect(target);
    const mp_remote_region remote = look_up(peer, owners ? "kv" : "theirs");
    std::atomic<int> moved{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&, i] {
        // Each moves bytes of its own.
        const int64_t length = i == 0 ? 4096 : static_cast<int64_t>(kLong / 4), at = i * length;
        mp_error error;
        for (;;) {
          const TransferHandle moving = submit(peer, i % 2 == 0 ? MP_READ : MP_WRITE, owners ? ours : registered,
                                               remote, {{at, at, length}}, {}, &error);
          if (moving == nullptr || finish(moving) != MP_COMPLETED) return;
          moved.fetch_add(1);
        }
      });
    }
    EXPECT_TRUE(eventually([&] { return moved.load() > round; }));
    if (GetParam() == End::kPeer) {
      EXPECT_EQ(mp_peer_close(peer.get(), nullptr), MP_OK);
      // The buffers belong to the transfers until these have ended.
      EXPECT_TRUE(eventually([&] { return mp_region_release(registered.get(), nullptr) == MP_OK; }));
    } else {
      owner.close();
    }
    EXPECT_EQ(mprotect(space, kLong, PROT_NONE), 0);
    for (std::thread &thread : threads) thread.join();
    source.close();
    target.close();
    munmap(space, kLong);
  }
}

TEST_F(EngineShm, NotificationsComeAfterTheirBytes) {
  for (int round = 0; round < 200; ++round) {
    std::memset(bytes_of(local_), round + 1, 65536);
    const RegionHandle &region = round % 2 == 0 ? mapped_ : copied_;
    const TransferHandle moving = submit(peer_, MP_WRITE, local_, round % 2 == 0 ? to_mapped_ : to_copied_,
                                         {{0, 0, 65536}}, {kPatienceNs, "there", round % 3 == 0});
    mp_notification notification;
    ASSERT_EQ(mp_notification_take(target_.get(), kPatienceNs, &notification), MP_OK);
    mp_notification_clear(&notification);
    ASSERT_EQ(bytes_of(region)[0], static_cast<uint8_t>(round + 1));
    ASSERT_EQ(bytes_of(region)[65535], static_cast<uint8_t>(round + 1));
    ASSERT_EQ(finish(moving), MP_COMPLETED);
  }
}

}  // namespace
}  // namespace moonpool
