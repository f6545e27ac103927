// SPDX-License-Identifier: Apache-2.0
// The cuda_ipc transport, requesting side: memory of the peer's GPUs is imported once, and this process copies between
// it and its own on a stream of its own.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "cuda_ipc_memory.hpp"
#include "cuda_stager.hpp"
#include "io_thread.hpp"
#include "link.hpp"
#include "shm_table.hpp"

namespace moonpool {

class CudaIpcLink final : public Link, public Handler, public std::enable_shared_from_this<CudaIpcLink> {
 public:
  CudaIpcLink(const std::shared_ptr<Peer> &peer, IoThread &io, Fd fd, Connected connected);
  ~CudaIpcLink() override;

  // `connected` is called when the peer has sent its table.
  void open(int64_t deadline_ns);
  const char *path() const override { return "cuda_ipc"; }
  bool takes(const Transfer &transfer) const override;
  bool usable() const override { return usable_.load(); }
  std::string shortcoming() const override;
  void submit(const std::shared_ptr<Transfer> &transfer) override;
  void adopt(std::vector<Work> work, const Error &cause) override;
  // What is being copied ends by itself.
  void cancel(Transfer &transfer) override;
  void assist(Transfer &, int64_t) override {}
  void region_gone(uint64_t key) override;
  void shutdown(const Error &cause, bool settled) override;

 private:
  // Regions that are imported or on the way at a time; those used longest ago make room. Fewer than the peer has slots.
  static constexpr size_t kImportedMax = 2048;
  static_assert(kImportedMax < UseTable::kSlots);
  // A region of the peer that is imported. When the last copy is over and it is not wanted any more, the peer is told.
  struct Reached {
    std::shared_ptr<cuda_ipc::Imported> memory;
    uint64_t offset;  // of the region in it
    uint64_t length;
    uint32_t slot;
    bool writable;
    int device;  // of this process, that it is memory of; -1: of another one
    int64_t used_at;
  };
  using ReachedPtr = std::shared_ptr<Reached>;
  // One that is being imported.
  struct Coming {
    std::shared_ptr<const cuda::DeviceMemory> here;  // what it is to be copied from or to
    cuda_ipc::Found found{};
    uint32_t slot = 0;
    uint32_t asked = 0;  // parts
    std::vector<cuda_ipc::Part> parts;
  };
  // Work whose regions are not all known yet.
  struct Waiting {
    Work work;
    std::vector<uint64_t> keys;
  };
  // What is being copied.
  struct Flight {
    explicit Flight(Work whole) : work(std::move(whole)) {}
    Work work;
    std::unordered_map<uint64_t, ReachedPtr> uses;  // counted in the table
    Reached *last = nullptr;                        // of them, for runs of one region
    uint64_t last_key = 0;
    std::vector<cuda::Copy> copies;
    std::vector<wire::FailedDesc> failed;
    bool within = true;  // all of it stays on one device
    Error error;         // why it was not begun
  };
  // What a step under the lock leaves to do without it.
  struct Todo {
    std::vector<Work> begin, stopped;
    std::vector<std::pair<Work, Error>> elsewhere;
    std::vector<std::pair<uint64_t, Coming>> import;
    std::vector<ReachedPtr> dropped;
    bool opened = false;
    Error fault;
  };

  std::shared_ptr<CudaIpcLink> self() { return shared_from_this(); }
  void on_events(uint32_t events) override;
  void take(std::vector<Work> work);
  void run(Todo todo);
  bool receive_locked(Todo *todo);
  void parse_locked(Todo *todo);
  bool handle_locked(cuda_ipc::Response response, Todo *todo);
  bool on_found_locked(const cuda_ipc::Response &response, Todo *todo);
  bool on_part_locked(const cuda_ipc::Response &response, Todo *todo);
  bool on_table_locked(const cuda_ipc::Response &response, Todo *todo);
  void ask_parts_locked(uint64_t key, Coming *coming);
  void refuse_locked(uint64_t key, std::string why_not);
  void look_for_locked(uint64_t key, const Transfer &transfer, Todo *todo);
  void begin_waiting_locked(Todo *todo);
  void make_room_locked(Todo *todo);
  void send_locked(const cuda_ipc::Request &request);
  void flush_locked();
  void watch_progress_locked();
  void check_progress();
  void import(uint64_t key, Coming coming);
  void begin(const Work &work);
  mp_status use_locked(uint64_t key, Flight *flight);
  mp_status resolve_locked(const Desc &desc, bool write, Flight *flight, cuda::Pointer *remote);
  void landed(Flight &flight, const Error &error);
  void let_go(uint64_t key);
  bool hung_up() const;
  void go_elsewhere(const Work &work, const Error &cause);
  Error here(Error error) const;
  bool end(Connected *connected, std::vector<Work> *never_begun);
  void broken(const Error &cause);

  const std::weak_ptr<Peer> peer_;
  Engine &engine_;
  const std::string label_;
  IoThread &io_;
  std::atomic<bool> usable_{false};
  std::atomic<bool> writes_{false};

  mutable std::mutex mutex_;
  Connected connected_;
  bool ended_ = false;
  uint32_t watched_ = 0;
  std::string in_, out_;
  std::deque<Fd> fds_;  // that came with responses
  std::shared_ptr<UseTable> table_;
  std::deque<Waiting> waiting_;
  std::unordered_map<uint64_t, Coming> coming_;
  std::unordered_set<uint64_t> importing_;
  std::unordered_map<uint64_t, ReachedPtr> reached_;
  std::unordered_map<uint64_t, std::string> refused_;  // that go another way, and why
  std::string why_not_;                                // the latest of them
  int64_t progress_at_ = 0;
  bool progress_watched_ = false;
};

}  // namespace moonpool
