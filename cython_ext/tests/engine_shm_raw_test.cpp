// SPDX-License-Identifier: Apache-2.0
//
// A client on the same host that is stopped in the middle, dies, lies or sends garbage: the owner of the memory goes
// on, and nothing is touched that was not offered.
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <future>

#include "support_engine.hpp"
#include "support_shm.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

constexpr uint64_t kBytes = 1u << 20;

uint64_t address_of(const void *memory) { return reinterpret_cast<uintptr_t>(memory); }

class EngineShmRaw : public ::testing::Test {
 protected:
  explicit EngineShmRaw(uint32_t progress_timeout_ms = 0)
      : target_([&](mp_config &config) {
          config.transports = "shm,tcp";
          if (progress_timeout_ms != 0) config.progress_timeout_ms = progress_timeout_ms;
        }) {}
  void SetUp() override {
    mapped_ = target_.allocate(kBytes, "mapped");
    std::memcpy(bytes_of(mapped_), random_data(kBytes, 1).data(), kBytes);
    copied_ = target_.add(memory_, "copied");
    constant_ = target_.add(constant_memory_, "constant", 0);
    ASSERT_TRUE(client_.connect());
    ASSERT_TRUE(client_.open());
    ASSERT_EQ(client_.status(), MP_OK);
  }
  void TearDown() override {
    EXPECT_TRUE(memory_ == random_data(kBytes, 2)) << "nothing here was written";
    EXPECT_TRUE(constant_memory_ == random_data(kBytes, 3));
    // An honest client is served as before.
    TestEngine source([](mp_config &config) { config.transports = "shm"; });
    const PeerHandle peer = source.connect(target_);
    const RegionHandle local = source.allocate(kBytes);
    EXPECT_EQ(transfer(peer, MP_READ, local, look_up(peer, "copied"), {{0, 0, kBytes}}), MP_COMPLETED);
    EXPECT_EQ(std::memcmp(bytes_of(local), memory_.data(), kBytes), 0);
  }
  uint64_t key(const char *name) { return client_.raw().key(name); }
  int64_t protocol_errors() const { return target_.stat({"serving", "protocol_errors"}); }

  // Before the engine, since registered memory has to outlive it.
  Bytes memory_ = random_data(kBytes, 2), constant_memory_ = random_data(kBytes, 3), own_ = Bytes(kBytes, 9);
  TestEngine target_;
  RegionHandle mapped_, copied_, constant_;
  RawShmClient client_{target_.port()};
};

TEST_F(EngineShmRaw, EachDescriptorIsCheckedByTheOwner) {
  const uint64_t own = address_of(own_.data());
  const std::vector<shm::Desc> descs = {
      {key("copied"), 0, 100, own},         {key("copied") ^ 1, 0, 100, own},
      {key("copied"), kBytes, 1, own},      {key("copied"), kBytes - 1, 2, own},
      {key("copied"), UINT64_MAX, 2, own},  {key("copied"), 5, 0, own},
      {key("copied"), 100, 100, own + 100}, {key("mapped"), 0, 100, own + 200},
      {key("copied"), 0, 100, 8},           {key("copied"), 0, 100, UINT64_MAX - 8},
      {key("constant"), 7, 100, own + 300},
  };
  const auto response = client_.copy(MP_READ, descs);
  ASSERT_TRUE(response);
  std::vector<std::pair<uint32_t, uint32_t>> failed;
  for (const wire::FailedDesc &one : response->failed) failed.emplace_back(one.desc, one.status);
  const std::vector<std::pair<uint32_t, uint32_t>> wanted = {
      {1, MP_REGION_UNKNOWN}, {2, MP_OUT_OF_RANGE}, {3, MP_OUT_OF_RANGE}, {4, MP_OUT_OF_RANGE},
      {5, MP_OUT_OF_RANGE},   {8, MP_SYSTEM},       {9, MP_SYSTEM}};
  EXPECT_EQ(failed, wanted);
  EXPECT_EQ(std::memcmp(own_.data(), memory_.data(), 200), 0);
  EXPECT_EQ(std::memcmp(own_.data() + 200, bytes_of(mapped_), 100), 0);
  EXPECT_EQ(std::memcmp(own_.data() + 300, constant_memory_.data() + 7, 100), 0);
  EXPECT_EQ(own_[400], 9);
}

