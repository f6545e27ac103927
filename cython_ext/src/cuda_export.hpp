// SPDX-License-Identifier: Apache-2.0
// Device memory as other devices reach it: where the allocations behind it end, and dma-bufs of parts of it.
#pragma once

#include "cuda_driver.hpp"
#include "status.hpp"
#include "system.hpp"

namespace moonpool::cuda {

// A range of one device, whose memory may be several allocations that were mapped one after the other (torch's
// expandable_segments). No registration may reach over a bound between two.
struct Layout {
  uint64_t step = 0;   // every bound is a multiple of it away from the first one; 0: there are no bounds
  uint64_t first = 0;  // bytes to the first bound
};
Error find_layout(const Driver &driver, Context context, Pointer base, uint64_t length, Layout *out);

// "" when dma-bufs of this device's memory can be made, otherwise what is missing.
std::string why_no_dmabuf(const Driver &driver, Device device);
// A dma-buf of the whole pages around the range, and where the range begins in it.
Error export_dmabuf(const Driver &driver, Context context, Pointer base, uint64_t length, Fd *fd, uint64_t *offset);

// Memory copies that the driver makes on the side of its streams wait until they are over for this range, so that what
// a device writes there and what they read have an order.
Error keep_in_order(const Driver &driver, Context context, Pointer base, uint64_t length);

// Whether what a NIC wrote into the device's memory has to be flushed before the device is sure to see it.
bool writes_need_flush(const Driver &driver, Device device);
// After the NIC has said that it wrote: when it returns the device sees it.
Error flush_writes(const Driver &driver, Context context);

}  // namespace moonpool::cuda
