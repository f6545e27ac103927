// SPDX-License-Identifier: Apache-2.0
// Ranges of a piece of memory as columns: a stride is 1 for an array and 0 for one number that holds for all.
#pragma once

#include <algorithm>
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

  // Whether one is inside `nbytes` bytes. A negative number is larger than any memory.
  bool fits(uint64_t nbytes, size_t i) const { return offset(i) <= nbytes && length(i) <= nbytes - offset(i); }
  // Whether all are; *bad: the first that is not.
  bool inside(uint64_t nbytes, size_t *bad) const {
    for (size_t i = 0; i < count; ++i) {
      if (fits(nbytes, i)) continue;
      *bad = i;
      return false;
    }
    return true;
  }
};

// Some of the bytes that ranges have together, one after the other: where they begin, and how many they are.
struct Stretch {
  size_t range;
  uint64_t skip;  // bytes of that range
  uint64_t bytes;
};

// Takes up to `bytes_max` bytes more of a range into the stretch, from `skip` of it on. Returns how many.
inline uint64_t extend(Stretch *stretch, const Ranges &ranges, size_t range, uint64_t skip, uint64_t bytes_max) {
  const uint64_t bytes = std::min(ranges.length(range) - skip, bytes_max - stretch->bytes);
  stretch->bytes += bytes;
  return bytes;
}

// What is left of a stretch, range by range.
class Walk {
 public:
  Walk(const Ranges &ranges, const Stretch &stretch) : ranges_(ranges), left_(stretch) {}
  // False at the end. Otherwise `bytes` bytes of a range, from `skip` of it on.
  bool next(size_t *range, uint64_t *skip, uint64_t *bytes) {
    if (left_.bytes == 0) return false;
    *range = left_.range;
    *skip = left_.skip;
    *bytes = std::min(left_.bytes, ranges_.length(left_.range) - left_.skip);
    left_ = {left_.range + 1, 0, left_.bytes - *bytes};
    return true;
  }

 private:
  const Ranges &ranges_;
  Stretch left_;
};

}  // namespace moonpool
