// SPDX-License-Identifier: Apache-2.0
#include "digest.hpp"

#include <algorithm>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "copy_avx2.hpp"

namespace moonpool {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "leaf values are hashed as little-endian words");

uint64_t leaf_digest(const void *data, size_t nbytes) {
#if defined(__x86_64__)
  static const bool avx2 = __builtin_cpu_supports("avx2");
  if (avx2) return xxh3_avx2(data, nbytes);
#endif
  return XXH3_64bits(data, nbytes);
}

uint64_t combine_leaves(const uint64_t *leaves, size_t count) {
  return count == 1 ? leaves[0] : XXH3_64bits(leaves, count * sizeof *leaves);
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
  for (size_t i = 0; i < count; ++i) {
    const int64_t offset = offsets[i * offsets_stride], length = lengths[i * lengths_stride];
    if (offset < 0 || length < 0 || static_cast<uint64_t>(offset) > nbytes ||
        static_cast<uint64_t>(length) > nbytes - static_cast<uint64_t>(offset)) {
      *bad = i;
      return MP_OUT_OF_RANGE;
    }
  }
  const auto *bytes = static_cast<const uint8_t *>(memory);
  for (size_t i = 0; i < count; ++i) {
    digests[i] = mp_digest(bytes + offsets[i * offsets_stride], static_cast<uint64_t>(lengths[i * lengths_stride]));
  }
  return MP_OK;
}
