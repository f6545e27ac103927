// SPDX-License-Identifier: Apache-2.0
//
// Memory of devices, of hosts, and of both; and what the driver says of an address.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "world.hpp"

namespace fake {

namespace {

std::atomic<uint64_t> g_next_physical{1};

bool overlaps_known(uint64_t address, size_t nbytes) {
  const auto next = world().ranges.lower_bound(address);
  if (next != world().ranges.end() && next->first < address + nbytes) return true;
  return range_at(address) != nullptr;
}

Range *base_of(uint64_t address, Kind one, Kind other) {
  const auto found = world().ranges.find(address);
  if (found == world().ranges.end() || (found->second.kind != one && found->second.kind != other)) return nullptr;
  return &found->second;
}

void find_reserved(uint64_t address, uint64_t *base, size_t *nbytes) {
  auto found = world().reservations.upper_bound(address);
  if (found == world().reservations.begin()) return;
  --found;
  if (address >= found->first + found->second) return;
  *base = found->first;
  *nbytes = found->second;
}

struct Answer {
  uint64_t value = 0;
  size_t nbytes = 8;  // of the attribute's type
};

// What the driver says of an address that it does not know is 0, but for the device.
bool answer(int attribute, uint64_t address, Answer *out) {
  const Range *range = range_at(address);
  const bool known = range != nullptr;
  const bool physical = known && range->physical != nullptr;
  switch (attribute) {
    case kContextOf:
      // Memory that was mapped belongs to no context.
      out->value = known && range->kind != Kind::kMapped ? reinterpret_cast<uint64_t>(range->context) : 0;
      return true;
    case kMemoryType:
      *out = {known ? (range->on_host() ? kHostMemory : kDeviceMemory) : 0u, 4};
      return true;
    case kDevicePointer:
      out->value = known ? address : 0;
      return true;
    case kHostPointer:
      out->value = known && !range->on_device() ? address : 0;
      return true;
    case kSyncMemops:
      *out = {known && range->sync_memops, 4};
      return true;
    case kBufferId:
      out->value = known ? range->buffer_id : 0;
      return true;
    case kIsManaged:
      *out = {known && range->kind == Kind::kManaged, 4};
      return true;
    case kDeviceOrdinal:
      *out = {static_cast<uint32_t>(known ? range->device : -2), 4};
      return true;
    case kLegacyIpcCapable:
      *out = {known && range->kind == Kind::kDevice, 4};
      return true;
    case kRangeStart:
    case kRangeSize: {
      // Of mapped memory all that was reserved with it.
      uint64_t base = known ? range->base : 0;
      size_t nbytes = known ? range->nbytes : 0;
      if (!known || range->kind == Kind::kMapped) find_reserved(address, &base, &nbytes);
      out->value = attribute == kRangeStart ? base : nbytes;
      return true;
    }
    case kMapped:
      *out = {known, 4};
      return true;
    case kAllowedHandleTypes:
      out->value = physical && range->kind == Kind::kMapped
                       ? static_cast<uint64_t>(range->physical->prop.requested_handle_types)
                       : 0;
      return true;
    case kGpuDirectCapable:
      *out = {known && (range->kind == Kind::kDevice ||
                        (range->kind == Kind::kMapped && range->physical->prop.flags.gpu_direct_rdma_capable != 0)),
              4};
      return true;
    case kAccessFlags: {
      uint64_t flags = known ? 3 : 0;
      if (known && range->kind == Kind::kMapped) {
        const auto found = range->access.find(range->device);
        flags = found == range->access.end() ? 0 : static_cast<uint64_t>(found->second);
      }
      *out = {flags, 4};
      return true;
    }
    case kMappingSize:
      out->value = known ? range->nbytes : 0;
      return true;
    case kMappingBase:
      out->value = known ? range->base : 0;
      return true;
    default:
      return false;
  }
}

}  // namespace

Physical::Physical(int fd, size_t nbytes, int device)
    : fd(fd), nbytes(nbytes), device(device), id(g_next_physical.fetch_add(1)) {}

Physical::~Physical() {
  if (data != nullptr) munmap(data, nbytes);
  if (fd >= 0) close(fd);
}

std::shared_ptr<Physical> Physical::make(size_t nbytes, int device) {
  const size_t whole = round_up(nbytes, kPage);
  const int fd = static_cast<int>(syscall(SYS_memfd_create, "fake_cuda", 1u /* MFD_CLOEXEC */));
  if (fd < 0) return nullptr;
  auto physical = std::make_shared<Physical>(fd, whole, device);
  if (ftruncate(fd, static_cast<off_t>(whole)) != 0) return nullptr;
  void *data = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return nullptr;
  physical->data = static_cast<uint8_t *>(data);
  return physical;
}

uint8_t *Range::bytes(uint64_t address) const {
  // Managed memory is where everybody sees it.
  if (kind == Kind::kManaged || on_host()) return reinterpret_cast<uint8_t *>(address);
  return physical->data + offset + (address - base);
}

uint64_t hide(size_t nbytes) {
  const size_t align = nbytes >= kGranularity ? kGranularity : kPage;
  void *all = mmap(nullptr, nbytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) return 0;
  const auto begin = reinterpret_cast<uint64_t>(all);
  const uint64_t aligned = round_up(begin, align), end = begin + nbytes + align;
  if (aligned > begin) munmap(all, aligned - begin);
  if (end > aligned + nbytes) munmap(reinterpret_cast<void *>(aligned + nbytes), end - aligned - nbytes);
  return aligned;
}

uint64_t map_hidden(const Physical &physical, size_t offset, size_t nbytes, uint64_t at) {
  const size_t whole = round_up(nbytes, kPage);
  if (at == 0) at = hide(whole);
  if (at == 0) return 0;
  void *where = mmap(reinterpret_cast<void *>(at), whole, PROT_NONE, MAP_SHARED | MAP_FIXED, physical.fd,
                     static_cast<off_t>(offset));
  return where == MAP_FAILED ? 0 : at;
}

Range *range_at(uint64_t address) {
  auto after = world().ranges.upper_bound(address);
  if (after == world().ranges.begin()) return nullptr;
  Range &range = (--after)->second;
  return address < range.base + range.nbytes ? &range : nullptr;
}

bool resolve(uint64_t address, size_t nbytes, int device, bool write, std::vector<Piece> *pieces, Place *place) {
  std::shared_lock gate(world().gate);
  const Range *first = range_at(address);
  *place = first == nullptr || !first->on_device() ? Place::kPageable : Place::kDevice;
  if (*place == Place::kPageable) {
    // One piece, whoever registered some of it. Part of device memory in the middle is none that a CPU can read.
    const bool pinned = first != nullptr && address + nbytes <= first->base + first->nbytes;
    if (!pinned) {
      const auto next = world().ranges.upper_bound(address);
      if (next != world().ranges.end() && next->first < address + nbytes && next->second.on_device()) return false;
    }
    *place = pinned ? (first->kind == Kind::kManaged ? Place::kDevice : Place::kPinned) : Place::kPageable;
    pieces->push_back({reinterpret_cast<uint8_t *>(address), nbytes, pinned ? first->physical : nullptr});
    return true;
  }
  for (size_t done = 0; done < nbytes;) {
    const Range *range = range_at(address + done);
    if (range == nullptr || !range->on_device()) return false;
    if (range->kind == Kind::kMapped) {
      const auto access = range->access.find(device);
      if (access == range->access.end() || access->second < (write ? 3 : 1)) return false;
    }
    const size_t some = std::min<size_t>(nbytes - done, range->base + range->nbytes - (address + done));
    pieces->push_back({range->bytes(address + done), some, range->physical});
    done += some;
  }
  return true;
}

}  // namespace fake

