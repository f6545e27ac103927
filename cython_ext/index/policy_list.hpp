// SPDX-License-Identifier: Apache-2.0
//
// A list of chunks from the newest to the oldest.
#pragma once

#include <cstddef>
#include <cstdint>

#include "chunk.hpp"

namespace moonpool::index {

class PolicyList {
 public:
  explicit PolicyList(Chunks &chunks) : chunks_(chunks) {}

  void add(uint32_t slot) {
    Chunk &chunk = chunks_[slot];
    chunk.before = kNone;
    chunk.after = newest_;
    (newest_ == kNone ? oldest_ : chunks_[newest_].before) = slot;
    newest_ = slot;
    ++size_;
  }
  void add_oldest(uint32_t slot) {
    Chunk &chunk = chunks_[slot];
    chunk.before = oldest_;
    chunk.after = kNone;
    (oldest_ == kNone ? newest_ : chunks_[oldest_].after) = slot;
    oldest_ = slot;
    ++size_;
  }
  void remove(uint32_t slot) {
    const Chunk &chunk = chunks_[slot];
    (chunk.before == kNone ? newest_ : chunks_[chunk.before].after) = chunk.after;
    (chunk.after == kNone ? oldest_ : chunks_[chunk.after].before) = chunk.before;
    --size_;
  }
  void renew(uint32_t slot) {
    if (slot == newest_) return;
    remove(slot);
    add(slot);
  }
  uint32_t oldest() const { return oldest_; }
  size_t size() const { return size_; }

 private:
  Chunks &chunks_;
  uint32_t newest_ = kNone, oldest_ = kNone;
  size_t size_ = 0;
};

}  // namespace moonpool::index
