// SPDX-License-Identifier: Apache-2.0
#include "pieces.hpp"

#include <sanitizer/asan_interface.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "world.hpp"

namespace moonpool::fuzz {

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kGap = 4 * kPage;
constexpr size_t kLargeBytes = 262144 + 20007;

// Random bytes, twice over so that a run of one period can begin anywhere. The period is a prime, so that no piece
// looks the same at two aligned places.
constexpr size_t kPeriod = 65521;

const uint8_t *pattern_from(uint64_t number, uint64_t at) {
  static const auto *bytes = [] {
    auto *made = new std::vector<uint8_t>(2 * kPeriod);
    uint32_t state = 1;
    for (size_t i = 0; i < kPeriod; ++i) {
      state = state * 1664525 + 1013904223;
      (*made)[i] = (*made)[i + kPeriod] = static_cast<uint8_t>(state >> 24);
    }
    return made;
  }();
  return bytes->data() + (number * 7919 + at % kPeriod) % kPeriod;
}

std::vector<Piece> make_pieces() {
  constexpr size_t kTotal = 6 * kGap + 64 * kPage + 40 * kPage;
  void *mapped = mmap(nullptr, kTotal, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  FUZZ_CHECK(mapped != MAP_FAILED);
  auto *arena = static_cast<uint8_t *>(mapped);
  ASAN_POISON_MEMORY_REGION(arena, kTotal);
  std::vector<Piece> made;
  size_t at = kGap;
  const auto add = [&](size_t bytes, bool writable) {
    made.push_back({arena + at, bytes, writable});
    ASAN_UNPOISON_MEMORY_REGION(arena + at, bytes);
    fill_pattern(arena + at, made.size() - 1, 0, bytes);
    at += bytes;
  };
  const auto gap = [&] { at = (at + kPage - 1) / kPage * kPage + kGap; };
  add(5000, true);
  gap();
  add(2 * kPage, false);
  FUZZ_CHECK(mprotect(made.back().base, made.back().bytes, PROT_READ) == 0);
  gap();
  add(kLargeBytes, true);
  gap();
  add(64, true);
  add(64, true);
  FUZZ_CHECK(at + kGap <= kTotal && made.size() == kPieces);
  return made;
}

}  // namespace

const std::vector<Piece> &pieces() {
  static const auto *all = new std::vector<Piece>(make_pieces());
  return *all;
}

void fill_pattern(uint8_t *out, uint64_t number, uint64_t at, size_t n) {
  for (size_t done = 0; done < n; done += std::min(kPeriod, n - done)) {
    std::memcpy(out + done, pattern_from(number, at + done), std::min(kPeriod, n - done));
  }
}

bool has_pattern(const uint8_t *bytes, uint64_t number, uint64_t at, size_t n) {
  for (size_t done = 0; done < n; done += std::min(kPeriod, n - done)) {
    if (std::memcmp(bytes + done, pattern_from(number, at + done), std::min(kPeriod, n - done)) != 0) return false;
  }
  return true;
}

void refill() {
  for (size_t i = 0; i < kPieces; ++i) {
    if (pieces()[i].writable) fill_pattern(pieces()[i].base, i, 0, pieces()[i].bytes);
  }
}

}  // namespace moonpool::fuzz
