// SPDX-License-Identifier: Apache-2.0
//
// Device memory of the stand-in for libcuda, as a program that uses a GPU has it.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "cuda_driver.hpp"
#include "fake_cuda.h"

namespace moonpool::testing {

using Bytes = std::vector<uint8_t>;

// The driver, with the primary context of device 0 current on this thread. Nothing of the stand-in may be left at its
// end: a test says what it has.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  cuda::Pointer allocate(const Bytes &content);
  static Bytes peek(cuda::Pointer address, size_t nbytes);
  static Bytes random(size_t nbytes, uint32_t seed);
  cuda::Stream stream();

  const cuda::Driver *driver = nullptr;
  cuda::Context context = nullptr;

 private:
  std::vector<cuda::Pointer> allocated_;
  std::vector<cuda::Stream> streams_;
};

}  // namespace moonpool::testing
