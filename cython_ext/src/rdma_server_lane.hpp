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
class Session;

class RdmaServerLane final : public Handler, public ServerLane, public std::enable_shared_from_this<RdmaServerLane> {
 public:
  RdmaServerLane(Engine &engine, IoThread &io, Fd fd, std::weak_ptr<Session> session);
  ~RdmaServerLane() override;

  void start() override;
  void close() override;
  bool closed() const override;
  // Its registrations go before; only a device that does not let go of them ends the lane.
  void drop_region(const Region &region) override;
  void rail_changed(uint32_t rail, bool up) override;
  bool marked(uint32_t count) const override;

 private:
  void on_events(uint32_t events) override;
  bool receive_locked();
  bool take_locked(const rdma::Frame &frame);
  void find_locked(uint64_t key);
  Error connect_locked(const rdma::Frame &frame);
  void on_marks();
  bool take_marks_locked();
  void flush_locked();
  void close_locked();
  void end_queue_locked();

  Engine &engine_;
  IoThread &io_;
  const std::weak_ptr<Session> session_;
  mutable std::mutex mutex_;
  bool closed_ = false;
  uint32_t watched_ = 0;
  std::string in_, out_;
  std::unique_ptr<RdmaQueue> queue_;
  std::shared_ptr<RdmaChannel> channel_;  // ready when marks have come
  uint32_t marks_ = 0;                    // that came
};

}  // namespace moonpool
