// SPDX-License-Identifier: Apache-2.0
//
// The space of a segment: what is given out never overlaps, and what comes back is whole again.
#include "allocator.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "key.hpp"

namespace moonpool::index {
namespace {

TEST(Allocator, GivesNeighboursOneAfterTheOther) {
  Allocator space;
  ASSERT_TRUE(space.set_capacity(100));
  for (uint64_t i = 0; i < 10; ++i) EXPECT_EQ(space.offset(space.take(10)), i * 10);
  EXPECT_EQ(space.take(1), kNone);
  EXPECT_EQ(space.free(), 0u);
  EXPECT_STREQ(space.check(), "");
}

TEST(Allocator, FreeNeighboursBecomeOne) {
  Allocator space;
  ASSERT_TRUE(space.set_capacity(30));
  const uint32_t first = space.take(10), second = space.take(10), third = space.take(10);
  space.give(first);
  space.give(third);
  EXPECT_EQ(space.largest_free(), 10u);
  EXPECT_EQ(space.free_pieces(), 2u);
  EXPECT_EQ(space.take(11), kNone) << "there is room, but in two pieces";
  space.give(second);
  EXPECT_EQ(space.largest_free(), 30u);
  EXPECT_EQ(space.free_pieces(), 1u);
  EXPECT_NE(space.take(30), kNone);
}

TEST(Allocator, WhatWaitsIsNotFree) {
  Allocator space;
  ASSERT_TRUE(space.set_capacity(10));
  const uint32_t piece = space.take(10);
  space.set_waiting(piece);
  EXPECT_EQ(space.used(), 0u);
  EXPECT_EQ(space.waiting(), 10u);
  EXPECT_EQ(space.take(1), kNone);
  space.give(piece);
  EXPECT_EQ(space.free(), 10u);
}

TEST(Allocator, TheCapacityGrowsAndShrinksWhereNothingLies) {
  Allocator space;
  ASSERT_TRUE(space.set_capacity(10));
  const uint32_t piece = space.take(6);
  EXPECT_FALSE(space.set_capacity(5));
  EXPECT_TRUE(space.set_capacity(6));
  EXPECT_EQ(space.take(1), kNone);
  EXPECT_TRUE(space.set_capacity(kUnitsMax));
  EXPECT_EQ(space.largest_free(), kUnitsMax - 6);
  space.give(piece);
  EXPECT_EQ(space.largest_free(), kUnitsMax);
  EXPECT_STREQ(space.check(), "");
}

TEST(Allocator, KnownExtentsComeInAnyOrderBeforeTheCapacity) {
  Allocator space;
  ASSERT_TRUE(space.set_capacity(kUnitsMax));
  const uint32_t late = space.take_at(80, 10, 3);
  EXPECT_NE(space.take_at(20, 10, 1), kNone);
  EXPECT_EQ(space.take_at(85, 1, 4), kNone) << "it lies in another";
  EXPECT_EQ(space.take_at(15, 6, 4), kNone) << "it reaches into another";
  EXPECT_EQ(space.take_at(10, 100, 4), kNone) << "it has others in it";
  EXPECT_EQ(space.take_at(kUnitsMax, 1, 4), kNone);
  EXPECT_FALSE(space.set_capacity(89));
  EXPECT_TRUE(space.set_capacity(100));
  EXPECT_EQ(space.largest_free(), 50u);
  space.give(late);
  EXPECT_EQ(space.largest_free(), 70u);
  EXPECT_NE(space.take_at(40, 5, 5), kNone) << "also when the gaps are known already";
  EXPECT_STREQ(space.check(), "");
}

// Against the plainest allocator that there is: a list of who has what.
TEST(Allocator, ManyStepsWithoutAnOverlap) {
  struct Extent {
    uint64_t offset, units;
    uint32_t piece;
  };
  constexpr uint64_t kCapacity = 4096;
  Allocator space;
  ASSERT_TRUE(space.set_capacity(kCapacity));
  std::vector<Extent> taken;
  std::vector<bool> used(kCapacity);
  Random random(1);
  for (int step = 0; step < 200'000; ++step) {
    const uint64_t drawn = random.next();
    if (drawn % 2 == 0 || taken.empty()) {
      const uint64_t units = 1 + (drawn >> 8) % (drawn % 16 == 0 ? 500 : 40);
      const uint32_t piece = drawn % 64 == 2 ? space.take_at((drawn >> 20) % kCapacity, units, 1) : space.take(units);
      if (piece == kNone) continue;
      const uint64_t offset = space.offset(piece);
      ASSERT_LE(offset + units, kCapacity);
      for (uint64_t at = offset; at < offset + units; ++at) {
        ASSERT_FALSE(used[at]);
        used[at] = true;
      }
      taken.push_back({offset, units, piece});
    } else {
      std::swap(taken[(drawn >> 8) % taken.size()], taken.back());
      for (uint64_t at = 0; at < taken.back().units; ++at) used[taken.back().offset + at] = false;
      space.give(taken.back().piece);
      taken.pop_back();
    }
    if (step % 1000 == 0) {
      ASSERT_STREQ(space.check(), "");
    }
  }
  for (const Extent &extent : taken) space.give(extent.piece);
  EXPECT_EQ(space.largest_free(), kCapacity);
  EXPECT_EQ(space.free_pieces(), 1u);
}

}  // namespace
}  // namespace moonpool::index
