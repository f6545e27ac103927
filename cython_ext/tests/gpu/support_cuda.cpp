// SPDX-License-Identifier: Apache-2.0
#include "support_cuda.hpp"

#include <random>

namespace moonpool::testing {

void CudaTest::SetUp() {
  Error why_not;
  driver = cuda::Driver::load(&why_not);
  ASSERT_NE(driver, nullptr) << why_not.message << why_not.cause;
  ASSERT_EQ(driver->primary_context_retain(&context, 0), cuda::kSuccess);
  ASSERT_EQ(driver->context_push(context), cuda::kSuccess);
  fakeCudaForgetCalls();
}

void CudaTest::TearDown() {
  ASSERT_EQ(fakeCudaSet("fail=;delay_us=0;ns_per_kib=0"), 0);
  fakeCudaHold(0);
  for (const cuda::Stream stream : streams_) {
    EXPECT_EQ(driver->stream_synchronize(stream), cuda::kSuccess);
    EXPECT_EQ(driver->stream_destroy(stream), cuda::kSuccess);
  }
  for (const cuda::Pointer address : allocated_) EXPECT_EQ(driver->free(address), cuda::kSuccess);
  for (const char *kind : {"allocations", "pinned", "events", "streams", "modules", "mappings", "handles", "imports"}) {
    EXPECT_EQ(fakeCudaAlive(kind), 0) << kind;
  }
  cuda::Context popped = nullptr;
  EXPECT_EQ(driver->context_pop(&popped), cuda::kSuccess);
  EXPECT_EQ(popped, context);
  EXPECT_EQ(driver->primary_context_release(0), cuda::kSuccess);
  EXPECT_EQ(fakeCudaAlive("contexts"), 0);
}

cuda::Pointer CudaTest::allocate(const Bytes &content) {
  cuda::Pointer address = 0;
  EXPECT_EQ(driver->allocate(&address, content.size()), cuda::kSuccess);
  EXPECT_EQ(fakeCudaPoke(address, content.data(), content.size()), 0);
  allocated_.push_back(address);
  return address;
}

Bytes CudaTest::peek(cuda::Pointer address, size_t nbytes) {
  Bytes content(nbytes);
  EXPECT_EQ(fakeCudaPeek(address, content.data(), nbytes), 0);
  return content;
}

Bytes CudaTest::random(size_t nbytes, uint32_t seed) {
  std::mt19937 generator(seed);
  Bytes content(nbytes);
  for (uint8_t &byte : content) byte = static_cast<uint8_t>(generator());
  return content;
}

cuda::Stream CudaTest::stream() {
  cuda::Stream made = nullptr;
  EXPECT_EQ(driver->stream_create(&made, cuda::kStreamNonBlocking, 0), cuda::kSuccess);
  streams_.push_back(made);
  return made;
}

}  // namespace moonpool::testing