TEST_F(EngineShmRaw, WhatPeersMayOnlyReadIsNotWrittenForThem) {
  const auto response = client_.copy(MP_WRITE, {{key("constant"), 0, 100, address_of(own_.data())}});
  ASSERT_TRUE(response);
  ASSERT_EQ(response->failed.size(), 1u);
  EXPECT_EQ(response->failed[0].status, MP_REGION_READ_ONLY);
}

// Memory of the client that ends in the middle: what was moved is said to be moved, and no more.
TEST_F(EngineShmRaw, APieceThatRunsIntoAHoleFailsAloneWhereverItStands) {
  auto *space = static_cast<uint8_t *>(mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(space, MAP_FAILED);
  ASSERT_EQ(munmap(space + 4096, 4096), 0);
  const shm::Desc good{key("copied"), 0, 64, address_of(space)}, bad{key("copied"), 0, 200, address_of(space) + 4000};
  for (size_t at = 0; at < 4; ++at) {
    std::vector<shm::Desc> descs(4, good);
    descs[at] = bad;
    std::memset(space, 0, 4000);
    const auto response = client_.copy(MP_READ, descs);
    ASSERT_TRUE(response);
    ASSERT_EQ(response->failed.size(), 1u) << at;
    EXPECT_EQ(response->failed[0].desc, at);
    EXPECT_EQ(response->failed[0].status, MP_SYSTEM);
    EXPECT_EQ(std::memcmp(space, memory_.data(), 64), 0);
  }
  munmap(space, 4096);
}

TEST_F(EngineShmRaw, AProofThatIsNotInThisProcessIsNotAccepted) {
  RawShmClient liar(target_.port());
  ASSERT_TRUE(liar.connect());
  const uint64_t content = 5;
  ASSERT_TRUE(liar.send(shm::request_header(shm::kOpen, address_of(&content), content + 1)));
  auto response = liar.receive();
  ASSERT_TRUE(response);
  EXPECT_EQ(response->header.status, MP_TRANSPORT_UNAVAILABLE);
  RawShmClient stray(target_.port());
  ASSERT_TRUE(stray.connect());
  ASSERT_TRUE(stray.send(shm::request_header(shm::kOpen, 8, 0)));
  response = stray.receive();
  ASSERT_TRUE(response);
  EXPECT_EQ(response->header.status, MP_TRANSPORT_UNAVAILABLE);
  EXPECT_EQ(response->header.value, static_cast<uint32_t>(EFAULT));
}

TEST_F(EngineShmRaw, MappingIsAnsweredForEveryKindOfKey) {
  RawShmClient::Mapped mapped;
  ASSERT_TRUE(client_.map(key("mapped"), &mapped));
  ASSERT_EQ(mapped.status, MP_OK);
  EXPECT_EQ(std::memcmp(mapped.memory->base(), bytes_of(mapped_), kBytes), 0);
  RawShmClient::Mapped other;
  ASSERT_TRUE(client_.map(key("mapped"), &other));
  EXPECT_EQ(other.status, MP_TRANSPORT_UNAVAILABLE) << "one mapping of a region at a time";
  ASSERT_TRUE(client_.map(key("copied"), &other));
  EXPECT_EQ(other.status, MP_OK);
  EXPECT_EQ(other.memory, nullptr);
  EXPECT_EQ(other.address, address_of(memory_.data()));
  EXPECT_EQ(other.length, kBytes);
  EXPECT_NE(other.slot, mapped.slot);
  ASSERT_TRUE(client_.map(key("copied"), &other));
  EXPECT_EQ(other.status, MP_TRANSPORT_UNAVAILABLE) << "once at a time";
  ASSERT_TRUE(client_.map(12345, &other));
  EXPECT_EQ(other.status, MP_REGION_UNKNOWN);
  // Given back, even twice and even what was never had, it can be had again.
  ASSERT_TRUE(client_.send(shm::request_header(shm::kUnmap, key("mapped"))));
  ASSERT_TRUE(client_.send(shm::request_header(shm::kUnmap, key("mapped"))));
  ASSERT_TRUE(client_.send(shm::request_header(shm::kUnmap, 12345)));
  ASSERT_TRUE(client_.map(key("mapped"), &mapped));
  EXPECT_EQ(mapped.status, MP_OK);
  ASSERT_EQ(mp_region_release(mapped_.get(), nullptr), MP_OK);
  ASSERT_TRUE(client_.map(key("mapped"), &other));
  EXPECT_EQ(other.status, MP_REGION_RELEASED);
  EXPECT_EQ(protocol_errors(), 0);
}

// Neither memory nor descriptors of the owner grow with what a client asks for and does not take.
TEST_F(EngineShmRaw, AClientThatTakesNoAnswersFillsOnlyItsOwnSocket) {
  std::string requests;
  for (int i = 0; i < 1000; ++i) {
    shm::encode(shm::request_header(shm::kMap, 1), nullptr, &requests);
    shm::RequestHeader header = shm::request_header(shm::kCopy, 1, 8);
    header.op = MP_READ;
    header.count = 1;
    const shm::Desc desc{key("copied"), 0, 8, address_of(own_.data())};
    shm::encode(header, &desc, &requests);
  }
  // Until the engine reads no more.
  size_t sent = 0;
  for (int idle = 0; idle < 200 && sent < 200 * requests.size();) {
    const size_t at = sent % requests.size();
    const ssize_t n = ::send(client_.fd(), requests.data() + at, requests.size() - at, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n > 0) sent += static_cast<size_t>(n), idle = 0;
    if (n <= 0) ++idle, std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_LT(sent, 200 * requests.size());
  client_.close();
  EXPECT_TRUE(eventually([&] { return target_.stat({"serving", "lanes"}) == 0; }));
}

// Its own process would be told of it over and over.
TEST_F(EngineShmRaw, AClientThatCannotBeAnsweredIsHungUpOn) {
  ASSERT_EQ(shutdown(client_.fd(), SHUT_RD), 0);
  ASSERT_TRUE(client_.send(shm::request_header(shm::kMap, key("mapped"))));
  EXPECT_TRUE(eventually([&] { return target_.stat({"serving", "lanes"}) == 0; }));
}

// The kernel counts the descriptors that a user has sent and nobody has taken, and lets no more go than a process may
// have open. Root is let off. Ends a process of its own, with 0 or the line that failed.
void map_while_too_many_descriptors_are_under_way() {
  const auto check = [](bool good, int line) {
    if (!good) _exit(line % 256);
  };
  constexpr uid_t kNobody = 65534;
  check(geteuid() != 0 || (setresgid(kNobody, kNobody, kNobody) == 0 && setresuid(kNobody, kNobody, kNobody) == 0 &&
                           prctl(PR_SET_DUMPABLE, 1) == 0),
        __LINE__);
  TestEngine target([](mp_config &config) { config.transports = "shm,tcp"; });
  const RegionHandle region = target.allocate(kBytes, "kv");
  RawShmClient client(target.port());
  check(client.connect() && client.open(), __LINE__);
  int ends[2];
  check(socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, ends) == 0, __LINE__);
  const std::vector<int> many(200, ends[0]);
  char byte = 0;
  iovec piece{&byte, 1};
  std::vector<char> control(CMSG_SPACE(many.size() * sizeof(int)));
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr *header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(many.size() * sizeof(int));
  std::memcpy(CMSG_DATA(header), many.data(), many.size() * sizeof(int));
  check(sendmsg(ends[0], &message, 0) == 1, __LINE__);
  rlimit before{};
  check(getrlimit(RLIMIT_NOFILE, &before) == 0, __LINE__);
  rlimit few = before;
  few.rlim_cur = 100;
  check(setrlimit(RLIMIT_NOFILE, &few) == 0, __LINE__);
  RawShmClient::Mapped mapped;
  check(client.map(client.raw().key("kv"), &mapped), __LINE__);
  check(mapped.status == MP_LIMIT, __LINE__);
  check(setrlimit(RLIMIT_NOFILE, &before) == 0, __LINE__);
  check(client.map(client.raw().key("kv"), &mapped), __LINE__);
  check(mapped.status == MP_OK && mapped.slot == 0, __LINE__);
  _exit(0);
}

TEST(EngineShmDeathTest, TooManyDescriptorsUnderWayAreARegionThatCannotBeMapped) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(map_while_too_many_descriptors_are_under_way(), ::testing::ExitedWithCode(0), "");
}

