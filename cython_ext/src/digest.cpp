// SPDX-License-Identifier: Apache-2.0
#include "digest.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "copy_avx2.hpp"
#include "ranges.hpp"

namespace moonpool {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "leaf values are hashed as little-endian words");

uint64_t leaf_digest(const void *data, size_t nbytes) {
#if defined(__x86_64__)
  static const bool avx2 = __builtin_cpu_supports("avx2");
  if (avx2) return xxh3_avx2(data, nbytes);
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