using namespace fake;

// ---------------------------------------------------------------- of devices

FAKE_API int cuMemAlloc_v2(uint64_t *out, size_t nbytes) {
  FAKE_ENTER(kContext);
  if (nbytes == 0) return kInvalidValue;
  World &all = world();
  Context *context = current_context();
  const int number = device_of(context);
  Device &device = all.devices[static_cast<size_t>(number)];
  const size_t whole = round_up(nbytes, kPage);
  if (device.used + whole > all.device_bytes) return kOutOfMemory;
  auto physical = Physical::make(nbytes, number);
  if (physical == nullptr) return kOutOfMemory;
  std::lock_guard gate(all.gate);
  std::vector<uint64_t> &unused = all.free_addresses[whole];
  uint64_t at = 0;
  if (!unused.empty()) {
    at = unused.back();
    unused.pop_back();
  }
  at = map_hidden(*physical, 0, nbytes, at);
  if (at == 0) return kOutOfMemory;
  physical->counted = true;
  device.used += whole;
  Range range;
  range.base = at;
  range.nbytes = nbytes;
  range.physical = std::move(physical);
  range.context = context;
  range.device = number;
  range.buffer_id = all.next_buffer_id++;
  all.ranges[at] = range;
  *out = at;
  return kSuccess;
}

