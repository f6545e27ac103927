// SPDX-License-Identifier: Apache-2.0
//
// The digest is a tree of XXH3-64 leaves, so it can be computed in any order.
#include "digest.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "support.hpp"

namespace moonpool {
namespace {

using moonpool::testing::Bytes;
using moonpool::testing::random_data;

// Straight from the definition in engine.h, one leaf after the other.
uint64_t by_definition(const Bytes &data) {
  if (data.size() <= kDigestLeafBytes) return leaf_digest(data.data(), data.size());
  Bytes values;
  for (size_t at = 0; at < data.size(); at += kDigestLeafBytes) {
    const uint64_t leaf = leaf_digest(data.data() + at, std::min<size_t>(kDigestLeafBytes, data.size() - at));
    for (int byte = 0; byte < 8; ++byte) values.push_back(static_cast<uint8_t>(leaf >> (8 * byte)));
  }
  return leaf_digest(values.data(), values.size());
}

// The first value is in the specification of XXH3, the second was computed with the xxHash library.
TEST(Digest, LeavesAreXxh3) {
  EXPECT_EQ(mp_digest("", 0), 0x2d06800538d394c2u);
  EXPECT_EQ(mp_digest("moonpool", 8), 0x6a034514e32e5e90u);
}

TEST(Digest, EqualsItsDefinitionAroundTheEdgesOfLeaves) {
  for (const size_t leaves : {0, 1, 2, 5}) {
    for (const int off : {-1, 0, 1}) {
      if (leaves == 0 && off < 0) continue;
      const Bytes data = random_data(leaves * kDigestLeafBytes + static_cast<size_t>(off), 3);
      EXPECT_EQ(mp_digest(data.data(), data.size()), by_definition(data)) << data.size() << " bytes";
    }
  }
}

TEST(Digest, LeavesMayBeHashedInAnyOrder) {
  const Bytes data = random_data(7 * kDigestLeafBytes + 123, 5);
  std::vector<size_t> order(8);
  std::iota(order.begin(), order.end(), size_t{0});
  std::shuffle(order.begin(), order.end(), std::mt19937(9));
  std::vector<uint64_t> leaves(order.size());
  for (const size_t leaf : order) {
    const size_t at = leaf * kDigestLeafBytes;
    leaves[leaf] = leaf_digest(data.data() + at, std::min<size_t>(kDigestLeafBytes, data.size() - at));
  }
  EXPECT_EQ(combine_leaves(leaves.data(), leaves.size()), mp_digest(data.data(), data.size()));
  std::swap(leaves[0], leaves[1]);
  EXPECT_NE(combine_leaves(leaves.data(), leaves.size()), mp_digest(data.data(), data.size()));
}

TEST(Digest, OneLeafIsItsOwnDigest) {
  const Bytes data = random_data(1000, 6);
  const uint64_t leaf = leaf_digest(data.data(), data.size());
  EXPECT_EQ(combine_leaves(&leaf, 1), leaf);
  EXPECT_EQ(mp_digest(data.data(), data.size()), leaf);
}

TEST(Digest, ABatchIsOneDigestForEachRange) {
  const Bytes data = random_data(2 * kDigestLeafBytes + 100, 9);
  const std::vector<int64_t> offsets{0, 1, 64, static_cast<int64_t>(data.size())};
  const std::vector<int64_t> lengths{static_cast<int64_t>(data.size()), 1000, 0, 0};
  std::vector<uint64_t> digests(4);
  size_t bad = 99;
  ASSERT_EQ(mp_digest_batch(data.data(), data.size(), offsets.data(), 1, lengths.data(), 1, 4, digests.data(), &bad),
            MP_OK);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(digests[i], mp_digest(data.data() + offsets[i], static_cast<uint64_t>(lengths[i]))) << i;
  }
  const int64_t length = 64;
  ASSERT_EQ(mp_digest_batch(data.data(), data.size(), offsets.data(), 1, &length, 0, 3, digests.data(), &bad), MP_OK);
  EXPECT_EQ(digests[1], mp_digest(data.data() + 1, 64));
}

TEST(Digest, ABatchWithARangeOutsideIsRefusedAsAWhole) {
  const Bytes data = random_data(100, 10);
  const int64_t wrong[][2] = {{0, 101}, {101, 0}, {-1, 1}, {0, -1}, {1, INT64_MAX}, {INT64_MAX, 1}, {INT64_MIN, 1}};
  for (const auto &[offset, length] : wrong) {
    const int64_t offsets[] = {0, offset}, lengths[] = {1, length};
    uint64_t digests[] = {7, 7};
    size_t bad = 99;
    EXPECT_EQ(mp_digest_batch(data.data(), data.size(), offsets, 1, lengths, 1, 2, digests, &bad), MP_OUT_OF_RANGE);
    EXPECT_EQ(bad, 1u);
    EXPECT_EQ(digests[0], 7u);
  }
}

TEST(Digest, WholesFromTheDigestsOfTheirLeaves) {
  const Bytes data = random_data(3 * kDigestLeafBytes + 17, 11);
  // One byte before, so that none of them is aligned.
  Bytes table(1 + 4 * sizeof(uint64_t));
  for (size_t i = 0; i < 4; ++i) {
    const uint64_t leaf =
        mp_digest(data.data() + i * kDigestLeafBytes, i < 3 ? kDigestLeafBytes : data.size() - 3 * kDigestLeafBytes);
    std::memcpy(table.data() + 1 + i * sizeof leaf, &leaf, sizeof leaf);
  }
  const int64_t offsets[] = {1, 9}, lengths[] = {32, 8};
  uint64_t digests[2];
  size_t bad = 99;
  ASSERT_EQ(mp_combine_batch(table.data(), table.size(), offsets, 1, lengths, 1, 2, digests, &bad), MP_OK);
  EXPECT_EQ(digests[0], mp_digest(data.data(), data.size()));
  EXPECT_EQ(digests[1], mp_digest(data.data() + kDigestLeafBytes, kDigestLeafBytes));
  for (const int64_t length : {int64_t{0}, int64_t{7}, int64_t{12}}) {
    const int64_t wrong[] = {8, length};
    EXPECT_EQ(mp_combine_batch(table.data(), table.size(), offsets, 1, wrong, 1, 2, digests, &bad),
              MP_INVALID_ARGUMENT);
    EXPECT_EQ(bad, 1u);
  }
  const int64_t outside = 40;
  EXPECT_EQ(mp_combine_batch(table.data(), table.size(), offsets, 1, &outside, 0, 2, digests, &bad), MP_OUT_OF_RANGE);
}

TEST(Digest, AnyFlippedByteChangesIt) {
  Bytes data = random_data(kDigestLeafBytes + 5000, 7);
  const uint64_t good = mp_digest(data.data(), data.size());
  std::mt19937 random(8);
  for (int round = 0; round < 50; ++round) {
    const size_t at = random() % data.size();
    data[at] ^= 1;
    EXPECT_NE(mp_digest(data.data(), data.size()), good) << "byte " << at;
    data[at] ^= 1;
  }
}

}  // namespace
}  // namespace moonpool
