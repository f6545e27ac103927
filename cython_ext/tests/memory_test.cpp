// SPDX-License-Identifier: Apache-2.0
//
// Memory that the engine allocates: what peers may do with its descriptor, and what becomes of it.
#include "memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>

#include "support.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

constexpr uint64_t kHugePage = 2u << 20;

std::unique_ptr<Memory> allocate(const Allocation &wanted) {
  std::unique_ptr<Memory> memory;
  const Error error = Memory::allocate(wanted, &memory);
  EXPECT_FALSE(error) << error.message << ": " << error.cause;
  return memory;
}

Allocation shared(uint64_t nbytes, bool peers_write = true) {
  Allocation wanted;
  wanted.nbytes = nbytes;
  wanted.shared = true;
  wanted.peers_write = peers_write;
  return wanted;
}

// What the kernel says of the mapping at an address.
std::string mapping_at(const void *address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx", &begin, &end) != 2) continue;
    const auto wanted = reinterpret_cast<uintptr_t>(address);
    if (begin <= wanted && wanted < end) return line;
  }
  return {};
}

TEST(Memory, IsZeroedAndPageAlignedWhateverItsSize) {
  for (const bool named : {false, true}) {
    for (const uint64_t nbytes :
         {uint64_t{1}, uint64_t{4096}, uint64_t{4097}, kHugePage - 1, kHugePage, 3 * kHugePage + 5}) {
      Allocation wanted = shared(nbytes);
      wanted.shared = named;
      const auto memory = allocate(wanted);
      ASSERT_NE(memory, nullptr);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(memory->base()) % 4096, 0u);
      if (nbytes >= kHugePage) {
        EXPECT_EQ(reinterpret_cast<uintptr_t>(memory->base()) % kHugePage, 0u) << "so that huge pages fit";
      }
      EXPECT_EQ(memory->page_bytes(), 4096u);
      const uint8_t *base = memory->base();
      EXPECT_TRUE(std::all_of(base, base + nbytes, [](uint8_t byte) { return byte == 0; }));
      std::memset(memory->base(), 1, nbytes);
      EXPECT_EQ(memory->fd() != nullptr, named);
    }
  }
}

TEST(Memory, ADescriptorCanNeitherShrinkNorGrowNorBeUnsealed) {
  const auto memory = allocate(shared(10000));
  const int fd = memory->fd()->get();
  EXPECT_NE(ftruncate(fd, 0), 0);
  EXPECT_NE(ftruncate(fd, 1 << 20), 0);
  EXPECT_NE(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), 0);
  struct stat status{};
  ASSERT_EQ(fstat(fd, &status), 0);
  EXPECT_EQ(status.st_size, 12288) << "whole pages";
  EXPECT_EQ(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

TEST(Memory, WhatPeersMayWriteIsOneMemoryOnBothSides) {
  const auto memory = allocate(shared(10000));
  std::string why_not;
  const auto mapping = Mapping::open(*memory->fd(), 10000, &why_not);
  ASSERT_NE(mapping, nullptr) << why_not;
  EXPECT_TRUE(mapping->writable());
  mapping->base()[9999] = 7;
  EXPECT_EQ(memory->base()[9999], 7);
  memory->base()[0] = 8;
  EXPECT_EQ(mapping->base()[0], 8);
}

// The kernel refuses, so a peer cannot write it by mistake or by force.
TEST(Memory, WhatPeersMayOnlyReadCannotBeWrittenThroughTheDescriptor) {
  const auto memory = allocate(shared(10000, false));
  const int fd = memory->fd()->get();
  EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
  EXPECT_EQ(pwrite(fd, "x", 1, 0), -1);
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  const int again = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (again >= 0) {
    EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, again, 0), MAP_FAILED);
    close(again);
  }
  std::string why_not;
  const auto mapping = Mapping::open(*memory->fd(), 10000, &why_not);
  ASSERT_NE(mapping, nullptr) << why_not;
  EXPECT_FALSE(mapping->writable());
  EXPECT_NE(mprotect(mapping->base(), 4096, PROT_READ | PROT_WRITE), 0);
  memory->base()[5] = 9;
  EXPECT_EQ(mapping->base()[5], 9) << "its owner still writes it";
}

