// SPDX-License-Identifier: Apache-2.0
//
// One loop: calls in their order, timers at their time, no event for a handler that is gone, no CPU while idle.
#include "io_thread.hpp"

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fstream>
#include <latch>

#include "support.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

class IoThreadTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_FALSE(io_.start()); }
  void TearDown() override { io_.stop(); }

  // Returns when everything posted before has run.
  void flush() {
    std::latch done(1);
    io_.post([&] { done.count_down(); });
    done.wait();
  }

  IoThread io_{0, 50};
};

// Counts its events; the descriptor is an eventfd.
class Counter : public Handler {
 public:
  Counter() { fd_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)); }
  void signal() {
    const uint64_t one = 1;
    ASSERT_EQ(write(fd(), &one, sizeof one), static_cast<ssize_t>(sizeof one));
  }
  std::function<void()> then;
  std::atomic<int> events{0};

 protected:
  void on_events(uint32_t) override {
    uint64_t count = 0;
    if (read(fd(), &count, sizeof count) < 0) return;
    events.fetch_add(1);
    if (then) then();
  }
};

TEST_F(IoThreadTest, MakesPostedCallsInTheirOrder) {
  std::vector<int> order;
  for (int i = 0; i < 1000; ++i) {
    io_.post([&order, i] { order.push_back(i); });
  }
  flush();
  ASSERT_EQ(order.size(), 1000u);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST_F(IoThreadTest, LosesNoPostOfManyThreads) {
  constexpr int kThreads = 4, kPosts = 5000;
  std::atomic<int> made{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < kPosts; ++n) {
        io_.post([&] { made.fetch_add(1); });
        // Sometimes the loop has gone to sleep before the next one comes.
        if (n % 500 == 0) std::this_thread::yield();
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  EXPECT_TRUE(eventually([&] { return made.load() == kThreads * kPosts; }));
}

TEST_F(IoThreadTest, RunsTimersInTheOrderOfTheirTimes) {
  std::vector<int> order;
  std::latch done(1);
  const int64_t now = now_ns();
  io_.post([&] {
    // Set within one turn, so none can run before all are there.
    io_.call_at(now + 30 * kMillisecond, [&] {
      order.push_back(3);
      done.count_down();
    });
    io_.call_at(now + 10 * kMillisecond, [&] { order.push_back(1); });
    io_.call_at(now - 1, [&] { order.push_back(0); });
    io_.call_at(now + 20 * kMillisecond, [&] { order.push_back(2); });
  });
  done.wait();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3}));
}

TEST_F(IoThreadTest, NeverRunsATimerEarly) {
  const int64_t when = now_ns() + 20 * kMillisecond;
  int64_t ran = 0;
  std::latch done(1);
  io_.call_at(when, [&] {
    ran = now_ns();
    done.count_down();
  });
  done.wait();
  EXPECT_GE(ran, when);
}

TEST_F(IoThreadTest, AnEarlierTimerWakesALoopThatSleepsForALaterOne) {
  io_.call_at(now_ns() + 10 * kPatienceNs, [] {});
  flush();
  std::latch done(1);
  io_.call_at(now_ns() + 1 * kMillisecond, [&] { done.count_down(); });
  EXPECT_TRUE(eventually([&] { return done.try_wait(); }));
}

TEST_F(IoThreadTest, DeliversEventsUntilTheHandlerIsRemoved) {
  auto handler = std::make_shared<Counter>();
  ASSERT_FALSE(io_.add(handler, EPOLLIN));
  EXPECT_EQ(io_.handler_count(), 1u);
  handler->signal();
  ASSERT_TRUE(eventually([&] { return handler->events.load() == 1; }));
  io_.remove(*handler);
  flush();
  EXPECT_EQ(io_.handler_count(), 0u);
  handler->signal();
  flush();
  EXPECT_EQ(handler->events.load(), 1);
  EXPECT_EQ(handler.use_count(), 1) << "the loop has let go of it";
}

TEST_F(IoThreadTest, ModifyChangesWhatIsWatched) {
  auto handler = std::make_shared<Counter>();
  ASSERT_FALSE(io_.add(handler, 0));
  handler->signal();
  flush();
  flush();
  EXPECT_EQ(handler->events.load(), 0);
  io_.modify(*handler, EPOLLIN);
  EXPECT_TRUE(eventually([&] { return handler->events.load() == 1; }));
}

