// SPDX-License-Identifier: Apache-2.0
//
// The one that was not used for the longest time. Users touch a chain from its end, so that a chunk is not older than
// what hangs on it; where it is nevertheless, it counts as used when the search meets it.
#pragma once

#include "policy.hpp"
#include "policy_list.hpp"

namespace moonpool::index {

class LruPolicy final : public Policy {
 public:
  explicit LruPolicy(Chunks &chunks) : chunks_(chunks), list_(chunks) {}

  void on_insert(uint32_t slot, uint32_t parent) override {
    list_.add(slot);
    if (parent != kNone && chunks_[parent].listed) list_.renew(parent);
  }
  void on_touch(uint32_t slot) override { list_.renew(slot); }
  void on_remove(uint32_t slot, bool) override { list_.remove(slot); }
  uint32_t victim(const MayGo &may_go, uint32_t *looks) override {
    for (size_t turns = list_.size(); turns > 0 && *looks > 0; --turns, --*looks) {
      const uint32_t oldest = list_.oldest();
      if (may_go(oldest)) return oldest;
      list_.renew(oldest);
    }
    return kNone;
  }

 private:
  Chunks &chunks_;
  PolicyList list_;
};

}  // namespace moonpool::index
