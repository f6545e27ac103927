// SPDX-License-Identifier: Apache-2.0
//
// The one that was not used for the longest time, leaves first: a chunk with children that comes to the end is parked
// until the last of them is gone, and takes its place.
#pragma once

#include "policy.hpp"
#include "policy_list.hpp"

namespace moonpool::index {

class LruPolicy final : public Policy {
 public:
  explicit LruPolicy(Chunks &chunks) : chunks_(chunks), list_(chunks) {}

  void on_insert(uint32_t slot, uint32_t) override {
    parked(slot) = 0;
    list_.add(slot);
  }
  void on_touch(uint32_t slot) override {
    on_remove(slot, false);
    on_insert(slot, kNone);
  }
  void on_remove(uint32_t slot, bool) override {
    if (parked(slot) == 0) list_.remove(slot);
  }
  void on_leaf(uint32_t slot, uint32_t) override {
    if (parked(slot) == 0) return;
    parked(slot) = 0;
    list_.add_oldest(slot);
  }
  uint32_t victim(const MayGo &may_go, uint32_t *looks) override {
    for (size_t turns = list_.size(); turns > 0 && *looks > 0; --turns, --*looks) {
      const uint32_t oldest = list_.oldest();
      if (chunks_[oldest].child != kNone) {
        list_.remove(oldest);
        parked(oldest) = 1;
      } else if (may_go(oldest)) {
        return oldest;
      } else {
        list_.renew(oldest);  // it is in use
      }
    }
    return kNone;
  }

 private:
  uint32_t &parked(uint32_t slot) { return chunks_[slot].policy_a; }

  Chunks &chunks_;
  PolicyList list_;
};

}  // namespace moonpool::index
