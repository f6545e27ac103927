// SPDX-License-Identifier: Apache-2.0
//
// Which keys went not long ago: 8 bytes each, sets of four of which the oldest makes room. A key is remembered until as
// many others have gone as the table was told to remember.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace moonpool::index {

class Ghosts {
 public:
  // How many to remember. The table follows it up and down by powers of two.
  void set_reach(size_t count) {
    reach_ = static_cast<uint32_t>(std::min<size_t>(count, UINT32_MAX / 4));
    const size_t wanted = std::bit_ceil(std::max<size_t>(reach_, 64));
    if (entries_.size() >= wanted && entries_.size() <= 4 * wanted) return;
    std::vector<Entry> before(wanted);
    before.swap(entries_);
    for (const Entry &entry : before) {
      if (entry.age_and_1 != 0 && now_ - entry.age_and_1 < reach_) put(entry);
    }
  }
  void add(uint64_t hash) {
    if (++now_ == 0) ++now_;
    put({tag_of(hash), now_});
  }
  // Whether it is remembered; then no more.
  bool take(uint64_t hash) {
    if (entries_.empty()) return false;
    const uint32_t tag = tag_of(hash);
    Entry *set = set_of(tag);
    for (Entry *at = set; at < set + kWays; ++at) {
      if (at->age_and_1 == 0 || at->tag != tag) continue;
      const bool known = now_ - at->age_and_1 < reach_;
      *at = {};
      return known;
    }
    return false;
  }
  size_t bytes() const { return entries_.capacity() * sizeof(Entry); }

 private:
  static constexpr size_t kWays = 4;
  struct Entry {
    uint32_t tag = 0;
    uint32_t age_and_1 = 0;  // the number of when it went; 0: empty
  };

  static uint32_t tag_of(uint64_t hash) { return static_cast<uint32_t>(hash >> 32); }
  Entry *set_of(uint32_t tag) {
    const size_t sets = entries_.size() / kWays;
    return &entries_[(uint64_t{tag} * sets >> 32) * kWays];
  }
  void put(Entry entry) {
    Entry *set = set_of(entry.tag);
    Entry *oldest = set;
    for (Entry *at = set; at < set + kWays; ++at) {
      if (at->age_and_1 == 0 || at->tag == entry.tag) {
        oldest = at;
        break;
      }
      if (now_ - at->age_and_1 > now_ - oldest->age_and_1) oldest = at;
    }
    *oldest = entry;
  }

  std::vector<Entry> entries_;
  uint32_t reach_ = 0, now_ = 0;
};

}  // namespace moonpool::index
