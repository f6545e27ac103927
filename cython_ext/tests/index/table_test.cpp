// SPDX-License-Identifier: Apache-2.0
#include "table.hpp"

#include <gtest/gtest.h>

#include <unordered_map>

#include "key.hpp"

namespace moonpool::index {
namespace {

TEST(Table, FindsWhatIsInItAndNothingElseWhileItGrowsAndShrinks) {
  Table table;
  std::unordered_map<uint64_t, uint32_t> expected;
  Random random(3);
  const auto find = [&](uint64_t hash) {
    return table.find(hash, [&](uint32_t slot) { return expected.count(hash) != 0 && expected[hash] == slot; });
  };
  uint32_t next = 0;
  for (int step = 0; step < 400'000; ++step) {
    const uint64_t drawn = random.next();
    const bool grows = step < 200'000 ? drawn % 4 != 0 : drawn % 4 == 0;
    // The upper half is what tells entries apart; few different ones make for long searches.
    const uint64_t hash = (drawn >> 20) % 100'000 * (uint64_t{1} << 32 | 0x9e3779b9);
    if (grows && expected.count(hash) == 0) {
      expected[hash] = next;
      table.insert(hash, next++);
    } else if (!grows && !expected.empty()) {
      const auto [gone, slot] = *expected.begin();
      table.erase(gone, slot);
      expected.erase(gone);
    }
    ASSERT_EQ(table.count(), expected.size());
    if (step % 20'000 != 0) continue;
    for (const auto &[its, slot] : expected) ASSERT_EQ(find(its), slot);
  }
  const size_t most = table.bytes();
  for (const auto &[hash, slot] : expected) table.erase(hash, slot);
  EXPECT_EQ(table.bytes(), 0u) << "of " << most;
}

TEST(Table, KeysWithTheSameHashAreToldApartByTheCaller) {
  Table table;
  for (uint32_t slot = 0; slot < 2000; ++slot) table.insert(42, slot);
  for (uint32_t slot = 0; slot < 2000; slot += 2) table.erase(42, slot);
  for (uint32_t slot = 0; slot < 2000; ++slot) {
    EXPECT_EQ(table.find(42, [&](uint32_t its) { return its == slot; }), slot % 2 == 0 ? kNone : slot);
  }
}

TEST(Arena, TheLowestNumberGoesFirstAndEmptyPagesGoBack) {
  Arena<uint64_t> arena;
  for (uint32_t i = 0; i < 10'000; ++i) ASSERT_EQ(arena.take(), i);
  arena.give(7);
  arena.give(9000);
  EXPECT_EQ(arena.take(), 7u);
  EXPECT_EQ(arena.take(), 9000u);
  EXPECT_FALSE(arena.take(5000));
  const size_t full = arena.bytes();
  for (uint32_t i = 4096; i < 10'000; ++i) arena.give(i);
  EXPECT_LT(arena.bytes(), full / 2);
  EXPECT_EQ(arena.end(), 4096u);
  EXPECT_TRUE(arena.take(9000));
  EXPECT_EQ(arena.next_used(4096), 9000u);
  EXPECT_EQ(arena.next_used(9001), arena.end());
  EXPECT_EQ(arena.take(), 4096u);
}

}  // namespace
}  // namespace moonpool::index
