// SPDX-License-Identifier: Apache-2.0
// Ranges of a piece of memory as columns: a stride is 1 for an array and 0 for one number that holds for all.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moonpool {

struct Ranges {
  const int64_t *offsets;
  size_t offsets_stride;
  const int64_t *lengths;
  size_t lengths_stride;
  size_t count;

  uint64_t offset(size_t i) const { return static_cast<uint64_t>(offsets[i * offsets_stride]); }
  uint64_t length(size_t i) const { return static_cast<uint64_t>(lengths[i * lengths_stride]); }

  // Whether all are inside `nbytes` bytes; *bad: the first that is not. A negative number is larger than any memory.
  bool inside(uint64_t nbytes, size_t *bad) const {
    for (size_t i = 0; i < count; ++i) {
      if (offset(i) <= nbytes && length(i) <= nbytes - offset(i)) continue;
      *bad = i;
      return false;
    }
    return true;
  }
};

}  // namespace moonpool