// Two handlers have events in the same turn and the first removes the second, which nobody else refers to.
TEST_F(IoThreadTest, AHandlerRemovedDuringDeliveryIsKeptUntilTheEndOfTheTurn) {
  for (int round = 0; round < 200; ++round) {
    auto one = std::make_shared<Counter>();
    auto two = std::make_shared<Counter>();
    std::latch delivered(1);
    std::atomic<bool> removed{false};
    const auto remove_both = [&, first = one.get(), second = two.get()] {
      if (removed.exchange(true)) return;
      io_.remove(*first);
      io_.remove(*second);
      delivered.count_down();
    };
    one->then = two->then = remove_both;
    std::latch ready(1);
    io_.post([&] {
      // Within one turn, so that both are delivered together.
      one->signal();
      two->signal();
      EXPECT_FALSE(io_.add(one, EPOLLIN));
      EXPECT_FALSE(io_.add(two, EPOLLIN));
      one.reset();
      two.reset();
      ready.count_down();
    });
    ready.wait();
    delivered.wait();
    flush();
    EXPECT_EQ(io_.handler_count(), 0u);
  }
}

TEST_F(IoThreadTest, HandlersComeAndGoFromOtherThreads) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < 500; ++n) {
        auto handler = std::make_shared<Counter>();
        ASSERT_FALSE(io_.add(handler, EPOLLIN));
        handler->signal();
        io_.remove(*handler);
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  flush();
  EXPECT_EQ(io_.handler_count(), 0u);
}

TEST_F(IoThreadTest, RefusesADescriptorThatEpollCannotWatch) {
  class Closed : public Handler {
    void on_events(uint32_t) override {}
  };
  EXPECT_EQ(io_.add(std::make_shared<Closed>(), EPOLLIN).code, MP_SYSTEM);
  EXPECT_EQ(io_.handler_count(), 0u);
}

TEST_F(IoThreadTest, DrainMakesTheLastCallsAndDisposeDropsTheRest) {
  auto handler = std::make_shared<Counter>();
  auto token = std::make_shared<int>(0);
  ASSERT_FALSE(io_.add(handler, EPOLLIN));
  io_.call_at(now_ns() + 10 * kPatienceNs, [token] { FAIL() << "its time has not come"; });
  io_.stop();
  int calls = 0;
  io_.post([&] {
    ++calls;
    io_.post([&] { ++calls; });
  });
  EXPECT_TRUE(io_.drain());
  EXPECT_TRUE(io_.drain());
  EXPECT_FALSE(io_.drain());
  EXPECT_EQ(calls, 2);
  io_.dispose();
  EXPECT_EQ(handler.use_count(), 1);
  EXPECT_EQ(token.use_count(), 1);
}

// The scheduler counts how often the thread was on a CPU: an idle loop is never woken.
TEST_F(IoThreadTest, AnIdleLoopUsesNoCpu) {
  pid_t tid = 0;
  io_.post([&] { tid = gettid(); });
  flush();
  const auto schedstat = [&] {
    std::ifstream file("/proc/self/task/" + std::to_string(tid) + "/schedstat");
    std::string line;
    std::getline(file, line);
    return line;
  };
  if (schedstat().empty()) GTEST_SKIP() << "this kernel keeps no /proc/<pid>/schedstat";
  // It looks for a while before it sleeps; from then on nothing changes.
  std::string before;
  const auto unchanged = [&] {
    std::string now = schedstat();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    before = now;
    return schedstat() == now;
  };
  EXPECT_TRUE(eventually(unchanged)) << before;
}

TEST(IoThreadSignals, AreLeftToTheApplication) {
  IoThread io(0, 0);
  ASSERT_FALSE(io.start());
  sigset_t blocked;
  sigemptyset(&blocked);
  std::latch done(1);
  io.post([&] {
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    done.count_down();
  });
  done.wait();
  EXPECT_EQ(sigismember(&blocked, SIGINT), 1);
  EXPECT_EQ(sigismember(&blocked, SIGTERM), 1);
  sigset_t ours;
  pthread_sigmask(SIG_SETMASK, nullptr, &ours);
  EXPECT_EQ(sigismember(&ours, SIGINT), 0) << "the caller's own mask is as it was";
  io.stop();
}

}  // namespace
}  // namespace moonpool
