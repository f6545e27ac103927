// SPDX-License-Identifier: Apache-2.0
#include "copy.hpp"

#include <cstring>
#include <vector>

#include "copy_avx2.hpp"
#include "digest.hpp"
#include "moonpool/engine.h"
#include "parallel.hpp"
#include "ranges.hpp"

namespace moonpool {

namespace {

#if defined(__x86_64__)
const bool g_avx2 = __builtin_cpu_supports("avx2");

bool overlap(const uint8_t *to, const uint8_t *from, size_t nbytes) { return to < from + nbytes && from < to + nbytes; }
#endif

// The bytes of all ranges, cut for in_turns.
std::vector<Stretch> turns_of(const Ranges &ranges) {
  std::vector<Stretch> turns;
  for (size_t i = 0; i < ranges.count; ++i) {
    for (uint64_t at = 0; at < ranges.length(i);) {
      if (turns.empty() || turns.back().bytes == kTurnBytes) turns.push_back({i, at, 0});
      at += extend(&turns.back(), ranges, i, at, kTurnBytes);
    }
  }
  return turns;
}

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

extern "C" mp_status mp_copy_batch(void *target, uint64_t target_bytes, const int64_t *target_offsets,
                                   size_t target_offsets_stride, const void *source, uint64_t source_bytes,
                                   const int64_t *source_offsets, size_t source_offsets_stride, const int64_t *lengths,
                                   size_t lengths_stride, size_t count, size_t *bad) {
  using namespace moonpool;
  const Ranges to{target_offsets, target_offsets_stride, lengths, lengths_stride, count};
  const Ranges from{source_offsets, source_offsets_stride, lengths, lengths_stride, count};
  if (!to.inside(target_bytes, bad) || !from.inside(source_bytes, bad)) return MP_OUT_OF_RANGE;
  auto *out = static_cast<uint8_t *>(target);
  const auto *in = static_cast<const uint8_t *>(source);
  uint64_t bytes = 0;
  for (size_t i = 0; i < count; ++i) bytes += to.length(i);
  const bool streaming = bytes >= kStreamingBytes;
  if (bytes < 2 * kTurnBytes || (out < in + source_bytes && in < out + target_bytes)) {
    // What lies in one memory may be the source of a later range, so the order counts.
    for (size_t i = 0; i < count; ++i) copy_bytes(out + to.offset(i), in + from.offset(i), to.length(i), streaming);
    return MP_OK;
  }
  const std::vector<Stretch> turns = turns_of(to);
  in_turns(turns.size(), threads_for(bytes), [&](size_t turn) {
    Walk walk(to, turns[turn]);
    size_t range;
    uint64_t skip, nbytes;
    while (walk.next(&range, &skip, &nbytes)) {
      copy_bytes(out + to.offset(range) + skip, in + from.offset(range) + skip, nbytes, streaming);
    }
  });
  return MP_OK;
}
