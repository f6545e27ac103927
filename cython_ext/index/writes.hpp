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
  // Its owner has done its part: it can neither expire nor be given up.
  void commit(uint32_t write, uint64_t number);
  void remove(uint32_t write);

  Write &operator[](uint32_t write) { return all_[write]; }
  uint32_t expired(int64_t now) const;      // one whose deadline is not after `now`, or kNone
  uint32_t of_owner(uint32_t owner) const;  // one of them, or kNone

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
