// SPDX-License-Identifier: Apache-2.0
#include "ghosts.hpp"

#include <sys/mman.h>

#include <algorithm>

namespace moonpool::index {

void Ghosts::set_capacity(size_t entries) {
  // A set is found by the upper half of a name, so there are no more than it can tell apart.
  const size_t sets = std::min<size_t>((entries + kWays - 1) / kWays, UINT32_MAX);
  if (sets == sets_) return;
  void *memory = MAP_FAILED;
  if (sets != 0) {
    memory = mmap(nullptr, sets * sizeof(Set), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }
  if (all_ != nullptr) munmap(all_, sets_ * sizeof(Set));
  all_ = memory == MAP_FAILED ? nullptr : static_cast<Set *>(memory);
  sets_ = memory == MAP_FAILED ? 0 : sets;
}

std::optional<Ghost> Ghosts::put(uint64_t name, Ghost ghost, uint64_t now) {
  if (sets_ == 0) return std::nullopt;
  Set &set = set_of(name);
  ++order_;
  Entry *into = set.entries;
  for (Entry &entry : set.entries) {
    if (entry.tag_and_count == 0 || entry.tag_and_count >> 3 == tag_of(name) >> 3) {
      into = &entry;
      break;
    }
    if (order_ - entry.order > order_ - into->order) into = &entry;
  }
  std::optional<Ghost> gone;
  if (into->tag_and_count != 0) gone = ghost_of(*into, now);
  *into = {(tag_of(name) & ~7u) | ghost.count, static_cast<uint32_t>(ghost.clock), order_};
  return gone;
}

std::optional<Ghost> Ghosts::take(uint64_t name, uint64_t now) {
  if (sets_ == 0) return std::nullopt;
  for (Entry &entry : set_of(name).entries) {
    if (entry.tag_and_count == 0 || entry.tag_and_count >> 3 != tag_of(name) >> 3) continue;
    const Ghost found = ghost_of(entry, now);
    entry = {};
    return found;
  }
  return std::nullopt;
}

}  // namespace moonpool::index
