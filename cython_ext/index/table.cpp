// SPDX-License-Identifier: Apache-2.0
#include "table.hpp"

#include <sys/mman.h>

#include <new>

namespace moonpool::index {

Table::~Table() {
  for (Part &part : parts_) {
    if (part.entries != nullptr) munmap(part.entries, part.capacity * sizeof(Entry));
  }
}

void Table::put(Part &part, Entry entry) {
  uint32_t i = home(entry.tag, part.capacity);
  while (part.entries[i].slot_and_1 != 0) i = next(i, part.capacity);
  part.entries[i] = entry;
}

void Table::resize(Part &part, uint32_t capacity) {
  Part made{nullptr, capacity, part.count};
  if (capacity != 0) {
    void *memory = mmap(nullptr, capacity * sizeof(Entry), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    made.entries = static_cast<Entry *>(memory);
  }
  for (uint32_t i = 0; i < part.capacity; ++i) {
    if (part.entries[i].slot_and_1 != 0) put(made, part.entries[i]);
  }
  if (part.entries != nullptr) munmap(part.entries, part.capacity * sizeof(Entry));
  bytes_ += capacity * sizeof(Entry);
  bytes_ -= part.capacity * sizeof(Entry);
  part = made;
}

void Table::insert(uint64_t hash, uint32_t slot) {
  Part &part = parts_[hash % kParts];
  if (part.capacity == 0) resize(part, kCapacityMin);
  // At most three quarters are taken: more would make searches for what is not there long.
  if ((part.count + 1) > part.capacity - part.capacity / 4) resize(part, part.capacity + part.capacity / 3);
  put(part, {tag_of(hash), slot + 1});
  ++part.count;
  ++count_;
}

void Table::erase(uint64_t hash, uint32_t slot) {
  Part &part = parts_[hash % kParts];
  uint32_t hole = home(tag_of(hash), part.capacity);
  while (part.entries[hole].slot_and_1 != slot + 1) hole = next(hole, part.capacity);
  // Entries behind the hole move up, unless that would put them before their home.
  for (uint32_t i = next(hole, part.capacity); part.entries[i].slot_and_1 != 0; i = next(i, part.capacity)) {
    const uint32_t at_home = home(part.entries[i].tag, part.capacity);
    const bool stays = hole < i ? (at_home > hole && at_home <= i) : (at_home > hole || at_home <= i);
    if (stays) continue;
    part.entries[hole] = part.entries[i];
    hole = i;
  }
  part.entries[hole] = {};
  --part.count;
  --count_;
  if (part.count == 0) {
    resize(part, 0);
  } else if (part.capacity > kCapacityMin && part.count < part.capacity / 4) {
    try {
      resize(part, part.capacity / 2 < kCapacityMin ? kCapacityMin : part.capacity / 2);
    } catch (const std::bad_alloc &) {
      // It stays as large as it is, which is no fault.
    }
  }
}

}  // namespace moonpool::index
