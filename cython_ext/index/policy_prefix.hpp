// SPDX-License-Identifier: Apache-2.0
//
// The default policy (docs/decisions/0007-eviction.md): least recently used, where who is used more often counts as
// more recent, by as much as would have had most hits lately; leaves first.
#pragma once

#include <array>

#include "ghosts.hpp"
#include "policy.hpp"
#include "policy_list.hpp"
#include "shadows.hpp"

namespace moonpool::index {

class PrefixPolicy final : public Policy {
 public:
  PrefixPolicy(Chunks &chunks, uint64_t seed);

  void set_capacity(size_t chunks) override;
  void on_insert(uint32_t slot, uint32_t parent) override;
  void on_touch(uint32_t slot) override;
  void on_remove(uint32_t slot, bool evicted) override;
  void on_leaf(uint32_t slot, uint32_t last_child) override;
  uint32_t victim(const MayGo &may_go, uint32_t *looks) override;
  uint32_t uses(uint32_t slot) const override { return state(slot).count; }
  size_t bytes() const override { return ghosts_.bytes(); }

 private:
  // Chunks of a class that come to its head though they are in use, before the search leaves it for now.
  static constexpr uint32_t kInUseMax = 64;

  // What a chunk has: 48 bits of clock, 3 of count, two flags.
  struct State {
    uint64_t clock;
    uint32_t count;
    bool parked, sampled;
  };
  State state(uint32_t slot) const;
  void set_state(uint32_t slot, State state);
  PolicyList &list_of(State state) { return lists_[Shadows::class_of(state.count)]; }

  uint64_t name_of(uint32_t slot) const { return chunks_[slot].name(seed_); }
  void unlink(uint32_t slot, State state);
  void recount(uint32_t slot, uint64_t clock, uint32_t count);

  Chunks &chunks_;
  const uint64_t seed_;
  std::array<PolicyList, Shadows::kClasses> lists_;
  Ghosts ghosts_;
  Shadows shadows_;
  uint64_t capacity_ = 0, clock_ = 0, next_choice_ = 0;
  uint32_t chosen_ = 1;
};

}  // namespace moonpool::index
