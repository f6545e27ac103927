// SPDX-License-Identifier: Apache-2.0
// A region's registrations: one or more memory regions of each device, based at the start of a page instead of
// at their address, so that no address crosses the wire.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "rdma_device.hpp"

namespace moonpool {

class RdmaMemory {
 public:
  // Registers with every device of the host, or with none.
  static Error make(const RdmaHost &host, const RdmaConfig &config, uint8_t *base, uint64_t length, bool writable,
                    std::shared_ptr<RdmaMemory> *out);
  ~RdmaMemory() { close(); }
  RdmaMemory(const RdmaMemory &) = delete;
  RdmaMemory &operator=(const RdmaMemory &) = delete;

  // Afterwards no device reads or writes the memory for anybody. False when a device would not let go.
  bool close();

  uint64_t piece_bytes() const { return piece_bytes_; }
  // The address of each piece's first byte for the devices: less than a page.
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
  RdmaMemory() = default;
  std::vector<uint32_t> keys(size_t device, uint32_t ibv_mr::*key) const;
  static Error add(OnDevice *on, uint8_t *base, uint64_t length, uint64_t piece_bytes, bool writable);

  uint64_t piece_bytes_ = 0;
  uint64_t start_ = 0;
  mutable std::mutex mutex_;
  std::vector<OnDevice> devices_;
};

}  // namespace moonpool
