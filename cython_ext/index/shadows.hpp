// SPDX-License-Identifier: Apache-2.0
//
// What the prefix policy would have hit with each of four bonuses (docs/decisions/0007-eviction.md). A shadow is a pool
// that keeps the highest scores: it is enough to know how many sampled chunks have which score, and above which score
// they are in it.
#pragma once

#include <array>
#include <cstdint>

namespace moonpool::index {

class Shadows {
 public:
  static constexpr uint32_t kStrengths = 4;
  static constexpr uint32_t kSample = 4;  // one chunk in so many is sampled
  static constexpr uint32_t kCountMax = 5;
  static constexpr uint32_t kClasses = 4;

  static uint32_t class_of(uint32_t count) {
    constexpr uint8_t kClassOf[kCountMax + 1] = {0, 0, 1, 2, 2, 3};
    return kClassOf[count];
  }
  // Of a class under a strength, in insertions.
  uint64_t bonus(uint32_t strength, uint32_t its_class) const { return its_class * kFactors[strength] * capacity_ / 2; }

  // `clock`: of now. The shadows are empty then, and fill with what is used from now on. What is removed from them may
  // have come before, so removing is lenient.
  void set_capacity(uint64_t chunks, uint64_t clock);
  // A sampled chunk has this score now, or has it no more.
  void add(uint64_t clock, uint32_t count, uint64_t now);
  void remove(uint64_t clock, uint32_t count);
  // A sampled chunk with this score was asked for.
  void hit(uint64_t clock, uint32_t count);
  // The strength with most hits; the counts are halved.
  uint32_t choose(uint32_t present);

 private:
  static constexpr uint64_t kFactors[kStrengths] = {0, 1, 4, 16};
  static constexpr uint32_t kBuckets = 2048;
  // Below the bucket of now by so much, nothing is in any shadow: with what is above, the ring holds it all.
  static constexpr uint64_t kBelowMax = 1000;

  struct Shadow {
    int64_t threshold = -1;
    uint64_t resident = 0, hits = 0;
    std::array<uint32_t, kBuckets> buckets{};
  };

  int64_t bucket_of(uint32_t strength, uint64_t clock, uint32_t count) const {
    return static_cast<int64_t>((clock + bonus(strength, class_of(count))) / width_);
  }

  uint64_t capacity_ = 0, width_ = 1;
  int64_t below_ = kBelowMax;
  std::array<Shadow, kStrengths> all_;
};

}  // namespace moonpool::index
