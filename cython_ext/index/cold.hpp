// SPDX-License-Identifier: Apache-2.0
//
// Chunks whose bytes are on disks only: for each disk a list in order of use, leaves first. A chunk is in the list of
// the disk that has its first shard. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "policy_lru.hpp"

namespace moonpool::index {

class Cold {
 public:
  explicit Cold(Chunks &chunks) : chunks_(chunks) {}

  // Room for a disk at this place in Segments. Throws std::bad_alloc; nothing after it does.
  void open(uint16_t disk) { lists_.try_emplace(disk, chunks_); }

  void add(uint32_t slot, uint16_t disk) {
    chunks_[slot].policy_c = disk;
    list_of(slot).on_insert(slot, kNone);
    ++count_;
  }
  void remove(uint32_t slot) {
    list_of(slot).on_remove(slot, false);
    --count_;
  }
  void on_touch(uint32_t slot) { list_of(slot).on_touch(slot); }
  void on_leaf(uint32_t slot) { list_of(slot).on_leaf(slot, kNone); }
  uint16_t disk_of(uint32_t slot) const { return static_cast<uint16_t>(chunks_[slot].policy_c); }
  uint32_t victim(uint16_t disk, const Policy::MayGo &may_go, uint32_t *looks) {
    const auto found = lists_.find(disk);
    return found == lists_.end() ? kNone : found->second.victim(may_go, looks);
  }

  bool empty(uint16_t disk) const {
    const auto found = lists_.find(disk);
    return found == lists_.end() || found->second.size() == 0;
  }
  // How many there are on all disks.
  size_t count() const { return count_; }

 private:
  LruPolicy &list_of(uint32_t slot) { return lists_.find(disk_of(slot))->second; }

  Chunks &chunks_;
  std::unordered_map<uint16_t, LruPolicy> lists_;
  size_t count_ = 0;
};

}  // namespace moonpool::index
