// SPDX-License-Identifier: Apache-2.0
// Which transfers meet which fault, drawn from a seed.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <random>
#include <vector>

#include "moonpool/testing.h"
#include "status.hpp"

namespace moonpool {

Error check_faults(const mp_faults &faults);

// What happens to one transfer.
struct FaultPlan {
  bool drop = false;
  mp_status error = MP_OK;
  int64_t delay_ns = 0;
  std::vector<uint32_t> failing;  // descriptors, ascending
  mp_status failing_status = MP_OK;
  bool corrupt = false;
  uint32_t corrupt_desc = 0;
  uint64_t corrupt_at = 0;  // its byte, taken modulo its length
  uint8_t corrupt_bit = 0;
};

class FaultRules {
 public:
  explicit FaultRules(const mp_faults &faults) { set(faults); }

  void set(const mp_faults &faults);
  FaultPlan draw(uint32_t descs);
  mp_faults_made made() const;

 private:
  bool chance(double probability);

  std::mutex mutex_;
  mp_faults faults_{};
  std::mt19937_64 random_;
  std::atomic<uint64_t> delayed_{0}, dropped_{0}, failed_{0}, partial_{0}, corrupted_{0};
};

}  // namespace moonpool
