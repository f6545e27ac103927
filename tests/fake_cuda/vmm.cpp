// SPDX-License-Identifier: Apache-2.0
//
// Virtual memory management: addresses, memory and access to it, each by a call of its own. What torch calls
// expandable segments is made of this.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "world.hpp"

namespace fake {

namespace {

bool is_whole(uint64_t n) { return n != 0 && n % kGranularity == 0; }

bool is_known(const AllocationProp &prop) {
  return prop.type == 1 && prop.location.type == 1 && prop.location.id >= 0 &&
         prop.location.id < world().device_count && (prop.requested_handle_types & ~1) == 0;
}

// Under the gate.
uint64_t handle_to(const std::shared_ptr<Physical> &physical) {
  const auto [found, fresh] = world().handles.try_emplace(physical->id, Handle{physical});
  if (!fresh) ++found->second.references;
  return physical->id;
}

// The mappings that these addresses consist of. Under the gate. False: there is a gap, or one goes on beyond them.
bool whole_mappings(uint64_t address, size_t nbytes, std::vector<Range *> *out) {
  for (uint64_t at = address; at < address + nbytes;) {
    const auto found = world().ranges.find(at);
    if (found == world().ranges.end() || found->second.kind != Kind::kMapped) return false;
    out->push_back(&found->second);
    at += found->second.nbytes;
    if (at > address + nbytes) return false;
  }
  return true;
}

}  // namespace

}  // namespace fake

using namespace fake;

FAKE_API int cuMemGetAllocationGranularity(size_t *out, const AllocationProp *prop, int option) {
  FAKE_ENTER(kDriver);
  if (option < 0 || option > 1 || !is_known(*prop)) return kInvalidValue;
  *out = kGranularity;
  return kSuccess;
}

FAKE_API int cuMemAddressReserve(uint64_t *out, size_t nbytes, size_t alignment, uint64_t wish,
                                 unsigned long long flags) {
  FAKE_ENTER(kDriver);
  (void)wish;
  if (!is_whole(nbytes) || (alignment & (alignment - 1)) != 0 || alignment > kGranularity || flags != 0) {
    return kInvalidValue;
  }
  const uint64_t at = hide(nbytes);
  if (at == 0) return kOutOfMemory;
  std::lock_guard gate(world().gate);
  world().reservations[at] = nbytes;
  *out = at;
  return kSuccess;
}

FAKE_API int cuMemAddressFree(uint64_t address, size_t nbytes) {
  FAKE_ENTER(kDriver);
  std::lock_guard gate(world().gate);
  const auto found = world().reservations.find(address);
  if (found == world().reservations.end() || found->second != nbytes) return kInvalidValue;
  const auto mapped = world().ranges.lower_bound(address);
  if (mapped != world().ranges.end() && mapped->first < address + nbytes) return kInvalidValue;
  munmap(reinterpret_cast<void *>(address), nbytes);
  world().reservations.erase(found);
  return kSuccess;
}

FAKE_API int cuMemCreate(uint64_t *out, size_t nbytes, const AllocationProp *prop, unsigned long long flags) {
  FAKE_ENTER(kDriver);
  if (!is_whole(nbytes) || !is_known(*prop) || flags != 0) return kInvalidValue;
  World &all = world();
  Device &device = all.devices[static_cast<size_t>(prop->location.id)];
  if (device.used + nbytes > all.device_bytes) return kOutOfMemory;
  const auto physical = Physical::make(nbytes, prop->location.id);
  if (physical == nullptr) return kOutOfMemory;
  physical->prop = *prop;
  std::lock_guard gate(all.gate);
  *out = handle_to(physical);
  return kSuccess;
}

FAKE_API int cuMemRelease(uint64_t handle) {
  FAKE_ENTER(kDriver);
  std::lock_guard gate(world().gate);
  const auto found = world().handles.find(handle);
  if (found == world().handles.end()) return kInvalidValue;
  // Mappings keep the memory.
  if (--found->second.references == 0) world().handles.erase(found);
  return kSuccess;
}

FAKE_API int cuMemMap(uint64_t address, size_t nbytes, size_t offset, uint64_t handle, unsigned long long flags) {
  FAKE_ENTER(kDriver);
  World &all = world();
  std::lock_guard gate(all.gate);
  const auto found = all.handles.find(handle);
  if (found == all.handles.end()) return kInvalidValue;
  const auto &physical = found->second.physical;
  if (!is_whole(nbytes) || address % kGranularity != 0 || offset != 0 || flags != 0 || nbytes > physical->nbytes) {
    return kInvalidValue;
  }
  auto reserved = all.reservations.upper_bound(address);
  if (reserved == all.reservations.begin()) return kInvalidValue;
  --reserved;
  if (address + nbytes > reserved->first + reserved->second) return kInvalidValue;
  const auto next = all.ranges.lower_bound(address);
  if (range_at(address) != nullptr || (next != all.ranges.end() && next->first < address + nbytes)) {
    return kAlreadyMapped;
  }
  if (map_hidden(*physical, 0, nbytes, address) == 0) return kOutOfMemory;
  Range range;
  range.base = address;
  range.nbytes = nbytes;
  range.kind = Kind::kMapped;
  range.physical = physical;
  range.device = physical->device;
  range.buffer_id = all.next_buffer_id++;
  all.ranges[address] = range;
  return kSuccess;
}

