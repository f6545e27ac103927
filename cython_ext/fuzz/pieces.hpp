// SPDX-License-Identifier: Apache-2.0
//
// Memory that targets register: pieces with poisoned gaps around them, so that the sanitizer reports the first byte
// that is read or written outside of one, and one piece that the kernel lets nobody write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moonpool::fuzz {

struct Piece {
  uint8_t *base;
  size_t bytes;
  bool writable;
};

constexpr size_t kSmall = 0;       // 5000 bytes
constexpr size_t kReadOnly = 1;    // 8192 bytes, write-protected
constexpr size_t kLarge = 2;       // more than one leaf of a digest
constexpr size_t kNeighbour = 3;   // 64 bytes, and directly behind them ...
constexpr size_t kNeighbours = 4;  // ... 64 more
constexpr size_t kPieces = 5;

const std::vector<Piece> &pieces();
// `n` bytes from `at` on of what is in a piece, or in a remote region with this number, at the start.
void fill_pattern(uint8_t *out, uint64_t number, uint64_t at, size_t n);
bool has_pattern(const uint8_t *bytes, uint64_t number, uint64_t at, size_t n);
// Puts the pattern into every writable piece.
void refill();

}  // namespace moonpool::fuzz
