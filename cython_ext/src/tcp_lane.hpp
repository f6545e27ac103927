// SPDX-License-Identifier: Apache-2.0
// One TCP lane, requesting side. Whoever needs it drives it: its I/O thread, the thread that submits, or the thread
// that waits. One of them at a time holds the lock, and never across anything that blocks.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "backoff.hpp"
#include "handshake.hpp"
#include "io_thread.hpp"
#include "stream.hpp"
#include "wire.hpp"
#include "work_queue.hpp"

namespace moonpool {

class Engine;
class TcpLink;

class TcpLane : public Handler, public std::enable_shared_from_this<TcpLane> {
 public:
  TcpLane(TcpLink &link, IoThread &io);
  ~TcpLane() override;

  void dial_now();
  // Sends and receives what can be without waiting. If another thread is driving, that thread does it.
  void kick();
  // The same for the thread that has just queued work.
  void submitted();
  IoThread &io() { return io_; }
  // The calling thread drives the lane until nothing of the transfer is on it or `until` has passed.
  void assist(Transfer &transfer, int64_t until);
  void cancel(const Transfer &transfer);
  // Returns what was unfinished.
  std::vector<Work> shutdown();
  bool ready() const { return ready_.load(std::memory_order_relaxed); }
  uint64_t load() const { return load_.load(std::memory_order_relaxed); }

 private:
  struct Frame {
    Work work;
    uint64_t id;
    bool discard = false;           // nobody wants the bytes of this read any more
    bool resolved = false;          // its descriptors were reported already
    std::vector<uint64_t> digests;  // of a write, known when it was sent
  };

  void on_events(uint32_t events) override;
  void on_dialed(uint64_t attempt, Dialed dialed);
  void schedule_dial_locked();
  // Runs `action` under the lock, then whatever others asked for meanwhile.
  template <class Action>
  void with_lock(Action action);
  void drive_locked();
  bool send_locked();
  bool start_frame_locked();
  bool receive_locked();
  bool check_silence_locked();
  bool receive_header_locked();
  bool begin_payload_locked();
  void finish_frame_locked();
  void cut_locked(Error cause);
  std::vector<Work> take_unfinished_locked();
  void arm_locked();
  void watch_progress_locked();
  void check_progress();
  bool can_start_locked() const;
  bool carries_locked(const Transfer &transfer) const;
  void wake_waiter_locked();

  // Valid until shutdown(), which the link calls before it goes; nothing below looks at it afterwards.
  TcpLink &link_;
  Engine &engine_;
  IoThread &io_;
  std::atomic<bool> attention_{false};
  std::atomic<bool> ready_{false};
  std::atomic<uint64_t> load_{0};  // bytes in flight

  std::mutex mutex_;
  bool shut_ = false;
  bool dialing_ = false;
  uint64_t attempt_ = 0;
  uint64_t lane_id_ = 0;
  Backoff backoff_;
  uint32_t armed_ = 0;        // what the I/O thread's epoll watches
  bool assisted_ = false;     // a waiting thread drives
  bool asleep_ = false;       // ... and sleeps until its descriptor or wake_ is ready
  uint32_t assist_mask_ = 0;  // events that it looks at itself
  Fd wake_;                   // wakes a sleeping waiter whose transfer ended in another way
  int64_t progress_at_ = 0;
  bool progress_watched_ = false;

  std::deque<Frame> frames_;  // in flight, oldest first; the newest may still be being sent
  uint64_t next_frame_id_ = 1;
  uint64_t turn_bytes_ = 0;
  bool sending_ = false;
  uint64_t reads_in_flight_ = 0;  // bytes
  std::vector<uint8_t> request_;  // head and table of the frame being sent
  PayloadWriter writer_;

  wire::ResponseHeader header_;
  size_t header_got_ = 0;
  bool in_payload_ = false;
  std::vector<wire::FailedDesc> failed_;
  size_t failed_got_ = 0;
  PayloadReader reader_;
};

template <class Action>
void TcpLane::with_lock(Action action) {
  {
    std::lock_guard lock(mutex_);
    action();
  }
  if (attention_.load()) kick();
}

}  // namespace moonpool
