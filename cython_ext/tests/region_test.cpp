// SPDX-License-Identifier: Apache-2.0
//
// Who may touch the bytes of a region, and until when.
#include "region.hpp"

#include <algorithm>
#include <barrier>

#include "support.hpp"

namespace moonpool {
namespace {

using moonpool::testing::eventually;

std::shared_ptr<Region> make_region(const std::string &name, uint64_t length = 4096,
                                    uint32_t flags = MP_REGION_WRITABLE) {
  // Never dereferenced here.
  auto *base = reinterpret_cast<uint8_t *>(uintptr_t{1} << 32);
  return std::make_shared<Region>(1, base, length, name, flags);
}

TEST(Region, ContainsIsExactAndSafeFromOverflow) {
  const auto region = make_region("kv", 4096);
  EXPECT_TRUE(region->contains(0, 4096));
  EXPECT_TRUE(region->contains(4095, 1));
  EXPECT_TRUE(region->contains(4096, 0));
  EXPECT_FALSE(region->contains(0, 4097));
  EXPECT_FALSE(region->contains(1, 4096));
  EXPECT_FALSE(region->contains(4096, 1));
  EXPECT_FALSE(region->contains(UINT64_MAX, 1));
  EXPECT_FALSE(region->contains(UINT64_MAX, 2));
  EXPECT_FALSE(region->contains(1, UINT64_MAX));
  EXPECT_FALSE(region->contains(UINT64_MAX - 4095, 4096)) << "offset + length wraps to 0";

  const auto huge = make_region("huge", UINT64_MAX);
  EXPECT_TRUE(huge->contains(UINT64_MAX - 1, 1));
  EXPECT_FALSE(huge->contains(UINT64_MAX - 1, 2));
  EXPECT_FALSE(huge->contains(UINT64_MAX, UINT64_MAX));
}

TEST(Region, AMessageTellsItFromOthersWithOrWithoutAName) {
  EXPECT_EQ(make_region("kv")->label(), "region \"kv\"");
  EXPECT_EQ(make_region("", 4096)->label(), "region without a name (id 1, 4096 bytes)");
}

TEST(Region, KeysAndGenerationsDiffer) {
  const auto one = make_region("a"), other = make_region("a");
  EXPECT_NE(one->key, other->key);
  EXPECT_LT(one->generation, other->generation);
}

TEST(Region, ReleaseIsRefusedWhileATransferUsesIt) {
  const auto region = make_region("kv");
  ASSERT_TRUE(region->begin_use());
  EXPECT_FALSE(region->try_release());
  EXPECT_FALSE(region->released());
  ASSERT_TRUE(region->begin_use()) << "a refused release leaves everything as it was";
  region->end_use();
  region->end_use();
  EXPECT_TRUE(region->try_release());
  EXPECT_TRUE(region->try_release()) << "releasing is idempotent";
  EXPECT_FALSE(region->begin_use());
  EXPECT_FALSE(region->begin_serving());
}

TEST(Region, RefusedReleasesDisturbNobody) {
  const auto region = make_region("kv");
  ASSERT_TRUE(region->begin_use());
  std::atomic<bool> over{false};
  std::thread releaser([&] {
    while (!over.load()) EXPECT_FALSE(region->try_release());
  });
  for (int i = 0; i < 20'000; ++i) {
    ASSERT_TRUE(region->begin_use()) << "nobody has released it";
    region->end_use();
    ASSERT_TRUE(region->begin_serving());
    region->end_serving();
  }
  over.store(true);
  releaser.join();
}

TEST(Region, OfTwoReleasesAtOnceNeitherSucceedsWhileItIsUsed) {
  constexpr int kRounds = 3000;
  std::vector<std::shared_ptr<Region>> regions;
  for (int i = 0; i < kRounds; ++i) {
    regions.push_back(make_region("kv"));
    ASSERT_TRUE(regions.back()->begin_use());
  }
  std::barrier together(2);
  std::atomic<int> released{0};
  const auto release_all = [&] {
    for (const auto &region : regions) {
      together.arrive_and_wait();
      released.fetch_add(region->try_release() ? 1 : 0);
    }
  };
  std::thread other(release_all);
  release_all();
  other.join();
  EXPECT_EQ(released.load(), 0);
}

// Users and servers come and go while the owner tries to release. Once it succeeded nobody is inside any more.
TEST(Region, NobodyIsInsideAReleasedRegion) {
  for (int round = 0; round < 50; ++round) {
    const auto region = make_region("kv");
    std::atomic<int> users{0}, servers{0};
    std::barrier start(5);
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([&] {
        start.arrive_and_wait();
        while (region->begin_use()) {
          users.fetch_add(1);
          users.fetch_sub(1);
          region->end_use();
        }
      });
      threads.emplace_back([&] {
        start.arrive_and_wait();
        while (region->begin_serving()) {
          servers.fetch_add(1);
          servers.fetch_sub(1);
          region->end_serving();
        }
      });
    }
    start.arrive_and_wait();
    ASSERT_TRUE(eventually([&] { return region->try_release(); }));
    EXPECT_EQ(users.load(), 0);
    region->wait_unserved();
    EXPECT_EQ(servers.load(), 0);
    for (std::thread &thread : threads) thread.join();
  }
}

TEST(ServingPin, HoldsTheReleaseUntilItGoes) {
  const auto region = make_region("kv");
  std::atomic<bool> unpinned{false};
  ServingPin pin(region);
  ASSERT_EQ(pin.get(), region.get());
  ASSERT_TRUE(region->try_release()) << "work for peers does not stop a release";
  EXPECT_EQ(ServingPin(region).get(), nullptr) << "but nothing new begins";
  std::thread owner([&] {
    region->wait_unserved();
    EXPECT_TRUE(unpinned.load());
  });
  ServingPin moved = std::move(pin);
  unpinned.store(true);
  moved.reset();
  owner.join();
}

TEST(RegionTable, NamesAreUniqueAmongLiveRegions) {
  RegionTable table(10);
  const auto first = make_region("kv");
  ASSERT_FALSE(table.insert(first));
  const Error taken = table.insert(make_region("kv"));
  EXPECT_EQ(taken.code, MP_INVALID_ARGUMENT);
  EXPECT_NE(taken.message.find("\"kv\""), std::string::npos) << taken.message;
  table.erase(*first);
  EXPECT_FALSE(table.insert(make_region("kv")));
}

TEST(RegionTable, RefusesMoreThanItsCapacity) {
  RegionTable table(3);
  std::vector<std::shared_ptr<Region>> regions;
  for (int i = 0; i < 3; ++i) {
    regions.push_back(make_region("kv" + std::to_string(i)));
    ASSERT_FALSE(table.insert(regions.back()));
  }
  EXPECT_EQ(table.insert(make_region("one more")).code, MP_LIMIT);
  EXPECT_EQ(table.size(), 3u);
  table.erase(*regions[1]);
  EXPECT_FALSE(table.insert(make_region("one more"))) << "a release makes room";
}

TEST(RegionTable, FindsByKeyAndKnowsWhatWasReleased) {
  RegionTable table(10);
  const auto region = make_region("kv");
  ASSERT_FALSE(table.insert(region));
  EXPECT_EQ(table.find(region->key), region);
  EXPECT_EQ(table.absence(region->key + 1), MP_REGION_UNKNOWN);
  table.erase(*region);
  table.erase(*region);
  EXPECT_EQ(table.find(region->key), nullptr);
  EXPECT_EQ(table.absence(region->key), MP_REGION_RELEASED);
  EXPECT_EQ(table.size(), 0u);
}

TEST(RegionTable, RemembersABoundedNumberOfReleasedKeys) {
  RegionTable table(10);
  std::vector<uint64_t> keys;
  for (int i = 0; i < 5000; ++i) {
    const auto region = make_region("kv");
    ASSERT_FALSE(table.insert(region));
    table.erase(*region);
    keys.push_back(region->key);
  }
  const auto remembered = [&](uint64_t key) { return table.absence(key) == MP_REGION_RELEASED; };
  EXPECT_TRUE(std::all_of(keys.end() - 4096, keys.end(), remembered));
  EXPECT_TRUE(std::none_of(keys.begin(), keys.end() - 4096, remembered)) << "the oldest are forgotten";
}

TEST(RegionTable, ListsWhatIsThere) {
  RegionTable table(100);
  for (int i = 0; i < 20; ++i) ASSERT_FALSE(table.insert(make_region("kv" + std::to_string(i))));
  EXPECT_EQ(table.all().size(), 20u);
}

class RequestCheckerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_FALSE(table_.insert(region_));
    ASSERT_FALSE(table_.insert(read_only_));
  }
  mp_status check(uint64_t key, uint64_t offset, uint64_t length, bool write = true) {
    address_ = nullptr;
    return checker_.check({key, offset, length}, write, &address_);
  }

  RegionTable table_{10};
  const std::shared_ptr<Region> region_ = make_region("kv");
  const std::shared_ptr<Region> read_only_ = make_region("weights", 4096, 0);
  RequestChecker checker_{table_};
  uint8_t *address_ = nullptr;
};

