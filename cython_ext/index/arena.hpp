// SPDX-License-Identifier: Apache-2.0
//
// Items under small numbers: the lowest free number goes first, pages that are empty go back to the system. Numbers and
// addresses of items stay what they are. Not thread-safe.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

namespace moonpool::index {

constexpr uint32_t kNone = UINT32_MAX;

template <class T>
class Arena {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  static constexpr uint32_t kPageItems = 4096;

  Arena() = default;
  Arena(const Arena &) = delete;
  Arena &operator=(const Arena &) = delete;
  ~Arena() { clear(); }

  // The lowest free number, its item as T{}. Throws std::bad_alloc, before anything has changed.
  uint32_t take() {
    while (first_room_ < pages_.size() && pages_[first_room_]->count == kPageItems) ++first_room_;
    const auto page = static_cast<uint32_t>(first_room_);
    map(page);
    uint32_t word = 0;
    while (~pages_[page]->used[word] == 0) ++word;
    const uint32_t at =
        page * kPageItems + word * 64 + static_cast<uint32_t>(std::countr_one(pages_[page]->used[word]));
    mark(at);
    return at;
  }

  // So many more can be taken, wherever there is room, without std::bad_alloc.
  void reserve(size_t count) {
    size_t room = 0;
    for (auto page = static_cast<uint32_t>(first_room_); room < count; ++page) {
      map(page);
      room += kPageItems - pages_[page]->count;
    }
  }

  // This number; false when it is taken.
  bool take(uint32_t at) {
    if (used(at)) return false;
    map(at / kPageItems);
    mark(at);
    return true;
  }

  void give(uint32_t at) {
    const uint32_t page = at / kPageItems, in_page = at % kPageItems;
    pages_[page]->used[in_page / 64] &= ~(uint64_t{1} << in_page % 64);
    --count_;
    first_room_ = std::min<size_t>(first_room_, page);
    if (--pages_[page]->count != 0) return;
    unmap(page);
    while (!items_.empty() && items_.back() == nullptr) {
      items_.pop_back();
      pages_.pop_back();
    }
    first_room_ = std::min(first_room_, pages_.size());
  }

  void clear() {
    for (uint32_t page = 0; page < items_.size(); ++page) {
      if (items_[page] != nullptr) unmap(page);
    }
    items_ = std::vector<T *>();
    pages_ = std::vector<std::unique_ptr<Page>>();
    first_room_ = count_ = 0;
  }

  bool used(uint32_t at) const {
    const uint32_t page = at / kPageItems, in_page = at % kPageItems;
    return page < pages_.size() && (pages_[page]->used[in_page / 64] >> in_page % 64 & 1) != 0;
  }

  T &operator[](uint32_t at) { return items_[at / kPageItems][at % kPageItems]; }
  const T &operator[](uint32_t at) const { return items_[at / kPageItems][at % kPageItems]; }

  size_t count() const { return count_; }
  // Every number in use is below.
  uint32_t end() const { return static_cast<uint32_t>(pages_.size()) * kPageItems; }
  // The first number in use from `at` on, or end().
  uint32_t next_used(uint32_t at) const {
    while (at < end()) {
      const uint64_t word = pages_[at / kPageItems]->used[at % kPageItems / 64] >> at % 64;
      if (word != 0) return at + static_cast<uint32_t>(std::countr_zero(word));
      at = (at / 64 + 1) * 64;
      if (at % kPageItems == 0) {
        while (at < end() && items_[at / kPageItems] == nullptr) at += kPageItems;
      }
    }
    return end();
  }
  size_t bytes() const { return mapped_ * kPageBytes + pages_.capacity() * (sizeof(Page) + 2 * sizeof(void *)); }

 private:
  static constexpr size_t kPageBytes = sizeof(T) * kPageItems;
  struct Page {
    std::array<uint64_t, kPageItems / 64> used{};
    uint32_t count = 0;
  };

  void map(uint32_t page) {
    while (pages_.size() <= page) {
      auto made = std::make_unique<Page>();
      items_.reserve(std::max<size_t>(items_.capacity(), pages_.size() + 1));
      pages_.push_back(std::move(made));
      items_.push_back(nullptr);
    }
    if (items_[page] != nullptr) return;
    void *memory = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    items_[page] = static_cast<T *>(memory);
    ++mapped_;
  }

  void unmap(uint32_t page) {
    munmap(items_[page], kPageBytes);
    items_[page] = nullptr;
    --mapped_;
  }

  void mark(uint32_t at) {
    const uint32_t page = at / kPageItems, in_page = at % kPageItems;
    pages_[page]->used[in_page / 64] |= uint64_t{1} << in_page % 64;
    ++pages_[page]->count;
    ++count_;
    new (&items_[page][in_page]) T{};
  }

  std::vector<T *> items_;
  std::vector<std::unique_ptr<Page>> pages_;
  size_t first_room_ = 0;  // no page before it has room
  size_t count_ = 0, mapped_ = 0;
};

}  // namespace moonpool::index
