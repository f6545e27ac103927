// SPDX-License-Identifier: Apache-2.0
// The owner's side of a cuda_ipc connection: says how regions of GPUs are reached, and knows when the client uses them.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda_ipc_frames.hpp"
#include "io_thread.hpp"
#include "region.hpp"
#include "server_lane.hpp"
#include "shm_table.hpp"

namespace moonpool {

class Engine;

class CudaIpcServerLane final : public Handler,
                                public ServerLane,
                                public std::enable_shared_from_this<CudaIpcServerLane> {
 public:
  CudaIpcServerLane(Engine &engine, IoThread &io, Fd fd);
  ~CudaIpcServerLane() override;

  void start() override;
  // Afterwards the client's copies may go on until it closes its end; each region knows of them.
  void close() override;
  bool closed() const override;
  bool settle(int64_t until) override;
  // A region waits for the client's copies by itself.
  void drop_region(const Region &) override {}

 private:
  class ExitWatch;
  struct Outgoing {
    std::string bytes;
    std::shared_ptr<const Fd> fd;
  };
  struct Shared {
    std::weak_ptr<Region> region;
    uint32_t slot;
  };

  void on_events(uint32_t events) override;
  bool receive_locked();
  bool parse_locked();
  void handle_locked(const cuda_ipc::Request &request);
  void find_locked(uint64_t key, cuda_ipc::Response *response);
  std::shared_ptr<const Fd> part_locked(const cuda_ipc::Request &request, cuda_ipc::Response *response);
  void drop_locked(uint64_t key);
  void respond_locked(const cuda_ipc::Response &response, std::shared_ptr<const Fd> fd);
  void flush_locked();
  bool send_locked(Outgoing *next);
  void watch_locked();
  void close_locked();
  void hung_up_locked();
  void end_locked();
  bool in_use_locked() const;

  Engine &engine_;
  IoThread &io_;
  mutable std::mutex mutex_;
  bool closed_ = false;  // serves nothing any more
  bool gone_ = false;    // the client closed its end
  bool ended_ = false;   // and its copies are over
  uint32_t watched_ = 0;
  std::string in_;
  std::deque<Outgoing> out_;
  std::shared_ptr<UseTable> table_;
  Fd client_;  // its pidfd; without one it may only read
  std::shared_ptr<ExitWatch> exit_watch_;
  std::unordered_map<uint64_t, Shared> shared_;
  std::vector<uint32_t> free_slots_;
};

}  // namespace moonpool
