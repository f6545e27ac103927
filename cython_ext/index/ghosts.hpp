// SPDX-License-Identifier: Apache-2.0
//
// What is remembered of chunks that went: when they were used last and how often. Sets of eight entries of 12 bytes;
// the one that went first makes room. Memory that was never written is never there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace moonpool::index {

struct Ghost {
  uint64_t clock;
  uint32_t count;  // 0 to 7
};

class Ghosts {
 public:
  Ghosts() = default;
  Ghosts(const Ghosts &) = delete;
  Ghosts &operator=(const Ghosts &) = delete;
  ~Ghosts() { set_capacity(0); }

  // What was remembered is forgotten. Where there is no memory, nothing is remembered from now on.
  void set_capacity(size_t entries);
  // Returns what had to make room. `now` is not before any `clock`, and within 2^32 of those that matter.
  std::optional<Ghost> put(uint64_t name, Ghost ghost, uint64_t now);
  // It is forgotten with that.
  std::optional<Ghost> take(uint64_t name, uint64_t now);

  size_t bytes() const { return sets_ * sizeof(Set); }

 private:
  static constexpr uint32_t kWays = 8;
  struct Entry {
    uint32_t tag_and_count;  // 0: empty
    uint32_t clock;          // its lower half
    uint32_t order;
  };
  struct Set {
    Entry entries[kWays];
  };

  static uint32_t tag_of(uint64_t name) { return static_cast<uint32_t>(name) | 8; }
  static Ghost ghost_of(const Entry &entry, uint64_t now) {
    return {now - static_cast<uint32_t>(static_cast<uint32_t>(now) - entry.clock), entry.tag_and_count & 7};
  }
  Set &set_of(uint64_t name) { return all_[(name >> 32) * sets_ >> 32]; }

  Set *all_ = nullptr;
  size_t sets_ = 0;
  uint32_t order_ = 0;
};

}  // namespace moonpool::index
