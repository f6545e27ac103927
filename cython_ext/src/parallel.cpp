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

// Takes about half a millisecond, of which a thread takes 0.02 to 0.05 to start.
constexpr uint64_t kBytesPerThread = 4u << 20;
// More do not make memory faster, and others have work too.
constexpr unsigned kThreadsMax = 4;

}  // namespace

unsigned threads_for(uint64_t bytes) {
  const uint64_t worth = std::min<uint64_t>(bytes / kBytesPerThread, kThreadsMax);
  if (worth < 2) return 1;
  return static_cast<unsigned>(std::min<uint64_t>({worth, cpu_count(), 1 + idle_cpus()}));
}

void in_turns(size_t turns, unsigned threads, const std::function<void(size_t)> &turn) {
  std::atomic<size_t> next{0};
  const auto run = [&] {
    for (size_t i = next.fetch_add(1, std::memory_order_relaxed); i < turns;
         i = next.fetch_add(1, std::memory_order_relaxed)) {
      turn(i);
    }
  };
  std::array<std::thread, kThreadsMax - 1> helpers;
  const size_t wanted = std::min<size_t>({threads, kThreadsMax, turns});
  if (wanted > 1) {
    // Signals belong to the application's threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (size_t i = 0; i + 1 < wanted; ++i) helpers[i] = std::thread(run);
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