// ---------------------------------------------------------------- garbage

TEST_F(EngineShmRaw, GarbageEndsTheConnectionAndNothingElse) {
  std::mt19937 random(5);
  for (int round = 0; round < 20; ++round) {
    RawShmClient one(target_.port());
    ASSERT_TRUE(one.connect());
    if (round % 2 == 0) {
      ASSERT_TRUE(one.open());
    }
    const Bytes garbage = random_data(1 + random() % 5000, random());
    send_all(one.fd(), garbage.data(), garbage.size());
    shutdown(one.fd(), SHUT_WR);
    EXPECT_TRUE(ends(one.fd()));
  }
  EXPECT_GT(protocol_errors(), 0);
  EXPECT_TRUE(eventually([&] { return target_.stat({"serving", "lanes"}) == 1; }));
  EXPECT_TRUE(client_.copy(MP_READ, {{key("copied"), 0, 8, address_of(own_.data())}}));
}

TEST_F(EngineShmRaw, RequestsOutOfOrderEndTheConnection) {
  const uint64_t proof = 1;
  const shm::RequestHeader open = shm::request_header(shm::kOpen, address_of(&proof), proof);
  ASSERT_TRUE(client_.send(open));
  EXPECT_TRUE(ends(client_.fd())) << "opened twice";
  for (const shm::Request type : {shm::kMap, shm::kUnmap}) {
    RawShmClient one(target_.port());
    ASSERT_TRUE(one.connect());
    ASSERT_TRUE(one.send(shm::request_header(type, key("mapped"))));
    EXPECT_TRUE(ends(one.fd())) << "not opened";
  }
}

