// SPDX-License-Identifier: Apache-2.0
// The kernels of copy.cpp and digest.cpp for processors with AVX2; the callers ask the processor first.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moonpool {

// Returns the next piece of some bytes and how long it is; nullptr: there is none.
using NextPiece = const void *(*)(void *context, size_t *nbytes);

#if defined(__x86_64__)
// Past the caches. `to` is aligned to 32 bytes, `nbytes` is a multiple of 128.
void stream_avx2(uint8_t *to, const uint8_t *from, size_t nbytes);
// Copies and returns XXH3-64 of the bytes that were put at `to`. Past the caches if `streaming` and `to` is aligned.
uint64_t copy_and_hash_avx2(uint8_t *to, const uint8_t *from, size_t nbytes, bool streaming);
uint64_t xxh3_avx2(const void *data, size_t nbytes);
// XXH3-64 of the `nbytes` bytes that all pieces have together.
uint64_t xxh3_pieces_avx2(NextPiece next, void *context, size_t nbytes);
#endif

}  // namespace moonpool
