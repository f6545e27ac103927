// SPDX-License-Identifier: Apache-2.0
// The shm transport, requesting side. Memory that the peer allocated is mapped once, and this process copies by itself.
// Other memory it reads where it lies; what is written there is copied by the peer, who owns and checks it, straight
// from this process.
#pragma once

#include <atomic>
#include <cerrno>
#include <deque>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "copy_link.hpp"
#include "io_thread.hpp"
#include "other_process.hpp"
#include "shm_frames.hpp"
#include "shm_table.hpp"

namespace moonpool {

class ShmLink final : public CopyLink, public Handler {
 public:
  ShmLink(const std::shared_ptr<Peer> &peer, IoThread &io, Fd fd, Connected connected);
  ~ShmLink() override;

  // Proves to the peer which process this is; `connected` is called when it has answered.
  void open(int64_t deadline_ns);
  bool takes(const Transfer &transfer) const override;
  std::string shortcoming() const override;
  void submit(const std::shared_ptr<Transfer> &transfer) override;
  void adopt(std::vector<Work> work, const Error &cause) override;
  void cancel(Transfer &transfer) override;
  void assist(Transfer &transfer, int64_t until) override;
  void region_gone(uint64_t key) override;
  void shutdown(const Error &cause, bool settled) override;

 private:
  // A region of the peer that this process reaches by itself. When the last copy is over and the region is gone, the
  // peer is told.
  struct Reached {
    std::shared_ptr<Mapping> memory;  // nullptr: it is only read, where it lies
    uint64_t address;                 // in the peer's process, when it is not mapped
    uint64_t length;
    uint32_t slot;
    std::atomic<bool> readable{true};  // as far as is known
  };
  using ReachedPtr = std::shared_ptr<Reached>;
  // Who copies to or from a region: kUnknown before the peer has been asked.
  enum class Copier { kUnknown, kThisProcess, kPeer };
  // What a step under the lock leaves to do without it: everything that calls transfers or the peer.
  struct Todo {
    std::vector<std::pair<Work, shm::CopyResponse>> copied;
    std::vector<std::shared_ptr<Transfer>> begin;
    std::vector<Work> stopped;
    std::vector<uint64_t> reached;  // keys
    bool opened = false;
    Error fault;
    bool peer_gone = false;
  };
  // A transfer, and the regions that may still have to be mapped before it begins.
  struct Waiting {
    std::shared_ptr<Transfer> transfer;
    std::vector<uint64_t> keys;
  };
  // What a link that ends leaves behind.
  struct Ended {
    Connected connected;
    std::vector<Work> never_begun;
    std::vector<Work> sent;  // the peer may be copying
  };
  class Uses;

  std::shared_ptr<ShmLink> self() { return std::static_pointer_cast<ShmLink>(shared_from_this()); }
  void turned_away(const std::shared_ptr<Transfer> &transfer) override;
  void not_moved(Work work, const Error &cause) override;
  void go_elsewhere(std::vector<Work> work, const Error &cause);
  Error not_reached() const;
  void copy(const Work &work) override;
  void not_read(const Work &work, const OtherProcess::ReadFault &fault);
  Copier copier_locked(uint64_t key, mp_op op) const;
  Copier copier_of(const std::vector<uint64_t> &keys, mp_op op) const;
  void on_events(uint32_t events) override;

  Todo drive();
  void drive_locked(Todo *todo);
  bool receive_locked(Todo *todo);
  void parse_locked(Todo *todo);
  bool handle_locked(shm::CopyResponse response, Todo *todo);
  bool on_opened_locked(const shm::CopyResponse &response, Todo *todo);
  bool on_reached_locked(const shm::CopyResponse &response, Todo *todo);
  void remember_locked(const shm::CopyResponse &response, std::shared_ptr<Mapping> memory, Todo *todo);
  bool on_copied_locked(shm::CopyResponse response, Todo *todo);
  void begin_waiting_locked(Todo *todo);
  void send_locked(const shm::RequestHeader &header, const shm::Desc *descs);
  void pump_locked(Todo *todo);
  void flush_locked();
  void watch_locked();
  void watch_progress_locked();
  bool awaits_locked(const Transfer &transfer) const;
  void wake_waiter_locked();

  void sleep(int64_t nanoseconds);
  void run(Todo todo);
  void report(const Work &work, const shm::CopyResponse &response);
  void request(const std::shared_ptr<Transfer> &transfer);
  void check_progress();
  bool end(Ended *out);
  void broken(const Error &cause, bool peer_gone);
  bool settle(int64_t until);
  bool hung_up() const;
  void let_go(uint64_t key);

  const std::weak_ptr<Peer> peer_;
  const OtherProcess owner_;
  OtherProcess::Proof owner_proof_;  // there before any region is
  IoThread &io_;
  WorkQueue requests_;  // what the peer copies
  std::atomic<bool> usable_{false};
  std::atomic<bool> peer_copies_{false};
  std::atomic<int> copies_errno_{EPERM};  // why not
  std::atomic<int> reads_errno_{EPERM};   // why this process may not read the peer's memory, 0 when it may

  mutable std::mutex mutex_;
  Connected connected_;
  uint64_t proof_ = 0;     // what the peer has to find in this process
  bool ended_ = false;     // broken or shut down
  bool assisted_ = false;  // a waiting thread is at the socket
  bool asleep_ = false;    // ... and sleeps until it or wake_ is ready
  Fd wake_;
  uint32_t watched_ = 0;
  std::string in_, out_;
  std::deque<Fd> fds_;  // that came with responses
  std::shared_ptr<UseTable> table_;
  std::vector<Waiting> waiting_;
  std::unordered_set<uint64_t> asked_;
  std::unordered_map<uint64_t, Work> sent_;
  uint64_t next_id_ = 1;
  int64_t progress_at_ = 0;
  bool progress_watched_ = false;

  mutable std::shared_mutex regions_mutex_;
  std::unordered_map<uint64_t, ReachedPtr> reached_;
  std::unordered_set<uint64_t> refused_;  // that the peer copies
  std::string why_not_mapped_;            // the first of them that could have been mapped
};

}  // namespace moonpool