TEST_F(EngineShmRaw, GarbageInsteadOfAHandshake) {
  for (int round = 0; round < 5; ++round) {
    const Fd fd = client_.dial_without_handshake();
    const Bytes garbage = random_data(500, static_cast<uint32_t>(round));
    send_all(fd.get(), garbage.data(), garbage.size());
    EXPECT_TRUE(ends(fd.get()));
  }
}

TEST_F(EngineShmRaw, AnotherSessionsTokenIsRefused) {
  const Fd fd = client_.dial(wire::kShm, random_id(), 2);
  EXPECT_FALSE(fd);
  EXPECT_EQ(client_.raw().status(), MP_PEER_LOST);
  // The right token, from an engine with another incarnation.
  RawShmClient thief(target_.port());
  ASSERT_TRUE(thief.connect());
  EXPECT_FALSE(thief.dial(wire::kShm, client_.raw().session(), 2));
}

// Without the kernel's word for who is on the other side nothing is shared.
TEST_F(EngineShmRaw, OverTcpItIsRefused) {
  const Fd fd = client_.raw().open(wire::kShm, client_.raw().session(), 2);
  ASSERT_TRUE(fd);
  const uint64_t proof = 1;
  const shm::RequestHeader open = shm::request_header(shm::kOpen, address_of(&proof), proof);
  send_struct(fd.get(), open);
  EXPECT_TRUE(ends(fd.get()));
}

// ---------------------------------------------------------------- in the middle of a copy