TEST_F(RequestCheckerTest, GivesTheAddressOfAGoodDescriptor) {
  EXPECT_EQ(check(region_->key, 100, 3996), MP_OK);
  EXPECT_EQ(address_, region_->base + 100);
  EXPECT_EQ(check(read_only_->key, 0, 1, false), MP_OK);
  EXPECT_EQ(address_, read_only_->base);
}

TEST_F(RequestCheckerTest, RefusesEveryKindOfBadDescriptor) {
  EXPECT_EQ(check(region_->key + 1, 0, 1), MP_REGION_UNKNOWN);
  EXPECT_EQ(check(0, 0, 1), MP_REGION_UNKNOWN);
  EXPECT_EQ(check(region_->key, 0, 0), MP_OUT_OF_RANGE);
  EXPECT_EQ(check(region_->key, 4096, 1), MP_OUT_OF_RANGE);
  EXPECT_EQ(check(region_->key, UINT64_MAX, 2), MP_OUT_OF_RANGE);
  EXPECT_EQ(check(region_->key, 1, UINT64_MAX), MP_OUT_OF_RANGE);
  EXPECT_EQ(check(read_only_->key, 0, 1, true), MP_REGION_READ_ONLY);
  EXPECT_EQ(address_, nullptr) << "no address for a refused descriptor";
}

