// SPDX-License-Identifier: Apache-2.0
//
// IoThread without a thread: the same interface as io_thread.cpp, its turns are made by the world.
#include <algorithm>

#include "io_thread.hpp"
#include "world.hpp"

namespace moonpool {

using fuzz::World;

std::atomic<int> ActiveThreads::count_{0};

bool ActiveThreads::may_look(bool) { return false; }
bool yield_core() { return true; }

IoThread::IoThread(unsigned index, unsigned spin_us) : index_(index), spin_max_ns_(int64_t{spin_us} * 1000) {}

IoThread::~IoThread() {
  stop();
  dispose();
}

Error IoThread::start() {
  const auto turn = [this] {
    const bool called = run_posted();
    const int64_t next_timer = run_timers();
    epoll_event events[64];
    const int n = wait_for_events(events, 64, next_timer);
    // As with epoll: a handler that another one of the same batch removed still gets its events.
    for (int i = 0; i < n; ++i) static_cast<Handler *>(events[i].data.ptr)->on_events(events[i].events);
    return called || n > 0 || has_posted_.load();
  };
  World::get().add_loop(this, turn, [this] { return timers_.empty() ? kNever : timers_.begin()->first; });
  return {};
}

void IoThread::stop() { World::get().remove_loop(this); }

void IoThread::dispose() {
  for (const auto &entry : handlers_) World::get().unwatch(entry.first);
  std::exchange(timers_, {}).clear();
  std::exchange(handlers_, {}).clear();
  std::exchange(removed_, {}).clear();
}

Error IoThread::add(const std::shared_ptr<Handler> &handler, uint32_t events) {
  handlers_[handler.get()] = handler;
  World::get().watch(handler.get(), events);
  return {};
}

void IoThread::modify(Handler &handler, uint32_t events) {
  if (handlers_.count(&handler) != 0) World::get().watch(&handler, events);
}

void IoThread::remove(Handler &handler) {
  World::get().unwatch(&handler);
  const auto it = handlers_.find(&handler);
  if (it == handlers_.end()) return;
  removed_.push_back(std::move(it->second));
  handlers_.erase(it);
}

void IoThread::post(std::function<void()> call) {
  posted_.push_back(std::move(call));
  has_posted_.store(true);
}

void IoThread::call_at(int64_t when_ns, std::function<void()> call) { timers_.emplace(when_ns, std::move(call)); }

size_t IoThread::handler_count() const { return handlers_.size(); }

bool IoThread::run_posted() {
  has_posted_.store(false);
  std::exchange(removed_, {}).clear();
  const auto calls = std::exchange(posted_, {});
  for (const auto &call : calls) {
    World::get().note_progress();
    call();
  }
  return !calls.empty();
}

int64_t IoThread::run_timers() {
  while (!timers_.empty()) {
    const auto first = timers_.begin();
    if (first->first > now_ns()) return first->first;
    const auto call = std::move(first->second);
    timers_.erase(first);
    World::get().note_progress();
    call();
  }
  return kNever;
}

int IoThread::wait_for_events(epoll_event *events, int capacity, int64_t) {
  // In the order of their descriptors, not of their addresses, so that runs repeat.
  std::vector<Handler *> handlers;
  for (const auto &entry : handlers_) handlers.push_back(entry.first);
  std::sort(handlers.begin(), handlers.end(), [](const Handler *a, const Handler *b) { return a->fd() < b->fd(); });
  int n = 0;
  for (Handler *handler : handlers) {
    const uint32_t ready = n < capacity ? World::get().ready_events(handler) : 0;
    if (ready == 0) continue;
    events[n].events = ready;
    events[n++].data.ptr = handler;
  }
  return n;
}

}  // namespace moonpool
