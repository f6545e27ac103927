// SPDX-License-Identifier: Apache-2.0
//
// Work in turns: each once, whoever does it, and all done when the call returns.
#include "parallel.hpp"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <set>

#include "support.hpp"

namespace moonpool {
namespace {

TEST(Parallel, EveryTurnIsTakenOnce) {
  for (const unsigned threads : {0u, 1u, 2u, 4u, 100u}) {
    for (const size_t turns : {size_t{0}, size_t{1}, size_t{3}, size_t{5000}}) {
      std::vector<int> taken(turns);
      in_turns(turns, threads, [&](size_t i) { ++taken[i]; });
      EXPECT_TRUE(std::all_of(taken.begin(), taken.end(), [](int times) { return times == 1; })) << threads;
    }
  }
}

TEST(Parallel, SeveralThreadsShareTheTurns) {
  std::mutex mutex;
  std::condition_variable changed;
  std::set<std::thread::id> at_work;
  // None goes on before all four have a turn.
  in_turns(4, 4, [&](size_t) {
    std::unique_lock lock(mutex);
    at_work.insert(std::this_thread::get_id());
    changed.notify_all();
    changed.wait_for(lock, std::chrono::nanoseconds(moonpool::testing::kPatienceNs),
                     [&] { return at_work.size() == 4; });
  });
  EXPECT_EQ(at_work.size(), 4u);
  EXPECT_EQ(at_work.count(std::this_thread::get_id()), 1u);
}

TEST(Parallel, LittleIsForOneThreadAndNothingForMoreThanFour) {
  EXPECT_EQ(threads_for(0), 1u);
  EXPECT_EQ(threads_for(7u << 20), 1u);
  EXPECT_GE(threads_for(UINT64_MAX), 1u);
  EXPECT_LE(threads_for(UINT64_MAX), std::min(4u, cpu_count()));
}

TEST(Parallel, WithoutAnotherThreadThisOneDoesItAll) {
  // In a process of its own that may make no threads, which root always may.
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const rlimit none{0, 0};
    pthread_t thread;
    if (setrlimit(RLIMIT_NPROC, &none) != 0 || (geteuid() == 0 && setuid(65534) != 0)) _exit(2);
    if (pthread_create(&thread, nullptr, [](void *) -> void * { return nullptr; }, nullptr) != EAGAIN) _exit(3);
    std::vector<int> taken(100);
    in_turns(taken.size(), 4, [&](size_t i) { ++taken[i]; });
    _exit(std::count(taken.begin(), taken.end(), 1) == 100 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace moonpool
