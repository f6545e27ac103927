// SPDX-License-Identifier: Apache-2.0
//
// Memory and devices: what a device does not register goes another way or is an error that helps, and what is released
// is nobody's any more.
#include "support_rdma.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

constexpr uint32_t kAlways = 1'000'000;

struct Refusal {
  int err;
  const char *cause, *hint;
};
class EngineRdmaRefusal : public EngineRdma, public ::testing::WithParamInterface<Refusal> {};
INSTANTIATE_TEST_SUITE_P(With, EngineRdmaRefusal,
                         ::testing::Values(Refusal{ENOMEM, "Cannot allocate memory", "RLIMIT_MEMLOCK"},
                                           Refusal{EAGAIN, "Resource temporarily unavailable", "RLIMIT_MEMLOCK"},
                                           Refusal{EFAULT, "Bad address", "mapped"},
                                           Refusal{EINVAL, "Invalid argument", "mapped"}),
                         [](const auto &info) { return "Errno" + std::to_string(info.param.err); });

TEST_P(EngineRdmaRefusal, IsAnErrorWhereRdmaIsRequired) {
  open_engines([](mp_config &config) { config.require = "rdma"; });
  // The second of its two devices; the first gives back what it had.
  standin::fail_calls({.call = standin::Call::kRegister, .err = GetParam().err, .times = kAlways, .device = 1});
  Bytes memory = random_data(bytes_, 1);
  mp_region *region = nullptr;
  mp_error error;
  ASSERT_EQ(
      mp_region_register(source_->get(), memory.data(), memory.size(), nullptr, MP_REGION_WRITABLE, &region, &error),
      MP_SYSTEM);
  EXPECT_EQ(region, nullptr);
  EXPECT_EQ(error.sys_errno, GetParam().err);
  EXPECT_TRUE(contains(error.message, "device standin1: cannot register 16777216 bytes")) << error.message;
  EXPECT_TRUE(contains(error.cause, GetParam().cause)) << error.cause;
  EXPECT_TRUE(contains(error.hint, GetParam().hint)) << error.hint;
  EXPECT_EQ(standin::alive().registrations, 0) << "all devices or none";
  EXPECT_EQ(source_->stat({"regions_not_registered"}), 1);
  // The engine goes on with others.
  standin::clear_faults();
  add_regions();
  connect();
  expect_moved(MP_WRITE, {{0, 0, 1000}});
}

TEST_P(EngineRdmaRefusal, OtherwiseTheRegionGoesAnotherWay) {
  for (const bool at_target : {false, true}) {
    SCOPED_TRACE(at_target);
    open_engines();
    standin::fail_calls(
        {.call = standin::Call::kRegister, .err = GetParam().err, .times = kAlways, .device = at_target ? 3 : 0});
    add_regions();
    EXPECT_EQ(standin::alive().registrations, 2);
    const TestEngine &refusing = at_target ? *target_ : *source_;
    EXPECT_EQ(refusing.stat({"regions_not_registered"}), 1);
    connect();
    for (const mp_op op : {MP_WRITE, MP_READ}) expect_moved(op, {{0, 0, static_cast<int64_t>(bytes_)}, {1, 1, 1}});
    EXPECT_EQ(standin::counters().written_bytes + standin::counters().read_bytes, 0u);
    EXPECT_GT(moved_by("tcp"), 0);
    // Other regions still go over rdma.
    standin::clear_faults();
    Bytes here = random_data(1 << 20, 3), there = random_data(1 << 20, 4);
    {
      const RegionHandle local = source_->add(here, nullptr), region = target_->add(there, "other");
      const mp_remote_region other = look_up(peer_, "other");
      EXPECT_EQ(transfer(peer_, MP_WRITE, local, other, {{0, 0, 1 << 20}}), MP_COMPLETED);
      EXPECT_TRUE(here == there);
      EXPECT_EQ(standin::counters().written_bytes, 1u << 20);
    }
    close();
    standin::reset();
  }
}

TEST_F(EngineRdma, UnderRequireATransferSaysThatThePeersMemoryIsNotRegistered) {
  open_engines([](mp_config &config) { config.require = "rdma"; });
  standin::fail_calls({.call = standin::Call::kRegister, .err = ENOMEM, .times = kAlways, .device = 2});
  add_regions();
  connect();
  for (int round = 0; round < 2; ++round) {
    mp_error error{};
    const TransferHandle moving = submit(peer_, MP_WRITE, local_, remote_, {{0, 0, 1000}}, {}, &error);
    if (moving != nullptr) {
      EXPECT_EQ(finish(moving), MP_FAILED);
      error = error_of(moving);
    }
    EXPECT_EQ(error.code, MP_TRANSPORT_UNAVAILABLE);
    const std::string text = std::string(error.message) + error.cause;
    EXPECT_TRUE(contains(text, "not registered for RDMA") || contains(text, "no path to the peer takes")) << text;
  }
}

TEST_F(EngineRdma, APieceThatIsRefusedGivesBackTheOthers) {
  standin::set_limits(0, {.mr_bytes_max = 2 << 20});
  open_engines();
  standin::fail_calls({.call = standin::Call::kRegister, .err = ENOMEM, .device = 1, .skip = 3});
  local_memory_ = random_data(bytes_, 1);
  local_ = source_->add(local_memory_, nullptr);
  EXPECT_EQ(standin::alive().registrations, 0);
  EXPECT_EQ(source_->stat({"regions_not_registered"}), 1);
}

