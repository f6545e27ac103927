// SPDX-License-Identifier: Apache-2.0
#include "rdma_memory.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

namespace moonpool {

namespace {

constexpr uint64_t kHugePageBytes = 2u << 20;  // pieces end at such bounds, so that huge pages are never divided
// Smaller ones are registered faster than a thread is started.
constexpr uint64_t kParallelBytes = 64u << 20;

// The kernel insists that a registration starts as far into a page as its memory does.
uint64_t start_of(const uint8_t *base) {
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  return reinterpret_cast<uintptr_t>(base) % page;
}

Error explain(const RdmaDevice &device, uint64_t length, int err) {
  Error error =
      system_error(MP_SYSTEM, err, "device " + device.name + ": cannot register " + std::to_string(length) + " bytes");
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  const std::string locked = limit.rlim_cur == RLIM_INFINITY ? "unlimited" : std::to_string(limit.rlim_cur) + " bytes";
  if (err == ENOMEM || err == EAGAIN) {
    error.hint = "RLIMIT_MEMLOCK is " + locked + " and " + std::to_string(length) +
                 " more are needed: raise `ulimit -l` (LimitMEMLOCK= in systemd, --ulimit memlock=-1 in Docker)";
  } else if (err == EFAULT || err == EINVAL) {
    error.hint =
        "the memory must be mapped and readable, and writable where the region is; GPU memory needs dma-buf "
        "or the nvidia-peermem module";
  } else {
    error.hint = "RLIMIT_MEMLOCK is " + locked + "; see `mooncake-bench doctor`";
  }
  return error;
}

}  // namespace

Error RdmaMemory::add(OnDevice *on, uint8_t *base, uint64_t length, uint64_t piece_bytes, bool writable) {
  const RdmaDevice &device = *on->device;
  const uint64_t start = start_of(base);
  // The local side of a read is written by the device, whoever else may.
  unsigned access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_RELAXED_ORDERING;
  if (writable) access |= IBV_ACCESS_REMOTE_WRITE;
  for (uint64_t at = 0; at < length; at += piece_bytes) {
    const uint64_t bytes = std::min(piece_bytes, length - at);
    ibv_mr *mr = device.verbs.reg_mr_iova2(device.pd, base + at, bytes, start, access);
    int err = mr == nullptr ? errno : 0;
    if (mr == nullptr && (err == EFAULT || err == EACCES || err == EPERM) && !writable) {
      // Memory that this process cannot write either is only read from.
      mr = device.verbs.reg_mr_iova2(device.pd, base + at, bytes, start,
                                     IBV_ACCESS_REMOTE_READ | IBV_ACCESS_RELAXED_ORDERING);
      err = mr == nullptr ? errno : 0;
    }
    if (mr == nullptr) return explain(device, bytes, err);
    on->pieces.push_back(mr);
  }
  return {};
}

Error RdmaMemory::make(const RdmaHost &host, const RdmaConfig &config, uint8_t *base, uint64_t length, bool writable,
                       std::shared_ptr<RdmaMemory> *out) {
  std::shared_ptr<RdmaMemory> made(new RdmaMemory());
  uint64_t piece = config.registration_bytes_max == 0 ? UINT64_MAX : config.registration_bytes_max;
  for (const auto &device : host.devices()) {
    made->devices_.push_back({device, {}});
    if (device->attributes.max_mr_size != 0) piece = std::min<uint64_t>(piece, device->attributes.max_mr_size);
  }
  made->start_ = start_of(base);
  made->piece_bytes_ = std::max(piece / kHugePageBytes * kHugePageBytes, kHugePageBytes);
  std::vector<Error> errors(made->devices_.size());
  const auto add_to = [&](size_t i) {
    errors[i] = add(&made->devices_[i], base, length, made->piece_bytes_, writable);
  };
  // Each device pins the pages for itself, which takes long for many.
  std::vector<std::thread> threads;
  for (size_t i = 1; i < errors.size(); ++i) {
    if (length >= kParallelBytes) {
      threads.emplace_back(add_to, i);
    } else {
      add_to(i);
    }
  }
  if (!errors.empty()) add_to(0);
  for (std::thread &thread : threads) thread.join();
  for (Error &error : errors) {
    if (error) return std::move(error);
  }
  *out = std::move(made);
  return {};
}

bool RdmaMemory::close() {
  std::lock_guard lock(mutex_);
  bool free = true;
  for (OnDevice &on : devices_) {
    std::erase_if(on.pieces, [&](ibv_mr *mr) { return on.device->verbs.dereg_mr(mr) == 0; });
    free = free && on.pieces.empty();
  }
  return free;
}

std::vector<uint32_t> RdmaMemory::keys(size_t device, uint32_t ibv_mr::*key) const {
  std::vector<uint32_t> keys;
  std::lock_guard lock(mutex_);
  if (device >= devices_.size()) return keys;
  for (const ibv_mr *mr : devices_[device].pieces) keys.push_back(mr->*key);
  return keys;
}

}  // namespace moonpool
