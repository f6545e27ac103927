// SPDX-License-Identifier: Apache-2.0
// One epoll loop: descriptors with handlers, posted calls, timers. It looks for a short time before it sleeps, as long
// as looking pays, and uses no CPU while idle.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "status.hpp"
#include "system.hpp"

namespace moonpool {

// How many threads of this process move bytes or look for them right now. After many bytes at once (kBulkBytes) looking
// is only for machines with cores to spare: half of them are left to the application and to peers on the same host.
// Small messages always look, because waking a thread takes longer than they do.
constexpr uint64_t kBulkBytes = 64u << 10;

class ActiveThreads {
 public:
  static void enter() { count_.fetch_add(1, std::memory_order_relaxed); }
  static void leave() { count_.fetch_sub(1, std::memory_order_relaxed); }
  static bool may_look(bool bulk);

 private:
  static std::atomic<int> count_;
};

// Gives the core to whoever else wants it. False when somebody did: then looking on would only delay them, and a thread
// that sleeps instead is woken on an idle core if there is one.
bool yield_core();

// Something that owns a descriptor and wants its events. Called on the loop's thread only.
class Handler {
 public:
  virtual ~Handler() = default;
  virtual void on_events(uint32_t events) = 0;
  int fd() const { return fd_.get(); }

 protected:
  Fd fd_;
};

class IoThread {
 public:
  IoThread(unsigned index, unsigned spin_us);
  ~IoThread();

  Error start();
  // Joins.
  void stop();
  // After stop(): makes the calls that were posted and not made yet, in the caller's thread. True when there were any.
  bool drain() { return run_posted(); }
  // After the last drain(): drops timers and handlers, and gives the descriptors back.
  void dispose();

  // These may be called from any thread.
  Error add(const std::shared_ptr<Handler> &handler, uint32_t events);
  void modify(Handler &handler, uint32_t events);
  // The handler is kept until the events that are being delivered have been, so no stale pointer is followed.
  void remove(Handler &handler);
  void post(std::function<void()> call);
  // For handlers: this turn moved kBulkBytes or more.
  void note_bulk() { bulk_ = true; }
  void call_at(int64_t when_ns, std::function<void()> call);
  size_t handler_count() const;

 private:
  void run();
  bool run_posted();
  int64_t run_timers();
  int wait_for_events(epoll_event *events, int capacity, int64_t next_timer);
  void wake();

  const unsigned index_;
  const int64_t spin_max_ns_;
  int64_t spin_ns_;
  Fd epoll_;
  Fd wake_;
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  // True while the loop is or is about to be blocked: only then a post needs the eventfd.
  std::atomic<bool> sleeping_{false};
  std::atomic<bool> has_posted_{false};  // or a timer that is earlier than the others
  std::atomic<bool> has_removed_{false};
  bool bulk_ = false;

  mutable std::mutex mutex_;
  std::vector<std::function<void()>> posted_;
  std::multimap<int64_t, std::function<void()>> timers_;
  std::unordered_map<Handler *, std::shared_ptr<Handler>> handlers_;
  std::vector<std::shared_ptr<Handler>> removed_;
};

}  // namespace moonpool
