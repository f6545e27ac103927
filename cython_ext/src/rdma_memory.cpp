// SPDX-License-Identifier: Apache-2.0
#include "rdma_memory.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>
#include <utility>

#include "cuda_export.hpp"
#include "rdma_frames.hpp"

namespace moonpool {

namespace {

constexpr uint64_t kHugePageBytes = 2u << 20;  // pieces end at such bounds, so that huge pages are never divided
// Smaller ones are registered faster than a thread is started.
constexpr uint64_t kParallelBytes = 64u << 20;

uint64_t page_bytes() {
  static const auto bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// The kernel insists that a registration starts as far into a page as its memory does.
uint64_t start_of(const uint8_t *base) { return reinterpret_cast<uintptr_t>(base) % page_bytes(); }

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
        "the memory must be mapped and readable, and writable where the region is; register memory of a GPU as "
        "what it is";
  } else {
    error.hint = "RLIMIT_MEMLOCK is " + locked + "; see `mooncake-bench doctor`";
  }
  return error;
}

}  // namespace

std::string why_no_peermem() {
  for (const char *name : {"/sys/module/nvidia_peermem", "/sys/module/nv_peer_mem"}) {
    if (access(name, F_OK) == 0) return {};
  }
  return "the module is not loaded";
}

Error RdmaMemory::add(OnDevice *on, const std::vector<Piece> &pieces, bool writable) {
  const RdmaDevice &device = *on->device;
  const auto try_with = [&](const Piece &piece, unsigned access) {
    return piece.fd < 0 ? device.verbs.reg_mr_iova2(device.pd, piece.at, piece.bytes, piece.address, access)
                        : device.verbs.reg_dmabuf_mr(device.pd, piece.fd_offset, piece.bytes, piece.address, piece.fd,
                                                     static_cast<int>(access));
  };
  // The local side of a read is written by the device, whoever else may.
  unsigned access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_RELAXED_ORDERING;
  if (writable) access |= IBV_ACCESS_REMOTE_WRITE;
  for (const Piece &piece : pieces) {
    ibv_mr *mr = try_with(piece, access);
    int err = mr == nullptr ? errno : 0;
    if (mr == nullptr && (err == EFAULT || err == EACCES || err == EPERM) && !writable) {
      // Memory that this process cannot write either is only read from.
      mr = try_with(piece, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_RELAXED_ORDERING);
      err = mr == nullptr ? errno : 0;
    }
    if (mr == nullptr) return explain(device, piece.bytes, err);
    on->pieces.push_back(mr);
  }
  return {};
}

// With every device, or with none.
Error RdmaMemory::add_all(const Source &source, const std::vector<Piece> &pieces) {
  std::vector<Error> errors(devices_.size());
  const auto add_to = [&](size_t i) { errors[i] = add(&devices_[i], pieces, source.writable); };
  // Each device pins the pages for itself, which takes long for many.
  std::vector<std::thread> threads;
  for (size_t i = 1; i < errors.size(); ++i) {
    if (source.length >= kParallelBytes) {
      threads.emplace_back(add_to, i);
    } else {
      add_to(i);
    }
  }
  if (!errors.empty()) add_to(0);
  for (std::thread &thread : threads) thread.join();
  for (Error &error : errors) {
    if (!error) continue;
    close();
    return std::move(error);
  }
  return {};
}

