// SPDX-License-Identifier: Apache-2.0
//
// Puts that are under way: by owner, by deadline. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <unordered_map>
#include <utility>

#include "arena.hpp"

namespace moonpool::index {

struct Write {
  int64_t deadline;
  uint64_t commit;  // 0: still written; otherwise the number of the commit that waits for its record
  uint32_t owner, slot, shard;
  uint32_t before, after;  // of the same owner
};

class Writes {
 public:
  // Throws std::bad_alloc, before anything has changed.
  uint32_t add(uint32_t owner, uint32_t slot, uint32_t shard, int64_t deadline);
  // It has its commit: its owner has done its part, and it can neither expire nor be given up.
  void committed(uint32_t write) { unlink(write); }
  void remove(uint32_t write);

  Write &operator[](uint32_t write) { return all_[write]; }
  uint32_t expired(int64_t now) const;      // one whose deadline is not after `now`, or kNone
  uint32_t of_owner(uint32_t owner) const;  // one of them, or kNone
  template <class Look>
  void each_expired(int64_t now, Look look) const {
    for (auto at = by_deadline_.begin(); at != by_deadline_.end() && at->first <= now; ++at) look(all_[at->second]);
  }
  template <class Look>
  void each_of_owner(uint32_t owner, Look look) const {
    for (uint32_t at = of_owner(owner); at != kNone; at = all_[at].after) look(all_[at]);
  }

  size_t count() const { return all_.count(); }
  const Arena<Write> &arena() const { return all_; }
  size_t bytes() const;

 private:
  void unlink(uint32_t write);

  Arena<Write> all_;
  std::set<std::pair<int64_t, uint32_t>> by_deadline_;
  std::unordered_map<uint32_t, uint32_t> first_;
};

}  // namespace moonpool::index
