// SPDX-License-Identifier: Apache-2.0
//
// Pieces by offset, as a treap within the pieces themselves: what restoring a million extents in any order needs, and
// no memory of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "arena.hpp"
#include "piece.hpp"

namespace moonpool::index {

class ExtentTree {
 public:
  explicit ExtentTree(Arena<Piece> &pieces) : pieces_(pieces) {}

  // Whether nothing in the tree lies within.
  bool is_free(uint64_t offset, uint64_t units) const;
  // The piece has its offset and size, and is_free() there.
  void insert(uint32_t piece);
  void erase(uint32_t piece);
  void clear() { root_ = kNone; }
  // Where the last one ends.
  uint64_t end() const;
  // All of them by rising offset.
  std::vector<uint32_t> sorted(size_t count) const;

 private:
  static uint32_t priority(uint32_t piece) { return piece * 0x9e3779b1u ^ piece >> 15; }
  uint32_t merge(uint32_t left, uint32_t right);

  Arena<Piece> &pieces_;
  uint32_t root_ = kNone;
};

}  // namespace moonpool::index
