// SPDX-License-Identifier: Apache-2.0
//
// From a key's hash to slots. Open addressing with linear probing over 256 parts, which grow and shrink one by one, so
// that no call pays for a table of millions. An entry is the upper half of the hash, which also says where it goes, and
// a slot: the chunks themselves are looked at only to compare keys. Not thread-safe; const calls may run at once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "arena.hpp"

namespace moonpool::index {

class Table {
 public:
  Table() = default;
  Table(const Table &) = delete;
  Table &operator=(const Table &) = delete;
  ~Table();

  // The slot with this hash for which `same` holds, or kNone.
  template <class Same>
  uint32_t find(uint64_t hash, Same same) const {
    const Part &part = parts_[hash % kParts];
    if (part.capacity == 0) return kNone;
    const uint32_t tag = tag_of(hash);
    for (uint32_t i = home(tag, part.capacity);; i = next(i, part.capacity)) {
      const Entry &entry = part.entries[i];
      if (entry.slot_and_1 == 0) return kNone;
      if (entry.tag == tag && same(entry.slot_and_1 - 1)) return entry.slot_and_1 - 1;
    }
  }
  void prefetch(uint64_t hash) const {
    const Part &part = parts_[hash % kParts];
    if (part.capacity != 0) __builtin_prefetch(&part.entries[home(tag_of(hash), part.capacity)]);
  }
  // The key is not in it. Throws std::bad_alloc, before anything has changed.
  void insert(uint64_t hash, uint32_t slot);
  // It is in it.
  void erase(uint64_t hash, uint32_t slot);

  size_t count() const { return count_; }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr uint32_t kParts = 256;
  static constexpr uint32_t kCapacityMin = 512;  // a page of memory
  struct Entry {
    uint32_t tag;
    uint32_t slot_and_1;  // 0: empty, which is what new memory holds
  };
  struct Part {
    Entry *entries = nullptr;
    uint32_t capacity = 0, count = 0;
  };

  static uint32_t tag_of(uint64_t hash) { return static_cast<uint32_t>(hash >> 32); }
  // In order of the tag, and for any capacity: it need not be a power of two, so growing is by a third.
  static uint32_t home(uint32_t tag, uint32_t capacity) {
    return static_cast<uint32_t>(uint64_t{tag} * capacity >> 32);
  }
  static uint32_t next(uint32_t i, uint32_t capacity) { return i + 1 == capacity ? 0 : i + 1; }
  static void put(Part &part, Entry entry);
  void resize(Part &part, uint32_t capacity);

  std::array<Part, kParts> parts_;
  size_t count_ = 0, bytes_ = 0;
};

}  // namespace moonpool::index
