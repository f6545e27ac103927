// SPDX-License-Identifier: Apache-2.0
#include "shadows.hpp"

#include <algorithm>

namespace moonpool::index {

void Shadows::set_capacity(uint64_t chunks, uint64_t clock) {
  capacity_ = chunks;
  width_ = std::max<uint64_t>(1, chunks / 32);
  const uint64_t above = bonus(kStrengths - 1, kClasses - 1) / width_ + 2;
  below_ = static_cast<int64_t>(std::min(kBelowMax, kBuckets - above));
  for (Shadow &shadow : all_) {
    shadow.buckets.fill(0);
    shadow.resident = 0;
    shadow.threshold = static_cast<int64_t>(clock / width_) - 1;
  }
}

void Shadows::add(uint64_t clock, uint32_t count, uint64_t now) {
  for (uint32_t strength = 0; strength < kStrengths; ++strength) {
    Shadow &shadow = all_[strength];
    const int64_t bucket = bucket_of(strength, clock, count);
    if (bucket > shadow.threshold) {
      ++shadow.buckets[static_cast<uint64_t>(bucket) % kBuckets];
      ++shadow.resident;
    }
    const int64_t lowest = static_cast<int64_t>(now / width_) - below_;
    while (shadow.resident > capacity_ / kSample || shadow.threshold < lowest) {
      ++shadow.threshold;
      uint32_t &gone = shadow.buckets[static_cast<uint64_t>(shadow.threshold) % kBuckets];
      shadow.resident -= gone;
      gone = 0;
    }
  }
}

void Shadows::remove(uint64_t clock, uint32_t count) {
  for (uint32_t strength = 0; strength < kStrengths; ++strength) {
    Shadow &shadow = all_[strength];
    const int64_t bucket = bucket_of(strength, clock, count);
    uint32_t &its = shadow.buckets[static_cast<uint64_t>(bucket) % kBuckets];
    if (bucket <= shadow.threshold || its == 0) continue;
    --its;
    --shadow.resident;
  }
}

void Shadows::hit(uint64_t clock, uint32_t count) {
  for (uint32_t strength = 0; strength < kStrengths; ++strength) {
    if (bucket_of(strength, clock, count) > all_[strength].threshold) ++all_[strength].hits;
  }
}

uint32_t Shadows::choose(uint32_t present) {
  uint32_t best = present;
  for (uint32_t strength = 0; strength < kStrengths; ++strength) {
    const uint64_t hits = all_[strength].hits, most = all_[best].hits;
    if (hits > most || (hits == most && best != present && strength < best)) best = strength;
  }
  for (Shadow &shadow : all_) shadow.hits /= 2;
  return best;
}

}  // namespace moonpool::index
