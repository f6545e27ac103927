// SPDX-License-Identifier: Apache-2.0
#include "record.hpp"

#include <gtest/gtest.h>

namespace moonpool::index {
namespace {

Record some() {
  Record record{};
  for (size_t i = 0; i < kHashBytes; ++i) record.hash[i] = static_cast<uint8_t>(i), record.parent[i] = 9;
  record.name_space = 77;
  record.shards = 4;
  record.present = {{1, 5, 4096, {{3, 64}, {4, 128}}}, {3, 6, 1, {{3, 8192}}}};
  return record;
}

bool reads(const std::string &bytes, uint32_t slot, Record *record) {
  return decode(reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size(), slot, record);
}

TEST(Record, ComesBackAsItWas) {
  std::string bytes, again;
  encode(some(), 12, &bytes);
  Record record;
  ASSERT_TRUE(reads(bytes, 12, &record));
  encode(record, 12, &again);
  EXPECT_EQ(bytes, again);
  EXPECT_EQ(record.present[0].extents[1].offset, 128u);
}

TEST(Record, OfAnotherSlotOrDamagedOrCutIsNone) {
  std::string bytes;
  encode(some(), 12, &bytes);
  Record record;
  EXPECT_FALSE(reads(bytes, 13, &record));
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::string other = bytes;
    other[i] ^= 1;
    EXPECT_FALSE(reads(other, 12, &record)) << "byte " << i;
    EXPECT_FALSE(reads(bytes.substr(0, i), 12, &record)) << "cut to " << i;
  }
  EXPECT_FALSE(reads(bytes + '\0', 12, &record));
}

TEST(Record, ThatMakesNoSenseIsNone) {
  const auto refused = [](auto change) {
    Record record = some();
    change(record);
    std::string bytes;
    encode(record, 1, &bytes);
    Record read;
    return !reads(bytes, 1, &read);
  };
  EXPECT_FALSE(refused([](Record &) {}));
  EXPECT_TRUE(refused([](Record &record) { record.present.clear(); }));
  EXPECT_TRUE(refused([](Record &record) { record.shards = 3; }));
  EXPECT_TRUE(refused([](Record &record) { record.shards = kShardsMax + 1; }));
  EXPECT_TRUE(refused([](Record &record) { record.present[1].shard = 1; }));
  EXPECT_TRUE(refused([](Record &record) { record.present[0].length = 0; }));
  EXPECT_TRUE(refused([](Record &record) { record.present[0].length = UINT64_MAX; }));
  EXPECT_TRUE(refused([](Record &record) { record.present[0].extents.clear(); }));
  EXPECT_TRUE(refused([](Record &record) { record.present[0].extents.resize(kReplicasMax + 1); }));
  EXPECT_TRUE(refused([](Record &record) { record.present[0].extents[0].offset = 65; }));
  EXPECT_TRUE(refused([](Record &record) { record.present[0].extents[0].segment = kNone; }));
}

}  // namespace
}  // namespace moonpool::index
