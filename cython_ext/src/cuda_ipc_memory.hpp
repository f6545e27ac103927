// SPDX-License-Identifier: Apache-2.0
// Memory of a GPU in two processes of one host: the owner's word for it, and another process's mapping of it.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "cuda_ipc_frames.hpp"
#include "cuda_memory.hpp"
#include "status.hpp"
#include "system.hpp"

namespace moonpool::cuda_ipc {

// ---- the owner

// Handle or number of parts, offset and device of the memory. The error says what the driver or the allocator would
// have had to do.
Error describe(const cuda::DeviceMemory &memory, Found *out);
// The descriptor of one part, and how long it is.
Error export_part(const cuda::DeviceMemory &memory, uint32_t part, Fd *fd, uint64_t *nbytes);

// ---- another process

// A part that came from the owner.
struct Part {
  Fd fd;
  uint64_t nbytes;
};

// A mapping, shared by all regions of one allocation. Unmapped when the last user is gone, which must be after the last
// copy that names it.
class Imported {
 public:
  // `here`: memory of this process that the copies come from or go to; its context is used. The parts are used up.
  // patience_ns: how long its end waits for the driver to unmap it, which waits for the device.
  static std::shared_ptr<Imported> open(const cuda::DeviceMemory &here, const Found &found, std::vector<Part> parts,
                                        int64_t patience_ns, Error *error);
  ~Imported();
  Imported(const Imported &) = delete;
  Imported &operator=(const Imported &) = delete;

  // Lets the device of this memory at it too, where it needs to be let.
  Error let(const cuda::DeviceMemory &here);

  // Of the allocation, or of the first part.
  cuda::Pointer base() const { return base_; }

 private:
  Imported(const cuda::DeviceMemory &here, bool mapped, int64_t patience_ns)
      : driver_(here.driver()), context_(here.context()), mapped_(mapped), patience_ns_(patience_ns) {}
  static std::shared_ptr<Imported> open_handle(const cuda::DeviceMemory &here, const Found &found, int64_t patience_ns,
                                               Error *error);
  Error map(const cuda::DeviceMemory &here, std::vector<Part> parts);

  const cuda::Driver &driver_;
  const cuda::Context context_;
  const bool mapped_;  // from parts
  const int64_t patience_ns_;
  cuda::Pointer base_ = 0;
  uint64_t reserved_bytes_ = 0;
  std::vector<std::pair<cuda::Pointer, uint64_t>> mappings_;
  std::mutex mutex_;
  std::set<cuda::Device> let_;  // devices, for mapped parts
};

// Whether it is the device of this memory.
bool is_device_of(const cuda::DeviceMemory &memory, const cuda::Uuid &device);
// "" when the device is one of those that this process sees.
std::string why_not_visible(const cuda::Driver &driver, const cuda::Uuid &device);

}  // namespace moonpool::cuda_ipc
