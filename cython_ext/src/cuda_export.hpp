// SPDX-License-Identifier: Apache-2.0
// Device memory as other devices reach it: where the allocations behind it end, and dma-bufs of parts of it.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_memory.hpp"
#include "pci.hpp"
#include "status.hpp"
#include "system.hpp"

namespace moonpool::cuda {

// A range of one device, whose memory may be several allocations that were mapped one after the other (torch's
// expandable_segments). No registration may reach over a bound between two.
struct Layout {
  uint64_t step = 0;   // every bound is a multiple of it away from the first one; 0: there are no bounds
  uint64_t first = 0;  // bytes to the first bound
};
Error find_layout(const DeviceMemory &memory, Layout *out);

// "" when dma-bufs of this device's memory can be made, otherwise what is missing.
std::string why_no_dmabuf(const Driver &driver, Device device);
// A dma-buf of the whole pages around a part of the memory, and where the part begins in it.
Error export_dmabuf(const DeviceMemory &memory, Pointer base, uint64_t length, Fd *fd, uint64_t *offset);

// The device's place on the bus.
pci::Place place_of(const DeviceMemory &memory);

// SYNC_MEMOPS: copies of this memory that the driver would go on with after their call has returned are over when it
// returns, so that what a NIC reads or writes afterwards comes after them.
Error keep_in_order(const DeviceMemory &memory);

// What NICs write into memory of these devices is not sure to be seen there before it was flushed. Thread-safe.
class WriteFlush {
 public:
  // Memory that NICs may write from now on. Nothing to do for devices that keep such writes in order.
  void add(const std::shared_ptr<const DeviceMemory> &memory);
  void remove(const std::shared_ptr<const DeviceMemory> &memory);
  bool needed() const { return count_.load(std::memory_order_relaxed) > 0; }
  // After a NIC has said that it wrote: when it returns the devices see it, but those whose context has died.
  Error flush() const;

 private:
  std::atomic<size_t> count_{0};
  mutable std::mutex mutex_;
  std::map<Context, std::vector<std::shared_ptr<const DeviceMemory>>> memories_;
};

}  // namespace moonpool::cuda
