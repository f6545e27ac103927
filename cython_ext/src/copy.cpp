// SPDX-License-Identifier: Apache-2.0
#include "copy.hpp"

#include <cstring>

#include "copy_avx2.hpp"
#include "digest.hpp"

namespace moonpool {

namespace {

#if defined(__x86_64__)
const bool g_avx2 = __builtin_cpu_supports("avx2");

bool overlap(const uint8_t *to, const uint8_t *from, size_t nbytes) { return to < from + nbytes && from < to + nbytes; }
#endif

}  // namespace

void copy_bytes(void *to, const void *from, size_t nbytes, bool streaming) {
  auto *target = static_cast<uint8_t *>(to);
  const auto *source = static_cast<const uint8_t *>(from);
#if defined(__x86_64__)
  if (streaming && g_avx2 && nbytes >= 4096 && !overlap(target, source, nbytes)) {
    const size_t head = (32 - reinterpret_cast<uintptr_t>(target) % 32) % 32;
    const size_t middle = (nbytes - head) / 128 * 128;
    std::memcpy(target, source, head);
    stream_avx2(target + head, source + head, middle);
    std::memcpy(target + head + middle, source + head + middle, nbytes - head - middle);
    return;
  }
#else
  (void)streaming;
#endif
  std::memmove(target, source, nbytes);
}

uint64_t copy_leaf(void *to, const void *from, size_t nbytes, bool streaming) {
  auto *target = static_cast<uint8_t *>(to);
  const auto *source = static_cast<const uint8_t *>(from);
#if defined(__x86_64__)
  if (g_avx2 && !overlap(target, source, nbytes)) return copy_and_hash_avx2(target, source, nbytes, streaming);
#else
  (void)streaming;
#endif
  std::memmove(target, source, nbytes);
  return leaf_digest(target, nbytes);
}

}  // namespace moonpool