// A client that has begun a copy and never ends it. The owner's patience is short here.
class EngineShmStuck : public EngineShmRaw {
 protected:
  explicit EngineShmStuck(uint32_t progress_timeout_ms = 500) : EngineShmRaw(progress_timeout_ms) {}
  void SetUp() override {
    EngineShmRaw::SetUp();
    ASSERT_TRUE(client_.map(key("mapped"), &mapping_));
    ASSERT_EQ(mapping_.status, MP_OK);
    ASSERT_TRUE(client_.table().begin_use(mapping_.slot));
  }

  RawShmClient::Mapped mapping_;
};

TEST_F(EngineShmStuck, IsWaitedForAndThenWritesPagesThatAreNobodysAnyMore) {
  const Bytes before(bytes_of(mapped_), bytes_of(mapped_) + kBytes);
  ASSERT_EQ(mp_region_release(mapped_.get(), nullptr), MP_OK);
  EXPECT_EQ(std::memcmp(bytes_of(mapped_), before.data(), kBytes), 0);
  std::memset(mapping_.memory->base(), 0x5a, kBytes);
  EXPECT_EQ(std::memcmp(bytes_of(mapped_), before.data(), kBytes), 0);
  std::memset(bytes_of(mapped_), 1, kBytes);
  EXPECT_EQ(mapping_.memory->base()[0], 0x5a);
  EXPECT_FALSE(client_.table().begin_use(mapping_.slot));
  // It is told, so that it does not report these bytes as written.
  EXPECT_FALSE(client_.table().end_use(mapping_.slot));
}

TEST_F(EngineShmStuck, HasWrittenWhatItEndedInTime) {
  auto releasing = std::async(std::launch::async, [&] { return mp_region_release(mapped_.get(), nullptr); });
  mapping_.memory->base()[0] ^= 1;
  const uint8_t written = mapping_.memory->base()[0];
  EXPECT_TRUE(client_.table().end_use(mapping_.slot));
  EXPECT_EQ(releasing.get(), MP_OK);
  EXPECT_EQ(bytes_of(mapped_)[0], written);
}

TEST_F(EngineShmStuck, DoesNotHoldUpOtherRegions) {
  const RegionHandle other = target_.allocate(4096, "other");
  ASSERT_EQ(mp_region_release(other.get(), nullptr), MP_OK);
  ASSERT_EQ(mp_region_release(copied_.get(), nullptr), MP_OK);
  copied_ = target_.add(memory_, "copied");
}

// Had each of its regions a patience of its own, the owner would wait for minutes.
TEST_F(EngineShmStuck, InManyRegionsHoldsAnEngineUpOnlyOnce) {
  constexpr int kRegions = 1000;
  TestEngine owner([](mp_config &config) {
    config.transports = "shm";
    config.progress_timeout_ms = 400;
  });
  std::vector<RegionHandle> regions;
  std::vector<std::string> names;
  for (int i = 0; i < kRegions; ++i) {
    names.push_back(std::to_string(i));
    regions.push_back(owner.allocate(4096, names.back().c_str()));
  }
  RawShmClient client(owner.port());
  ASSERT_TRUE(client.connect());
  ASSERT_TRUE(client.open());
  std::vector<RawShmClient::Mapped> mapped(kRegions);
  for (int i = 0; i < kRegions; ++i) {
    ASSERT_TRUE(client.map(client.raw().key(names[static_cast<size_t>(i)]), &mapped[static_cast<size_t>(i)]));
    ASSERT_TRUE(client.table().begin_use(mapped[static_cast<size_t>(i)].slot));
  }
  auto closing = std::async(std::launch::async, [&] { owner.close(); });
  const bool in_time = closing.wait_for(std::chrono::nanoseconds(kPatienceNs)) == std::future_status::ready;
  EXPECT_TRUE(in_time) << "400 ms for each of " << kRegions << " regions";
  // So that a test that failed ends.
  for (const RawShmClient::Mapped &one : mapped) client.table().end_use(one.slot);
}