TEST(Memory, APeersMappingStaysOutOfForkedChildren) {
  const auto memory = allocate(shared(4096));
  std::string why_not;
  const auto mapping = Mapping::open(*memory->fd(), 4096, &why_not);
  ASSERT_NE(mapping, nullptr);
  std::ifstream maps("/proc/self/smaps");
  const std::string head = mapping_at(mapping->base()).substr(0, 20);
  ASSERT_NE(head, "");
  bool inside = false, seen = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.find('-') != std::string::npos && line.find(':') == std::string::npos) inside = false;
    if (line.compare(0, head.size(), head) == 0) inside = true;
    if (inside && line.rfind("VmFlags:", 0) == 0) {
      seen = true;
      EXPECT_NE(line.find(" dc"), std::string::npos) << "do not copy on fork: " << line;
      break;
    }
  }
  EXPECT_TRUE(seen);
}

TEST(Memory, AMappingThatCouldEndThisProcessIsRefused) {
  std::string why_not;
  const Fd loose(memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(loose.get(), 8192), 0);
  EXPECT_EQ(Mapping::open(loose, 4096, &why_not), nullptr) << "it could shrink";
  EXPECT_NE(why_not, "");
  ASSERT_EQ(fcntl(loose.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_NE(Mapping::open(loose, 8192, &why_not), nullptr);
  EXPECT_EQ(Mapping::open(loose, 8193, &why_not), nullptr) << "it is too small";
  EXPECT_EQ(Mapping::open(loose, 0, &why_not), nullptr);
  EXPECT_EQ(Mapping::open(loose, UINT64_MAX, &why_not), nullptr);
  EXPECT_EQ(Mapping::open(Fd(open("/dev/zero", O_RDWR | O_CLOEXEC)), 4096, &why_not), nullptr) << "no memfd at all";
  EXPECT_EQ(Mapping::open(Fd(), 4096, &why_not), nullptr);
}

// Linux 6.1 makes them whatever its settings are, as long as there is memory in one piece.
bool makes_huge_pages() {
  void *space = mmap(nullptr, 2 * kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (space == MAP_FAILED) return false;
  auto *aligned =
      reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(space) + kHugePage - 1) / kHugePage * kHugePage);
  std::memset(aligned, 1, kHugePage);
  constexpr int kCollapse = 25;  // MADV_COLLAPSE
  const bool made = madvise(aligned, kHugePage, kCollapse) == 0;
  munmap(space, 2 * kHugePage);
  return made;
}

TEST(Memory, HugePagesThatAreRequiredAreThereOrTheErrorSaysHowToGetThem) {
  for (const bool named : {false, true}) {
    Allocation wanted = shared(3 * kHugePage);
    wanted.shared = named;
    wanted.huge_pages = MP_HUGE_PAGES_REQUIRED;
    std::unique_ptr<Memory> memory;
    const Error error = Memory::allocate(wanted, &memory);
    if (error) {
      EXPECT_FALSE(makes_huge_pages()) << error.message << ": " << error.cause;
      EXPECT_EQ(error.code, MP_NO_MEMORY);
      EXPECT_NE(error.hint.find("vm.nr_hugepages"), std::string::npos) << error.hint;
      EXPECT_EQ(memory, nullptr);
      continue;
    }
    EXPECT_EQ(memory->page_bytes(), kHugePage);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory->base()) % kHugePage, 0u);
    std::memset(memory->base(), 1, wanted.nbytes);
    if (!named) continue;
    std::string why_not;
    const auto mapping = Mapping::open(*memory->fd(), wanted.nbytes, &why_not);
    ASSERT_NE(mapping, nullptr) << why_not;
    EXPECT_EQ(mapping->base()[wanted.nbytes - 1], 1);
  }
}

TEST(Memory, WithoutHugePagesItIsSmallPages) {
  Allocation wanted = shared(2 * kHugePage);
  wanted.huge_pages = MP_HUGE_PAGES_NEVER;
  const auto memory = allocate(wanted);
  ASSERT_NE(memory, nullptr);
  EXPECT_EQ(memory->page_bytes(), 4096u);
}

TEST(Memory, AnUnknownNumaNodeIsRefusedWithTheChoices) {
  Allocation wanted = shared(4096);
  wanted.numa_node = 0;
  EXPECT_NE(allocate(wanted), nullptr) << "every host has node 0";
  wanted.numa_node = 4711;
  std::unique_ptr<Memory> memory;
  const Error error = Memory::allocate(wanted, &memory);
  EXPECT_EQ(error.code, MP_INVALID_ARGUMENT);
  EXPECT_NE(error.message.find("4711"), std::string::npos) << error.message;
  EXPECT_NE(error.hint.find("choose from 0"), std::string::npos) << error.hint;
  EXPECT_EQ(memory, nullptr);
}

