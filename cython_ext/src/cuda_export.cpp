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
constexpr int kFlushFromHost = 1;    // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
constexpr int kOrderedForOwner = 100;  // CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
constexpr int kFlushCurrentContext = 0;

constexpr uint64_t kGranularity = 2u << 20;  // that devices map memory in; what is mapped begins and ends at such bounds

uint64_t page_bytes() {
  static const auto bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

int attribute(const Driver &driver, Device device, int which) {
  int value = 0;
  return driver.device_attribute(&value, which, device) == kSuccess ? value : 0;
}

}  // namespace

Error find_layout(const Driver &driver, Context context, Pointer base, uint64_t length, Layout *out) {
  const ContextScope scope(driver, context);
  if (scope.result() != kSuccess) return call_error(driver, scope.result(), "the context of the memory cannot be used");
  *out = {};
  const Pointer end = base + length;
  for (Pointer at = base; at < end;) {
    Pointer start = 0;
    size_t bytes = 0;
    const Result result = driver.address_range(&start, &bytes, at);
    if (result != kSuccess) return call_error(driver, result, "the allocation of the memory cannot be found");
    const Pointer next = start + bytes;
    if (next <= at) {
      return make_error(MP_CUDA, "the driver names an allocation that does not hold the address asked for",
                        "a newer driver");
    }
    if (at == base) {
      out->first = next - base;
    } else if (next < end) {
      out->step = std::gcd(out->step, bytes);
    }
    at = next;
  }
  if (out->first >= length) {
    *out = {};
  } else if (out->step == 0) {
    // One bound: anything that reaches over neither end.
    out->step = std::max(out->first, length - out->first);
    out->step = (out->step + kGranularity - 1) / kGranularity * kGranularity;
  }
  return {};
}

std::string why_no_dmabuf(const Driver &driver, Device device) {
  if (driver.range_handle == nullptr) return "the driver has no cuMemGetHandleForAddressRange, which came with CUDA 11.7";
  if (attribute(driver, device, kDmabufSupported) == 0) {
    return "the device has no dma-buf support (the open kernel modules of the driver, and kernel 5.12 or later, have it)";
  }
  return {};
}

Error export_dmabuf(const Driver &driver, Context context, Pointer base, uint64_t length, Fd *fd, uint64_t *offset) {
  const ContextScope scope(driver, context);
  if (scope.result() != kSuccess) return call_error(driver, scope.result(), "the context of the memory cannot be used");
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

Error keep_in_order(const Driver &driver, Context context, Pointer base, uint64_t length) {
  const ContextScope scope(driver, context);
  if (scope.result() != kSuccess) return call_error(driver, scope.result(), "the context of the memory cannot be used");
  const unsigned on = 1;
  for (Pointer at = base; at < base + length;) {
    Pointer start = 0;
    size_t bytes = 0;
    Result result = driver.address_range(&start, &bytes, at);
    if (result == kSuccess) result = driver.set_pointer_attribute(&on, kAttributeSyncMemops, start);
    if (result == kNotSupported || result == kInvalidValue) return {};  // mapped memory has no such attribute
    if (result != kSuccess) return call_error(driver, result, "copies of the memory cannot be ordered (SYNC_MEMOPS)");
    at = start + bytes;
  }
  return {};
}

bool writes_need_flush(const Driver &driver, Device device) {
  return driver.flush_rdma_writes != nullptr && (attribute(driver, device, kRdmaFlushOptions) & kFlushFromHost) != 0 &&
         attribute(driver, device, kRdmaWritesOrdering) < kOrderedForOwner;
}

Error flush_writes(const Driver &driver, Context context) {
  const ContextScope scope(driver, context);
  Result result = scope.result();
  if (result == kSuccess) result = driver.flush_rdma_writes(kFlushCurrentContext, kOrderedForOwner);
  return result == kSuccess ? Error{} : call_error(driver, result, "what arrived cannot be flushed to the device");
}

}  // namespace moonpool::cuda
