// SPDX-License-Identifier: Apache-2.0
#include "writes.hpp"

#include "undo.hpp"

namespace moonpool::index {

uint32_t Writes::add(uint32_t owner, uint32_t slot, uint32_t shard, int64_t deadline) {
  const uint32_t made = all_.take();
  Undo undo([&] {
    by_deadline_.erase({deadline, made});
    all_.give(made);
  });
  by_deadline_.emplace(deadline, made);
  const auto first = first_.try_emplace(owner, kNone).first;
  undo.keep();
  all_[made] = {deadline, 0, owner, slot, shard, kNone, first->second};
  if (first->second != kNone) all_[first->second].before = made;
  first->second = made;
  return made;
}

void Writes::unlink(uint32_t write) {
  const Write &gone = all_[write];
  by_deadline_.erase({gone.deadline, write});
  if (gone.after != kNone) all_[gone.after].before = gone.before;
  if (gone.before != kNone) {
    all_[gone.before].after = gone.after;
  } else if (gone.after != kNone) {
    first_[gone.owner] = gone.after;
  } else {
    first_.erase(gone.owner);
  }
}

void Writes::remove(uint32_t write) {
  if (all_[write].commit == 0) unlink(write);
  all_.give(write);
}

uint32_t Writes::expired(int64_t now) const {
  return by_deadline_.empty() || by_deadline_.begin()->first > now ? kNone : by_deadline_.begin()->second;
}

uint32_t Writes::of_owner(uint32_t owner) const {
  const auto found = first_.find(owner);
  return found == first_.end() ? kNone : found->second;
}

size_t Writes::bytes() const {
  constexpr size_t kNode = 48;  // of a set, with what the heap adds
  return all_.bytes() + (by_deadline_.size() + first_.size()) * kNode;
}

}  // namespace moonpool::index
