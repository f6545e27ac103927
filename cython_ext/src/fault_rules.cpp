// SPDX-License-Identifier: Apache-2.0
#include "fault_rules.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace moonpool {

namespace {

Error check_probability(const char *name, double value) {
  if (value >= 0.0 && value <= 1.0) return {};  // not so for a NaN
  return make_error(MP_CONFIG, std::string(name) + " is no probability", "a number from 0 to 1");
}

Error check_status(const char *name, int32_t status) {
  if (status > MP_PENDING && status <= kLastStatus && status != MP_WAIT_TIMEOUT) return {};
  return make_error(MP_CONFIG, std::string(name) + " is " + std::to_string(status) + ", which no transfer fails with",
                    "an mp_status such as MP_PEER_LOST");
}

}  // namespace

Error check_faults(const mp_faults &faults) {
  if (faults.abi_version != MP_ABI_VERSION) {
    return make_error(MP_CONFIG, "mp_faults is of another version of the interface", "call mp_faults_init first");
  }
  const std::pair<const char *, double> probabilities[] = {
      {"delay", faults.delay},     {"drop", faults.drop},       {"error", faults.error},
      {"partial", faults.partial}, {"corrupt", faults.corrupt}, {"partial_share", faults.partial_share}};
  for (const auto &[name, value] : probabilities) {
    if (Error error = check_probability(name, value)) return error;
  }
  if (faults.delay_min_us > faults.delay_max_us) {
    return make_error(MP_CONFIG, "delay_min_us is above delay_max_us", "the shortest delay first");
  }
  if (Error error = check_status("error_status", faults.error_status)) return error;
  return check_status("partial_status", faults.partial_status);
}

void FaultRules::set(const mp_faults &faults) {
  std::lock_guard lock(mutex_);
  faults_ = faults;
  random_.seed(faults.seed);
}

bool FaultRules::chance(double probability) {
  // Drawn also when it cannot be, so that one probability does not shift what the seed decides about the others.
  return std::uniform_real_distribution<double>(0.0, 1.0)(random_) < probability;
}

FaultPlan FaultRules::draw(uint32_t descs) {
  std::lock_guard lock(mutex_);
  FaultPlan plan;
  const bool error = chance(faults_.error), partial = chance(faults_.partial), delay = chance(faults_.delay);
  plan.drop = chance(faults_.drop);
  plan.corrupt = chance(faults_.corrupt);
  if (error) {
    plan.error = static_cast<mp_status>(faults_.error_status);
    failed_.fetch_add(1);
    return plan;
  }
  if (plan.drop) {
    dropped_.fetch_add(1);
    return plan;
  }
  if (delay) {
    std::uniform_int_distribution<int64_t> microseconds(faults_.delay_min_us, faults_.delay_max_us);
    plan.delay_ns = microseconds(random_) * 1000;
    delayed_.fetch_add(1);
  }
  std::uniform_int_distribution<uint32_t> any(0, descs - 1);
  if (partial) {
    plan.failing_status = static_cast<mp_status>(faults_.partial_status);
    for (uint32_t i = 0; i < descs; ++i) {
      if (chance(faults_.partial_share)) plan.failing.push_back(i);
    }
    if (plan.failing.empty()) plan.failing.push_back(any(random_));
    partial_.fetch_add(1);
  }
  // Of those that are moved.
  plan.corrupt_desc = any(random_);
  for (uint32_t tried = 0; std::binary_search(plan.failing.begin(), plan.failing.end(), plan.corrupt_desc); ++tried) {
    plan.corrupt_desc = (plan.corrupt_desc + 1) % descs;
    if (tried == descs) {
      plan.corrupt = false;
      break;
    }
  }
  plan.corrupt_at = random_();
  plan.corrupt_bit = static_cast<uint8_t>(1u << (random_() % 8));
  if (plan.corrupt) corrupted_.fetch_add(1);
  return plan;
}

mp_faults_made FaultRules::made() const {
  return {delayed_.load(), dropped_.load(), failed_.load(), partial_.load(), corrupted_.load()};
}

}  // namespace moonpool
