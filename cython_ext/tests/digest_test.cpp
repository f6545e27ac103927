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

// Wholes that lie in ranges of several memories, cut at random.
class Scattered {
 public:
  Scattered(const std::vector<Bytes> &wholes, uint32_t seed, uint64_t cut_max) {
    std::mt19937_64 random(seed);
    memories_.resize(3);
    for (const Bytes &whole : wholes) {
      const size_t before = lengths.size();
      for (uint64_t at = 0; at < whole.size();) {
        const uint64_t length = random() % 20 == 0 ? 0 : std::min<uint64_t>(1 + random() % cut_max, whole.size() - at);
        const size_t memory = random() % memories_.size();
        Bytes &bytes = memories_[memory];
        bytes.resize(bytes.size() + random() % 3, 0xee);  // at any address
        which.push_back(static_cast<int64_t>(memory));
        offsets.push_back(static_cast<int64_t>(bytes.size()));
        lengths.push_back(static_cast<int64_t>(length));
        const auto from = whole.begin() + static_cast<ptrdiff_t>(at);
        bytes.insert(bytes.end(), from, from + static_cast<ptrdiff_t>(length));
        at += length;
      }
      counts.push_back(static_cast<int64_t>(lengths.size() - before));
    }
  }
  mp_status digest(std::vector<uint64_t> *digests, size_t *bad) {
    std::vector<mp_memory> memories;
    for (const Bytes &bytes : memories_) memories.push_back({bytes.data(), bytes.size()});
    digests->assign(counts.size(), 7);
    return mp_digest_joined(memories.data(), memories.size(), which.data(), 1, offsets.data(), 1, lengths.data(), 1,
                            lengths.size(), counts.data(), 1, counts.size(), digests->data(), bad);
  }

  std::vector<int64_t> which, offsets, lengths, counts;

 private:
  std::vector<Bytes> memories_;
};

TEST(Digest, OfPiecesIsThatOfTheBytesTogetherHoweverTheyAreCut) {
  for (uint32_t seed = 1; seed <= 12; ++seed) {
    std::mt19937 random(seed);
    std::vector<Bytes> wholes;
    for (int i = 0; i < 6; ++i) {
      const int64_t near =
          static_cast<int64_t>(random() % 4 * kDigestLeafBytes) + static_cast<int64_t>(random() % 5) - 2;
      wholes.push_back(random_data(static_cast<size_t>(std::max<int64_t>(near, 0)), seed * 10));
    }
    for (const uint64_t cut_max : {uint64_t{90}, uint64_t{5000}, 2 * kDigestLeafBytes}) {
      Scattered scattered(wholes, seed, cut_max);
      std::vector<uint64_t> digests;
      size_t bad = 99;
      ASSERT_EQ(scattered.digest(&digests, &bad), MP_OK);
      for (size_t i = 0; i < wholes.size(); ++i) {
        EXPECT_EQ(digests[i], mp_digest(wholes[i].data(), wholes[i].size()))
            << wholes[i].size() << " bytes, cut at " << cut_max << ", seed " << seed;
      }
    }
  }
}

TEST(Digest, OfManyPiecesOnSeveralThreads) {
  const std::vector<Bytes> wholes{random_data(20u << 20, 1), random_data(33, 2), random_data((9u << 20) + 5, 3)};
  Scattered scattered(wholes, 4, 40'000);
  std::vector<uint64_t> digests;
  size_t bad = 99;
  ASSERT_EQ(scattered.digest(&digests, &bad), MP_OK);
  for (size_t i = 0; i < wholes.size(); ++i) EXPECT_EQ(digests[i], mp_digest(wholes[i].data(), wholes[i].size())) << i;
}

TEST(Digest, PiecesThatAreNotThereAreRefusedAsAWhole) {
  const std::vector<Bytes> wholes{random_data(300, 1), random_data(300, 2)};
  std::vector<uint64_t> digests;
  size_t bad = 99;
  const auto spoilt = [&](auto spoil) {
    Scattered scattered(wholes, 3, 50);
    spoil(&scattered);
    bad = 99;
    const mp_status status = scattered.digest(&digests, &bad);
    EXPECT_TRUE(std::all_of(digests.begin(), digests.end(), [](uint64_t one) { return one == 7; }));
    return status;
  };
  for (const int64_t wrong : {int64_t{-1}, int64_t{3}, INT64_MAX, INT64_MIN}) {
    EXPECT_EQ(spoilt([wrong](Scattered *one) { one->which[2] = wrong; }), MP_OUT_OF_RANGE);
    EXPECT_EQ(bad, 2u);
  }
  for (const int64_t wrong : {int64_t{-1}, int64_t{601}, INT64_MAX, INT64_MIN}) {
    EXPECT_EQ(spoilt([wrong](Scattered *one) { one->offsets[1] = wrong; }), MP_OUT_OF_RANGE);
    EXPECT_EQ(bad, 1u);
    EXPECT_EQ(spoilt([wrong](Scattered *one) { one->lengths[1] = wrong; }), MP_OUT_OF_RANGE);
    EXPECT_EQ(bad, 1u);
  }
  for (const int64_t wrong : {int64_t{-1}, int64_t{1000}, INT64_MAX, INT64_MIN}) {
    EXPECT_EQ(spoilt([wrong](Scattered *one) { one->counts[0] = wrong; }), MP_INVALID_ARGUMENT);
    EXPECT_EQ(bad, 0u);
  }
  EXPECT_EQ(spoilt([](Scattered *one) { ++one->counts[1]; }), MP_INVALID_ARGUMENT);
  EXPECT_EQ(bad, 1u);
  EXPECT_EQ(spoilt([](Scattered *one) { --one->counts[1]; }), MP_INVALID_ARGUMENT);
  EXPECT_EQ(bad, 2u);
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
