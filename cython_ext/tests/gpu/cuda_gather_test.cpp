// SPDX-License-Identifier: Apache-2.0
#include "cuda_gather.hpp"

#include <numeric>

#include "support_cuda.hpp"
#include "system.hpp"

namespace moonpool::testing {

namespace {

using cuda::Piece;
using cuda::PieceCopier;

constexpr int64_t kPatienceNs = 10'000'000'000;

// Every second block of a cache to a chunk, one after the other.
std::vector<Piece> gather(cuda::Pointer chunk, cuda::Pointer cache, size_t count, uint64_t nbytes) {
  std::vector<Piece> pieces;
  for (uint64_t i = 0; i < count; ++i) pieces.push_back({chunk + i * nbytes, cache + 2 * i * nbytes, nbytes});
  return pieces;
}

class CudaGather : public CudaTest {
 protected:
  // What a copy by `pieces` has to leave at `to`.
  static Bytes expected(const std::vector<Piece> &pieces, cuda::Pointer to, Bytes target, cuda::Pointer from,
                        const Bytes &source) {
    for (const Piece &piece : pieces) {
      std::copy_n(source.begin() + static_cast<ptrdiff_t>(piece.from - from), piece.nbytes,
                  target.begin() + static_cast<ptrdiff_t>(piece.to - to));
    }
    return target;
  }

  static cuda::Result enqueue(PieceCopier &copier, const std::vector<Piece> &pieces, cuda::Stream on,
                              cuda::Reach reach = cuda::Reach::kWithinDevice) {
    bool begun = false;
    const cuda::Result result = copier.enqueue(pieces, reach, on, &begun);
    EXPECT_EQ(begun, result == cuda::kSuccess);
    return result;
  }

