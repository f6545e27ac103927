// SPDX-License-Identifier: Apache-2.0
//
// A piece of a segment, taken or free: 28 bytes each.
#pragma once

#include <cstdint>

namespace moonpool::index {

enum class PieceState : uint8_t { kFree, kUsed, kWaiting };

struct Piece {
  uint32_t offset_low, size_low;
  uint8_t offset_high, size_high;
  PieceState state;
  bool committed;          // what is there is that of a chunk, and not only being written
  uint32_t before, after;  // by offset; in an ExtentTree: left and right
  union {
    uint32_t slot;       // the owner
    uint32_t list_next;  // free ones of the same class
  };
  uint32_t list_before;

  // In units.
  uint64_t offset() const { return uint64_t{offset_high} << 32 | offset_low; }
  uint64_t size() const { return uint64_t{size_high} << 32 | size_low; }
  uint64_t end() const { return offset() + size(); }
  void set_offset(uint64_t units) {
    offset_low = static_cast<uint32_t>(units);
    offset_high = static_cast<uint8_t>(units >> 32);
  }
  void set_size(uint64_t units) {
    size_low = static_cast<uint32_t>(units);
    size_high = static_cast<uint8_t>(units >> 32);
  }
};
static_assert(sizeof(Piece) == 28);

}  // namespace moonpool::index
