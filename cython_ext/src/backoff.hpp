// SPDX-License-Identifier: Apache-2.0
// How long to wait before the next attempt to connect: doubles with each failure, so that a fault never becomes a
// storm.
#pragma once

#include <algorithm>

#include "system.hpp"

namespace moonpool {

class Backoff {
 public:
  static constexpr int64_t kFirstNs = 50 * kMillisecond;
  static constexpr int64_t kMaxNs = 5000 * kMillisecond;

  int64_t wait_ns() const { return wait_ns_; }
  void grow() { wait_ns_ = std::clamp(wait_ns_ * 2, kFirstNs, kMaxNs); }
  void reset() { wait_ns_ = 0; }

 private:
  int64_t wait_ns_ = 0;
};

}  // namespace moonpool
