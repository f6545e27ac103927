// SPDX-License-Identifier: Apache-2.0
// A region's registrations: one or more memory regions of each device, based at the start of a page instead of
// at their address, so that no address crosses the wire.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_memory.hpp"
#include "rdma_device.hpp"

namespace moonpool {

class RdmaMemory {
 public:
  // What is to be registered.
  struct Source {
    uint8_t *base;
    uint64_t length;
    bool writable;
    const cuda::DeviceMemory *gpu = nullptr;  // memory of a GPU
  };
  // How devices reach it.
  enum class Route { kPages, kDmabuf, kPeermem };

  // Registers with every device of the host, or with none. Memory of a GPU as a dma-buf, or else by its address, which
  // takes the module nvidia-peermem.
  static Error make(const RdmaHost &host, const RdmaConfig &config, const Source &source,
                    std::shared_ptr<RdmaMemory> *out);
  ~RdmaMemory() { close(); }
  RdmaMemory(const RdmaMemory &) = delete;
  RdmaMemory &operator=(const RdmaMemory &) = delete;

  // Afterwards no device reads or writes the memory for anybody. False when a device would not let go.
  bool close();

  Route route() const { return route_; }
  uint64_t piece_bytes() const { return piece_bytes_; }
  // Where the region begins in its first piece.
  uint64_t start() const { return start_; }
  // Piece after piece: for this host's own work requests, and for peers. Empty when the device has it not registered,
  // or it is closed.
  std::vector<uint32_t> local_keys(size_t device) const { return keys(device, &ibv_mr::lkey); }
  std::vector<uint32_t> remote_keys(size_t device) const { return keys(device, &ibv_mr::rkey); }

 private:
  struct OnDevice {
    std::shared_ptr<RdmaDevice> device;
    std::vector<ibv_mr *> pieces;
  };
  // What one registration covers.
  struct Piece {
    uint8_t *at;
    uint64_t bytes;
    uint64_t address;  // of its first byte, for the devices
    int fd = -1;       // the dma-buf, and where in it
    uint64_t fd_offset = 0;
  };
  RdmaMemory() = default;
  Error cut(const Source &source, uint64_t piece_max, std::vector<Piece> *pieces);
  Error add_all(const Source &source, const std::vector<Piece> &pieces);
  Error add_gpu(const Source &source, std::vector<Piece> pieces);
  std::vector<uint32_t> keys(size_t device, uint32_t ibv_mr::*key) const;
  static Error add(OnDevice *on, const std::vector<Piece> &pieces, bool writable);

  Route route_ = Route::kPages;
  uint64_t piece_bytes_ = 0;
  uint64_t start_ = 0;
  mutable std::mutex mutex_;
  std::vector<OnDevice> devices_;
};

// "" when memory of a GPU may be registered by its address, otherwise why not.
std::string why_no_peermem();

}  // namespace moonpool
