// SPDX-License-Identifier: Apache-2.0
//
// Memory and events of other processes, and dma-buf. A handle names the process and its descriptor of the memfd; that
// process has to live and be visible, as with the driver.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "world.hpp"

namespace fake {

namespace {

constexpr char kMagic[8] = {'f', 'a', 'k', 'e', 'c', 'u', 'd', 'a'};

struct Named {
  char magic[8];
  int32_t pid, fd;
  uint64_t inode, nbytes;
  int32_t device;
  uint32_t flags;
};
static_assert(sizeof(Named) <= sizeof(IpcHandle));

bool name(const Physical &physical, size_t nbytes, int device, uint32_t flags, IpcHandle *out) {
  struct stat here;
  if (fstat(physical.fd, &here) != 0) return false;
  Named named{};
  std::memcpy(named.magic, kMagic, sizeof kMagic);
  named.pid = getpid();
  named.fd = physical.fd;
  named.inode = here.st_ino;
  named.nbytes = nbytes;
  named.device = device;
  named.flags = flags;
  std::memset(out, 0, sizeof *out);
  std::memcpy(out, &named, sizeof named);
  return true;
}

int find(const IpcHandle &handle, Named *named, std::shared_ptr<Physical> *out) {
  std::memcpy(named, &handle, sizeof *named);
  if (std::memcmp(named->magic, kMagic, sizeof kMagic) != 0) return kInvalidValue;
  if (named->pid == getpid()) return kInvalidContext;
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", named->pid, named->fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return kMapFailed;
  struct stat there;
  if (fstat(fd, &there) != 0 || there.st_ino != named->inode) {
    close(fd);  // the memory was freed, and the descriptor is another one
    return kInvalidValue;
  }
  auto physical = std::make_shared<Physical>(fd, static_cast<size_t>(there.st_size), named->device);
  void *data = mmap(nullptr, physical->nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return kMapFailed;
  physical->data = static_cast<uint8_t *>(data);
  *out = physical;
  return kSuccess;
}

}  // namespace

}  // namespace fake

using namespace fake;

// ---------------------------------------------------------------- memory

FAKE_API int cuIpcGetMemHandle(IpcHandle *out, uint64_t address) {
  FAKE_ENTER(kContext);
  std::shared_lock gate(world().gate);
  const Range *range = range_at(address);
  // Of all of the allocation, wherever in it the address is. Mapped and managed memory has none.
  if (range == nullptr || range->kind != Kind::kDevice) return kInvalidValue;
  return name(*range->physical, range->nbytes, range->device, 0, out) ? kSuccess : kOperatingSystem;
}

FAKE_API int cuIpcOpenMemHandle_v2(uint64_t *out, IpcHandle handle, unsigned flags) {
  FAKE_ENTER(kContext);
  if (flags != 1) return kInvalidValue;
  World &all = world();
  const std::string text(handle.bytes, sizeof handle.bytes);
  std::lock_guard gate(all.gate);
  for (auto &[base, range] : all.ranges) {
    if (range.kind != Kind::kImported || range.handle != text) continue;
    ++range.opens;
    *out = base;
    return kSuccess;
  }
  Named named;
  std::shared_ptr<Physical> physical;
  if (const int code = find(handle, &named, &physical)) return code;
  const uint64_t at = map_hidden(*physical, 0, named.nbytes, 0);
  if (at == 0) return kMapFailed;
  Range range;
  range.base = at;
  range.nbytes = named.nbytes;
  range.kind = Kind::kImported;
  range.physical = std::move(physical);
  range.context = current_context();
  range.device = named.device;
  range.buffer_id = all.next_buffer_id++;
  range.handle = text;
  all.ranges[at] = range;
  *out = at;
  return kSuccess;
}

FAKE_API int cuIpcCloseMemHandle(uint64_t address) {
  FAKE_ENTER(kContext);
  World &all = world();
  Context *owner;
  {
    std::shared_lock gate(all.gate);
    const auto found = all.ranges.find(address);
    if (found == all.ranges.end() || found->second.kind != Kind::kImported) return kInvalidValue;
    owner = found->second.context;
  }
  if (const int dead = drain(owner)) return dead;
  std::lock_guard gate(all.gate);
  const auto found = all.ranges.find(address);
  if (found == all.ranges.end() || found->second.kind != Kind::kImported) return kInvalidValue;
  if (--found->second.opens > 0) return kSuccess;
  munmap(reinterpret_cast<void *>(address), round_up(found->second.nbytes, kPage));
  all.ranges.erase(found);
  return kSuccess;
}

// ---------------------------------------------------------------- events

FAKE_API int cuIpcGetEventHandle(IpcHandle *out, void *event) {
  FAKE_ENTER(kContext);
  std::shared_lock gate(world().gate);
  const auto found = world().events.find(event);
  if (found == world().events.end()) return kInvalidHandle;
  if ((found->second->flags & 4) == 0) return kInvalidValue;
  return name(*found->second->page, kPage, -1, found->second->flags, out) ? kSuccess : kOperatingSystem;
}

FAKE_API int cuIpcOpenEventHandle(void **out, IpcHandle handle) {
  FAKE_ENTER(kContext);
  Named named;
  auto event = std::make_shared<Event>();
  if (const int code = find(handle, &named, &event->page)) return code;
  event->context = current_context();
  event->flags = named.flags;
  std::lock_guard gate(world().gate);
  world().events[event.get()] = event;
  *out = event.get();
  return kSuccess;
}

// ---------------------------------------------------------------- dma-buf

// Of whole pages of one allocation. The last page of an allocation belongs to it.
FAKE_API int cuMemGetHandleForAddressRange(void *out, uint64_t address, size_t nbytes, int type,
                                           unsigned long long flags) {
  FAKE_ENTER(kContext);
  if (type != 1 || flags > 1 || nbytes == 0 || address % kPage != 0 || nbytes % kPage != 0) return kInvalidValue;
  World &all = world();
  std::lock_guard gate(all.gate);
  const Range *range = range_at(address);
  if (range == nullptr || !range->on_device()) return kInvalidValue;
  if (address + nbytes > range->base + round_up(range->nbytes, kPage)) return kInvalidValue;
  if (range->kind == Kind::kImported) return kNotSupported;
  int supported = 1;
  {
    std::lock_guard lock(all.settings_mutex);
    for (const auto &[which, value] : all.attributes) {
      if (which.second == 124 && (which.first == -1 || which.first == range->device)) supported = value;
    }
  }
  if (supported == 0) return kNotSupported;
  // With a file position of its own.
  char path[64];
  std::snprintf(path, sizeof path, "/proc/self/fd/%d", range->physical->fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  const size_t offset = range->offset + (address - range->base);
  if (fd < 0 || lseek(fd, static_cast<off_t>(offset), SEEK_SET) < 0) return kOperatingSystem;
  all.dmabufs[fd] = {offset, nbytes};
  std::memcpy(out, &fd, sizeof fd);
  return kSuccess;
}

FAKE_API int cuFlushGPUDirectRDMAWrites(int target, int scope) {
  FAKE_ENTER(kContext);
  return target == 0 && (scope == 100 || scope == 200) ? kSuccess : kInvalidValue;
}
