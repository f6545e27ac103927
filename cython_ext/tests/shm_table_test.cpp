// SPDX-License-Identifier: Apache-2.0
//
// Two processes agree on who touches which memory, also when one of them stops or dies in the middle.
#include "shm_table.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <future>

#include "support.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

class Table : public ::testing::Test {
 protected:
  void SetUp() override {
    Fd fd;
    owner_ = UseTable::make(&fd);
    ASSERT_NE(owner_, nullptr);
    std::string why_not;
    client_ = UseTable::open(fd, &why_not);
    ASSERT_NE(client_, nullptr) << why_not;
    fd_ = std::move(fd);
  }

  Fd fd_;
  std::shared_ptr<UseTable> owner_, client_;
};

TEST_F(Table, BothSidesSeeTheSameCounts) {
  EXPECT_FALSE(owner_->used(7));
  ASSERT_TRUE(client_->begin_use(7));
  ASSERT_TRUE(client_->begin_use(7));
  EXPECT_TRUE(owner_->used(7));
  EXPECT_FALSE(owner_->used(6));
  EXPECT_FALSE(owner_->used(8));
  client_->end_use(7);
  EXPECT_TRUE(owner_->used(7));
  client_->end_use(7);
  EXPECT_FALSE(owner_->used(7));
  EXPECT_TRUE(owner_->wait_unused(7, 0));
}

TEST_F(Table, TheFirstAndTheLastSlot) {
  for (const uint32_t slot : {0u, UseTable::kSlots - 1}) {
    ASSERT_TRUE(client_->begin_use(slot));
    EXPECT_TRUE(owner_->used(slot));
    client_->end_use(slot);
    owner_->withdraw(slot);
    EXPECT_FALSE(client_->begin_use(slot));
  }
  EXPECT_TRUE(client_->begin_use(1));
}

TEST_F(Table, NothingBeginsAfterAWithdrawalUntilTheSlotIsGivenOutAgain) {
  owner_->withdraw(3);
  EXPECT_FALSE(client_->begin_use(3));
  EXPECT_FALSE(client_->begin_use(3));
  EXPECT_FALSE(owner_->used(3)) << "what was refused is no use";
  EXPECT_TRUE(owner_->wait_unused(3, 0));
  owner_->reset(3);
  EXPECT_TRUE(client_->begin_use(3));
}

TEST_F(Table, AWaitEndsWithTheLastUse) {
  ASSERT_TRUE(client_->begin_use(3));
  ASSERT_TRUE(client_->begin_use(3));
  owner_->withdraw(3);
  EXPECT_FALSE(owner_->wait_unused(3, now_ns() + kMillisecond));
  auto waiting = std::async(std::launch::async, [this] { return owner_->wait_unused(3, now_ns() + kPatienceNs); });
  client_->end_use(3);
  client_->end_use(3);
  EXPECT_TRUE(waiting.get());
}

TEST_F(Table, WhoeverWasNotWaitedForIsTold) {
  ASSERT_TRUE(client_->begin_use(3));
  ASSERT_TRUE(client_->begin_use(3));
  EXPECT_TRUE(client_->end_use(3));
  owner_->withdraw(3);
  EXPECT_FALSE(owner_->abandon(3));
  EXPECT_TRUE(owner_->used(3));
  EXPECT_FALSE(client_->begin_use(3));
  EXPECT_FALSE(client_->end_use(3));
  EXPECT_FALSE(owner_->used(3));
  // Nobody was left behind here.
  owner_->withdraw(4);
  EXPECT_TRUE(owner_->abandon(4));
}

TEST_F(Table, AWaitEndsWithTheClient) {
  ASSERT_TRUE(client_->begin_use(3));
  owner_->withdraw(3);
  auto waiting = std::async(std::launch::async, [this] { return owner_->wait_unused(3, now_ns() + kPatienceNs); });
  owner_->end_uses(3);
  EXPECT_TRUE(waiting.get());
  EXPECT_FALSE(client_->begin_use(3));
}

// The promise of the table: once the owner has waited, nobody is in there.
TEST_F(Table, WithdrawalsAgainstUsersInOtherThreads) {
  for (uint32_t slot = 0; slot < 300; ++slot) {
    std::atomic<int> inside{0}, turns{0};
    std::atomic<bool> withdrawn{false}, broken{false};
    std::vector<std::thread> users;
    for (int i = 0; i < 2; ++i) {
      users.emplace_back([&] {
        while (client_->begin_use(slot)) {
          inside.fetch_add(1);
          if (withdrawn.load()) broken.store(true);
          turns.fetch_add(1);
          inside.fetch_sub(1);
          client_->end_use(slot);
        }
      });
    }
    EXPECT_TRUE(eventually([&] { return turns.load() > 0; }));
    owner_->withdraw(slot);
    EXPECT_TRUE(owner_->wait_unused(slot, now_ns() + kPatienceNs));
    withdrawn.store(true);
    EXPECT_EQ(inside.load(), 0);
    for (std::thread &user : users) user.join();
    EXPECT_FALSE(broken.load()) << "a use began after the owner had been told that none does";
  }
}

