// SPDX-License-Identifier: Apache-2.0
#include "parallel.hpp"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <system_error>
#include <thread>

#include "system.hpp"

namespace moonpool {

namespace {

// A thread starts in some 20 us, in which so many bytes are copied many times over.
constexpr uint64_t kBytesPerThread = 4u << 20;
// More do not make memory faster, and others have work too.
constexpr uint64_t kThreadsMax = 4;

}  // namespace

void in_turns(size_t turns, uint64_t bytes, const std::function<void(size_t)> &turn) {
  std::atomic<size_t> next{0};
  const auto run = [&] {
    for (size_t i = next.fetch_add(1, std::memory_order_relaxed); i < turns;
         i = next.fetch_add(1, std::memory_order_relaxed)) {
      turn(i);
    }
  };
  const uint64_t threads = std::min({uint64_t{turns}, bytes / kBytesPerThread, kThreadsMax});
  std::array<std::thread, kThreadsMax - 1> helpers;
  if (threads > 1) {
    // Signals belong to the application's threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      const uint64_t worth = std::min<uint64_t>(threads, cpu_count());
      for (size_t i = 0; i + 1 < worth; ++i) helpers[i] = std::thread(run);
    } catch (const std::system_error &) {
      // The system gives no more threads: those that are there do it all.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  run();
  for (std::thread &helper : helpers) {
    if (helper.joinable()) helper.join();
  }
}

}  // namespace moonpool
