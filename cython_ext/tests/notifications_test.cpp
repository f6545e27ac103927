// SPDX-License-Identifier: Apache-2.0
#include "notifications.hpp"

#include "support.hpp"

namespace moonpool {
namespace {

Notice notice(const std::string &payload) { return {"peer", {1, 2, 3}, payload}; }

TEST(Notifications, ComeInOrderAndWhole) {
  NotificationQueue queue(10);
  const std::string binary("a\0b", 3);
  ASSERT_TRUE(queue.push(notice("first")));
  ASSERT_TRUE(queue.push(notice(binary)));
  Notice got;
  ASSERT_TRUE(queue.take(0, &got));
  EXPECT_EQ(got.payload, "first");
  EXPECT_EQ(got.peer, "peer");
  EXPECT_EQ(got.incarnation, (Id128{1, 2, 3}));
  ASSERT_TRUE(queue.take(0, &got));
  EXPECT_EQ(got.payload, binary);
  EXPECT_FALSE(queue.take(0, &got));
  EXPECT_FALSE(queue.take(1 * kMillisecond, &got));
}

TEST(Notifications, AreRefusedBeyondTheBound) {
  NotificationQueue queue(2);
  EXPECT_TRUE(queue.push(notice("1")));
  EXPECT_TRUE(queue.push(notice("2")));
  EXPECT_FALSE(queue.push(notice("3")));
  EXPECT_EQ(queue.size(), 2u);
  Notice got;
  ASSERT_TRUE(queue.take(0, &got));
  EXPECT_TRUE(queue.push(notice("4"))) << "taking one makes room";
}

TEST(Notifications, AreRefusedBeyondTheirBytes) {
  NotificationQueue queue(1u << 20);
  const std::string large(1u << 20, 'x');
  for (size_t i = 0; i < NotificationQueue::kBytesMax / large.size(); ++i) ASSERT_TRUE(queue.push(notice(large)));
  EXPECT_FALSE(queue.push(notice("y")));
  Notice got;
  ASSERT_TRUE(queue.take(0, &got));
  EXPECT_TRUE(queue.push(notice("y"))) << "taking one makes room";
}

TEST(Notifications, WakeWhoWaits) {
  NotificationQueue queue(10);
  std::thread taker([&] {
    Notice got;
    EXPECT_TRUE(queue.take(-1, &got));
    EXPECT_EQ(got.payload, "wake up");
  });
  EXPECT_TRUE(queue.push(notice("wake up")));
  taker.join();
}

TEST(Notifications, ClosingEndsWaitersAndKeepsWhatIsQueued) {
  NotificationQueue queue(10);
  ASSERT_TRUE(queue.push(notice("last words")));
  std::vector<std::thread> takers;
  std::atomic<int> taken{0};
  for (int i = 0; i < 3; ++i) {
    takers.emplace_back([&] {
      Notice got;
      while (queue.take(-1, &got)) taken.fetch_add(1);
    });
  }
  queue.close();
  for (std::thread &taker : takers) taker.join();
  EXPECT_EQ(taken.load(), 1);
  EXPECT_TRUE(queue.closed());
  EXPECT_FALSE(queue.push(notice("too late")));
}

TEST(Notifications, EachGoesToOneTaker) {
  NotificationQueue queue(100'000);
  constexpr int kEach = 2000;
  std::atomic<int> taken{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < kEach; ++n) EXPECT_TRUE(queue.push(notice("x")));
    });
    threads.emplace_back([&] {
      Notice got;
      for (int n = 0; n < kEach; ++n) taken.fetch_add(queue.take(-1, &got) ? 1 : 0);
    });
  }
  for (std::thread &thread : threads) thread.join();
  EXPECT_EQ(taken.load(), 2 * kEach);
  EXPECT_EQ(queue.size(), 0u);
}

}  // namespace
}  // namespace moonpool