TEST_F(Table, ServicesEndWhenTheClientRevokesItsMemory) {
  ASSERT_TRUE(owner_->begin_service());
  client_->revoke();
  EXPECT_FALSE(owner_->begin_service());
  EXPECT_FALSE(client_->wait_idle(now_ns() + kMillisecond));
  auto waiting = std::async(std::launch::async, [this] { return client_->wait_idle(now_ns() + kPatienceNs); });
  owner_->end_service();
  EXPECT_TRUE(waiting.get());
  EXPECT_TRUE(client_->wait_idle(0));
}

TEST_F(Table, ServicesInOtherThreadsAgainstARevocation) {
  for (int round = 0; round < 200; ++round) {
    SetUp();
    std::atomic<int> inside{0};
    std::atomic<bool> stop{false}, revoked{false}, broken{false};
    std::vector<std::thread> servers;
    for (int i = 0; i < 2; ++i) {
      servers.emplace_back([&] {
        while (!stop.load() && owner_->begin_service()) {
          inside.fetch_add(1);
          if (revoked.load()) broken.store(true);
          inside.fetch_sub(1);
          owner_->end_service();
        }
      });
    }
    client_->revoke();
    EXPECT_TRUE(client_->wait_idle(now_ns() + kPatienceNs));
    EXPECT_EQ(inside.load(), 0);
    revoked.store(true);
    stop.store(true);
    for (std::thread &server : servers) server.join();
    EXPECT_FALSE(broken.load()) << "a service ran after the client had been told that none does";
  }
}

// A client in a process of its own, which uses slot 5 until it is told to stop.
class OtherProcess : public Table {
 protected:
  void SetUp() override {
    Table::SetUp();
    ASSERT_EQ(pipe(ready_), 0);
    ASSERT_EQ(pipe(go_), 0);
    // A forked child has neither the mapping nor the descriptors of the core; it maps what it was sent.
    const int sent = dup(fd_.get());
    child_ = fork();
    ASSERT_GE(child_, 0);
    if (child_ == 0) {
      std::string why_not;
      const auto table = UseTable::open(Fd(sent), &why_not);
      char byte = table != nullptr && table->begin_use(5) ? 'y' : 'n';
      if (write(ready_[1], &byte, 1) != 1 || byte == 'n' || read(go_[0], &byte, 1) != 1) _exit(1);
      table->end_use(5);
      _exit(0);
    }
    close(sent);
    char byte = 0;
    ASSERT_EQ(read(ready_[0], &byte, 1), 1);
    ASSERT_EQ(byte, 'y');
    owner_->withdraw(5);
  }
  void TearDown() override {
    for (const int fd : {ready_[0], ready_[1], go_[0], go_[1]}) close(fd);
  }

  int ready_[2] = {-1, -1}, go_[2] = {-1, -1};
  pid_t child_ = -1;
};

// Private futexes would never wake anybody here.
TEST_F(OtherProcess, IsWaitedFor) {
  EXPECT_FALSE(owner_->wait_unused(5, now_ns() + kMillisecond));
  auto waiting = std::async(std::launch::async, [this] { return owner_->wait_unused(5, now_ns() + kPatienceNs); });
  EXPECT_EQ(write(go_[1], "g", 1), 1);
  EXPECT_TRUE(waiting.get());
  int status = -1;
  EXPECT_EQ(waitpid(child_, &status, 0), child_);
  EXPECT_EQ(status, 0);
}

TEST_F(OtherProcess, ThatIsKilledLeavesItsUseBehindAndTheWaitIsBounded) {
  kill(child_, SIGKILL);
  int status = -1;
  EXPECT_EQ(waitpid(child_, &status, 0), child_);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_TRUE(owner_->used(5));
  EXPECT_FALSE(owner_->wait_unused(5, now_ns() + 20 * kMillisecond));
}

TEST(TableDescriptor, IsRefusedWhenItIsNoTable) {
  std::string why_not;
  const Fd small(memfd_create("small", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(small.get(), 4096), 0);
  ASSERT_EQ(fcntl(small.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_EQ(UseTable::open(small, &why_not), nullptr);
  EXPECT_NE(why_not, "");
  // Counting in it would be a fault.
  const Fd constant(memfd_create("constant", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(constant.get(), 1 << 20), 0);
  ASSERT_EQ(fcntl(constant.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE), 0);
  EXPECT_EQ(UseTable::open(constant, &why_not), nullptr);
  uint16_t port;
  const Fd socket = listen_on_loopback(&port);
  EXPECT_EQ(UseTable::open(socket, &why_not), nullptr);
}

}  // namespace
}  // namespace moonpool