  static uint64_t copy_calls() {
    return fakeCudaCalls("cuMemcpyAsync") + fakeCudaCalls("cuMemcpyBatchAsync") + fakeCudaCalls("cuLaunchKernel");
  }
};

TEST_F(CudaGather, PiecesThatFollowEachOtherAreOne) {
  std::vector<Piece> pieces{{100, 500, 10}, {110, 510, 20}, {130, 600, 5}, {135, 605, 0}, {135, 605, 5}, {0, 610, 1}};
  cuda::join_pieces(&pieces);
  ASSERT_EQ(pieces.size(), 3u);
  EXPECT_EQ(pieces[0].nbytes, 30u);
  EXPECT_EQ(pieces[1].from, 600u);
  EXPECT_EQ(pieces[1].nbytes, 10u);
  EXPECT_EQ(pieces[2].to, 0u);
}

TEST_F(CudaGather, SmallPiecesTakeOneLaunch) {
  for (const size_t count : {size_t{2}, size_t{300}}) {
    const uint64_t nbytes = 272;  // 17 vectors: less than one for each thread
    const Bytes source = random(2 * count * nbytes, 1);
    const cuda::Pointer cache = allocate(source), chunk = allocate(Bytes(count * nbytes, 0xee));
    const std::vector<Piece> pieces = gather(chunk, cache, count, nbytes);
    const cuda::Stream on = stream();
    fakeCudaForgetCalls();
    PieceCopier copier(*driver, context, kPatienceNs);
    ASSERT_EQ(enqueue(copier, pieces, on), cuda::kSuccess);
    EXPECT_EQ(copy_calls(), 1u);
    EXPECT_EQ(fakeCudaCalls("cuLaunchKernel"), 1u);
    ASSERT_EQ(driver->stream_synchronize(on), cuda::kSuccess);
    EXPECT_EQ(peek(chunk, count * nbytes), expected(pieces, chunk, Bytes(count * nbytes, 0xee), cache, source));
  }
}

TEST_F(CudaGather, TheKernelCopiesEveryLengthAndNothingBeside) {
  // Through the loop of four vectors, that of one, and that of bytes; several blocks share the longest.
  const std::vector<uint64_t> lengths{1, 15, 16, 17, 4095, 4096, 4097, 16384, 16400, 65535, 140'001, 300'000};
  const Bytes source = random(1 << 20, 2), target = random(1 << 20, 3);
  const cuda::Pointer from = allocate(source), to = allocate(target);
  std::vector<Piece> pieces;
  uint64_t at = 0;
  for (const uint64_t nbytes : lengths) {
    pieces.push_back({to + at + 64, from + at, nbytes});
    at = (at + nbytes + 80) / 16 * 16;
  }
  const cuda::Stream on = stream();
  PieceCopier copier(*driver, context, kPatienceNs);
  ASSERT_EQ(enqueue(copier, pieces, on), cuda::kSuccess);
  EXPECT_EQ(fakeCudaCalls("cuLaunchKernel"), 1u);
  ASSERT_EQ(driver->stream_synchronize(on), cuda::kSuccess);
  EXPECT_EQ(peek(to, target.size()), expected(pieces, to, target, from, source));
}

TEST_F(CudaGather, LargeOrUnalignedPiecesTakeOneBatch) {
  for (const auto &[nbytes, skip] : {std::pair{uint64_t{1} << 20, 0u}, std::pair{uint64_t{1000}, 3u}}) {
    const size_t count = 6;
    const Bytes source = random(2 * count * nbytes + 16, 4);
    const cuda::Pointer cache = allocate(source), chunk = allocate(Bytes(count * nbytes));
    const std::vector<Piece> pieces = gather(chunk, cache + skip, count, nbytes);
    const cuda::Stream on = stream();
    fakeCudaForgetCalls();
    PieceCopier copier(*driver, context, kPatienceNs);
    ASSERT_EQ(enqueue(copier, pieces, on), cuda::kSuccess);
    EXPECT_EQ(copy_calls(), 1u);
    EXPECT_EQ(fakeCudaCalls("cuMemcpyBatchAsync"), 1u);
    ASSERT_EQ(driver->stream_synchronize(on), cuda::kSuccess);
    EXPECT_EQ(peek(chunk, count * nbytes), expected(pieces, chunk, Bytes(count * nbytes), cache, source));
  }
}

TEST_F(CudaGather, ADriverWithoutBatchesLaunchesForAll) {
  cuda::Driver older = *driver;
  older.copy_batch = nullptr;
  const uint64_t nbytes = 200'003;
  const Bytes source = random(8 * nbytes, 5);
  const cuda::Pointer cache = allocate(source), chunk = allocate(Bytes(4 * nbytes));
  const std::vector<Piece> pieces = gather(chunk, cache, 4, nbytes);
  const cuda::Stream on = stream();
  PieceCopier copier(older, context, kPatienceNs);
  ASSERT_EQ(enqueue(copier, pieces, on), cuda::kSuccess);
  EXPECT_EQ(copy_calls(), 1u);
  ASSERT_EQ(driver->stream_synchronize(on), cuda::kSuccess);
  EXPECT_EQ(peek(chunk, 4 * nbytes), expected(pieces, chunk, Bytes(4 * nbytes), cache, source));
}

TEST_F(CudaGather, WhatIsContiguousIsOneCopy) {
  const Bytes source = random(64 << 10, 6);
  const cuda::Pointer from = allocate(source), to = allocate(Bytes(source.size()));
  std::vector<Piece> pieces;
  for (uint64_t at = 0; at < source.size(); at += 1024) pieces.push_back({to + at, from + at, 1024});
  const cuda::Stream on = stream();
  PieceCopier copier(*driver, context, kPatienceNs);
  ASSERT_EQ(enqueue(copier, pieces, on), cuda::kSuccess);
  EXPECT_EQ(copy_calls(), 1u);
  EXPECT_EQ(fakeCudaCalls("cuMemcpyAsync"), 1u);
  ASSERT_EQ(driver->stream_synchronize(on), cuda::kSuccess);
  EXPECT_EQ(peek(to, source.size()), source);
}

TEST_F(CudaGather, WithoutAKernelItIsStillRight) {
  // As where compiling PTX is forbidden.
  ASSERT_EQ(fakeCudaSet("fail=cuModuleLoadData:1:218"), 0);
  cuda::Driver older = *driver;
  older.copy_batch = nullptr;
  const Bytes source = random(20 * 256, 7);
  const cuda::Pointer cache = allocate(source), chunk = allocate(Bytes(10 * 256));
  const std::vector<Piece> pieces = gather(chunk, cache, 10, 256);
  const cuda::Stream on = stream();
  PieceCopier copier(older, context, kPatienceNs);
  ASSERT_EQ(enqueue(copier, pieces, on), cuda::kSuccess);
  EXPECT_EQ(fakeCudaCalls("cuLaunchKernel"), 0u);
  ASSERT_EQ(driver->stream_synchronize(on), cuda::kSuccess);
  EXPECT_EQ(peek(chunk, 10 * 256), expected(pieces, chunk, Bytes(10 * 256), cache, source));
}

TEST_F(CudaGather, ATableIsNotChangedWhileAKernelMayReadIt) {
  const Bytes source = random(4096, 8);
  const cuda::Pointer cache = allocate(source);
  std::vector<cuda::Pointer> chunks;
  const cuda::Stream on = stream();
  PieceCopier copier(*driver, context, kPatienceNs);
  fakeCudaHold(1);
  for (uint64_t n = 0; n < 5; ++n) {
    chunks.push_back(allocate(Bytes(64)));
    const std::vector<Piece> pieces{{chunks.back(), cache + 256 * n, 16},
                                    {chunks.back() + 32, cache + 256 * n + 128, 16}};
    ASSERT_EQ(enqueue(copier, pieces, on), cuda::kSuccess);
  }
  fakeCudaHold(0);
  ASSERT_EQ(driver->stream_synchronize(on), cuda::kSuccess);
  for (size_t n = 0; n < chunks.size(); ++n) {
    const auto begin = source.begin() + static_cast<ptrdiff_t>(256 * n);
    const Bytes found = peek(chunks[n], 48);
    EXPECT_TRUE(std::equal(found.begin(), found.begin() + 16, begin));
    EXPECT_TRUE(std::equal(found.begin() + 32, found.end(), begin + 128));
  }
  // More than there are tables: it goes on once a kernel has ended.
  for (int n = 0; n < 20; ++n) {
    ASSERT_EQ(enqueue(copier, {{chunks[0], cache, 16}, {chunks[0] + 32, cache + 64, 16}}, on), cuda::kSuccess);
  }
  ASSERT_EQ(driver->stream_synchronize(on), cuda::kSuccess);
}

TEST_F(CudaGather, ADeviceThatHangsHoldsNobodyUpForEver) {
  const Bytes source = random(4096, 8);
  const cuda::Pointer cache = allocate(source), chunk = allocate(Bytes(64));
  const cuda::Stream on = stream();
  const std::vector<Piece> pieces{{chunk, cache, 16}, {chunk + 32, cache + 64, 16}};
  constexpr int64_t kShort = 300'000'000;
  PieceCopier copier(*driver, context, kShort);
  fakeCudaHold(1);
  bool begun = false;
  cuda::Result result = cuda::kSuccess;
  int launched = 0;
  for (; result == cuda::kSuccess && launched < 100; ++launched) {
    result = copier.enqueue(pieces, cuda::Reach::kWithinDevice, on, &begun);
  }
  EXPECT_EQ(result, cuda::kNotReady);
  EXPECT_FALSE(begun);
  // The next ones do not wait as long again.
  const int64_t began = now_ns();
  for (int n = 0; n < 100; ++n) {
    EXPECT_EQ(copier.enqueue(pieces, cuda::Reach::kWithinDevice, on, &begun), cuda::kNotReady);
  }
  EXPECT_LT(now_ns() - began, 10 * kShort);
  fakeCudaHold(0);
  ASSERT_EQ(driver->stream_synchronize(on), cuda::kSuccess);
  for (int n = 0; n < launched; ++n) ASSERT_EQ(enqueue(copier, pieces, on), cuda::kSuccess);
  ASSERT_EQ(driver->stream_synchronize(on), cuda::kSuccess);
  EXPECT_TRUE(std::equal(source.begin(), source.begin() + 16, peek(chunk, 16).begin()));
}

TEST_F(CudaGather, AfterAnErrorOfTheDriverItGoesOn) {
  const cuda::Pointer cache = allocate(Bytes(4096)), chunk = allocate(Bytes(2048));
  const cuda::Stream on = stream();
  PieceCopier copier(*driver, context, kPatienceNs);
  for (const char *const call : {"cuEventCreate", "cuMemHostAlloc", "cuLaunchKernel"}) {
    ASSERT_EQ(fakeCudaSet(("fail=" + std::string(call) + ":1:2").c_str()), 0);
    EXPECT_EQ(enqueue(copier, gather(chunk, cache, 8, 256), on), cuda::kOutOfMemory) << call;
  }
  ASSERT_EQ(fakeCudaSet("fail=cuMemcpyBatchAsync:1:2"), 0);
  EXPECT_EQ(enqueue(copier, gather(chunk, cache + 1, 8, 256), on), cuda::kOutOfMemory);
  ASSERT_EQ(enqueue(copier, gather(chunk, cache, 8, 256), on), cuda::kSuccess);
}

TEST_F(CudaGather, ADeviceThatHasNoBatchesGetsAKernel) {
  ASSERT_EQ(fakeCudaSet("fail=cuMemcpyBatchAsync:1:801"), 0);
  const Bytes source = random(8 * 1000, 9);
  const cuda::Pointer cache = allocate(source), chunk = allocate(Bytes(4 * 1000));
  const std::vector<Piece> pieces = gather(chunk, cache, 4, 1000);
  const cuda::Stream on = stream();
  PieceCopier copier(*driver, context, kPatienceNs);
  ASSERT_EQ(enqueue(copier, pieces, on), cuda::kSuccess);
  ASSERT_EQ(driver->stream_synchronize(on), cuda::kSuccess);
  EXPECT_EQ(peek(chunk, 4000), expected(pieces, chunk, Bytes(4000), cache, source));
}

TEST_F(CudaGather, NoKernelReachesForAnotherDevice) {
  const Bytes source = random(4096, 10);
  const cuda::Pointer cache = allocate(source), chunk = allocate(Bytes(2048));
  const std::vector<Piece> pieces = gather(chunk, cache, 8, 256);
  const cuda::Stream on = stream();
  cuda::Driver older = *driver;
  older.copy_batch = nullptr;
  for (const cuda::Driver *const one : {driver, const_cast<const cuda::Driver *>(&older)}) {
    PieceCopier copier(*one, context, kPatienceNs);
    ASSERT_EQ(enqueue(copier, pieces, on, cuda::Reach::kAnywhere), cuda::kSuccess);
  }
  ASSERT_EQ(driver->stream_synchronize(on), cuda::kSuccess);
  EXPECT_EQ(fakeCudaCalls("cuModuleLoadData"), 0u);
  EXPECT_EQ(fakeCudaCalls("cuMemcpyBatchAsync"), 1u);
  EXPECT_EQ(fakeCudaCalls("cuMemcpyAsync"), 8u);
  EXPECT_EQ(peek(chunk, 2048), expected(pieces, chunk, Bytes(2048), cache, source));
}

TEST_F(CudaGather, PinnedMemoryOfTheHostIsASourceAndATarget) {
  void *pinned = nullptr;
  ASSERT_EQ(driver->host_allocate(&pinned, 4096, cuda::kHostAllocPortable), cuda::kSuccess);
  auto *host = static_cast<uint8_t *>(pinned);
  std::iota(host, host + 4096, uint8_t{0});
  const cuda::Pointer cache = allocate(Bytes(8192));
  const auto chunk = reinterpret_cast<cuda::Pointer>(pinned);
  const cuda::Stream on = stream();
  {
    PieceCopier copier(*driver, context, kPatienceNs);
    std::vector<Piece> back, there;
    for (uint64_t i = 0; i < 8; ++i) {
      there.push_back({cache + 1024 * i, chunk + 256 * i, 256});
      back.push_back({chunk + 2048 + 256 * i, cache + 1024 * i, 256});
    }
    ASSERT_EQ(enqueue(copier, there, on, cuda::Reach::kHost), cuda::kSuccess);
    ASSERT_EQ(enqueue(copier, back, on, cuda::Reach::kHost), cuda::kSuccess);
    ASSERT_EQ(driver->stream_synchronize(on), cuda::kSuccess);
  }
  EXPECT_TRUE(std::equal(host, host + 2048, host + 2048));
  EXPECT_EQ(driver->host_free(pinned), cuda::kSuccess);
}

}  // namespace

}  // namespace moonpool::testing