TEST_F(EngineRdma, MemoryThatNobodyMayWriteIsRegisteredForReading) {
  open_engines();
  local_memory_ = random_data(bytes_, 1);
  remote_memory_ = random_data(bytes_, 2);
  local_ = source_->add(local_memory_, nullptr);
  // The kernel's answer for pages that this process may not write.
  for (const int device : {2, 3}) {
    standin::fail_calls({.call = standin::Call::kRegister, .err = EFAULT, .device = device});
  }
  remote_region_ = target_->add(remote_memory_, "kv", 0);
  EXPECT_EQ(target_->stat({"regions_not_registered"}), 0);
  connect();
  expect_moved(MP_READ, {{0, 0, static_cast<int64_t>(bytes_)}});
  EXPECT_EQ(moved_by("tcp"), 0);
  mp_error error{};
  EXPECT_EQ(submit(peer_, MP_WRITE, local_, remote_, {{0, 0, 10}}, {}, &error), nullptr);
  EXPECT_EQ(error.code, MP_REGION_READ_ONLY);
}

// ---------------------------------------------------------------- released

class EngineRdmaRelease : public EngineRdma {
 protected:
  // The owner's again: it is used for something else, and stays as it is.
  void reuse() { std::fill(remote_memory_.begin(), remote_memory_.end(), 7); }
  bool untouched() const { return remote_memory_ == Bytes(bytes_, 7); }
  void release() {
    mp_error error;
    ASSERT_EQ(mp_region_release(remote_region_.get(), &error), MP_OK) << error.message;
  }
  void expect_refused(const TransferHandle &transfer) {
    EXPECT_EQ(finish(transfer), MP_FAILED);
    EXPECT_EQ(error_of(transfer).code, MP_REGION_RELEASED) << text_of(transfer);
  }
};

TEST_F(EngineRdmaRelease, WritesThatThePostedRequestsWereToMakeGoNowhere) {
  open();
  expect_moved(MP_WRITE, {{0, 0, 100}});
  standin::hold_requests(true);
  const TransferHandle moving = start(MP_WRITE, {{0, 0, static_cast<int64_t>(bytes_)}});
  ASSERT_TRUE(eventually([] { return standin::requests_waiting() > 0; }));
  release();
  reuse();
  standin::hold_requests(false);
  expect_refused(moving);
  EXPECT_TRUE(untouched());
}

TEST_F(EngineRdmaRelease, InTheMiddleOfWrites) {
  standin::set_deferred(true);
  open();
  for (uint32_t round = 0; round < 10; ++round) {
    SCOPED_TRACE(round);
    shuffle(round);
    const uint64_t before = standin::counters().written_bytes;
    const TransferHandle moving = start(MP_WRITE, {{0, 0, static_cast<int64_t>(bytes_)}});
    if (round % 2 == 0) {
      ASSERT_TRUE(eventually([&] { return standin::counters().written_bytes > before; }));
    }
    release();
    reuse();
    const mp_transfer_state state = finish(moving);
    EXPECT_TRUE(state == MP_FAILED || state == MP_COMPLETED) << state;
    if (state == MP_FAILED) {
      EXPECT_EQ(error_of(moving).code, MP_REGION_RELEASED) << text_of(moving);
    }
    ASSERT_TRUE(untouched());
    remote_region_ = target_->add(remote_memory_, "kv");
    ASSERT_TRUE(eventually([&] {
      const uint64_t old = remote_.key;
      remote_ = look_up(peer_, "kv");
      return remote_.key != old || old == 0;
    }));
    expect_moved(MP_WRITE, {{5, 6, 70'000}});
  }
}

TEST_F(EngineRdmaRelease, ADeviceThatDoesNotLetGoCostsLanesAndNothingElse) {
  open();
  expect_moved(MP_WRITE, {{0, 0, 100}});
  Bytes other_memory = random_data(1 << 20, 9);
  const RegionHandle other_region = target_->add(other_memory, "other");
  const mp_remote_region other = look_up(peer_, "other");
  const int64_t before = standin::alive().registrations;
  standin::fail_calls({.call = standin::Call::kDeregister, .err = EBUSY, .device = 2});
  release();
  EXPECT_EQ(standin::alive().registrations, before - 2);
  reuse();
  mp_error error{};
  const TransferHandle refused = submit(peer_, MP_WRITE, local_, remote_, {{0, 0, 10}}, {}, &error);
  if (refused != nullptr) {
    expect_refused(refused);
  } else {
    EXPECT_EQ(error.code, MP_REGION_RELEASED);
  }
  EXPECT_EQ(transfer(peer_, MP_WRITE, local_, other, {{0, 0, 1 << 20}}), MP_COMPLETED);
  EXPECT_EQ(std::memcmp(local_memory_.data(), other_memory.data(), 1 << 20), 0);
  EXPECT_TRUE(untouched());
}

TEST_F(EngineRdmaRelease, AKeyThatIsDeadIsAskedForAgain) {
  open();
  expect_moved(MP_WRITE, {{0, 0, 100}});
  // As if this side had the keys of another registration.
  standin::fail_requests({.status = IBV_WC_REM_ACCESS_ERR});
  expect_moved(MP_WRITE, {{0, 0, static_cast<int64_t>(bytes_)}});
  EXPECT_EQ(moved_by("tcp"), 0);
}

}  // namespace
}  // namespace moonpool