FAKE_API int cuMemUnmap(uint64_t address, size_t nbytes) {
  FAKE_ENTER(kDriver);
  World &all = world();
  std::lock_guard gate(all.gate);
  std::vector<Range *> mappings;
  if (!whole_mappings(address, nbytes, &mappings)) return kInvalidValue;
  for (const Range *mapping : mappings) {
    const uint64_t at = mapping->base;
    mmap(reinterpret_cast<void *>(at), mapping->nbytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    all.ranges.erase(at);
  }
  return kSuccess;
}

FAKE_API int cuMemSetAccess(uint64_t address, size_t nbytes, const AccessDesc *access, size_t n) {
  FAKE_ENTER(kDriver);
  std::lock_guard gate(world().gate);
  std::vector<Range *> mappings;
  if (!whole_mappings(address, nbytes, &mappings)) return kInvalidValue;
  for (size_t i = 0; i < n; ++i) {
    const AccessDesc &one = access[i];
    const bool known = one.location.type == 1 && one.location.id >= 0 && one.location.id < world().device_count;
    if (!known || (one.flags != 0 && one.flags != 1 && one.flags != 3)) return kInvalidValue;
    for (Range *mapping : mappings) mapping->access[one.location.id] = one.flags;
  }
  return kSuccess;
}

FAKE_API int cuMemGetAccess(unsigned long long *flags, const Location *location, uint64_t address) {
  FAKE_ENTER(kDriver);
  std::shared_lock gate(world().gate);
  const Range *range = range_at(address);
  if (range == nullptr || range->kind != Kind::kMapped || location->type != 1) return kInvalidValue;
  const auto found = range->access.find(location->id);
  *flags = found == range->access.end() ? 0 : static_cast<unsigned long long>(found->second);
  return kSuccess;
}

FAKE_API int cuMemRetainAllocationHandle(uint64_t *out, void *address) {
  FAKE_ENTER(kDriver);
  std::lock_guard gate(world().gate);
  const Range *range = range_at(reinterpret_cast<uint64_t>(address));
  if (range == nullptr || range->kind != Kind::kMapped) return kInvalidValue;
  *out = handle_to(range->physical);
  return kSuccess;
}

FAKE_API int cuMemGetAllocationPropertiesFromHandle(AllocationProp *prop, uint64_t handle) {
  FAKE_ENTER(kDriver);
  std::shared_lock gate(world().gate);
  const auto found = world().handles.find(handle);
  if (found == world().handles.end()) return kInvalidValue;
  *prop = found->second.physical->prop;
  return kSuccess;
}

FAKE_API int cuMemExportToShareableHandle(void *out, uint64_t handle, int type, unsigned long long flags) {
  FAKE_ENTER(kDriver);
  std::shared_lock gate(world().gate);
  const auto found = world().handles.find(handle);
  if (found == world().handles.end() || type != 1 || flags != 0) return kInvalidValue;
  const Physical &physical = *found->second.physical;
  // Only what was created for it.
  if (physical.prop.requested_handle_types != 1) return kNotPermitted;
  const int fd = fcntl(physical.fd, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return kOperatingSystem;
  std::memcpy(out, &fd, sizeof fd);
  return kSuccess;
}

FAKE_API int cuMemImportFromShareableHandle(uint64_t *out, void *os_handle, int type) {
  FAKE_ENTER(kContext);
  if (type != 1) return kInvalidValue;
  const int given = static_cast<int>(reinterpret_cast<intptr_t>(os_handle));
  struct stat there;
  // Memory of devices has whole granules; other descriptors are none of it.
  if (fstat(given, &there) != 0 || !S_ISREG(there.st_mode) || !is_whole(static_cast<uint64_t>(there.st_size))) {
    return kInvalidValue;
  }
  const int fd = fcntl(given, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return kOperatingSystem;
  const int device = device_of(current_context());
  auto physical = std::make_shared<Physical>(fd, static_cast<size_t>(there.st_size), device);
  void *data = mmap(nullptr, physical->nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return kOutOfMemory;
  physical->data = static_cast<uint8_t *>(data);
  physical->prop.type = 1;
  physical->prop.requested_handle_types = 1;
  physical->prop.location = {1, device};
  std::lock_guard gate(world().gate);
  *out = handle_to(physical);
  return kSuccess;
}
