// SPDX-License-Identifier: Apache-2.0
//
// What the table and the policies make of a key. All 32 bytes count: a caller's keys need not be hashes of anything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace moonpool::index {

constexpr size_t kHashBytes = 32;
constexpr uint8_t kNoHash[kHashBytes] = {};

inline bool is_no_hash(const uint8_t *hash) { return std::memcmp(hash, kNoHash, kHashBytes) == 0; }

inline uint64_t mixed(uint64_t a, uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t key_hash(const uint8_t *hash, uint32_t name_space, uint64_t seed) {
  uint64_t words[4];
  std::memcpy(words, hash, sizeof words);
  // Odd constants with as many ones as zeros; they keep words of zeros from swallowing the others.
  const uint64_t front = mixed(words[0] ^ 0xa0761d6478bd642f, words[1] ^ seed);
  const uint64_t back = mixed(words[2] ^ 0xe7037ed1a0b428db, words[3] ^ seed ^ 0x8ebc6af09c88c6e3);
  return mixed(front ^ back ^ name_space, seed ^ 0x589965cc75374cc3);
}

// For choices that need not be secret: splitmix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  // From 0 to 1, without 1.
  double fraction() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }

 private:
  uint64_t state_;
};

}  // namespace moonpool::index
