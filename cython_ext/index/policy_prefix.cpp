// SPDX-License-Identifier: Apache-2.0
#include "policy_prefix.hpp"

#include <algorithm>

namespace moonpool::index {

namespace {

constexpr uint64_t kClockMask = (uint64_t{1} << 48) - 1;
constexpr uint64_t kPeriodMin = 16;

}  // namespace

PrefixPolicy::PrefixPolicy(Chunks &chunks, uint64_t seed)
    : chunks_(chunks),
      seed_(seed),
      lists_{PolicyList(chunks), PolicyList(chunks), PolicyList(chunks), PolicyList(chunks)} {}

PrefixPolicy::State PrefixPolicy::state(uint32_t slot) const {
  const Chunk &chunk = chunks_[slot];
  const uint64_t packed = uint64_t{chunk.policy_b} << 32 | chunk.policy_c;
  return {packed & kClockMask, static_cast<uint32_t>(packed >> 48 & 7), (packed >> 51 & 1) != 0,
          (packed >> 52 & 1) != 0};
}

void PrefixPolicy::set_state(uint32_t slot, State state) {
  const uint64_t packed = (state.clock & kClockMask) | uint64_t{state.count} << 48 |
                          uint64_t{state.parked ? 1u : 0u} << 51 | uint64_t{state.sampled ? 1u : 0u} << 52;
  chunks_[slot].policy_b = static_cast<uint32_t>(packed >> 32);
  chunks_[slot].policy_c = static_cast<uint32_t>(packed);
}

void PrefixPolicy::set_capacity(size_t chunks) {
  // A new capacity makes the shadows start again, so small changes are none.
  chunks = std::max<size_t>(chunks, 1);
  if (capacity_ != 0 && alike(capacity_, chunks)) return;
  capacity_ = chunks;
  ghosts_.set_capacity(chunks);
  shadows_.set_capacity(chunks, clock_);
  next_choice_ = clock_ + std::max<uint64_t>(kPeriodMin, capacity_);
}

void PrefixPolicy::unlink(uint32_t slot, State state) {
  if (!state.parked) list_of(state).remove(slot);
}

void PrefixPolicy::recount(uint32_t slot, uint64_t clock, uint32_t count) {
  State its = state(slot);
  if (its.sampled) {
    shadows_.remove(its.clock, its.count);
    shadows_.add(clock, count, clock_);
  }
  unlink(slot, its);
  its = {clock, count, false, its.sampled};
  set_state(slot, its);
  list_of(its).add(slot);
}

void PrefixPolicy::on_insert(uint32_t slot, uint32_t parent) {
  ++clock_;
  const uint64_t name = name_of(slot);
  State made{clock_, 1, false, name % Shadows::kSample == 0};
  std::optional<Ghost> ghost;
  if (made.sampled) {
    ghost = ghosts_.take(name, clock_);
    if (ghost) {
      made.count = std::min(Shadows::kCountMax, ghost->count + 1);
      shadows_.hit(ghost->clock, ghost->count);
      shadows_.remove(ghost->clock, ghost->count);
    }
    shadows_.add(clock_, made.count, clock_);
  }
  set_state(slot, made);
  list_of(made).add(slot);
  if (ghost) {
    // What comes before it was used as often.
    for (uint32_t above = parent; above != kNone && chunks_[above].listed && !chunks_[above].cold;
         above = chunks_[above].parent) {
      const State its = state(above);
      if (its.count >= made.count) break;
      recount(above, its.clock, made.count);
    }
  }
  if (clock_ < next_choice_ || capacity_ == 0) return;
  next_choice_ = clock_ + std::max<uint64_t>(kPeriodMin, capacity_);
  chosen_ = shadows_.choose(chosen_);
}

void PrefixPolicy::on_touch(uint32_t slot) {
  const State its = state(slot);
  if (its.sampled) shadows_.hit(its.clock, its.count);
  recount(slot, clock_, std::min(Shadows::kCountMax, its.count + 1));
}

void PrefixPolicy::on_remove(uint32_t slot, bool evicted) {
  const State its = state(slot);
  unlink(slot, its);
  if (!its.sampled) return;
  if (!evicted) {
    // Somebody wanted it to be gone: nothing is left of it.
    shadows_.remove(its.clock, its.count);
    return;
  }
  const std::optional<Ghost> gone = ghosts_.put(name_of(slot), {its.clock, its.count}, clock_);
  if (gone) shadows_.remove(gone->clock, gone->count);
}

// It takes the place of its last child.
void PrefixPolicy::on_leaf(uint32_t slot, uint32_t last_child) {
  State its = state(slot);
  if (!its.parked) return;
  // One that was never committed has the clock 0.
  const uint64_t clock = state(last_child).clock;
  if (clock > its.clock) {
    if (its.sampled) {
      shadows_.remove(its.clock, its.count);
      shadows_.add(clock, its.count, clock_);
    }
    its.clock = clock;
  }
  its.parked = false;
  set_state(slot, its);
  list_of(its).add_oldest(slot);
}

uint32_t PrefixPolicy::victim(const MayGo &may_go, uint32_t *looks) {
  std::array<uint32_t, Shadows::kClasses> in_use{};
  for (; *looks > 0; --*looks) {
    uint32_t best = kNone;
    uint64_t lowest = UINT64_MAX;
    for (uint32_t its_class = 0; its_class < Shadows::kClasses; ++its_class) {
      const uint32_t head = lists_[its_class].oldest();
      if (head == kNone || in_use[its_class] == kInUseMax) continue;
      const uint64_t score = state(head).clock + shadows_.bonus(chosen_, its_class);
      if (score >= lowest) continue;
      lowest = score;
      best = head;
    }
    if (best == kNone) return kNone;
    State its = state(best);
    if (chunks_[best].warm_children != 0) {
      unlink(best, its);
      its.parked = true;
      set_state(best, its);
    } else if (may_go(best)) {
      return best;
    } else {
      // It is as new as any now, and may still come before all of another class.
      ++in_use[Shadows::class_of(its.count)];
      recount(best, clock_, its.count);
    }
  }
  return kNone;
}

}  // namespace moonpool::index
