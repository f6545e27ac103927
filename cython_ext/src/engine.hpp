// SPDX-License-Identifier: Apache-2.0
// One engine: its I/O threads, its regions, the peers it connected to, the sessions it serves.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda_export.hpp"
#include "cuda_stager.hpp"
#include "handshake.hpp"
#include "io_thread.hpp"
#include "link.hpp"
#include "notifications.hpp"
#include "rdma_device.hpp"
#include "region.hpp"
#include "session.hpp"
#include "shm_frames.hpp"
#include "stats.hpp"
#include "transfer.hpp"

namespace moonpool {

class RdmaLink;

struct Config {
  std::string name;
  std::string listen;
  std::vector<std::string> transports;
  std::string require;
  std::string secret;
  bool insecure = false;
  uint32_t lanes = 0;
  uint32_t io_threads = 0;
  uint64_t slice_bytes = 0;
  uint32_t spin_us = 0;
  uint32_t connect_timeout_ms = 0;
  uint32_t progress_timeout_ms = 0;
  uint32_t deadline_ms = 0;
  uint32_t regions_max = 0;
  uint32_t peers_max = 0;
  uint32_t notifications_max = 0;
  bool cuda_staging = true;
  uint64_t cuda_staging_bytes = 0;
  RdmaConfig rdma;
};

// Checks every field and fills in the defaults.
Error resolve_config(const mp_config &raw, const std::vector<std::unique_ptr<Transport>> &transports, Config *config);

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  explicit Engine(Config config, std::vector<std::unique_ptr<Transport>> transports);
  ~Engine();

  Error open();
  // From any thread, any number of times; every caller returns after the engine is down.
  void close();
  bool closed() const { return closing_.load(); }
  bool forked() const { return fork_epoch_ != fork_epoch(); }
  const std::string &address() const { return address_; }
  // Where peers on this host meet it; see shm_frames.hpp.
  const shm::HostIdentity &host() const { return host_; }

  Error add_region(const std::shared_ptr<Region> &region);
  Error release_region(Region &region);
  uint64_t next_region_id() { return next_region_id_.fetch_add(1); }

  // False when the engine is closing.
  bool add_peer(const std::shared_ptr<Peer> &peer);
  void drop_session(const std::shared_ptr<Session> &session);
  // A peer of another engine of this process copies by itself. False when its session has ended.
  bool admit_local(Peer &client, const std::shared_ptr<ServerLane> &lane);
  // Ends what an engine has here. Without an error nothing that it began writes memory, and no read of it completes.
  Error fence(const Id128 &incarnation, uint32_t *sessions);
  // Starts it: from here on the engine owns it until it ends.
  void run(const std::shared_ptr<Transfer> &transfer);

  // Around copies that this process makes itself, by whatever thread: closing waits for them.
  void begin_copying() { copying_.fetch_add(1); }
  void end_copying() {
    if (copying_.fetch_sub(1) == 1 && closing_.load()) copying_.notify_all();
  }

  IoThread &next_io() { return *io_[next_io_.fetch_add(1) % io_.size()]; }
  // To help a thread that is busy itself.
  IoThread &next_io_but(const IoThread &busy) {
    IoThread &next = next_io();
    return &next != &busy ? next : next_io();
  }
  size_t io_count() const { return io_.size(); }
  size_t peer_count() const;
  size_t session_count() const;

  // The engine owns a link while it connects, and tells it of ports that go up and down as long as it lives.
  void rdma_link_made(const std::shared_ptr<RdmaLink> &link);
  void rdma_link_settled(const RdmaLink &link);
  // Devices have written memory: GPUs see it when this returns. For a transfer: memory of its own.
  void flush_gpu_writes();
  void flush_gpu_writes(const Transfer &transfer);
  // Whether memory of a GPU has been registered.
  bool has_gpu_memory() const { return has_gpu_memory_.load(std::memory_order_relaxed); }
  // Why memory was not registered for RDMA, the latest time; "" when all was.
  std::string registration_problem() const;
  // Lanes wait for queue pairs: idle ones give theirs up as long as that is so.
  void make_room_for_queue_pairs();

  static std::shared_ptr<Engine> in_this_process(const Id128 &incarnation);

  const Config config;
  const std::vector<std::unique_ptr<Transport>> transports;
  const Identity identity;
  RegionTable regions;
  TransferList running;
  NotificationQueue notifications;
  Stats stats;
  cuda::Staging staging;
  std::shared_ptr<RdmaHost> rdma;  // nullptr: not among the transports

 private:
  class Acceptor;

  Error listen();
  void listen_on_host();
  Error open_rdma();
  void make_room();
  Error register_rdma(Region &region);
  Error try_register_rdma(Region &region);
  bool withdraw_rdma(Region &region);
  void greet_client(Fd fd);
  Admission admit(const wire::Hello &hello, IoThread &io);
  Admission admit_control(const wire::Hello &hello, IoThread &io);
  Admission admit_lane(const wire::Hello &hello, IoThread &io);
  std::vector<std::shared_ptr<Session>> all_sessions() const;
  // nullptr: it has ended.
  std::shared_ptr<Session> find_session(const Id128 &token, const Id128 &client) const;
  void run_after_stream(const std::shared_ptr<Transfer> &transfer);
  void arm_deadline(int64_t deadline_ns);
  void check_deadlines();
  static Error deadline_cause(const Transfer &transfer);

  const uint64_t fork_epoch_ = fork_epoch();
  std::string address_;
  shm::HostIdentity host_;
  std::vector<std::unique_ptr<IoThread>> io_;
  std::atomic<uint32_t> next_io_{0};
  std::atomic<uint64_t> next_region_id_{1};
  std::atomic<int64_t> deadline_armed_{kNever};
  std::vector<std::shared_ptr<Acceptor>> acceptors_;
  std::atomic<bool> closing_{false};
  std::atomic<uint32_t> copying_{0};

  // Held while regions change, so that a session hears of every region exactly once.
  std::mutex announce_mutex_;
  mutable std::mutex mutex_;
  std::condition_variable closed_changed_;
  bool closed_ = false;
  std::vector<std::weak_ptr<Peer>> peers_;
  std::vector<std::shared_ptr<Session>> sessions_;
  std::vector<std::weak_ptr<RdmaLink>> rdma_links_;
  std::vector<std::shared_ptr<RdmaLink>> rdma_connecting_;
  std::atomic<bool> making_room_{false};
  std::atomic<bool> has_gpu_memory_{false};
  cuda::WriteFlush write_flush_;
  std::string registration_problem_;
};

}  // namespace moonpool