FAKE_API int cuMemFree_v2(uint64_t address) {
  FAKE_ENTER(kContext);
  World &all = world();
  Context *owner;
  {
    std::shared_lock gate(all.gate);
    const Range *range = base_of(address, Kind::kDevice, Kind::kManaged);
    if (range == nullptr) return kInvalidValue;
    owner = range->context;
  }
  // The driver waits for whatever may use it.
  if (const int dead = drain(owner)) return dead;
  std::lock_guard gate(all.gate);
  Range *range = base_of(address, Kind::kDevice, Kind::kManaged);
  if (range == nullptr) return kInvalidValue;
  const size_t whole = round_up(range->nbytes, kPage);
  if (range->kind == Kind::kDevice) {
    all.devices[static_cast<size_t>(range->device)].used -= whole;
    // The address stays taken and cannot be touched, until it is given out again.
    mmap(reinterpret_cast<void *>(address), whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
         -1, 0);
    all.free_addresses[whole].push_back(address);
  }
  all.ranges.erase(address);
  return kSuccess;
}

FAKE_API int cuMemAllocManaged(uint64_t *out, size_t nbytes, unsigned flags) {
  FAKE_ENTER(kContext);
  if (nbytes == 0 || (flags != 1 && flags != 2)) return kInvalidValue;
  World &all = world();
  auto physical = Physical::make(nbytes, device_of(current_context()));
  if (physical == nullptr) return kOutOfMemory;
  std::lock_guard gate(all.gate);
  Range range;
  range.base = reinterpret_cast<uint64_t>(physical->data);
  range.nbytes = nbytes;
  range.kind = Kind::kManaged;
  range.context = current_context();
  range.device = physical->device;
  range.physical = std::move(physical);
  range.buffer_id = all.next_buffer_id++;
  all.ranges[range.base] = range;
  *out = range.base;
  return kSuccess;
}

FAKE_API int cuMemGetInfo_v2(size_t *unused, size_t *total) {
  FAKE_ENTER(kContext);
  *total = world().device_bytes;
  *unused = *total - world().devices[static_cast<size_t>(device_of(current_context()))].used;
  return kSuccess;
}

FAKE_API int cuMemGetAddressRange_v2(uint64_t *base, size_t *nbytes, uint64_t address) {
  FAKE_ENTER(kContext);
  std::shared_lock gate(world().gate);
  const Range *range = range_at(address);
  if (range == nullptr || range->on_host()) return kNotFound;
  if (base != nullptr) *base = range->base;
  if (nbytes != nullptr) *nbytes = range->nbytes;
  return kSuccess;
}

// ---------------------------------------------------------------- of hosts

