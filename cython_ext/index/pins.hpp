// SPDX-License-Identifier: Apache-2.0
//
// Pins by their owners. A pin holds chunks by slot and birth: one that was lost meanwhile is not unpinned twice. Not
// thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace moonpool::index {

struct Pinned {
  uint32_t slot, birth;
};

class Pins {
 public:
  // Throws std::bad_alloc, before anything has changed.
  void add(uint32_t owner, uint64_t pin, const std::vector<Pinned> &pinned);
  // What this pin held; it is gone.
  std::vector<Pinned> take(uint32_t owner, uint64_t pin);
  // Calls `look` for each that the owner holds; all are gone.
  template <class Look>
  void take_owner(uint32_t owner, Look look) {
    for (auto at = all_.lower_bound({owner, 0}); at != all_.end() && at->first.first == owner; at = all_.erase(at)) {
      for (const Pinned pinned : at->second) look(pinned);
      count_ -= at->second.size();
    }
  }

  size_t count() const { return count_; }
  size_t bytes() const;

 private:
  std::map<std::pair<uint32_t, uint64_t>, std::vector<Pinned>> all_;
  size_t count_ = 0;
};

}  // namespace moonpool::index
