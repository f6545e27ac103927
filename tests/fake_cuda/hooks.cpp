// SPDX-License-Identifier: Apache-2.0
//
// What tests ask, see fake_cuda.h.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#pragma GCC visibility push(default)
#include "fake_cuda.h"
#pragma GCC visibility pop
#include "world.hpp"

using namespace fake;

namespace {

// Calls `touch` with every piece of this device memory and its address. Under the gate.
template <class Touch>
int each_piece(uint64_t address, size_t nbytes, Touch touch) {
  std::shared_lock gate(world().gate);
  for (const bool doing : {false, true}) {
    for (size_t done = 0; done < nbytes;) {
      const Range *range = range_at(address + done);
      if (range == nullptr || range->physical == nullptr) return -1;
      const size_t left = range->base + range->nbytes - (address + done);
      const size_t some = left < nbytes - done ? left : nbytes - done;
      if (doing) touch(range->bytes(address + done), done, some);
      done += some;
    }
  }
  return 0;
}

int64_t contexts() {
  int64_t active = static_cast<int64_t>(world().others.size());
  for (const Device &device : world().devices) active += device.primary.references > 0;
  return active;
}

int64_t ranges_of(Kind one, Kind other) {
  int64_t n = 0;
  for (const auto &[base, range] : world().ranges) n += range.kind == one || range.kind == other;
  return n;
}

}  // namespace

extern "C" {

int fakeCudaSet(const char *settings) { return set(&world(), settings) ? 0 : -1; }

uint64_t fakeCudaCalls(const char *name) { return count_of(name); }

uint64_t fakeCudaAllCalls(void) { return world().all_calls; }

void fakeCudaForgetCalls(void) {
  World &all = world();
  std::lock_guard lock(all.counts_mutex);
  for (auto &[name, counter] : all.counts) counter = 0;
  all.all_calls = 0;
}

int64_t fakeCudaAlive(const char *kind) {
  World &all = world();
  std::shared_lock gate(all.gate);
  const std::string what = kind;
  if (what == "contexts") return contexts();
  if (what == "primary contexts made") return static_cast<int64_t>(all.primaries_made.load());
  if (what == "streams") return static_cast<int64_t>(all.streams.size());
  if (what == "events") return static_cast<int64_t>(all.events.size());
  if (what == "allocations") return ranges_of(Kind::kDevice, Kind::kManaged);
  if (what == "mappings") return ranges_of(Kind::kMapped, Kind::kMapped);
  if (what == "handles") return static_cast<int64_t>(all.handles.size());
  if (what == "reservations") return static_cast<int64_t>(all.reservations.size());
  if (what == "pinned") return ranges_of(Kind::kPinned, Kind::kRegistered);
  if (what == "imports") return ranges_of(Kind::kImported, Kind::kImported);
  if (what == "modules") return static_cast<int64_t>(all.modules.size());
  return -1;
}

void fakeCudaBreak(int device, int code) {
  std::shared_lock gate(world().gate);
  world().devices.at(static_cast<size_t>(device)).primary.dead = code;
}

void fakeCudaHold(int on) {
  World &all = world();
  std::lock_guard lock(all.hold_mutex);
  all.held = on != 0;
  all.hold_changed.notify_all();
}

int fakeCudaPeek(uint64_t address, void *to, size_t nbytes) {
  return each_piece(address, nbytes, [&](const uint8_t *data, size_t at, size_t some) {
    std::memcpy(static_cast<uint8_t *>(to) + at, data, some);
  });
}

int fakeCudaPoke(uint64_t address, const void *from, size_t nbytes) {
  return each_piece(address, nbytes, [&](uint8_t *data, size_t at, size_t some) {
    std::memcpy(data, static_cast<const uint8_t *>(from) + at, some);
  });
}

int fakeCudaOpen(uint64_t address, size_t nbytes, int on) {
  if (each_piece(address, nbytes, [](uint8_t *, size_t, size_t) {}) != 0) return -1;
  const uint64_t begin = address / kPage * kPage;
  const size_t whole = round_up(address + nbytes - begin, kPage);
  return mprotect(reinterpret_cast<void *>(begin), whole, on != 0 ? PROT_READ | PROT_WRITE : PROT_NONE);
}

int fakeCudaDmabuf(int fd, void **data, size_t *nbytes) {
  World &all = world();
  std::shared_lock gate(all.gate);
  const auto found = all.dmabufs.find(fd);
  struct stat here;
  if (found == all.dmabufs.end() || fstat(fd, &here) != 0) return -1;
  for (const auto &[base, range] : all.ranges) {
    struct stat there;
    if (range.physical == nullptr || range.physical->fd < 0 || fstat(range.physical->fd, &there) != 0) continue;
    if (there.st_ino != here.st_ino) continue;
    *data = range.physical->data + found->second.first;
    *nbytes = found->second.second;
    return 0;
  }
  return -1;
}

}  // extern "C"