// Pieces end at multiples of piece_bytes_ from a point before the region, which is start_ bytes away: where pages end
// (huge ones too where the memory begins with one; more would tell peers where it lies), or where the allocations end
// that a GPU's memory is made of.
Error RdmaMemory::cut(const Source &source, uint64_t piece_max, std::vector<Piece> *pieces) {
  cuda::Layout layout;
  if (source.gpu != nullptr) {
    if (Error error = cuda::find_layout(*source.gpu, &layout)) return error;
  }
  piece_bytes_ = std::max(piece_max / kHugePageBytes * kHugePageBytes, kHugePageBytes);
  start_ = start_of(source.base);
  if (layout.step != 0) {
    // The largest part of a step that devices take and that divides it, in whole pages.
    const uint64_t pages = layout.step / page_bytes();
    uint64_t parts = (layout.step + piece_bytes_ - 1) / piece_bytes_;
    while (pages % parts != 0) ++parts;
    piece_bytes_ = layout.step / parts;
    start_ = (piece_bytes_ - layout.first % piece_bytes_) % piece_bytes_;
  }
  for (uint64_t at = 0; at < source.length;) {
    const uint64_t address = (start_ + at) % piece_bytes_;
    const uint64_t bytes = std::min(piece_bytes_ - address, source.length - at);
    pieces->push_back({source.base + at, bytes, address});
    at += bytes;
  }
  if (pieces->size() <= rdma::kPiecesMax) return {};
  return make_error(MP_LIMIT,
                    "memory that has to be registered in " + std::to_string(pieces->size()) +
                        " pieces is not registered for RDMA, at most " + std::to_string(rdma::kPiecesMax) + " are",
                    "register smaller regions, or raise rdma_registration_bytes_max");
}

Error RdmaMemory::add_gpu(const Source &source, std::vector<Piece> pieces) {
  const cuda::DeviceMemory &gpu = *source.gpu;
  std::string why_not = cuda::why_no_dmabuf(gpu.driver(), gpu.device());
  if (why_not.empty() && devices_.front().device->verbs.reg_dmabuf_mr == nullptr) {
    why_not = "libibverbs has no ibv_reg_dmabuf_mr, which came with rdma-core 34";
  }
  if (why_not.empty()) {
    std::vector<Fd> open(pieces.size());
    std::vector<Piece> dmabufs = pieces;
    Error error;
    for (size_t i = 0; i < pieces.size() && !error; ++i) {
      error = cuda::export_dmabuf(gpu, reinterpret_cast<cuda::Pointer>(pieces[i].at), pieces[i].bytes, &open[i],
                                  &dmabufs[i].fd_offset);
      dmabufs[i].fd = open[i].get();
    }
    if (!error) error = add_all(source, dmabufs);
    if (!error) {
      route_ = Route::kDmabuf;
      return {};
    }
    why_not = error.message + (error.cause.empty() ? "" : " (" + error.cause + ")");
  }
  // Only trying tells: the module need not be one that the kernel shows here.
  Error by_address = add_all(source, pieces);
  if (!by_address) {
    route_ = Route::kPeermem;
    return {};
  }
  std::string peermem = why_no_peermem();
  if (peermem.empty()) peermem = by_address.message + " (" + by_address.cause + ")";
  Error error = make_error(MP_TRANSPORT_UNAVAILABLE,
                           "memory of cuda:" + std::to_string(gpu.device()) + " cannot be registered for RDMA",
                           "`modprobe nvidia-peermem`, or a driver with dma-buf support (open kernel modules, kernel "
                           "5.12, rdma-core 34); see `mooncake-bench doctor`");
  error.cause = "dma-buf: " + why_not + "; nvidia-peermem: " + peermem;
  return error;
}

Error RdmaMemory::make(const RdmaHost &host, const RdmaConfig &config, const Source &source,
                       std::shared_ptr<RdmaMemory> *out) {
  std::shared_ptr<RdmaMemory> made(new RdmaMemory());
  uint64_t piece_max = config.registration_bytes_max == 0 ? UINT64_MAX : config.registration_bytes_max;
  for (const auto &device : host.devices()) {
    made->devices_.push_back({device, {}});
    if (device->attributes.max_mr_size != 0) piece_max = std::min<uint64_t>(piece_max, device->attributes.max_mr_size);
  }
  std::vector<Piece> pieces;
  Error error = made->cut(source, piece_max, &pieces);
  if (!error) error = source.gpu == nullptr ? made->add_all(source, pieces) : made->add_gpu(source, std::move(pieces));
  if (error) return error;
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
