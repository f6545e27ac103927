// SPDX-License-Identifier: Apache-2.0
//
// Peers that restart, close or go away: handles of the old incarnation are refused, everything else goes on.
#include "support_engine.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

constexpr uint64_t kBytes = 1u << 20;

class EngineRestart : public ::testing::Test {
 protected:
  void start_target(const std::string &listen = "127.0.0.1:0") {
    remote_region_.reset();
    target_.reset();
    target_ = std::make_unique<TestEngine>([&](mp_config &config) { config.listen = listen.c_str(); });
    remote_region_ = target_->add(remote_memory_, "kv");
  }
  void SetUp() override {
    start_target();
    region_ = source_.add(memory_, nullptr);
    peer_ = source_.connect(*target_);
    remote_ = look_up(peer_, "kv");
  }
  // At the same address, as another process.
  void restart_target() {
    const std::string address = target_->address();
    start_target(address);
  }
  // Until the peer is connected to the new incarnation.
  void ensure() {
    uint8_t incarnation[16];
    mp_engine_incarnation(target_->get(), incarnation);
    mp_error error{};
    ASSERT_TRUE(eventually([&] {
      mp_peer_info info;
      mp_peer_ensure(peer_.get(), 0, nullptr, nullptr, &error);
      mp_peer_get_info(peer_.get(), &info);
      return info.state == MP_PEER_READY && std::memcmp(info.incarnation, incarnation, sizeof incarnation) == 0;
    })) << error.message;
  }
  PlanHandle plan(const mp_remote_region &remote) {
    const int64_t zero = 0, length = 4096;
    mp_region *locals[1] = {region_.get()};
    const mp_remote_region *remotes[1] = {&remote};
    const mp_batch batch{1, &zero, 0, &zero, 0, &length, 0, locals, 1, nullptr, remotes, 1, nullptr};
    mp_plan *out = nullptr;
    EXPECT_EQ(mp_plan_create(peer_.get(), &batch, &out, nullptr), MP_OK);
    return PlanHandle(out);
  }

  Bytes remote_memory_ = random_data(kBytes, 1), memory_ = random_data(kBytes, 2);
  std::unique_ptr<TestEngine> target_;
  RegionHandle remote_region_;
  TestEngine source_;
  RegionHandle region_;
  PeerHandle peer_;
  mp_remote_region remote_;
};

TEST_F(EngineRestart, HandlesOfTheOldIncarnationAreStaleAndTheNextLookUpWorks) {
  const PlanHandle old_plan = plan(remote_);
  restart_target();
  ensure();
  const Bytes before = memory_, remote_before = remote_memory_;
  mp_error error;
  EXPECT_EQ(submit(peer_, MP_WRITE, region_, remote_, {{0, 0, 4096}}, {}, &error), nullptr);
  EXPECT_EQ(error.code, MP_REGION_STALE);
  EXPECT_NE(std::string(error.hint), "");
  mp_transfer *posted = nullptr;
  const mp_status status = mp_plan_post(old_plan.get(), MP_WRITE, nullptr, 0, nullptr, &posted, &error);
  const TransferHandle stale(posted);
  if (status == MP_OK) {
    EXPECT_EQ(finish(stale), MP_FAILED);
    EXPECT_EQ(statuses(stale), std::vector<uint8_t>{MP_REGION_STALE});
  } else {
    EXPECT_EQ(status, MP_REGION_STALE);
  }
  EXPECT_TRUE(remote_memory_ == remote_before);

  const mp_remote_region found = look_up(peer_, "kv");
  EXPECT_NE(found.key, remote_.key);
  EXPECT_EQ(transfer(peer_, MP_WRITE, region_, found, {{0, 0, 4096}}), MP_COMPLETED);
  EXPECT_TRUE(std::equal(memory_.begin(), memory_.begin() + 4096, remote_memory_.begin()));
  EXPECT_TRUE(memory_ == before);
}

TEST_F(EngineRestart, ATransferThatConnectsAgainIsRefusedByANewIncarnation) {
  restart_target();
  ASSERT_TRUE(eventually([&] {
    mp_peer_info info;
    mp_peer_get_info(peer_.get(), &info);
    return info.state == MP_PEER_LOST_STATE;
  }));
  mp_error error;
  const TransferHandle moving = submit(peer_, MP_READ, region_, remote_, {{0, 0, 4096}}, {}, &error);
  if (moving == nullptr) {
    EXPECT_EQ(error.code, MP_REGION_STALE);
  } else {
    EXPECT_EQ(finish(moving), MP_FAILED);
    EXPECT_EQ(statuses(moving), std::vector<uint8_t>{MP_REGION_STALE});
  }
}

