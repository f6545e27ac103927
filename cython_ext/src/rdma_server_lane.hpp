// SPDX-License-Identifier: Apache-2.0
// The rdma transport, serving side: a queue pair that a client reads and writes through, as long as its socket lives.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "io_thread.hpp"
#include "rdma_frames.hpp"
#include "rdma_queue.hpp"
#include "server_lane.hpp"

namespace moonpool {

class Engine;

class RdmaServerLane final : public Handler, public ServerLane, public std::enable_shared_from_this<RdmaServerLane> {
 public:
  RdmaServerLane(Engine &engine, IoThread &io, Fd fd);
  ~RdmaServerLane() override;

  void start() override;
  void close() override;
  bool closed() const override;
  // Its registrations go before; only a device that does not let go of them ends the lane.
  void drop_region(const Region &region) override;

 private:
  void on_events(uint32_t events) override;
  bool receive_locked();
  bool take_locked(const rdma::Frame &frame);
  void find_locked(uint64_t key);
  void flush_locked();
  void close_locked();

  Engine &engine_;
  IoThread &io_;
  mutable std::mutex mutex_;
  bool closed_ = false;
  uint32_t watched_ = 0;
  std::string in_, out_;
  std::unique_ptr<RdmaQueue> queue_;
};

}  // namespace moonpool
