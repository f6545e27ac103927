// SPDX-License-Identifier: Apache-2.0
//
// S3-FIFO (Yang et al., SOSP 2023): a small queue that what is used once passes through quickly, a main queue whose
// chunks get another turn for each use, and the keys of what has gone, which come back into the main queue. Leaves go
// first, as in policy_lru.hpp.
#pragma once

#include "ghosts.hpp"
#include "policy.hpp"
#include "policy_list.hpp"

namespace moonpool::index {

class S3FifoPolicy final : public Policy {
 public:
  S3FifoPolicy(Chunks &chunks, uint64_t seed) : chunks_(chunks), seed_(seed), small_(chunks), main_(chunks) {}

  void set_capacity(size_t chunks) override;
  void on_insert(uint32_t slot, uint32_t parent) override;
  void on_touch(uint32_t slot) override;
  void on_remove(uint32_t slot, bool evicted) override;
  void on_leaf(uint32_t slot, uint32_t last_child) override;
  uint32_t victim(const MayGo &may_go, uint32_t *looks) override;
  uint32_t uses(uint32_t slot) const override {
    const Chunk &chunk = chunks_[slot];
    return 1 + chunk.policy_b + (in_main(chunk) ? 1 : 0);
  }
  size_t bytes() const override { return ghosts_.bytes(); }

 private:
  static constexpr uint32_t kUsesMax = 3;
  static constexpr size_t kSmallShare = 10;  // a tenth of all, as in the paper

  // In policy_c.
  static constexpr uint32_t kInMain = 1, kParked = 2;

  static uint32_t &uses(Chunk &chunk) { return chunk.policy_b; }
  static bool in_main(const Chunk &chunk) { return (chunk.policy_c & kInMain) != 0; }
  static bool parked(const Chunk &chunk) { return (chunk.policy_c & kParked) != 0; }
  PolicyList &queue_of(const Chunk &chunk) { return in_main(chunk) ? main_ : small_; }

  Chunks &chunks_;
  const uint64_t seed_;
  PolicyList small_, main_;
  Ghosts ghosts_;
  size_t capacity_ = 0;
};

}  // namespace moonpool::index
