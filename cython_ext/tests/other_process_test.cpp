// SPDX-License-Identifier: Apache-2.0
//
// Reads from the memory of another process: every byte, and nothing that is not proved to be that process's.
#include "other_process.hpp"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>

#include "digest.hpp"
#include "shm_table.hpp"
#include "support.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

using Kind = OtherProcess::ReadFault::Kind;

constexpr size_t kBytes = 1u << 20;

uint64_t address_of(const void *memory) { return reinterpret_cast<uintptr_t>(memory); }

// A forked child that has the same memory, keeps it as it was, and listens on a Unix socket.
class ReadingAnotherProcess : public ::testing::Test {
 protected:
  void SetUp() override {
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    const int listener = socket(AF_UNIX, SOCK_STREAM, 0), client = socket(AF_UNIX, SOCK_STREAM, 0);
    ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr *>(&name), sizeof name.sun_family), 0);
    socklen_t length = sizeof name;
    ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr *>(&name), &length), 0);
    int ready[2];
    ASSERT_EQ(pipe(ready), 0);
    child_ = fork();
    ASSERT_GE(child_, 0);
    if (child_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      // Whoever listens is who the kernel says is on the other side.
      if (listen(listener, 1) != 0 || write(ready[1], "r", 1) != 1) _exit(1);
      for (;;) pause();
    }
    char byte = 0;
    ASSERT_EQ(::read(ready[0], &byte, 1), 1);
    ASSERT_EQ(connect(client, reinterpret_cast<sockaddr *>(&name), length), 0);
    other_ = OtherProcess::behind(client);
    for (const int fd : {listener, client, ready[0], ready[1]}) close(fd);
    ASSERT_EQ(other_.pid(), child_);
    // Here it is another content from now on.
    proof_content_ = 6;
    memory_.assign(kBytes, 0);
  }
  void TearDown() override { end_child(); }
  void end_child() {
    if (child_ <= 0) return;
    kill(child_, SIGKILL);
    EXPECT_EQ(waitpid(child_, nullptr, 0), child_);
    child_ = -1;
  }
  OtherProcess::ReadFault read(OtherProcess::Pieces *pieces, uint64_t *digests = nullptr) {
    return other_.read({address_of(&proof_content_), 5}, pieces, digests);
  }

  const Bytes wanted_ = random_data(kBytes, 1);
  Bytes memory_ = wanted_, here_ = Bytes(kBytes);
  uint64_t proof_content_ = 5;
  pid_t child_ = -1;
  OtherProcess other_;
};

TEST_F(ReadingAnotherProcess, EveryPieceWithItsDigestAndNoOtherByte) {
  for (const bool digest : {false, true}) {
    OtherProcess::Pieces pieces;
    EXPECT_TRUE(pieces.empty());
    Bytes expected(kBytes);
    here_ = expected;
    std::vector<uint64_t> digests(1000), expected_digests(1000);
    size_t at = 0;
    for (uint32_t place = 0; place < 1000; ++place) {
      const size_t length = 1 + place;
      pieces.add(place, &here_[at], address_of(&memory_[kBytes - at - length]), length);
      std::memcpy(&expected[at], &wanted_[kBytes - at - length], length);
      expected_digests[place] = leaf_digest(&expected[at], length);
      at += length + 3;
    }
    EXPECT_EQ(read(&pieces, digest ? digests.data() : nullptr).kind, Kind::kNone);
    EXPECT_TRUE(here_ == expected);
    if (digest) {
      EXPECT_EQ(digests, expected_digests);
    }
  }
}

TEST_F(ReadingAnotherProcess, NothingCountsWithoutTheProof) {
  OtherProcess::Pieces wrong, missing;
  wrong.add(0, here_.data(), address_of(memory_.data()), 100);
  EXPECT_EQ(other_.read({address_of(&proof_content_), 6}, &wrong, nullptr).kind, Kind::kElsewhere);
  missing.add(0, here_.data(), address_of(memory_.data()), 100);
  EXPECT_EQ(other_.read({8, 5}, &missing, nullptr).kind, Kind::kElsewhere);
  EXPECT_EQ(other_.prove({address_of(&proof_content_), 5}), 0);
  EXPECT_EQ(other_.prove({address_of(&proof_content_), 6}), ESRCH);
  EXPECT_EQ(other_.prove({8, 5}), EFAULT);
}

TEST_F(ReadingAnotherProcess, TheFirstPieceThatCannotBeReadIsNamed) {
  for (const uint32_t bad : {0u, 1u, 700u, 999u}) {
    for (const bool digest : {false, true}) {
      OtherProcess::Pieces pieces;
      std::vector<uint64_t> digests(1000);
      for (uint32_t place = 0; place < 1000; ++place) {
        pieces.add(place, &here_[place * 1000], place == bad ? 8 : address_of(&memory_[place]), 1000);
      }
      const OtherProcess::ReadFault fault = read(&pieces, digest ? digests.data() : nullptr);
      EXPECT_EQ(fault.kind, Kind::kUnreadable);
      EXPECT_EQ(fault.place, bad);
    }
  }
}

TEST_F(ReadingAnotherProcess, ItsDeathIsKnown) {
  EXPECT_FALSE(other_.exited());
  end_child();
  EXPECT_TRUE(other_.exited());
  OtherProcess::Pieces pieces;
  pieces.add(0, here_.data(), address_of(memory_.data()), 100);
  EXPECT_NE(read(&pieces).kind, Kind::kNone);
  EXPECT_EQ(other_.prove({address_of(&proof_content_), 5}), ESRCH);
}

// A child of the owner has a copy of its memory, and may come to have its number.
TEST(ProofOfATable, IsNotInAForkedChild) {
  Fd fd;
  const auto table = UseTable::make(&fd);
  ASSERT_NE(table, nullptr);
  const OtherProcess::Proof proof = table->proof();
  const pid_t child = fork();
  if (child == 0) {
    uint64_t seen = 0;
    iovec ours{&seen, sizeof seen}, theirs{reinterpret_cast<void *>(proof.address), sizeof seen};
    // Something else may have come to lie there.
    const bool read = process_vm_readv(getpid(), &ours, 1, &theirs, 1, 0) == sizeof seen;
    _exit(read && seen == proof.content ? 1 : 0);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  uint64_t seen = 0;
  std::memcpy(&seen, reinterpret_cast<void *>(proof.address), sizeof seen);
  EXPECT_EQ(seen, proof.content);
}

TEST(OtherSide, IsNobodyWhereTheKernelDoesNotSay) {
  uint16_t port;
  const Fd socket = listen_on_loopback(&port);
  EXPECT_FALSE(OtherProcess::behind(socket.get()));
  EXPECT_FALSE(OtherProcess::behind(-1));
}

}  // namespace
}  // namespace moonpool
