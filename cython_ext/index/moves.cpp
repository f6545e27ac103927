// SPDX-License-Identifier: Apache-2.0
#include "moves.hpp"

namespace moonpool::index {

Move &Moves::add(uint32_t slot, uint32_t shard, Place from, Place to, MoveKind kind) {
  const uint64_t id = last_ + 1;
  Move &made = all_[id];
  try {
    by_slot_.emplace(slot, id);
  } catch (...) {
    all_.erase(id);
    throw;
  }
  last_ = id;
  made = {id, slot, shard, from, to, kind, false, 0};
  return made;
}

Move *Moves::find(uint64_t id) {
  const auto found = all_.find(id);
  return found == all_.end() ? nullptr : &found->second;
}

Move *Moves::of(uint32_t slot) {
  if (by_slot_.empty()) return nullptr;
  const auto found = by_slot_.find(slot);
  return found == by_slot_.end() ? nullptr : find(found->second);
}

void Moves::leave(Move &move) {
  by_slot_.erase(move.slot);
  move.slot = kNone;
}

void Moves::remove(const Move &move) {
  if (move.slot != kNone) by_slot_.erase(move.slot);
  all_.erase(move.id);
}

size_t Moves::bytes() const {
  constexpr size_t kNode = 32;  // of a map, with what the heap adds
  return all_.size() * (sizeof(Move) + 2 * kNode);
}

}  // namespace moonpool::index