FAKE_API int cuMemHostAlloc(void **out, size_t nbytes, unsigned flags) {
  FAKE_ENTER(kContext);
  if (nbytes == 0 || flags > 7) return kInvalidValue;
  void *data = mmap(nullptr, round_up(nbytes, kPage), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return kOutOfMemory;
  std::lock_guard gate(world().gate);
  Range range;
  range.base = reinterpret_cast<uint64_t>(data);
  range.nbytes = nbytes;
  range.kind = Kind::kPinned;
  range.context = current_context();
  range.device = device_of(current_context());
  range.buffer_id = world().next_buffer_id++;
  world().ranges[range.base] = range;
  *out = data;
  return kSuccess;
}

FAKE_API int cuMemFreeHost(void *data) {
  FAKE_ENTER(kContext);
  const auto address = reinterpret_cast<uint64_t>(data);
  Context *owner;
  {
    std::shared_lock gate(world().gate);
    const Range *range = base_of(address, Kind::kPinned, Kind::kPinned);
    if (range == nullptr) return kInvalidValue;
    owner = range->context;
  }
  if (const int dead = drain(owner)) return dead;
  std::lock_guard gate(world().gate);
  const Range *range = base_of(address, Kind::kPinned, Kind::kPinned);
  if (range == nullptr) return kInvalidValue;
  munmap(data, round_up(range->nbytes, kPage));
  world().ranges.erase(address);
  return kSuccess;
}

FAKE_API int cuMemHostRegister_v2(void *data, size_t nbytes, unsigned flags) {
  FAKE_ENTER(kContext);
  const auto address = reinterpret_cast<uint64_t>(data);
  if (data == nullptr || nbytes == 0 || flags > 15) return kInvalidValue;
  // Pages that are not there cannot be pinned.
  std::vector<unsigned char> there((address % kPage + nbytes + kPage - 1) / kPage);
  if (mincore(reinterpret_cast<void *>(address / kPage * kPage), there.size() * kPage, there.data()) != 0) {
    return kInvalidValue;
  }
  std::lock_guard gate(world().gate);
  if (overlaps_known(address, nbytes)) return kHostMemoryAlreadyRegistered;
  Range range;
  range.base = address;
  range.nbytes = nbytes;
  range.kind = Kind::kRegistered;
  range.context = current_context();
  range.device = device_of(current_context());
  range.buffer_id = world().next_buffer_id++;
  world().ranges[address] = range;
  return kSuccess;
}

FAKE_API int cuMemHostUnregister(void *data) {
  FAKE_ENTER(kContext);
  std::lock_guard gate(world().gate);
  const auto address = reinterpret_cast<uint64_t>(data);
  if (base_of(address, Kind::kRegistered, Kind::kRegistered) == nullptr) return kHostMemoryNotRegistered;
  world().ranges.erase(address);
  return kSuccess;
}

FAKE_API int cuMemHostGetDevicePointer_v2(uint64_t *out, void *data, unsigned flags) {
  FAKE_ENTER(kContext);
  std::shared_lock gate(world().gate);
  const Range *range = range_at(reinterpret_cast<uint64_t>(data));
  if (flags != 0 || range == nullptr || range->on_device()) return kInvalidValue;
  *out = reinterpret_cast<uint64_t>(data);
  return kSuccess;
}

// ---------------------------------------------------------------- what is at an address

FAKE_API int cuPointerGetAttributes(unsigned count, const int *attributes, void **data, uint64_t address) {
  FAKE_ENTER(kDriver);
  std::shared_lock gate(world().gate);
  for (unsigned i = 0; i < count; ++i) {
    Answer one;
    if (!answer(attributes[i], address, &one)) return kInvalidValue;
    std::memcpy(data[i], &one.value, one.nbytes);
  }
  return kSuccess;
}

FAKE_API int cuPointerGetAttribute(void *data, int attribute, uint64_t address) {
  FAKE_ENTER(kDriver);
  std::shared_lock gate(world().gate);
  Answer one;
  // Unlike its plural, it refuses what the driver does not know.
  if (range_at(address) == nullptr || !answer(attribute, address, &one)) return kInvalidValue;
  std::memcpy(data, &one.value, one.nbytes);
  return kSuccess;
}

FAKE_API int cuPointerSetAttribute(const void *value, int attribute, uint64_t address) {
  FAKE_ENTER(kContext);
  std::lock_guard gate(world().gate);
  Range *range = range_at(address);
  if (range == nullptr || attribute != kSyncMemops) return kInvalidValue;
  if (range->kind == Kind::kMapped) return kNotSupported;
  if (range->kind != Kind::kDevice) return kInvalidValue;
  int on;
  std::memcpy(&on, value, sizeof on);
  range->sync_memops = on != 0;
  return kSuccess;
}
