// SPDX-License-Identifier: Apache-2.0
// The RDMA devices of this host and their ports. A rail is one port: bytes are striped over rails.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "io_thread.hpp"
#include "pci.hpp"
#include "rdma_gid.hpp"
#include "status.hpp"
#include "verbs.hpp"

namespace moonpool {

struct RdmaConfig {
  std::string devices;  // comma list of NAME[:PORT][@GID_INDEX]; "": all
  uint32_t queue_pairs = 0;
  uint32_t queue_pairs_max = 0;  // of one engine, for its own requests
  uint32_t queue_depth = 0;
  uint32_t inline_bytes = 0;
  uint32_t service_level = 0;
  uint32_t traffic_class = 0;
  uint32_t pkey_index = 0;
  uint64_t registration_bytes_max = 0;
};

// One entry of RdmaConfig::devices.
struct DeviceChoice {
  std::string name;
  int port = 0;  // 0: every port
  int gid_index = -1;
};
Error parse_device_choices(const std::string &text, std::vector<DeviceChoice> *out);

// An opened device with its protection domain.
class RdmaDevice {
 public:
  static Error open(const Verbs &verbs, ibv_device *device, std::shared_ptr<RdmaDevice> *out);
  ~RdmaDevice();
  RdmaDevice(const RdmaDevice &) = delete;
  RdmaDevice &operator=(const RdmaDevice &) = delete;

  const Verbs &verbs;
  const std::string name;
  ibv_context *context = nullptr;
  ibv_pd *pd = nullptr;
  ibv_device_attr attributes{};
  pci::Place place;  // where it is attached

 private:
  RdmaDevice(const Verbs &verbs, std::string name);
};

struct RailState {
  bool up = false;
  bool ethernet = false;
  uint16_t lid = 0;
  uint8_t mtu = 0;  // ibv_mtu
  Gid gid{};
  uint32_t gid_index = 0;
  std::string reason;  // the choice of the GID, or why it is not up
};

class Rail {
 public:
  Rail(std::shared_ptr<RdmaDevice> device, size_t device_index, uint8_t port, int gid_index)
      : device(std::move(device)), device_index(device_index), port(port), wanted_gid_(gid_index) {}

  // "mlx5_0:1".
  std::string label() const { return device->name + ":" + std::to_string(port); }
  // Asks the device. True when the rail went up or down, or has another address.
  bool refresh();
  RailState state() const;
  // The error of whoever wants to use it in this state; none when it is up.
  Error unusable(const RailState &state) const;
  Error unusable() const { return unusable(state()); }

  const std::shared_ptr<RdmaDevice> device;
  const size_t device_index;  // among the devices of the engine
  const uint8_t port;
  std::atomic<uint64_t> read_bytes{0}, written_bytes{0}, errors{0};
  std::atomic<int64_t> queue_pairs{0};

 private:
  const int wanted_gid_;
  mutable std::mutex mutex_;
  RailState state_;
};

// What one engine uses of the host's devices.
class RdmaHost {
 public:
  // Opens what `config` names; a device that is not there is an error, one that cannot be used is a problem.
  Error open(const RdmaConfig &config);

  const std::vector<std::shared_ptr<RdmaDevice>> &devices() const { return devices_; }
  const std::vector<std::shared_ptr<Rail>> &rails() const { return rails_; }
  const std::shared_ptr<Rail> &rail(size_t i) const { return rails_[i]; }
  bool any_up() const;
  // One of the engine's queue pairs for requests is to be made. False when it has as many as it may, or others wait:
  // then `its_turn` is called once, in the order in which they came, when it has been counted. It may be called by any
  // thread, under the lock of a lane, and returns false when nobody wants it any more.
  bool take_queue_pair(std::function<bool()> its_turn);
  void give_queue_pair();
  bool queue_pairs_wanted() const { return waiting_.load(std::memory_order_relaxed) > 0; }
  // Why no rail can be used.
  std::string why_not() const;

  // Asks a rail's device. Not every device says that a port is back.
  void look_at(const std::shared_ptr<Rail> &rail) const;
  void look_at_those_down() const;
  // Calls `changed` on the I/O thread after a rail has changed.
  Error watch(IoThread &io, std::function<void(const std::shared_ptr<Rail> &)> changed);
  void unwatch();

 private:
  class Watcher;

  uint32_t queue_pairs_max_ = 0;
  std::mutex queue_pairs_mutex_;
  uint32_t queue_pairs_ = 0;
  std::deque<std::function<bool()>> turns_;
  std::atomic<size_t> waiting_{0};  // its size
  std::vector<std::shared_ptr<RdmaDevice>> devices_;
  std::vector<std::shared_ptr<Rail>> rails_;
  std::vector<std::string> problems_;
  std::vector<std::shared_ptr<Watcher>> watchers_;
  IoThread *io_ = nullptr;
  std::function<void(const std::shared_ptr<Rail> &)> changed_;
};

// "" when there is a device in this host, otherwise why none can be used; `*names` lists them.
std::string find_rdma_devices(std::vector<std::string> *names);

}  // namespace moonpool
