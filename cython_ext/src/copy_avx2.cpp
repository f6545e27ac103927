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

// How far ahead memory is asked for. Without it a copy waits at the end of every page.
constexpr size_t kAhead = 2048;
// The same where pieces lie here and there, so that the processor does not ask by itself.
constexpr size_t kAheadOfPieces = 6144;
// XXH3 takes stripes of 64 bytes and mixes its state after each block of 16; a stripe's part of the secret begins 8
// bytes after the one before (xxhash.h, XXH3_hashLong_internal_loop).
constexpr size_t kStripe = 64;
constexpr size_t kBlock = 16 * kStripe;
constexpr size_t kMixSecret = 128;

inline void prefetch(const uint8_t *from) {
  _mm_prefetch(reinterpret_cast<const char *>(from + kAhead), _MM_HINT_T0);
  _mm_prefetch(reinterpret_cast<const char *>(from + kAhead + 64), _MM_HINT_T0);
}

inline __m256i load(const void *from) { return _mm256_loadu_si256(static_cast<const __m256i *>(from)); }

template <bool kStreaming>
inline void store(uint8_t *to, __m256i value) {
  if (kStreaming) {
    _mm256_stream_si256(reinterpret_cast<__m256i *>(to), value);
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), value);
  }
}

inline __m256i accumulate(__m256i sum, __m256i data, __m256i secret) {
  const __m256i keyed = _mm256_xor_si256(data, secret);
  const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
  const __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
  return _mm256_add_epi64(product, _mm256_add_epi64(sum, swapped));
}

inline __m256i mix(__m256i sum, __m256i secret) {
  const __m256i prime = _mm256_set1_epi32(static_cast<int>(XXH_PRIME32_1));
  const __m256i keyed = _mm256_xor_si256(_mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47)), secret);
  const __m256i low = _mm256_mul_epu32(keyed, prime);
  const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(keyed, 32), prime);
  return _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
}

// Of so many bytes, the blocks that can be taken before the end: a stripe and a byte at least are left over.
inline size_t whole_blocks(size_t nbytes) { return nbytes <= kBlock + kStripe ? 0 : (nbytes - kStripe - 1) / kBlock; }

class PieceReader {
 public:
  PieceReader(NextPiece next, void *context) : next_(next), context_(context) {
    advance();
    advance();
  }
  // The next `nbytes` bytes, which must be there: where they lie, or in `room` when that is in several pieces.
  const uint8_t *take(size_t nbytes, uint8_t *room) {
    if (nbytes <= left_) {
      const uint8_t *from = at_;
      at_ += nbytes;
      left_ -= nbytes;
      return from;
    }
    for (size_t have = 0; have < nbytes;) {
      if (left_ == 0) advance();
      const size_t some = left_ < nbytes - have ? left_ : nbytes - have;
      memcpy(room + have, at_, some);
      at_ += some;
      left_ -= some;
      have += some;
    }
    return room;
  }
  // What is wanted soon. It may be asked for, not read.
  const uint8_t *ahead() const { return left_ > ahead_ ? at_ + ahead_ : then_ + (ahead_ - left_); }

 private:
  void advance() {
    at_ = then_;
    left_ = then_bytes_;
    ahead_ = left_ < kAheadOfPieces ? left_ : kAheadOfPieces;
    if (const void *piece = next_(context_, &then_bytes_)) {
      then_ = static_cast<const uint8_t *>(piece);
    } else {
      then_bytes_ = 0;
    }
  }

  const NextPiece next_;
  void *const context_;
  const uint8_t *at_ = nullptr, *then_ = nullptr;
  size_t left_ = 0, then_bytes_ = 0, ahead_ = 0;
};

// The library hashes memory. Here the hash is of the very registers that are stored, so that nobody who changes `from`
// meanwhile comes between the two, and no byte is read twice. The end of the leaf is the library's again.
template <bool kStreaming>
uint64_t copy_and_hash(uint8_t *to, const uint8_t *from, size_t nbytes) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  const unsigned char *secret = state.extSecret;
  const size_t blocks = whole_blocks(nbytes);
  __m256i low = load(state.acc), high = load(state.acc + 4);
  size_t at = 0;
  for (size_t block = 0; block < blocks; ++block) {
    for (size_t stripe = 0; stripe < kBlock / kStripe; ++stripe, at += kStripe) {
      const __m256i a = load(from + at), b = load(from + at + 32);
      if (stripe % 2 == 0) prefetch(from + at);
      store<kStreaming>(to + at, a);
      store<kStreaming>(to + at + 32, b);
      low = accumulate(low, a, load(secret + 8 * stripe));
      high = accumulate(high, b, load(secret + 8 * stripe + 32));
    }
    low = mix(low, load(secret + kMixSecret));
    high = mix(high, load(secret + kMixSecret + 32));
  }
  if (kStreaming) _mm_sfence();
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(state.acc), low);
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(state.acc + 4), high);
  state.totalLen = at;
  uint8_t rest[kBlock + kStripe];
  memcpy(rest, from + at, nbytes - at);
  memcpy(to + at, rest, nbytes - at);
  XXH3_64bits_update(&state, rest, nbytes - at);
  return XXH3_64bits_digest(&state);
}

}  // namespace

void stream_avx2(uint8_t *to, const uint8_t *from, size_t nbytes) {
  for (size_t i = 0; i < nbytes; i += 128) {
    const __m256i a = load(from + i), b = load(from + i + 32), c = load(from + i + 64), d = load(from + i + 96);
    prefetch(from + i);
    store<true>(to + i, a);
    store<true>(to + i + 32, b);
    store<true>(to + i + 64, c);
    store<true>(to + i + 96, d);
  }
  _mm_sfence();
}

uint64_t copy_and_hash_avx2(uint8_t *to, const uint8_t *from, size_t nbytes, bool streaming) {
  const bool aligned = reinterpret_cast<uintptr_t>(to) % 32 == 0;
  return streaming && aligned ? copy_and_hash<true>(to, from, nbytes) : copy_and_hash<false>(to, from, nbytes);
}

uint64_t xxh3_avx2(const void *data, size_t nbytes) { return XXH3_64bits(data, nbytes); }

// The library takes what lies in pieces at half of the rate and less, as it asks for no memory ahead of the next one.
uint64_t xxh3_pieces_avx2(NextPiece next, void *context, size_t nbytes) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  const unsigned char *secret = state.extSecret;
  const size_t blocks = whole_blocks(nbytes);
  __m256i low = load(state.acc), high = load(state.acc + 4);
  PieceReader pieces(next, context);
  uint8_t room[kBlock + kStripe];
  for (size_t block = 0; block < blocks; ++block) {
    const uint8_t *ahead = pieces.ahead();
    const uint8_t *from = pieces.take(kBlock, room);
    for (size_t at = 0; at < kBlock; at += kStripe) {
      const __m256i a = load(from + at), b = load(from + at + 32);
      _mm_prefetch(reinterpret_cast<const char *>(ahead + at), _MM_HINT_T0);
      low = accumulate(low, a, load(secret + at / 8));
      high = accumulate(high, b, load(secret + at / 8 + 32));
    }
    low = mix(low, load(secret + kMixSecret));
    high = mix(high, load(secret + kMixSecret + 32));
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(state.acc), low);
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(state.acc + 4), high);
  state.totalLen = blocks * kBlock;
  const size_t rest = nbytes - blocks * kBlock;
  XXH3_64bits_update(&state, pieces.take(rest, room), rest);
  return XXH3_64bits_digest(&state);
}

}  // namespace moonpool
#endif
