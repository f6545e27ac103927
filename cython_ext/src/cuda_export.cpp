// SPDX-License-Identifier: Apache-2.0
#include "cuda_export.hpp"

#include <unistd.h>

#include <algorithm>
#include <numeric>

namespace moonpool::cuda {

namespace {

constexpr int kDmabufHandle = 1;  // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
// CU_DEVICE_ATTRIBUTE_*
constexpr int kDmabufSupported = 124;
constexpr int kRdmaFlushOptions = 117;
constexpr int kRdmaWritesOrdering = 118;
constexpr int kFlushFromHost = 1;      // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
constexpr int kOrderedForOwner = 100;  // CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
constexpr int kFlushCurrentContext = 0;

constexpr uint64_t kGranularity =
    2u << 20;  // that devices map memory in; what is mapped begins and ends at such bounds

uint64_t page_bytes() {
  static const auto bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

int attribute(const Driver &driver, Device device, int which) {
  int value = 0;
  return driver.device_attribute(&value, which, device) == kSuccess ? value : 0;
}

Error unusable(const DeviceMemory &memory, Result result) {
  return call_error(memory.driver(), result,
                    "the context of cuda:" + std::to_string(memory.device()) + " is of no use");
}

}  // namespace

Error find_layout(const DeviceMemory &memory, Layout *out) {
  const Driver &driver = memory.driver();
  const ContextScope scope(driver, memory.context());
  if (scope.result() != kSuccess) return unusable(memory, scope.result());
  *out = {};
  const Pointer end = memory.address() + memory.nbytes();
  for (Pointer at = memory.address(); at < end;) {
    Pointer start = 0;
    size_t bytes = 0;
    const Result result = driver.address_range(&start, &bytes, at);
    if (result != kSuccess) return call_error(driver, result, "the allocation of the memory cannot be found");
    const Pointer next = start + bytes;
    if (next <= at) return make_error(MP_CUDA, "the driver names an allocation that the memory does not lie in");
    if (at == memory.address()) {
      out->first = next - at;
    } else if (next < end) {
      out->step = std::gcd(out->step, bytes);
    }
    at = next;
  }
  if (out->first >= memory.nbytes()) {
    *out = {};
  } else if (out->step == 0) {
    // One bound: any step that reaches beyond both ends.
    out->step = std::max(out->first, memory.nbytes() - out->first);
    out->step = (out->step + kGranularity - 1) / kGranularity * kGranularity;
  }
  return {};
}

std::string why_no_dmabuf(const Driver &driver, Device device) {
  if (driver.range_handle == nullptr) {
    return "the driver has no cuMemGetHandleForAddressRange, which came with CUDA 11.7";
  }
  if (attribute(driver, device, kDmabufSupported) == 0) {
    return "the driver has no dma-buf support for the device, which takes its open kernel modules and kernel 5.12";
  }
  return {};
}

Error export_dmabuf(const DeviceMemory &memory, Pointer base, uint64_t length, Fd *fd, uint64_t *offset) {
  const Driver &driver = memory.driver();
  const ContextScope scope(driver, memory.context());
  if (scope.result() != kSuccess) return unusable(memory, scope.result());
  const uint64_t page = page_bytes();
  const Pointer begin = base / page * page;
  const Pointer end = (base + length + page - 1) / page * page;
  int number = -1;
  const Result result = driver.range_handle(&number, begin, end - begin, kDmabufHandle, 0);
  if (result != kSuccess) {
    return call_error(driver, result, "a dma-buf of " + std::to_string(end - begin) + " bytes cannot be made");
  }
  *fd = Fd(number);
  *offset = base - begin;
  return {};
}

pci::Place place_of(const DeviceMemory &memory) {
  char bus_id[32] = {};
  const Driver &driver = memory.driver();
  if (driver.device_pci_bus_id(bus_id, sizeof bus_id, memory.device()) != kSuccess) return {};
  return pci::place_of_bus_id(bus_id);
}

Error keep_in_order(const DeviceMemory &memory) {
  // Mapped memory does not have the attribute.
  if (memory.virtual_memory()) return {};
  const Driver &driver = memory.driver();
  const ContextScope scope(driver, memory.context());
  if (scope.result() != kSuccess) return unusable(memory, scope.result());
  const unsigned on = 1;
  const Result result = driver.set_pointer_attribute(&on, kAttributeSyncMemops, memory.address());
  if (result == kSuccess || result == kNotSupported) return {};
  return call_error(driver, result, "copies of the memory cannot be ordered (SYNC_MEMOPS)");
}

void WriteFlush::add(const std::shared_ptr<const DeviceMemory> &memory) {
  const Driver &driver = memory->driver();
  const Device device = memory->device();
  const bool can =
      driver.flush_rdma_writes != nullptr && (attribute(driver, device, kRdmaFlushOptions) & kFlushFromHost) != 0;
  if (!can || attribute(driver, device, kRdmaWritesOrdering) >= kOrderedForOwner) return;
  std::lock_guard lock(mutex_);
  memories_[memory->context()].push_back(memory);
  count_.fetch_add(1);
}

void WriteFlush::remove(const std::shared_ptr<const DeviceMemory> &memory) {
  std::lock_guard lock(mutex_);
  const auto it = memories_.find(memory->context());
  if (it == memories_.end()) return;
  count_.fetch_sub(std::erase(it->second, memory));
  if (it->second.empty()) memories_.erase(it);
}

Error WriteFlush::flush() const {
  Error first;
  std::lock_guard lock(mutex_);
  for (const auto &[context, memories] : memories_) {
    const Driver &driver = memories.front()->driver();
    const ContextScope scope(driver, context);
    Result result = scope.result();
    if (result == kSuccess) result = driver.flush_rdma_writes(kFlushCurrentContext, kOrderedForOwner);
    if (result != kSuccess && !first) {
      first = call_error(driver, result,
                         "what a NIC wrote cannot be flushed to cuda:" + std::to_string(memories.front()->device()));
    }
  }
  return first;
}

}  // namespace moonpool::cuda