TEST_F(EngineRestart, APeerThatIsGoneFailsTransfersWithItsCause) {
  const std::string address = target_->address();
  remote_region_.reset();
  target_.reset();
  const TransferHandle moving = submit(peer_, MP_READ, region_, remote_, {{0, 0, 4096}});
  EXPECT_EQ(finish(moving), MP_FAILED);
  const mp_error error = error_of(moving);
  EXPECT_TRUE(error.code == MP_CONNECT || error.code == MP_PEER_LOST) << error.code;
  EXPECT_NE(std::string(error.peer).find(address), std::string::npos) << error.peer;
  mp_error refused;
  EXPECT_EQ(mp_peer_ensure(peer_.get(), 200, nullptr, nullptr, &refused), MP_CONNECT);
  EXPECT_NE(std::string(refused.cause), "") << refused.message;
  EXPECT_EQ(refused.retryable, 1);
}

TEST_F(EngineRestart, RegionsComeAndGoWhileConnected) {
  mp_remote_region found;
  mp_error error;
  EXPECT_EQ(mp_peer_find_region(peer_.get(), "later", 0, &found, &error), MP_REGION_UNKNOWN);
  EXPECT_NE(std::string(error.hint).find("\"kv\""), std::string::npos) << error.hint;
  RegionHandle later;
  std::thread owner([&] { later = target_->allocate(4096, "later"); });
  EXPECT_EQ(look_up(peer_, "later").length, 4096u);
  owner.join();
  mp_remote_region list[3];
  ASSERT_EQ(mp_peer_list_regions(peer_.get(), list, 3), 2u);
  EXPECT_STREQ(list[0].name, "kv");
  EXPECT_STREQ(list[1].name, "later");
  ASSERT_EQ(mp_region_release(later.get(), nullptr), MP_OK);
  EXPECT_TRUE(eventually([&] { return mp_peer_list_regions(peer_.get(), nullptr, 0) == 1; }));

  // Released and registered again under the same name: the old handle does not reach the new region.
  ASSERT_EQ(mp_region_release(remote_region_.get(), nullptr), MP_OK);
  const TransferHandle released = submit(peer_, MP_WRITE, region_, remote_, {{0, 0, 8}});
  EXPECT_EQ(finish(released), MP_FAILED);
  EXPECT_EQ(statuses(released), std::vector<uint8_t>{MP_REGION_RELEASED});
  remote_region_ = target_->add(remote_memory_, "kv");
  const TransferHandle old = submit(peer_, MP_WRITE, region_, remote_, {{0, 0, 8}});
  EXPECT_EQ(finish(old), MP_FAILED);
  EXPECT_EQ(statuses(old), std::vector<uint8_t>{MP_REGION_RELEASED});
}

// Some items of a batch are refused by the target, not by the checks on this side.
TEST_F(EngineRestart, ItemsThatTheTargetRefusesDoNotHideTheOthers) {
  const RegionHandle gone = target_->allocate(kBytes, "gone");
  const mp_remote_region gone_remote = look_up(peer_, "gone");
  ASSERT_EQ(mp_region_release(gone.get(), nullptr), MP_OK);
  std::vector<Item> items;
  std::vector<uint32_t> remote_index;
  std::vector<uint8_t> expected;
  for (int64_t i = 0; i < 90; ++i) {
    items.push_back({i * 1000, i * 2000, 1000});
    remote_index.push_back(i % 3 == 0 ? 1 : 0);
    expected.push_back(i % 3 == 0 ? MP_REGION_RELEASED : MP_OK);
  }
  mp_region *locals[1] = {region_.get()};
  const mp_remote_region *remotes[2] = {&remote_, &gone_remote};
  const mp_batch batch{items.size(), &items[0].local, 3, &items[0].remote,   3, &items[0].length, 3, locals, 1,
                       nullptr,      remotes,         2, remote_index.data()};
  for (const mp_op op : {MP_READ, MP_WRITE}) {
    for (const int32_t digest : {0, 1}) {
      mp_options options{};
      options.digest = digest;
      mp_transfer *out = nullptr;
      mp_error error;
      ASSERT_EQ(mp_submit(peer_.get(), op, &batch, &options, &out, &error), MP_OK) << error.message;
      const TransferHandle moving(out);
      EXPECT_EQ(finish(moving), MP_FAILED);
      EXPECT_EQ(statuses(moving), expected) << op << " digest " << digest;
      EXPECT_EQ(error_of(moving).code, MP_REGION_RELEASED);
      EXPECT_EQ(error_of(moving).item, 0);
      for (size_t i = 1; i < items.size(); i += 3) {
        EXPECT_EQ(std::memcmp(memory_.data() + items[i].local, remote_memory_.data() + items[i].remote, 1000), 0);
      }
    }
  }
  EXPECT_EQ(source_.stat({"lane_errors"}), 0);
}

}  // namespace
}  // namespace moonpool
