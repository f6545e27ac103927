// SPDX-License-Identifier: Apache-2.0
//
// A path that breaks while the peer lives: its transfers go on over the next one, and it is tried again later.
#include <sys/socket.h>

#include "support_engine.hpp"
#include "support_shm.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

constexpr uint64_t kBytes = 16u << 20;

class EnginePaths : public ::testing::Test {
 protected:
  static void both(mp_config &config) { config.transports = "shm,tcp"; }
  void SetUp() override {
    mapped_ = target_.allocate(kBytes, "mapped");
    std::memcpy(bytes_of(mapped_), memory_.data(), kBytes);
    copied_ = target_.add(memory_, "copied");
    local_ = source_.allocate(kBytes);
    peer_ = source_.connect(target_);
    remotes_ = {look_up(peer_, "mapped"), look_up(peer_, "copied")};
  }
  mp_peer_info info() const {
    mp_peer_info info;
    mp_peer_get_info(peer_.get(), &info);
    return info;
  }
  std::string path() const { return info().path; }
  // As if the Unix socket broke: both sides see its end, and the control connection goes on.
  static size_t cut() {
    const std::vector<int> sockets = served_unix_sockets();
    for (const int fd : sockets) shutdown(fd, SHUT_RDWR);
    return sockets.size();
  }
  bool read_is_right(const mp_remote_region &remote) {
    std::memset(bytes_of(local_), 0, kBytes);
    const TransferHandle moving = submit(peer_, MP_READ, local_, remote, {{0, 0, kBytes}});
    const mp_transfer_state state = finish(moving);
    EXPECT_EQ(state, MP_COMPLETED) << error_of(moving).message << ": " << error_of(moving).cause;
    return std::memcmp(bytes_of(local_), memory_.data(), kBytes) == 0;
  }

  Bytes memory_ = random_data(kBytes, 1);
  TestEngine target_{both}, source_{both};
  RegionHandle mapped_, copied_, local_;
  PeerHandle peer_;
  std::vector<mp_remote_region> remotes_;
};

TEST_F(EnginePaths, ABrokenOneIsLeftAndComesBack) {
  for (const mp_remote_region &remote : remotes_) ASSERT_TRUE(read_is_right(remote));
  EXPECT_EQ(path(), "shm");
  EXPECT_STREQ(info().fallback, "");
  EXPECT_EQ(source_.stat({"paths", "tcp", "read_bytes"}), 0);
  EXPECT_EQ(cut(), 1u);
  ASSERT_TRUE(eventually([&] { return source_.stat({"paths_failed"}) == 1; }));
  // Whichever path it is by now, the bytes are right.
  for (const mp_remote_region &remote : remotes_) ASSERT_TRUE(read_is_right(remote));
  EXPECT_TRUE(eventually([&] { return read_is_right(remotes_[0]) && path() == "shm"; })) << info().fallback;
  for (const mp_remote_region &remote : remotes_) ASSERT_TRUE(read_is_right(remote));
  EXPECT_EQ(source_.stat({"paths_failed"}), 1);
  EXPECT_EQ(source_.stat({"regions_mapped"}), 1) << "what was mapped over the broken one is given back";
  EXPECT_TRUE(eventually([&] { return served_unix_sockets().size() == 1; }));
}

TEST_F(EnginePaths, TheReasonIsToldWhileAnotherIsUsed) {
  ASSERT_TRUE(read_is_right(remotes_[0]));
  // It cannot come back either.
  const std::vector<int> sockets = served_unix_sockets();
  ASSERT_EQ(sockets.size(), 1u);
  shutdown(sockets[0], SHUT_RDWR);
  ASSERT_TRUE(eventually([&] { return source_.stat({"paths_failed"}) == 1; }));
  EXPECT_NE(std::string(info().fallback).find("shm: "), std::string::npos) << info().fallback;
  EXPECT_NE(std::string(info().fallback).find("Unix socket"), std::string::npos) << info().fallback;
}

struct Breaking {
  mp_op op;
  bool mapped, digest;
};
class EnginePathsBreaking : public EnginePaths, public ::testing::WithParamInterface<Breaking> {};
INSTANTIATE_TEST_SUITE_P(While, EnginePathsBreaking,
                         ::testing::Values(Breaking{MP_READ, true, false}, Breaking{MP_WRITE, true, false},
                                           Breaking{MP_READ, false, false}, Breaking{MP_WRITE, false, false},
                                           Breaking{MP_READ, true, true}, Breaking{MP_WRITE, false, true}),
                         [](const auto &info) {
                           return std::string(info.param.op == MP_READ ? "Reading" : "Writing") +
                                  (info.param.mapped ? "Mapped" : "Copied") + (info.param.digest ? "WithDigests" : "");
                         });

