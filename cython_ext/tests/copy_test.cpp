// SPDX-License-Identifier: Apache-2.0
//
// The copy kernels: every byte, no byte beside it, and the digest of what was put down, however the ranges lie.
#include "copy.hpp"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>

#include "digest.hpp"
#include "support.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

// Memory between two pages that may not be touched, so that one byte too many ends the test.
class Guarded {
 public:
  explicit Guarded(size_t nbytes)
      : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))), usable_((nbytes + page_ - 1) / page_ * page_) {
    void *space = mmap(nullptr, usable_ + 2 * page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(space, MAP_FAILED);
    base_ = static_cast<uint8_t *>(space);
    EXPECT_EQ(mprotect(base_, page_, PROT_NONE), 0);
    EXPECT_EQ(mprotect(base_ + page_ + usable_, page_, PROT_NONE), 0);
  }
  ~Guarded() { munmap(base_, usable_ + 2 * page_); }
  Guarded(const Guarded &) = delete;

  uint8_t *begin() const { return base_ + page_; }
  uint8_t *end() const { return base_ + page_ + usable_; }
  size_t size() const { return usable_; }
  void fill(uint8_t byte) const { std::memset(begin(), byte, usable_); }
  // Whether every byte but those of [from, from + nbytes) is still `byte`.
  bool only(const uint8_t *from, size_t nbytes, uint8_t byte) const {
    const auto same = [byte](uint8_t one) { return one == byte; };
    return std::all_of(static_cast<const uint8_t *>(begin()), from, same) &&
           std::all_of(from + nbytes, static_cast<const uint8_t *>(end()), same);
  }

 private:
  const size_t page_, usable_;
  uint8_t *base_;
};

constexpr size_t kRoom = kDigestLeafBytes + 8192;

// With and without stores past the caches.
class Copy : public ::testing::TestWithParam<bool> {
 protected:
  Copy() {
    const Bytes data = random_data(source_.size(), 1);
    std::memcpy(source_.begin(), data.data(), data.size());
  }
  // Both functions, from `from` to `to`.
  void check(uint8_t *to, const uint8_t *from, size_t nbytes) {
    target_.fill(0xa5);
    copy_bytes(to, from, nbytes, GetParam());
    ASSERT_EQ(std::memcmp(to, from, nbytes), 0) << describe(to, from, nbytes);
    ASSERT_TRUE(target_.only(to, nbytes, 0xa5)) << describe(to, from, nbytes);
    if (nbytes > kDigestLeafBytes) return;
    target_.fill(0x5a);
    const uint64_t digest = copy_leaf(to, from, nbytes, GetParam());
    ASSERT_EQ(std::memcmp(to, from, nbytes), 0) << describe(to, from, nbytes);
    ASSERT_TRUE(target_.only(to, nbytes, 0x5a)) << describe(to, from, nbytes);
    ASSERT_EQ(digest, mp_digest(from, nbytes)) << describe(to, from, nbytes);
  }
  static std::string describe(const uint8_t *to, const uint8_t *from, size_t nbytes) {
    return std::to_string(nbytes) + " bytes, target at " + std::to_string(reinterpret_cast<uintptr_t>(to) % 64) +
           ", source at " + std::to_string(reinterpret_cast<uintptr_t>(from) % 64) + " of a cache line";
  }

  const Guarded source_{kRoom}, target_{kRoom};
};

INSTANTIATE_TEST_SUITE_P(Kernels, Copy, ::testing::Bool(),
                         [](const auto &info) { return info.param ? "PastTheCaches" : "ThroughThem"; });

TEST_P(Copy, EveryAlignmentOfBothSides) {
  for (size_t to = 0; to < 64; ++to) {
    for (size_t from = 0; from < 64; from += to % 8 == 0 ? 1 : 13) {
      check(target_.begin() + to, source_.begin() + from, 4096 + 128 + 17);
    }
  }
}

TEST_P(Copy, LengthsAroundEveryStepOfTheKernels) {
  for (const size_t step : {size_t{0}, size_t{32}, size_t{128}, size_t{2048}, size_t{4096}, size_t{6144}, size_t{8192},
                            size_t{65536}, size_t{kDigestLeafBytes}}) {
    for (int off = -33; off <= 33; ++off) {
      if (off < 0 && step < static_cast<size_t>(-off)) continue;
      const size_t nbytes = step + static_cast<size_t>(off);
      for (const size_t to : {0, 1, 31}) check(target_.begin() + to, source_.begin() + 5, nbytes);
    }
  }
}

// Asking for memory ahead must not touch what is behind the end.
TEST_P(Copy, UpToTheLastByteBeforeAPageThatMayNotBeTouched) {
  for (size_t nbytes = 1; nbytes <= source_.size(); nbytes += 1 + nbytes / 7) {
    check(target_.end() - nbytes, source_.end() - nbytes, nbytes);
    check(target_.end() - nbytes, source_.begin(), nbytes);
    check(target_.begin(), source_.end() - nbytes, nbytes);
  }
}

