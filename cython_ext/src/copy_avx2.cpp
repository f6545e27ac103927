// SPDX-License-Identifier: Apache-2.0
// Compiled with -mavx2. Nothing of the standard library's templates may be used here: the linker keeps one copy of
// each, and might keep the one that needs AVX2.
#include "copy_avx2.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace moonpool {

namespace {

// How far ahead memory is asked for, and what is hashed between two stretches of stores: small enough that the
// processor overlaps one with the other, and that the bytes are still in the nearest cache.
constexpr size_t kAhead = 2048;
constexpr size_t kStretch = 2048;

inline void prefetch(const uint8_t *from) {
  _mm_prefetch(reinterpret_cast<const char *>(from + kAhead), _MM_HINT_T0);
  _mm_prefetch(reinterpret_cast<const char *>(from + kAhead + 64), _MM_HINT_T0);
}

inline __m256i load(const uint8_t *from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)); }
inline void stream(uint8_t *to, __m256i value) { _mm256_stream_si256(reinterpret_cast<__m256i *>(to), value); }
inline void store(uint8_t *to, __m256i value) { _mm256_store_si256(reinterpret_cast<__m256i *>(to), value); }

}  // namespace

void stream_avx2(uint8_t *to, const uint8_t *from, size_t nbytes) {
  for (size_t i = 0; i < nbytes; i += 128) {
    const __m256i a = load(from + i), b = load(from + i + 32), c = load(from + i + 64), d = load(from + i + 96);
    prefetch(from + i);
    stream(to + i, a);
    stream(to + i + 32, b);
    stream(to + i + 64, c);
    stream(to + i + 96, d);
  }
  _mm_sfence();
}

uint64_t stream_leaf_avx2(uint8_t *to, const uint8_t *from, size_t nbytes) {
  alignas(64) uint8_t seen[kStretch];
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  // Up to where `to` is aligned, and the rest that is no full stretch, go through the cache.
  const size_t head = (32 - reinterpret_cast<uintptr_t>(to) % 32) % 32;
  size_t at = 0;
  const auto plain = [&](size_t n) {
    memcpy(seen, from + at, n);
    memcpy(to + at, seen, n);
    XXH3_64bits_update(&state, seen, n);
    at += n;
  };
  if (head > 0 && head < nbytes) plain(head);
  for (; nbytes - at >= kStretch; at += kStretch) {
    for (size_t i = 0; i < kStretch; i += 128) {
      const uint8_t *source = from + at + i;
      const __m256i a = load(source), b = load(source + 32), c = load(source + 64), d = load(source + 96);
      prefetch(source);
      store(seen + i, a);
      store(seen + i + 32, b);
      store(seen + i + 64, c);
      store(seen + i + 96, d);
      uint8_t *target = to + at + i;
      stream(target, a);
      stream(target + 32, b);
      stream(target + 64, c);
      stream(target + 96, d);
    }
    XXH3_64bits_update(&state, seen, kStretch);
  }
  if (at < nbytes) plain(nbytes - at);
  _mm_sfence();
  return XXH3_64bits_digest(&state);
}

uint64_t xxh3_avx2(const void *data, size_t nbytes) { return XXH3_64bits(data, nbytes); }

}  // namespace moonpool
#endif