// A client that has begun to read memory that was only registered. The patience is longer than a test may take.
class EngineShmReads : public EngineShmRaw {
 protected:
  EngineShmReads() : EngineShmRaw(static_cast<uint32_t>(10 * kPatienceNs / kMillisecond)) {}
  void SetUp() override {
    EngineShmRaw::SetUp();
    ASSERT_TRUE(client_.map(key("copied"), &lent_));
    ASSERT_EQ(lent_.status, MP_OK);
    ASSERT_TRUE(client_.table().begin_use(lent_.slot));
    ASSERT_TRUE(client_.table().begin_use(lent_.slot)) << "two of its threads";
  }

  RawShmClient::Mapped lent_;
};

TEST_F(EngineShmReads, AndIsNotWaitedForButTold) {
  auto releasing = std::async(std::launch::async, [&] { return mp_region_release(copied_.get(), nullptr); });
  ASSERT_EQ(releasing.wait_for(std::chrono::nanoseconds(kPatienceNs)), std::future_status::ready);
  EXPECT_EQ(releasing.get(), MP_OK);
  // The same memory under the same name is another region.
  copied_ = target_.add(memory_, "copied");
  EXPECT_FALSE(client_.table().end_use(lent_.slot));
  EXPECT_FALSE(client_.table().end_use(lent_.slot));
  EXPECT_FALSE(client_.table().begin_use(lent_.slot));
}

TEST_F(EngineShmReads, AndIsToldByTheTableAndTheSocketWhenItIsFenced) {
  uint32_t sessions = 0;
  const Id128 incarnation = client_.raw().incarnation();
  auto fencing = std::async(std::launch::async,
                            [&] { return mp_engine_fence(target_.get(), incarnation.data(), &sessions, nullptr); });
  ASSERT_EQ(fencing.wait_for(std::chrono::nanoseconds(kPatienceNs)), std::future_status::ready);
  EXPECT_EQ(fencing.get(), MP_OK);
  EXPECT_EQ(sessions, 1u);
  EXPECT_FALSE(client_.table().end_use(lent_.slot));
  EXPECT_TRUE(ends(client_.fd()));
}

TEST_F(EngineShmReads, AndIsToldWhenTheEngineIsClosed) {
  TestEngine owner([](mp_config &config) { config.transports = "shm"; });
  Bytes memory(kBytes, 5);
  const RegionHandle region = owner.add(memory, "kv");
  RawShmClient client(owner.port());
  ASSERT_TRUE(client.connect());
  ASSERT_TRUE(client.open());
  RawShmClient::Mapped lent;
  ASSERT_TRUE(client.map(client.raw().key("kv"), &lent));
  ASSERT_TRUE(client.table().begin_use(lent.slot));
  owner.close();
  EXPECT_TRUE(ends(client.fd())) << "whoever reads looks at the socket as well";
}

// The default patience is for a client that is alive; the death of one is known at once.
class EngineShmDies : public EngineShmStuck {
 protected:
  EngineShmDies() : EngineShmStuck(static_cast<uint32_t>(10 * kPatienceNs / kMillisecond)) {}
};

TEST_F(EngineShmDies, AndIsNotWaitedFor) {
  auto releasing = std::async(std::launch::async, [&] { return mp_region_release(mapped_.get(), nullptr); });
  // The release waits for the copy by now, or will find the client gone.
  EXPECT_TRUE(eventually([&] {
    if (!client_.table().begin_use(mapping_.slot)) return true;
    client_.table().end_use(mapping_.slot);
    return false;
  }));
  client_.close();
  const bool in_time = releasing.wait_for(std::chrono::nanoseconds(kPatienceNs)) == std::future_status::ready;
  EXPECT_TRUE(in_time);
  // So that a test that failed ends.
  if (!in_time) client_.table().end_use(mapping_.slot);
  EXPECT_EQ(releasing.get(), MP_OK);
}

}  // namespace
}  // namespace moonpool
