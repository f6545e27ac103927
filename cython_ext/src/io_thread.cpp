// SPDX-License-Identifier: Apache-2.0
#include "io_thread.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <string>

namespace moonpool {

std::atomic<int> ActiveThreads::count_{0};

bool ActiveThreads::may_look(bool bulk) {
  static const int spare = std::max(1, static_cast<int>(cpu_count() / 2));
  return !bulk || count_.load(std::memory_order_relaxed) <= spare;
}

bool yield_core() {
  // A yield with nobody waiting comes back in a fraction of this; running somebody else takes longer.
  constexpr int64_t kAloneNs = 3000;
  const int64_t before = now_ns();
  sched_yield();
  return now_ns() - before < kAloneNs;
}

IoThread::IoThread(unsigned index, unsigned spin_us)
    : index_(index), spin_max_ns_(int64_t{spin_us} * 1000), spin_ns_(spin_max_ns_) {}

IoThread::~IoThread() {
  stop();
  dispose();
}

Error IoThread::start() {
  epoll_ = Fd(epoll_create1(EPOLL_CLOEXEC));
  wake_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_ || !wake_) return system_error(MP_SYSTEM, errno, "cannot make an I/O thread", "raise `ulimit -n`");
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = nullptr;
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event);
  // Signals belong to the application's threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread_.native_handle(), ("mp-io-" + std::to_string(index_)).c_str());
  return {};
}

void IoThread::stop() {
  if (!thread_.joinable()) return;
  stopping_.store(true);
  wake();
  thread_.join();
}

void IoThread::dispose() {
  std::unordered_map<Handler *, std::shared_ptr<Handler>> handlers;
  std::multimap<int64_t, std::function<void()>> timers;
  std::vector<std::shared_ptr<Handler>> removed;
  {
    std::lock_guard lock(mutex_);
    handlers.swap(handlers_);
    timers.swap(timers_);
    removed.swap(removed_);
  }
  timers.clear();
  handlers.clear();
  removed.clear();
  epoll_.reset();
  wake_.reset();
}

Error IoThread::add(const std::shared_ptr<Handler> &handler, uint32_t events) {
  {
    std::lock_guard lock(mutex_);
    handlers_[handler.get()] = handler;
  }
  epoll_event event{};
  event.events = events;
  event.data.ptr = handler.get();
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, handler->fd(), &event) == 0) return {};
  const int err = errno;
  remove(*handler);
  return system_error(MP_SYSTEM, err, "cannot watch a socket", "raise fs.epoll.max_user_watches");
}

void IoThread::modify(Handler &handler, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = &handler;
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, handler.fd(), &event);
}

void IoThread::remove(Handler &handler) {
  if (handler.fd() >= 0) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, handler.fd(), nullptr);
  std::lock_guard lock(mutex_);
  const auto it = handlers_.find(&handler);
  if (it == handlers_.end()) return;
  removed_.push_back(std::move(it->second));
  handlers_.erase(it);
  has_removed_.store(true);
  // It may own a lot, such as the memory of a peer that is gone; a loop that sleeps would keep it.
  if (sleeping_.load()) wake();
}

void IoThread::post(std::function<void()> call) {
  {
    std::lock_guard lock(mutex_);
    posted_.push_back(std::move(call));
    has_posted_.store(true);
  }
  if (sleeping_.load()) wake();
}

void IoThread::call_at(int64_t when_ns, std::function<void()> call) {
  bool earliest;
  {
    std::lock_guard lock(mutex_);
    earliest = timers_.empty() || when_ns < timers_.begin()->first;
    timers_.emplace(when_ns, std::move(call));
    if (earliest) has_posted_.store(true);
  }
  if (earliest && sleeping_.load()) wake();
}

size_t IoThread::handler_count() const {
  std::lock_guard lock(mutex_);
  return handlers_.size();
}

void IoThread::wake() {
  const uint64_t one = 1;
  // It can only fail when the counter is full, and then the loop is woken anyway.
  [[maybe_unused]] const ssize_t n = write(wake_.get(), &one, sizeof one);
}

bool IoThread::run_posted() {
  std::vector<std::function<void()>> calls;
  std::vector<std::shared_ptr<Handler>> removed;
  {
    std::lock_guard lock(mutex_);
    has_posted_.store(false);
    has_removed_.store(false);
    calls.swap(posted_);
    removed.swap(removed_);
  }
  for (auto &call : calls) call();
  return !calls.empty();
}

int64_t IoThread::run_timers() {
  for (;;) {
    std::function<void()> call;
    {
      std::lock_guard lock(mutex_);
      if (timers_.empty()) return kNever;
      const auto first = timers_.begin();
      if (first->first > now_ns()) return first->first;
      call = std::move(first->second);
      timers_.erase(first);
    }
    call();
  }
}

int IoThread::wait_for_events(epoll_event *events, int capacity, int64_t next_timer) {
  const int64_t start = now_ns();
  int n = 0;
  // Looking is cheaper than being woken when the next event is near; `spin_ns_` follows whether it was.
  if (spin_ns_ > 0) {
    n = epoll_wait(epoll_.get(), events, capacity, 0);
    if (n != 0) return n;
    const int64_t until = std::min(start + spin_ns_, next_timer);
    while (ActiveThreads::may_look(bulk_) && !has_posted_.load(std::memory_order_relaxed) &&
           !stopping_.load(std::memory_order_relaxed)) {
      const bool alone = yield_core();
      n = epoll_wait(epoll_.get(), events, capacity, 0);
      if (n != 0) return n;
      if (bulk_ && !alone) break;
      if (now_ns() >= until) {
        spin_ns_ = spin_ns_ < 1000 ? 0 : spin_ns_ / 2;
        break;
      }
    }
  }
  sleeping_.store(true);
  if (has_posted_.load() || has_removed_.load() || stopping_.load()) {
    sleeping_.store(false);
    return 0;
  }
  int timeout_ms = -1;
  if (next_timer != kNever) {
    const int64_t left = next_timer - now_ns();
    // Rounded up: waking a little late is right, waking early would spin.
    timeout_ms = left <= 0 ? 0 : static_cast<int>(std::min<int64_t>(left / kMillisecond + 1, 3'600'000));
  }
  ActiveThreads::leave();
  n = epoll_wait(epoll_.get(), events, capacity, timeout_ms);
  ActiveThreads::enter();
  sleeping_.store(false);
  if (n > 0 && now_ns() - start < spin_max_ns_) spin_ns_ = spin_max_ns_;
  return n;
}

void IoThread::run() {
  constexpr int kCapacity = 64;
  epoll_event events[kCapacity];
  int64_t next_timer = kNever;
  ActiveThreads::enter();
  while (!stopping_.load(std::memory_order_relaxed)) {
    if (has_posted_.load() || has_removed_.load() || next_timer <= now_ns()) {
      run_posted();
      next_timer = run_timers();
    }
    const int n = wait_for_events(events, kCapacity, next_timer);
    bulk_ = false;
    for (int i = 0; i < n; ++i) {
      auto *handler = static_cast<Handler *>(events[i].data.ptr);
      if (handler != nullptr) {
        handler->on_events(events[i].events);
      } else {
        uint64_t count = 0;
        [[maybe_unused]] const ssize_t got = read(wake_.get(), &count, sizeof count);
      }
    }
  }
  ActiveThreads::leave();
}

}  // namespace moonpool
