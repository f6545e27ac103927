// SPDX-License-Identifier: Apache-2.0
//
// The one that was not used for the longest time, leaves first: a chunk with children that comes to the end is parked
// until the last of them is gone, and takes its place.
#pragma once

#include <algorithm>

#include "policy.hpp"
#include "policy_list.hpp"

namespace moonpool::index {

class LruPolicy final : public Policy {
 public:
  explicit LruPolicy(Chunks &chunks) : chunks_(chunks), list_(chunks) {}

  void on_insert(uint32_t slot, uint32_t) override {
    chunks_[slot].policy_b = 1;
    list_.add(slot);
  }
  void on_touch(uint32_t slot) override {
    on_remove(slot, false);
    chunks_[slot].policy_b = std::min(uses(slot) + 1, kParked - 1);
    list_.add(slot);
  }
  void on_remove(uint32_t slot, bool) override {
    if (!parked(slot)) list_.remove(slot);
  }
  void on_leaf(uint32_t slot, uint32_t) override {
    if (!parked(slot)) return;
    chunks_[slot].policy_b &= ~kParked;
    list_.add_oldest(slot);
  }
  uint32_t victim(const MayGo &may_go, uint32_t *looks) override {
    for (size_t turns = list_.size(); turns > 0 && *looks > 0; --turns, --*looks) {
      const uint32_t oldest = list_.oldest();
      if (has_children(chunks_[oldest])) {
        list_.remove(oldest);
        chunks_[oldest].policy_b |= kParked;
      } else if (may_go(oldest)) {
        return oldest;
      } else {
        list_.renew(oldest);  // it is in use
      }
    }
    return kNone;
  }
  uint32_t uses(uint32_t slot) const override { return chunks_[slot].policy_b & ~kParked; }
  size_t size() const { return list_.size(); }  // without those that are parked

 private:
  // In policy_b, beside the count of uses.
  static constexpr uint32_t kParked = 1u << 31;

  // A chunk that is cold itself has none but cold ones, as a rule, and none may lose its parent.
  static bool has_children(const Chunk &chunk) { return chunk.cold ? chunk.child != kNone : chunk.warm_children != 0; }
  bool parked(uint32_t slot) const { return (chunks_[slot].policy_b & kParked) != 0; }

  Chunks &chunks_;
  PolicyList list_;
};

}  // namespace moonpool::index