TEST_P(Copy, RangesThatOverlap) {
  constexpr ptrdiff_t kLength = 20000;
  for (const ptrdiff_t shift : {1 - kLength, -4096l, -129l, -128l, -32l, -1l, 0l, 1l, 32l, 127l, 2048l, kLength - 1}) {
    for (const bool leaf : {false, true}) {
      Bytes memory = random_data(3 * kLength, 4);
      const Bytes wanted(memory.begin() + kLength, memory.begin() + 2 * kLength);
      uint8_t *from = memory.data() + kLength;
      if (leaf) {
        EXPECT_EQ(copy_leaf(from + shift, from, kLength, GetParam()), mp_digest(wanted.data(), kLength)) << shift;
      } else {
        copy_bytes(from + shift, from, kLength, GetParam());
      }
      EXPECT_EQ(std::memcmp(from + shift, wanted.data(), kLength), 0) << shift;
    }
  }
}

TEST_P(Copy, NeighboursThatDoNotOverlapAreNoOverlap) {
  Bytes memory = random_data(2 * kDigestLeafBytes, 5);
  const Bytes before = memory;
  const uint64_t digest = copy_leaf(memory.data() + kDigestLeafBytes, memory.data(), kDigestLeafBytes, GetParam());
  EXPECT_EQ(digest, mp_digest(before.data(), kDigestLeafBytes));
  EXPECT_EQ(std::memcmp(memory.data(), before.data(), kDigestLeafBytes), 0);
  EXPECT_EQ(std::memcmp(memory.data() + kDigestLeafBytes, before.data(), kDigestLeafBytes), 0);
}

// Without this a digest would vouch for bytes that the destination does not hold.
TEST_P(Copy, TheDigestIsThatOfTheBytesPutDownWhateverHappensToTheSource) {
  auto *shared = static_cast<uint8_t *>(
      mmap(nullptr, kDigestLeafBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(shared, MAP_FAILED);
  // Another process, as in real life: the thread sanitizer would rightly complain of another thread.
  const pid_t scribbler = fork();
  ASSERT_GE(scribbler, 0);
  if (scribbler == 0) {
    for (uint8_t byte = 0;; ++byte) std::memset(shared, byte, kDigestLeafBytes);
  }
  Bytes target(kDigestLeafBytes);
  int mixed = 0;
  for (int round = 0; round < 200; ++round) {
    const uint64_t digest = copy_leaf(target.data(), shared, kDigestLeafBytes, GetParam());
    EXPECT_EQ(digest, mp_digest(target.data(), kDigestLeafBytes));
    mixed += target.front() != target.back() ? 1 : 0;
  }
  kill(scribbler, SIGKILL);
  waitpid(scribbler, nullptr, 0);
  munmap(shared, kDigestLeafBytes);
  RecordProperty("copies_of_a_source_that_changed", mixed);
}

// Enough for several threads.
TEST(CopyBatch, ManyRangesLandWhereTheyBelongAndNowhereElse) {
  constexpr size_t kRange = 24'001, kCount = 1500;
  const Bytes source = random_data(kRange * kCount, 6);
  const Guarded target(kCount * (kRange + 3));
  target.fill(0xa5);
  std::vector<int64_t> order(kCount), to, from;
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(7));
  for (size_t i = 0; i < kCount; ++i) {
    to.push_back(order[i] * int64_t{kRange + 3} + 1);
    from.push_back(static_cast<int64_t>(i * kRange));
  }
  const int64_t length = kRange;
  size_t bad = 99;
  ASSERT_EQ(mp_copy_batch(target.begin(), target.size(), to.data(), 1, source.data(), source.size(), from.data(), 1,
                          &length, 0, kCount, &bad),
            MP_OK);
  Bytes wanted(target.size(), 0xa5);
  for (size_t i = 0; i < kCount; ++i) std::copy_n(&source[i * kRange], kRange, &wanted[static_cast<size_t>(to[i])]);
  EXPECT_EQ(std::memcmp(target.begin(), wanted.data(), wanted.size()), 0);
}

TEST(CopyBatch, OneRangeOfSeveralTurns) {
  const Bytes source = random_data((13u << 20) + 77, 8);
  Bytes target(source.size() + 64, 0xa5);
  const int64_t to = 33, from = 0, length = static_cast<int64_t>(source.size());
  size_t bad = 99;
  ASSERT_EQ(
      mp_copy_batch(target.data(), target.size(), &to, 0, source.data(), source.size(), &from, 0, &length, 0, 1, &bad),
      MP_OK);
  EXPECT_EQ(std::memcmp(&target[33], source.data(), source.size()), 0);
  EXPECT_EQ(target[32], 0xa5);
  EXPECT_EQ(target[33 + source.size()], 0xa5);
}

// A range may carry on what the one before has brought.
TEST(CopyBatch, WithinOneMemoryInTheOrderOfTheRanges) {
  constexpr size_t kRange = 1u << 20, kCount = 12;
  Bytes memory = random_data((kCount + 1) * kRange, 9);
  const Bytes first(memory.begin(), memory.begin() + kRange);
  std::vector<int64_t> to, from;
  for (size_t i = 0; i < kCount; ++i) {
    from.push_back(static_cast<int64_t>(i * kRange));
    to.push_back(static_cast<int64_t>((i + 1) * kRange));
  }
  const int64_t length = kRange;
  size_t bad = 99;
  ASSERT_EQ(mp_copy_batch(memory.data(), memory.size(), to.data(), 1, memory.data(), memory.size(), from.data(), 1,
                          &length, 0, kCount, &bad),
            MP_OK);
  EXPECT_EQ(std::memcmp(&memory[kCount * kRange], first.data(), kRange), 0);
}

}  // namespace
}  // namespace moonpool