TEST(Memory, MoreThanThereIsIsAnErrorAndNoCrash) {
  for (const uint64_t nbytes : {uint64_t{1} << 60, uint64_t{1} << 63, static_cast<uint64_t>(INT64_MAX), UINT64_MAX}) {
    for (const bool named : {false, true}) {
      Allocation wanted = shared(nbytes);
      wanted.shared = named;
      std::unique_ptr<Memory> memory;
      const Error error = Memory::allocate(wanted, &memory);
      EXPECT_EQ(error.code, MP_NO_MEMORY) << nbytes;
      EXPECT_NE(error.hint.find("this host has "), std::string::npos) << error.hint;
    }
  }
}

class FewDescriptors : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before_), 0); }
  void TearDown() override { setrlimit(RLIMIT_NOFILE, &before_); }
  void limit(rlim_t descriptors) {
    rlimit fewer = before_;
    fewer.rlim_cur = descriptors;
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &fewer), 0);
  }

  rlimit before_{};
};

// An application needs descriptors of its own, so memory leaves it half of them.
TEST_F(FewDescriptors, ItBecomesMemoryThatPeersReachInOtherWays) {
  limit(64);
  std::vector<std::unique_ptr<Memory>> all;
  size_t with_descriptor = 0;
  for (int i = 0; i < 100; ++i) {
    all.push_back(allocate(shared(4096)));
    ASSERT_NE(all.back(), nullptr);
    std::memset(all.back()->base(), i, 4096);
    with_descriptor += all.back()->fd() != nullptr ? 1 : 0;
  }
  EXPECT_EQ(with_descriptor, 32u);
  // The budget comes back with the memory.
  all.clear();
  EXPECT_NE(allocate(shared(4096))->fd(), nullptr);
}

TEST_F(FewDescriptors, NotOneLeftIsNoFailure) {
  std::vector<int> taken;
  limit(256);
  for (int fd = dup(0); fd >= 0; fd = dup(0)) taken.push_back(fd);
  const auto memory = allocate(shared(4096));
  for (const int fd : taken) close(fd);
  ASSERT_NE(memory, nullptr);
  EXPECT_EQ(memory->fd(), nullptr);
  memory->base()[0] = 1;
}

TEST(Memory, DetachedItIsWhereItWasAndNobodyElsesAnyMore) {
  for (const uint64_t nbytes : {uint64_t{10000}, kHugePage + 4096}) {
    const auto memory = allocate(shared(nbytes));
    const Bytes content = random_data(nbytes, 3);
    std::memcpy(memory->base(), content.data(), nbytes);
    std::string why_not;
    const auto mapping = Mapping::open(*memory->fd(), nbytes, &why_not);
    ASSERT_NE(mapping, nullptr);
    const uint8_t *base = memory->base();
    memory->detach();
    EXPECT_EQ(memory->base(), base);
    EXPECT_EQ(std::memcmp(base, content.data(), nbytes), 0);
    mapping->base()[1] = static_cast<uint8_t>(~content[1]);
    EXPECT_EQ(base[1], content[1]) << "what the peer still writes goes nowhere";
    memory->base()[2] = static_cast<uint8_t>(~content[2]);
    EXPECT_EQ(mapping->base()[2], content[2]);
    memory->detach();
    EXPECT_EQ(base[1], content[1]) << "it may be called again";
  }
}

// A peer that keeps its mapping must not keep the memory.
TEST(Memory, ItsPagesGoWithItWhoeverHasThemMapped) {
  std::string why_not;
  auto memory = allocate(shared(kHugePage));
  std::memset(memory->base(), 1, kHugePage);
  const auto mapping = Mapping::open(*memory->fd(), kHugePage, &why_not);
  ASSERT_NE(mapping, nullptr);
  const Fd kept(dup(memory->fd()->get()));
  struct stat status{};
  ASSERT_EQ(fstat(kept.get(), &status), 0);
  EXPECT_GE(status.st_blocks * 512, static_cast<blkcnt_t>(kHugePage));
  memory.reset();
  ASSERT_EQ(fstat(kept.get(), &status), 0);
  EXPECT_EQ(status.st_blocks, 0);
  EXPECT_EQ(mapping->base()[0], 0) << "the mapping itself stays safe to touch";
}

TEST(Memory, ADescriptorThatWasForgottenIsClosedAndTheMemoryStays) {
  const auto memory = allocate(shared(4096));
  const int fd = memory->fd()->get();
  memory->base()[0] = 4;
  memory->forget_fd();
  EXPECT_EQ(memory->fd(), nullptr);
  EXPECT_EQ(fcntl(fd, F_GETFD), -1);
  EXPECT_EQ(memory->base()[0], 4);
  memory->forget_fd();
}

TEST(Memory, ThisHostCanShareIt) { EXPECT_EQ(why_no_shared_memory(), ""); }

}  // namespace
}  // namespace moonpool
