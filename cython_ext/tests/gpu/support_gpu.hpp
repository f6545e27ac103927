// SPDX-License-Identifier: Apache-2.0
//
// A process with memory of GPUs on the stand-in driver: what torch would be.
#pragma once

#include <vector>

#include "cuda_driver.hpp"
#include "fake_cuda.h"
#include "support_engine.hpp"

namespace moonpool::testing {

// The primary context of a device, current for this thread.
class Gpu {
 public:
  explicit Gpu(int device = 0);
  ~Gpu();
  Gpu(const Gpu &) = delete;

  static const cuda::Driver &driver();

 private:
  const int device_;
};

// One allocation, or several that are mapped one after the other.
class GpuMemory {
 public:
  // With a current context.
  explicit GpuMemory(uint64_t nbytes);
  GpuMemory(const std::vector<uint64_t> &parts, bool shareable = true);
  ~GpuMemory() { free(); }
  GpuMemory(const GpuMemory &) = delete;
  void free();

  uint64_t address() const { return address_; }
  uint64_t nbytes() const { return nbytes_; }
  Bytes get(uint64_t offset, uint64_t nbytes) const;
  Bytes get() const { return get(0, nbytes_); }
  void set(const Bytes &content, uint64_t offset = 0);

 private:
  uint64_t address_ = 0, nbytes_ = 0;
  std::vector<uint64_t> parts_;  // empty: one allocation
};

// MP_OK, or the error.
mp_status add_gpu(const TestEngine &engine, uint64_t address, uint64_t nbytes, const char *name, uint32_t flags,
                  RegionHandle *out, mp_error *error);
RegionHandle add_gpu(const TestEngine &engine, const GpuMemory &memory, const char *name,
                     uint32_t flags = MP_REGION_WRITABLE);

}  // namespace moonpool::testing
