// SPDX-License-Identifier: Apache-2.0
//
// What goes first: what all policies have in common, and what is special about each.
#include "policy.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>

#include "family.hpp"
#include "ghosts.hpp"

namespace moonpool::index {
namespace {

class Policies : public ::testing::TestWithParam<const char *> {
 protected:
  void SetUp() override {
    policy_ = Policy::make(GetParam(), chunks_, 5);
    ASSERT_NE(policy_, nullptr);
    policy_->set_capacity(100);
  }
  uint32_t add(uint32_t number, uint32_t parent = kNone) {
    uint8_t hash[kHashBytes] = {};
    std::memcpy(hash, &number, sizeof number);
    const uint32_t slot = chunks_.add(hash, 1, 1);
    uint32_t steps = 1000;
    if (parent != kNone) family_.join(slot, parent, &steps);
    chunks_[slot].listed = true;
    policy_->on_insert(slot, parent);
    return slot;
  }
  void remove(uint32_t slot, bool evicted = true) {
    policy_->on_remove(slot, evicted);
    chunks_[slot].listed = false;
    const uint32_t parent = chunks_[slot].parent;
    family_.leave(slot);
    if (parent != kNone && chunks_[parent].child == kNone) policy_->on_leaf(parent, slot);
    chunks_.give(slot);
  }
  uint32_t victim(const Policy::MayGo &may_go = [](uint32_t) { return true; }) {
    uint32_t looks = 10'000;
    return policy_->victim(may_go, &looks);
  }

