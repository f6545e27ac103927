// SPDX-License-Identifier: Apache-2.0
// The owner's side of a same-host connection: hands out descriptors of memory that can be mapped, says where the rest
// can be read, and copies between that and the client's memory when it is asked to.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "io_thread.hpp"
#include "other_process.hpp"
#include "region.hpp"
#include "server_lane.hpp"
#include "shm_frames.hpp"
#include "shm_table.hpp"

namespace moonpool {

class Engine;

class ShmServerLane final : public Handler, public ServerLane, public std::enable_shared_from_this<ShmServerLane> {
 public:
  ShmServerLane(Engine &engine, IoThread &io, Fd fd);
  ~ShmServerLane() override;

  void start() override;
  // Afterwards the client's own copies may go on until it closes its end; each region knows of them.
  void close() override;
  bool closed() const override;
  bool settle(int64_t until) override;
  // Copies are short, and a region waits for them by itself.
  void drop_region(const Region &) override {}

 private:
  struct Outgoing {
    std::string bytes;
    std::shared_ptr<const Fd> fd;
  };
  struct Shared {
    std::weak_ptr<Region> region;  // its memory goes with its owner's last handle, whatever the client keeps
    uint32_t slot;
    bool mapped;
  };

  void on_events(uint32_t events) override;
  bool receive_locked();
  bool parse_locked();
  bool handle_locked(shm::CopyRequest request);
  void open_client_locked(const shm::RequestHeader &request);
  void map_locked(uint64_t key);
  void unmap_locked(uint64_t key);
  void respond_locked(const shm::CopyResponse &response, std::shared_ptr<const Fd> fd);
  void queue_locked(const shm::CopyResponse &response, std::shared_ptr<const Fd> fd);
  void flush_locked();
  bool refuse_locked(Outgoing *next);
  void watch_locked();
  void work();
  void close_locked(std::unique_lock<std::mutex> &lock);
  void end_locked();
  bool copy(const shm::CopyRequest &request, shm::CopyResponse *answer);

  Engine &engine_;
  IoThread &io_;
  mutable std::mutex mutex_;
  std::condition_variable quiet_;
  bool closed_ = false;  // serves nothing any more
  bool ended_ = false;   // and the client is gone
  uint32_t watched_ = 0;
  std::string in_;
  std::deque<Outgoing> out_;
  unsigned held_ = 0;  // answers in out_ that wait for more
  std::shared_ptr<UseTable> table_;
  OtherProcess client_;
  std::unordered_map<uint64_t, Shared> shared_;
  std::vector<uint32_t> free_slots_;
  std::deque<shm::CopyRequest> pending_;
  unsigned working_ = 0;  // threads that are copying
};

}  // namespace moonpool
