// SPDX-License-Identifier: Apache-2.0
#include "support_gpu.hpp"

namespace moonpool::testing {

namespace {

constexpr int kPinnedAllocation = 1;  // CU_MEM_ALLOCATION_TYPE_PINNED
constexpr int kOnDevice = 1;          // CU_MEM_LOCATION_TYPE_DEVICE
constexpr int kPosixDescriptor = 1;   // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
constexpr int kReadWrite = 3;         // CU_MEM_ACCESS_FLAGS_PROT_READWRITE

}  // namespace

const cuda::Driver &Gpu::driver() {
  Error why_not;
  const cuda::Driver *const driver = cuda::Driver::load(&why_not);
  EXPECT_NE(driver, nullptr) << why_not.message << ": " << why_not.cause;
  return *driver;
}

Gpu::Gpu(int device) : device_(device) {
  cuda::Context context = nullptr;
  EXPECT_EQ(driver().primary_context_retain(&context, device), cuda::kSuccess);
  EXPECT_EQ(driver().context_push(context), cuda::kSuccess);
}

Gpu::~Gpu() {
  cuda::Context popped = nullptr;
  EXPECT_EQ(driver().context_pop(&popped), cuda::kSuccess);
  EXPECT_EQ(driver().primary_context_release(device_), cuda::kSuccess);
}

GpuMemory::GpuMemory(uint64_t nbytes) : nbytes_(nbytes) {
  EXPECT_EQ(Gpu::driver().allocate(&address_, nbytes), cuda::kSuccess);
}

GpuMemory::GpuMemory(const std::vector<uint64_t> &parts, bool shareable) : parts_(parts) {
  const cuda::Driver &driver = Gpu::driver();
  cuda::Device device = 0;
  EXPECT_EQ(driver.context_device(&device), cuda::kSuccess);
  for (const uint64_t part : parts) nbytes_ += part;
  EXPECT_EQ(driver.reserve_address(&address_, nbytes_, 0, 0, 0), cuda::kSuccess);
  cuda::AllocationProperties properties{};
  properties.type = kPinnedAllocation;
  properties.requested_handle_types = shareable ? kPosixDescriptor : 0;
  properties.location = {kOnDevice, device};
  properties.flags.gpu_direct_rdma_capable = 1;
  uint64_t at = address_;
  for (const uint64_t part : parts) {
    cuda::AllocationHandle handle = 0;
    EXPECT_EQ(driver.create_allocation(&handle, part, &properties, 0), cuda::kSuccess);
    EXPECT_EQ(driver.map(at, part, 0, handle, 0), cuda::kSuccess);
    EXPECT_EQ(driver.release_allocation(handle), cuda::kSuccess);
    at += part;
  }
  const cuda::AccessDescription access{{kOnDevice, device}, kReadWrite};
  EXPECT_EQ(driver.set_access(address_, nbytes_, &access, 1), cuda::kSuccess);
}

void GpuMemory::free() {
  if (address_ == 0) return;
  const cuda::Driver &driver = Gpu::driver();
  if (parts_.empty()) {
    EXPECT_EQ(driver.free(address_), cuda::kSuccess);
  } else {
    uint64_t at = address_;
    for (const uint64_t part : parts_) {
      EXPECT_EQ(driver.unmap(at, part), cuda::kSuccess);
      at += part;
    }
    EXPECT_EQ(driver.free_address(address_, nbytes_), cuda::kSuccess);
  }
  address_ = 0;
}

Bytes GpuMemory::get(uint64_t offset, uint64_t nbytes) const {
  Bytes content(nbytes);
  EXPECT_EQ(fakeCudaPeek(address_ + offset, content.data(), nbytes), 0);
  return content;
}

void GpuMemory::set(const Bytes &content, uint64_t offset) {
  EXPECT_EQ(fakeCudaPoke(address_ + offset, content.data(), content.size()), 0);
}

mp_status add_gpu(const TestEngine &engine, uint64_t address, uint64_t nbytes, const char *name, uint32_t flags,
                  RegionHandle *out, mp_error *error) {
  mp_region *region = nullptr;
  const mp_status status = mp_region_register_cuda(engine.get(), reinterpret_cast<void *>(address), nbytes, MP_CUDA_ANY,
                                                   name, flags, &region, error);
  out->reset(region);
  return status;
}

RegionHandle add_gpu(const TestEngine &engine, const GpuMemory &memory, const char *name, uint32_t flags) {
  RegionHandle region;
  mp_error error;
  EXPECT_EQ(add_gpu(engine, memory.address(), memory.nbytes(), name, flags, &region, &error), MP_OK)
      << error.message << ": " << error.cause;
  return region;
}

}  // namespace moonpool::testing
