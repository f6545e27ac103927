// SPDX-License-Identifier: Apache-2.0
//
// How a batch of descriptors is cut over connections, and how one cut becomes iovecs. Both sides of a run use this,
// so they agree without talking.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <climits>
#include <vector>

#include "limits_api.h"

namespace moonpool::limits {

// The part of one batch that travels over one connection.
struct Share {
  size_t first = 0;   // descriptor, counted from the start of the list
  uint64_t skip = 0;  // bytes of that descriptor that belong to the connection before
  uint64_t bytes = 0;
};

// The part of a list that one stream walks.
struct Walk {
  const mpl_list *list;
  size_t first;    // descriptor
  size_t batches;  // in one cycle

  Walk(const mpl_list &whole, size_t stream)
      : list(&whole),
        first(stream * (whole.count / whole.streams)),
        batches(whole.count / whole.streams / whole.batch) {}

  size_t batch_begin(uint64_t batch) const { return first + (batch % batches) * list->batch; }

  uint64_t batch_bytes(uint64_t batch) const {
    const int64_t *lengths = list->lengths + batch_begin(batch);
    uint64_t total = 0;
    for (size_t i = 0; i < list->batch; ++i) total += static_cast<uint64_t>(lengths[i]);
    return total;
  }
};

// How many of `connections` are worth using for the largest batch of the list.
inline size_t connections_used(const mpl_list &list, size_t connections) {
  uint64_t most = 0;
  for (size_t i = 0; i < list.count; i += list.batch) {
    uint64_t total = 0;
    for (size_t j = i; j < i + list.batch; ++j) total += static_cast<uint64_t>(list.lengths[j]);
    most = std::max(most, total);
  }
  return std::clamp<uint64_t>(most / MPL_SHARE_BYTES_MIN, 1, connections);
}

// Share `index` of `used` equal ones. A cut falls between two descriptors, or on a page inside a large one.
inline Share share_of(const Walk &walk, uint64_t batch, size_t index, size_t used) {
  constexpr uint64_t kPage = 4096;
  const size_t begin = walk.batch_begin(batch);
  const size_t end = begin + walk.list->batch;
  const int64_t *lengths = walk.list->lengths;
  const uint64_t total = walk.batch_bytes(batch);
  if (used == 1) return {begin, 0, total};

  size_t descriptor = begin;
  uint64_t before = 0;  // bytes ahead of `descriptor`
  auto advance_to_cut = [&](size_t cut) -> uint64_t {
    if (cut == used) return total;
    const uint64_t wanted = total / used * cut;
    while (descriptor < end && before + static_cast<uint64_t>(lengths[descriptor]) <= wanted)
      before += static_cast<uint64_t>(lengths[descriptor++]);
    if (descriptor == end || static_cast<uint64_t>(lengths[descriptor]) < MPL_SHARE_BYTES_MIN) return before;
    return before + (wanted - before) / kPage * kPage;
  };
  const uint64_t from = advance_to_cut(index);
  const Share share{descriptor, from - before, 0};
  const uint64_t to = advance_to_cut(index + 1);
  return {share.first, share.skip, to - from};
}

// Gives out a share as iovecs, IOV_MAX at a time.
class Pieces {
 public:
  Pieces(const mpl_list &list, const Share &share)
      : list_(list), descriptor_(share.first), skip_(share.skip), left_(share.bytes) {}

  bool empty() const { return left_ == 0; }

  // Appends to `out` until it holds IOV_MAX entries or the share ends; returns the bytes appended.
  uint64_t fill(std::vector<iovec> &out) {
    uint64_t appended = 0;
    while (left_ > 0 && out.size() < IOV_MAX) {
      const uint64_t length = std::min(static_cast<uint64_t>(list_.lengths[descriptor_]) - skip_, left_);
      auto *base = static_cast<char *>(list_.memory) + list_.offsets[descriptor_] + skip_;
      out.push_back({base, length});
      appended += length;
      left_ -= length;
      ++descriptor_;
      skip_ = 0;
    }
    return appended;
  }

 private:
  const mpl_list &list_;
  size_t descriptor_;
  uint64_t skip_;
  uint64_t left_;
};

}  // namespace moonpool::limits
