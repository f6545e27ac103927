// SPDX-License-Identifier: Apache-2.0
#include "digest.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "copy_avx2.hpp"
#include "parallel.hpp"
#include "ranges.hpp"

namespace moonpool {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "leaf values are hashed as little-endian words");

namespace {

#if defined(__x86_64__)
const bool g_avx2 = __builtin_cpu_supports("avx2");
#endif

// Wholes, each of several ranges of several memories.
struct Joined {
  const mp_memory *memories;
  const int64_t *which;
  size_t which_stride;
  Ranges ranges;

  const uint8_t *at(size_t range, uint64_t skip) const {
    const mp_memory &memory = memories[which[range * which_stride]];
    return static_cast<const uint8_t *>(memory.data) + ranges.offset(range) + skip;
  }
  mp_status check(size_t memories_count, size_t *bad) const {
    for (size_t i = 0; i < ranges.count; ++i) {
      *bad = i;
      const int64_t memory = which[i * which_stride];
      if (memory < 0 || static_cast<uint64_t>(memory) >= memories_count) return MP_OUT_OF_RANGE;
      if (!ranges.fits(memories[memory].nbytes, i)) return MP_OUT_OF_RANGE;
    }
    return MP_OK;
  }
};

class PiecesOfLeaf {
 public:
  PiecesOfLeaf(const Joined &joined, const Stretch &leaf) : joined_(joined), walk_(joined.ranges, leaf) {}
  static const void *next(void *self, size_t *nbytes) { return static_cast<PiecesOfLeaf *>(self)->advance(nbytes); }

 private:
  const void *advance(size_t *nbytes) {
    size_t range;
    uint64_t skip, bytes;
    if (!walk_.next(&range, &skip, &bytes)) return nullptr;
    *nbytes = bytes;
    return joined_.at(range, skip);
  }

  const Joined &joined_;
  Walk walk_;
};

uint64_t digest_of_leaf(const Joined &joined, const Stretch &leaf) {
  if (leaf.bytes == 0) return leaf_digest("", 0);
  if (leaf.bytes <= joined.ranges.length(leaf.range) - leaf.skip) {
    return leaf_digest(joined.at(leaf.range, leaf.skip), leaf.bytes);
  }
  PiecesOfLeaf pieces(joined, leaf);
#if defined(__x86_64__)
  if (g_avx2) return xxh3_pieces_avx2(PiecesOfLeaf::next, &pieces, leaf.bytes);
#endif
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  size_t nbytes = 0;
  while (const void *piece = PiecesOfLeaf::next(&pieces, &nbytes)) XXH3_64bits_update(&state, piece, nbytes);
  return XXH3_64bits_digest(&state);
}

}  // namespace

uint64_t leaf_digest(const void *data, size_t nbytes) {
#if defined(__x86_64__)
  if (g_avx2) return xxh3_avx2(data, nbytes);
#endif
  return XXH3_64bits(data, nbytes);
}

uint64_t combine_leaves(const void *leaves, size_t count) {
  uint64_t first = 0;
  if (count != 1) return XXH3_64bits(leaves, count * sizeof first);
  std::memcpy(&first, leaves, sizeof first);
  return first;
}

}  // namespace moonpool

extern "C" uint64_t mp_digest(const void *data, uint64_t nbytes) {
  using namespace moonpool;
  const auto *bytes = static_cast<const uint8_t *>(data);
  if (nbytes <= kDigestLeafBytes) return leaf_digest(bytes, nbytes);
  std::vector<uint64_t> leaves;
  leaves.reserve((nbytes + kDigestLeafBytes - 1) / kDigestLeafBytes);
  for (uint64_t at = 0; at < nbytes; at += kDigestLeafBytes) {
    leaves.push_back(leaf_digest(bytes + at, std::min(kDigestLeafBytes, nbytes - at)));
  }
  return combine_leaves(leaves.data(), leaves.size());
}

extern "C" mp_status mp_digest_batch(const void *memory, uint64_t nbytes, const int64_t *offsets, size_t offsets_stride,
                                     const int64_t *lengths, size_t lengths_stride, size_t count, uint64_t *digests,
                                     size_t *bad) {
  using namespace moonpool;
  const Ranges ranges{offsets, offsets_stride, lengths, lengths_stride, count};
  if (!ranges.inside(nbytes, bad)) return MP_OUT_OF_RANGE;
  const auto *bytes = static_cast<const uint8_t *>(memory);
  for (size_t i = 0; i < count; ++i) digests[i] = mp_digest(bytes + ranges.offset(i), ranges.length(i));
  return MP_OK;
}

extern "C" mp_status mp_combine_batch(const void *memory, uint64_t nbytes, const int64_t *offsets,
                                      size_t offsets_stride, const int64_t *lengths, size_t lengths_stride,
                                      size_t count, uint64_t *digests, size_t *bad) {
  using namespace moonpool;
  const Ranges ranges{offsets, offsets_stride, lengths, lengths_stride, count};
  if (!ranges.inside(nbytes, bad)) return MP_OUT_OF_RANGE;
  for (size_t i = 0; i < count; ++i) {
    *bad = i;
    if (ranges.length(i) == 0 || ranges.length(i) % sizeof *digests != 0) return MP_INVALID_ARGUMENT;
  }
  const auto *bytes = static_cast<const uint8_t *>(memory);
  for (size_t i = 0; i < count; ++i) {
    digests[i] = combine_leaves(bytes + ranges.offset(i), ranges.length(i) / sizeof *digests);
  }
  return MP_OK;
}

extern "C" mp_status mp_digest_joined(const mp_memory *memories, size_t memories_count, const int64_t *which,
                                      size_t which_stride, const int64_t *offsets, size_t offsets_stride,
                                      const int64_t *lengths, size_t lengths_stride, size_t count,
                                      const int64_t *counts, size_t counts_stride, size_t wholes, uint64_t *digests,
                                      size_t *bad) {
  using namespace moonpool;
  const Joined joined{memories, which, which_stride, {offsets, offsets_stride, lengths, lengths_stride, count}};
  if (const mp_status status = joined.check(memories_count, bad); status != MP_OK) return status;
  std::vector<Stretch> leaves;
  std::vector<size_t> ends(wholes);
  size_t range = 0;
  uint64_t bytes = 0;
  for (size_t i = 0; i < wholes; ++i) {
    *bad = i;
    const int64_t ranges = counts[i * counts_stride];
    if (ranges < 0 || static_cast<uint64_t>(ranges) > count - range) return MP_INVALID_ARGUMENT;
    leaves.push_back({range, 0, 0});
    for (const size_t end = range + static_cast<size_t>(ranges); range < end; ++range) {
      for (uint64_t at = 0; at < joined.ranges.length(range);) {
        if (leaves.back().bytes == kDigestLeafBytes) leaves.push_back({range, at, 0});
        at += extend(&leaves.back(), joined.ranges, range, at, kDigestLeafBytes);
      }
      bytes += joined.ranges.length(range);
    }
    ends[i] = leaves.size();
  }
  *bad = wholes;
  if (range != count) return MP_INVALID_ARGUMENT;
  std::vector<uint64_t> values(leaves.size());
  in_turns(leaves.size(), threads_for(bytes),
           [&](size_t leaf) { values[leaf] = digest_of_leaf(joined, leaves[leaf]); });
  for (size_t i = 0, first = 0; i < wholes; first = ends[i++]) {
    digests[i] = combine_leaves(&values[first], ends[i] - first);
  }
  return MP_OK;
}
