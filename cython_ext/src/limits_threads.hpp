// SPDX-License-Identifier: Apache-2.0
//
// How the threads of a run begin together, keep in step, and end after the same number of batches.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "limits_socket.hpp"

namespace moonpool::limits {

// Releases the helper threads of one stream for every batch and waits until all are through.
class Gate {
 public:
  explicit Gate(uint32_t helpers) : helpers_(helpers) {}

  void release() {
    arrived_.store(0, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
  }
  void wait_for_helpers() {
    for (uint32_t seen = arrived_.load(std::memory_order_acquire); seen < helpers_;
         seen = arrived_.load(std::memory_order_acquire))
      arrived_.wait(seen, std::memory_order_acquire);
  }
  void wait_for_release(uint32_t round) { round_.wait(round, std::memory_order_acquire); }
  void arrive() {
    if (arrived_.fetch_add(1, std::memory_order_release) + 1 == helpers_) arrived_.notify_one();
  }

 private:
  uint32_t helpers_;
  std::atomic<uint32_t> round_{0};
  std::atomic<uint32_t> arrived_{0};
};

// Lets the connections of one stream run freely and yet end after the same number of batches.
class Tickets {
 public:
  bool take(uint64_t batch, bool may_close, int64_t end_ns, const int32_t *stop) {
    const bool close = may_close && batch > 0 &&
                       (now_ns() >= end_ns || (stop != nullptr && __atomic_load_n(stop, __ATOMIC_RELAXED) != 0));
    const std::lock_guard lock(mutex_);
    if (close && !closed_) {
      closed_ = true;
      end_ = std::max(taken_, batch);
    }
    if (closed_ && batch >= end_) return false;
    taken_ = std::max(taken_, batch + 1);
    return true;
  }

 private:
  std::mutex mutex_;
  uint64_t taken_ = 0;
  uint64_t end_ = 0;
  bool closed_ = false;
};

// Threads that begin together. When one cannot be made, those already made end without having begun.
class Crew {
 public:
  ~Crew() {
    if (go_.load() == kWait) release(kCancel);
    join();
  }
  template <typename Function>
  void add(Function function) {
    threads_.emplace_back([this, function]() mutable {
      go_.wait(kWait);
      if (go_.load() == kGo) function();
    });
  }
  void run() {
    release(kGo);
    join();
  }

 private:
  static constexpr int kWait = 0, kGo = 1, kCancel = 2;

  void release(int value) {
    go_.store(value);
    go_.notify_all();
  }
  void join() {
    for (std::thread &thread : threads_)
      if (thread.joinable()) thread.join();
  }

  std::atomic<int> go_{kWait};
  std::vector<std::thread> threads_;
};

}  // namespace moonpool::limits
