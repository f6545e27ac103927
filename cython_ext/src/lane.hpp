// SPDX-License-Identifier: Apache-2.0
// One lane, requesting side: a connection of its own, with a socket whose handshake binds it to the session. Whoever
// needs a lane drives it: its I/O thread, the thread that submits, or the thread that waits. One of them at a time
// holds the lock, and never across anything that blocks.
#pragma once

#include <poll.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "backoff.hpp"
#include "handshake.hpp"
#include "io_thread.hpp"
#include "wire.hpp"
#include "work_queue.hpp"

namespace moonpool {

class Engine;
class LaneLink;

class Lane : public Handler, public std::enable_shared_from_this<Lane> {
 public:
  Lane(LaneLink &link, IoThread &io, wire::Kind kind);
  ~Lane() override;

  void dial_now();
  // It is not connected before somebody calls dial_now().
  void begin_resting() { resting_.store(true); }
  // Not connected by choice: dial_now() brings it back.
  bool resting() const { return resting_.load(std::memory_order_relaxed); }
  // Gives up its connection if nothing is under way on it.
  bool rest();
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
  // It is ready, or will be in a moment: it was until now and has not failed to connect since, or only has to be woken.
  bool promising() const { return ready() || promising_.load(std::memory_order_relaxed) || resting(); }
  uint64_t load() const { return load_.load(std::memory_order_relaxed); }
  // What its being far from the transfer's memory is worth, in bytes under way.
  virtual uint64_t distance(const Transfer &) const { return 0; }

 protected:
  // ---- what a kind of lane does, under the lock but for the first one
  // Before it dials: why that is of no use now.
  virtual Error hindrance() { return {}; }
  // Whether it has what it needs of a bounded supply. If not it waits for its turn, and dials then.
  virtual bool admitted_locked() { return true; }
  // Gives that back, before begin_locked() has made anything of it.
  virtual void give_up_turn_locked() {}
  // The socket has had its handshake. Calls opened_locked() now or later, or cut_locked().
  virtual void begin_locked() = 0;
  virtual void drive_locked() = 0;
  // For the thread that has just queued work: no answer can be there yet.
  virtual void send_first_locked() = 0;
  // Tells the I/O thread what to watch.
  virtual void arm_locked() = 0;
  // The same after work was queued by a thread that may wait for it in a moment.
  virtual void arm_submitted_locked() { arm_locked(); }
  // Whether processors move the bytes, so that looking for their end would slow them down.
  virtual bool copies() const { return true; }
  // The error of a lane that did not become ready in time.
  virtual Error not_ready_locked() const;
  // Something is in flight.
  virtual bool busy_locked() const = 0;
  virtual bool carries_locked(const Transfer &transfer) const = 0;
  virtual void cancel_locked(const Transfer &transfer) = 0;
  // Gives up what is in flight. Afterwards this side touches no memory for the lane.
  virtual std::vector<Work> take_unfinished_locked() = 0;
  // After it was cut: whether connecting again may well help.
  virtual bool returns_soon_locked() const { return true; }
  // Where a waiter sleeps, made ready for it; .fd < 0: only until it is woken. Nothing: something came meanwhile.
  virtual std::optional<pollfd> sleep_on_locked() = 0;
  virtual void sleep_ended_locked() = 0;

  // ---- for the kinds of lanes
  // Runs `action` under the lock, then whatever others asked for meanwhile.
  template <class Action>
  void with_lock(Action action) {
    {
      std::lock_guard lock(mutex_);
      action();
    }
    if (attention_.load()) kick();
  }
  // The lane takes work from here on.
  void opened_locked();
  void cut_locked(Error cause);
  // Ends its connection, on which nothing is under way. It rests then, or connects again.
  void leave_locked(bool again);
  bool can_leave_locked() const { return ready_.load() && !assisted_ && !busy_locked(); }
  void watch_progress_locked();
  // Fails one descriptor for what the peer said of it.
  void refuse(Transfer &transfer, uint32_t desc, mp_status code) const;
  void wake_waiter_locked();
  // Something moved or was finished, so a waiter that sleeps has to look.
  void progressed_locked();

  // Valid until shutdown(), which the link calls before it goes; nothing below looks at it afterwards.
  LaneLink &link_;
  Engine &engine_;
  IoThread &io_;
  std::atomic<bool> ready_{false};
  std::atomic<bool> promising_{false};
  std::atomic<uint64_t> load_{0};  // bytes in flight
  std::mutex mutex_;
  bool shut_ = false;
  uint64_t lane_id_ = 0;
  bool assisted_ = false;  // a waiting thread drives
  bool asleep_ = false;    // ... and sleeps until its descriptor or wake_ is ready
  int64_t progress_at_ = 0;

 private:
  void on_dialed(uint64_t attempt, Dialed dialed);
  void failed_to_dial_locked(const Error &cause);
  void schedule_dial_locked();
  void check_opened(uint64_t attempt);
  void check_progress();

  const wire::Kind kind_;
  std::atomic<bool> resting_{false};
  std::atomic<bool> attention_{false};
  bool dialing_ = false;  // until it is ready
  uint64_t attempt_ = 0;
  Backoff backoff_;
  Fd wake_;  // wakes a sleeping waiter whose transfer ended in another way
  bool progress_watched_ = false;
};

}  // namespace moonpool