  Chunks chunks_;
  Family family_{chunks_};
  std::unique_ptr<Policy> policy_;
};

TEST_P(Policies, WhatMayGoIsFoundBehindWhatIsNewerAndInUse) {
  std::set<uint32_t> often;
  for (uint32_t i = 0; i < 5; ++i) {
    const uint32_t slot = add(i);
    for (uint32_t use = 0; use < 9; ++use) policy_->on_touch(slot);
    often.insert(slot);
  }
  for (uint32_t i = 5; i < 20; ++i) add(i);
  for (uint32_t left = 5; left > 0; --left) {
    const uint32_t found = victim([&](uint32_t slot) { return often.contains(slot); });
    ASSERT_NE(found, kNone);
    often.erase(found);
    remove(found);
  }
}

TEST_P(Policies, TheEndOfAChainGoesFirst) {
  uint32_t chain[10];
  for (uint32_t i = 0; i < 10; ++i) chain[i] = add(i, i == 0 ? kNone : chain[i - 1]);
  for (uint32_t i = 10; i-- > 0;) {
    ASSERT_EQ(victim(), chain[i]);
    remove(chain[i]);
  }
  EXPECT_EQ(victim(), kNone);
}

TEST_P(Policies, WhatIsInUseIsPassedOver) {
  const uint32_t first = add(1), second = add(2);
  EXPECT_EQ(victim([&](uint32_t slot) { return slot == second; }), second);
  EXPECT_EQ(victim([&](uint32_t slot) { return slot == first; }), first);
  EXPECT_EQ(victim([](uint32_t) { return false; }), kNone);
}

TEST_P(Policies, TheSearchIsBounded) {
  for (uint32_t i = 0; i < 1000; ++i) add(i);
  uint32_t looks = 10, asked = 0;
  EXPECT_EQ(policy_->victim([&](uint32_t) { return ++asked, false; }, &looks), kNone);
  EXPECT_LE(asked, 10u);
}

TEST_P(Policies, AVictimThatStaysIsFoundAgain) {
  const uint32_t first = add(1);
  add(2);
  EXPECT_EQ(victim(), first);
  EXPECT_EQ(victim(), first);
}

// Random lives; whoever goes is a leaf that is there, and all go in the end.
TEST_P(Policies, NobodyIsForgotten) {
  Random random(11);
  std::vector<uint32_t> there;
  for (uint32_t step = 0; step < 20'000; ++step) {
    const uint64_t drawn = random.next();
    const uint32_t some = there.empty() ? kNone : there[(drawn >> 8) % there.size()];
    switch (drawn % 8) {
      case 0:
        if (some != kNone) {
          remove(some, false);
          std::erase(there, some);
        }
        break;
      case 1:
      case 2:
        if (some != kNone) policy_->on_touch(some);
        break;
      case 3:
      case 4:
        if (const uint32_t slot = victim(); slot != kNone) {
          ASSERT_EQ(chunks_[slot].child, kNone);
          ASSERT_EQ(std::count(there.begin(), there.end(), slot), 1);
          remove(slot);
          std::erase(there, slot);
        }
        break;
      default:
        there.push_back(add(static_cast<uint32_t>(drawn >> 40) % 500, drawn % 3 == 0 ? kNone : some));
    }
    if (step % 5000 == 0) policy_->set_capacity(1 + (drawn >> 16) % 300);
  }
  for (size_t left = there.size(); left > 0; --left) {
    const uint32_t slot = victim();
    ASSERT_NE(slot, kNone) << left << " are left";
    remove(slot);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Policies, ::testing::Values("lru", "s3fifo", "prefix"),
                         [](const auto &info) { return std::string(info.param); });

class Lru : public Policies {};
TEST_P(Lru, WhatWasUsedLastGoesLast) {
  const uint32_t first = add(1), second = add(2), third = add(3);
  policy_->on_touch(first);
  for (const uint32_t slot : {second, third, first}) {
    EXPECT_EQ(victim(), slot);
    remove(slot);
  }
}
INSTANTIATE_TEST_SUITE_P(One, Lru, ::testing::Values("lru"));

class S3Fifo : public Policies {};
TEST_P(S3Fifo, WhatComesBackSoonStaysLonger) {
  uint32_t slots[20];
  for (uint32_t i = 0; i < 20; ++i) slots[i] = add(i);
  ASSERT_EQ(victim(), slots[0]);
  remove(slots[0]);
  const uint32_t again = add(0);
  for (uint32_t i = 1; i < 18; ++i) {
    ASSERT_EQ(victim(), slots[i]);
    remove(slots[i]);
  }
  EXPECT_NE(victim(), again);
}
INSTANTIATE_TEST_SUITE_P(One, S3Fifo, ::testing::Values("s3fifo"));

class Prefix : public Policies {};
TEST_P(Prefix, WhatIsUsedOftenStaysLongerThanWhatIsNew) {
  const uint32_t often = add(0);
  for (int i = 0; i < 5; ++i) policy_->on_touch(often);
  for (uint32_t i = 1; i < 60; ++i) add(i);
  EXPECT_NE(victim(), often);
}
INSTANTIATE_TEST_SUITE_P(One, Prefix, ::testing::Values("prefix"));

TEST(Ghosts, RememberAsManyAsTheyAreToldTo) {
  Ghosts ghosts;
  EXPECT_FALSE(ghosts.put(1, {5, 2}, 10).has_value());
  EXPECT_FALSE(ghosts.take(1, 10).has_value()) << "nothing, before they are told";
  ghosts.set_capacity(64);
  Random random(2);
  std::vector<uint64_t> names(1000);
  size_t gone = 0;
  for (uint64_t &name : names) {
    name = random.next();
    gone += ghosts.put(name, {uint64_t{1} << 33, 3}, (uint64_t{1} << 33) + 7).has_value() ? 1 : 0;
  }
  size_t known = 0;
  for (const uint64_t name : names) {
    const auto ghost = ghosts.take(name, (uint64_t{1} << 33) + 9);
    if (!ghost) continue;
    ++known;
    EXPECT_EQ(ghost->clock, uint64_t{1} << 33);
    EXPECT_EQ(ghost->count, 3u);
    EXPECT_FALSE(ghosts.take(name, uint64_t{1} << 34).has_value()) << "once only";
  }
  EXPECT_EQ(known, 64u);
  EXPECT_EQ(gone, 1000u - 64u);
}

}  // namespace
}  // namespace moonpool::index
