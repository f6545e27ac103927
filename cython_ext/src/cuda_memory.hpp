// SPDX-License-Identifier: Apache-2.0
// What a pointer is in the eyes of the CUDA driver, and the memory of a device that a region was registered over.
#pragma once

#include <memory>

#include "cuda_driver.hpp"

namespace moonpool::cuda {

enum class Kind {
  kHost = MP_MEMORY_HOST,
  kPinned = MP_MEMORY_PINNED,
  kDevice = MP_MEMORY_DEVICE,
  kManaged = MP_MEMORY_MANAGED
};
const char *kind_text(Kind kind);

// What the driver knows of the memory at an address.
struct PointerFacts {
  Kind kind = Kind::kHost;
  int device = -1;
  Context context = nullptr;  // nullptr: mapped by virtual memory management, or the host's
  uint64_t buffer_id = 0;     // of the allocation; never given twice
};
Error pointer_facts(const Driver &driver, Pointer address, PointerFacts *facts);

// That plain host memory is registered as what it is. Costs nothing in a process that has not opened libcuda, and opens
// it in none.
Error check_host_memory(const void *address, uint64_t nbytes);

// Memory of one device, with the context that it is reached through.
class DeviceMemory {
 public:
  // `device`: what the caller says; MP_CUDA_ANY: whatever the pointer says.
  static Error open(void *address, uint64_t nbytes, int32_t device, std::shared_ptr<DeviceMemory> *out);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory &) = delete;
  DeviceMemory &operator=(const DeviceMemory &) = delete;

  const Driver &driver() const { return driver_; }
  Context context() const { return context_; }
  int device() const { return device_; }
  bool managed() const { return managed_; }
  // Mapped by cuMemMap, in one or several parts: legacy IPC handles do not reach it.
  bool virtual_memory() const { return retained_; }
  Pointer address() const { return address_; }
  uint64_t nbytes() const { return nbytes_; }
  // MP_REGION_RELEASED when the memory was freed since it was registered, even when other memory is there now.
  Error check_alive() const;

 private:
  DeviceMemory(const Driver &driver, Pointer address, uint64_t nbytes, const PointerFacts &first);
  Error find_context();
  Error find_end(const PointerFacts &first);

  const Driver &driver_;
  const Pointer address_;
  const uint64_t nbytes_;
  const int device_;
  const bool managed_;
  Context context_;
  bool retained_ = false;  // the primary context, for memory that belongs to none
  uint64_t first_id_;
  uint64_t last_id_;  // of the part that its last byte is in
};

}  // namespace moonpool::cuda