TEST_F(RequestCheckerTest, PinsUntilItIsReset) {
  ASSERT_EQ(check(region_->key, 0, 1), MP_OK);
  ASSERT_EQ(check(region_->key, 1, 1), MP_OK);
  EXPECT_TRUE(checker_.pins(*region_));
  EXPECT_TRUE(region_->served());
  checker_.reset();
  EXPECT_FALSE(region_->served());
}

TEST_F(RequestCheckerTest, UnpinsOneRegionAndKeepsTheOthers) {
  ASSERT_EQ(check(region_->key, 0, 1), MP_OK);
  ASSERT_EQ(check(read_only_->key, 0, 1, false), MP_OK);
  ASSERT_EQ(check(region_->key, 1, 1), MP_OK);
  checker_.unpin(*region_);
  EXPECT_FALSE(region_->served());
  EXPECT_FALSE(checker_.pins(*region_));
  EXPECT_TRUE(read_only_->served());
}

TEST_F(RequestCheckerTest, RefusesAReleasedRegionEvenIfItWasTheLastOneSeen) {
  ASSERT_EQ(check(region_->key, 0, 1), MP_OK);
  checker_.reset();
  ASSERT_TRUE(region_->try_release());
  EXPECT_EQ(check(region_->key, 0, 1), MP_REGION_RELEASED) << "still in the table, already released";
  table_.erase(*region_);
  EXPECT_EQ(check(region_->key, 0, 1), MP_REGION_RELEASED);
}

}  // namespace
}  // namespace moonpool