TEST_P(EnginePathsBreaking, EveryTransferGoesOn) {
  const Breaking &how = GetParam();
#if defined(__SANITIZE_THREAD__)
  if (how.op == MP_WRITE && !how.mapped) {
    GTEST_SKIP()
        << "what orders the copies of the owner lies in memory that is mapped twice, where the thread sanitizer "
           "does not see it";
  }
#endif
  const mp_remote_region &remote = remotes_[how.mapped ? 0 : 1];
  uint8_t *theirs = how.mapped ? bytes_of(mapped_) : memory_.data();
  for (int round = 0; round < 25; ++round) {
    ASSERT_TRUE(eventually([&] {
      EXPECT_EQ(transfer(peer_, MP_READ, local_, remote, {{0, 0, 64}}), MP_COMPLETED);
      return path() == "shm";
    }));
    const Bytes data = random_data(kBytes, static_cast<uint32_t>(round));
    std::memcpy(how.op == MP_READ ? theirs : bytes_of(local_), data.data(), kBytes);
    std::memset(how.op == MP_READ ? bytes_of(local_) : theirs, 0, kBytes);
    std::vector<TransferHandle> moving;
    constexpr int64_t kPart = kBytes / 4;
    for (int64_t at = 0; at < 4 * kPart; at += kPart) {
      moving.push_back(submit(peer_, how.op, local_, remote, {{at, at, kPart}}, {kPatienceNs, {}, how.digest}));
    }
    // The serving side may know of the socket a moment later, and of the one before it until then.
    ASSERT_TRUE(eventually([] { return cut() > 0; }));
    for (const TransferHandle &one : moving) {
      EXPECT_EQ(finish(one), MP_COMPLETED) << error_of(one).message << ": " << error_of(one).cause;
    }
    ASSERT_EQ(std::memcmp(bytes_of(local_), data.data(), kBytes), 0) << round;
    ASSERT_EQ(std::memcmp(theirs, data.data(), kBytes), 0) << round;
  }
}

// Whoever tries again is right to, and is told with whom and how it was tried.
void expect_lost(const mp_error &error) {
  EXPECT_EQ(error.code, MP_PEER_LOST) << error.message;
  EXPECT_EQ(error.retryable, 1);
  EXPECT_STREQ(error.path, "shm") << error.message;
  EXPECT_NE(std::string(error.peer).find("127.0.0.1"), std::string::npos) << error.peer;
}

TEST(EnginePathsAlone, WithoutAnotherTheTransferFailsAndTheNextOneIsServed) {
  Bytes memory = random_data(kBytes, 1);
  const auto only = [](mp_config &config) { config.transports = "shm"; };
  TestEngine target(only), source(only);
  const RegionHandle region = target.add(memory, "kv"), local = source.allocate(kBytes);
  const PeerHandle peer = source.connect(target);
  const mp_remote_region remote = look_up(peer, "kv");
  ASSERT_EQ(transfer(peer, MP_READ, local, remote, {{0, 0, kBytes}}), MP_COMPLETED);
  // As when the peer restarts: its path ends before its control connection does.
  int refused = 0;
  for (int64_t cuts = 1; refused == 0; ++cuts) {
    ASSERT_LT(cuts, 100);
    for (const int fd : served_unix_sockets()) shutdown(fd, SHUT_RDWR);
    ASSERT_TRUE(eventually([&] { return source.stat({"paths_failed"}) == cuts; }));
    EXPECT_TRUE(eventually([&] {
      mp_error error;
      const TransferHandle moving = submit(peer, MP_READ, local, remote, {{0, 0, kBytes}}, {}, &error);
      if (moving == nullptr) return false;
      const mp_transfer_state state = finish(moving);
      if (state == MP_COMPLETED) return true;
      EXPECT_EQ(state, MP_FAILED);
      expect_lost(error_of(moving));
      ++refused;
      return false;
    }));
  }
}

TEST(EnginePathsAlone, APeerThatIsGoneWhenItsPathIsConnectedIsLost) {
  shm::HostIdentity gone = shm::HostIdentity::of_this_process();
  gone.socket = "moonpool-nobody-listens-here";
  const RawServer target(4096, {{"shm", shm::encode_identity(gone)}});
  for (const char *require : {"", "shm"}) {
    TestEngine source([&](mp_config &config) {
      config.transports = *require == '\0' ? "shm" : "shm,tcp";
      config.require = *require == '\0' ? nullptr : require;
    });
    mp_peer *peer = nullptr;
    mp_error error{};
    mp_peer_connect(source.get(), target.address().c_str(), 0, nullptr, nullptr, &peer, &error);
    ASSERT_EQ(peer, nullptr);
    expect_lost(error);
  }
}

}  // namespace
}  // namespace moonpool
