// SPDX-License-Identifier: Apache-2.0
//
// Faults while bytes move: the other rail, then the next path, or an error that says what happened.
#include "support_rdma.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;
using standin::Call;

constexpr uint32_t kAlways = 1'000'000;

class EngineRdmaFault : public EngineRdma {
 protected:
  EngineRdmaFault() : EngineRdma(8u << 20) {}
  std::vector<Item> everything() const { return {{0, 0, static_cast<int64_t>(bytes_)}}; }
  bool moves_over_rdma() {
    const int64_t before = moved_by("rdma");
    expect_moved(MP_WRITE, {{0, 0, 4096}});
    return moved_by("rdma") > before;
  }
};

struct Fault {
  ibv_wc_status status;
  const char *name;
  bool landed;
};
class EngineRdmaStatus : public EngineRdmaFault, public ::testing::WithParamInterface<std::tuple<Fault, bool>> {};
INSTANTIATE_TEST_SUITE_P(
    Completed, EngineRdmaStatus,
    ::testing::Combine(::testing::Values(Fault{IBV_WC_RETRY_EXC_ERR, "Retries", false},
                                         Fault{IBV_WC_RETRY_EXC_ERR, "RetriesAfterItArrived", true},
                                         Fault{IBV_WC_REM_ACCESS_ERR, "RemoteAccess", false},
                                         Fault{IBV_WC_LOC_PROT_ERR, "LocalProtection", false},
                                         Fault{IBV_WC_REM_OP_ERR, "RemoteOperation", false},
                                         Fault{IBV_WC_WR_FLUSH_ERR, "Flush", false}),
                       ::testing::Bool()),
    [](const auto &info) {
      return std::string(std::get<0>(info.param).name) + (std::get<1>(info.param) ? "Later" : "AtOnce");
    });

TEST_P(EngineRdmaStatus, OnceIsNothingToTheTransfer) {
  const Fault &fault = std::get<0>(GetParam());
  standin::set_deferred(std::get<1>(GetParam()));
  open();
  for (const mp_op op : {MP_WRITE, MP_READ}) {
    for (const uint32_t skip : {0u, 3u}) {
      standin::fail_requests({.status = fault.status, .skip = skip, .landed = fault.landed});
      expect_moved(op, everything());
    }
  }
  EXPECT_EQ(moved_by("tcp"), 0);
  EXPECT_GE(source_->stat({"retries"}), 4);
  EXPECT_GE(rail(*source_, 0, "errors") + rail(*source_, 1, "errors"), 4);
}

TEST_F(EngineRdmaFault, KeysThatOneLaneFoundWrongAreAskedForAgainByTheOthers) {
  // Many requests to a slice, so that some lane is in the middle of one when another forgets the keys of both.
  open();
  std::vector<Item> items;
  for (int64_t at = 0; at + 512 <= static_cast<int64_t>(bytes_); at += 1024) items.push_back({at, at, 512});
  for (uint32_t round = 0; round < 40; ++round) {
    standin::fail_requests({.status = IBV_WC_REM_ACCESS_ERR, .skip = 50 * round});
    expect_moved(round % 2 == 0 ? MP_WRITE : MP_READ, items);
  }
  EXPECT_EQ(moved_by("tcp"), 0);
}

TEST_F(EngineRdmaFault, TheOtherRailTakesOver) {
  open();
  // Its lanes cannot come back either.
  standin::fail_requests({.status = IBV_WC_RETRY_EXC_ERR, .times = kAlways, .device = 0, .empty = true});
  for (const mp_op op : {MP_WRITE, MP_READ, MP_WRITE}) expect_moved(op, everything());
  EXPECT_EQ(rail(*source_, 0, "written_bytes") + rail(*source_, 0, "read_bytes"), 0);
  EXPECT_EQ(rail(*source_, 1, "written_bytes"), static_cast<int64_t>(2 * bytes_));
  EXPECT_EQ(moved_by("tcp"), 0);
}

TEST_F(EngineRdmaFault, WithoutAnyRailTcpTakesOver) {
  open();
  standin::fail_requests({.status = IBV_WC_RETRY_EXC_ERR, .vendor_code = 129, .times = kAlways, .empty = true});
  for (const mp_op op : {MP_WRITE, MP_READ}) expect_moved(op, everything());
  EXPECT_GE(moved_by("tcp"), static_cast<int64_t>(2 * bytes_));
  EXPECT_EQ(moved_by("rdma"), 0);
  ASSERT_TRUE(eventually([&] { return !fallback().empty(); }));
  for (const char *part : {"rdma: rail standin", "to 10.0.", "transport retry counter exceeded", "vendor code 129"}) {
    EXPECT_TRUE(contains(fallback(), part)) << part << " is not in " << fallback();
  }
  standin::clear_faults();
  EXPECT_TRUE(eventually([&] { return moves_over_rdma(); })) << fallback();
  EXPECT_EQ(fallback(), "");
}

TEST_F(EngineRdmaFault, UnderRequireTheErrorSaysWhatWhereAndWithWhom) {
  open([](mp_config &config) { config.require = "rdma"; });
  standin::fail_requests({.status = IBV_WC_RETRY_EXC_ERR, .vendor_code = 129, .times = kAlways});
  const TransferHandle moving = start(MP_WRITE, everything());
  EXPECT_EQ(finish(moving), MP_FAILED);
  const mp_error error = error_of(moving);
  EXPECT_TRUE(error.code == MP_PEER_LOST || error.code == MP_TRANSPORT_UNAVAILABLE) << error.code;
  EXPECT_STREQ(error.path, "rdma");
  EXPECT_TRUE(contains(error.peer, target_->address())) << error.peer;
  for (const char *part : {"rail standin", ":1 to 10.0.", "transport retry counter exceeded", "vendor code 129"}) {
    EXPECT_TRUE(contains(error.message, part)) << part << " is not in " << error.message;
  }
  EXPECT_TRUE(contains(error.hint, "no acknowledgement came")) << error.hint;
  standin::clear_faults();
  EXPECT_TRUE(eventually([&] {
    mp_error why{};
    const TransferHandle again = submit(peer_, MP_WRITE, local_, remote_, everything(), {}, &why);
    return again != nullptr && finish(again) == MP_COMPLETED;
  })) << "it comes back";
  EXPECT_TRUE(same(everything()));
}

TEST_F(EngineRdmaFault, AWaiterIsToldToo) {
  // A single slice: whoever waits drives the lane.
  open();
  for (int round = 0; round < 20; ++round) {
    standin::fail_requests({.status = IBV_WC_RETRY_EXC_ERR, .landed = round % 2 == 0});
    expect_moved(round % 4 < 2 ? MP_WRITE : MP_READ, {{0, 0, 4096}});
  }
  EXPECT_GE(source_->stat({"retries"}), 20);
}

TEST_F(EngineRdmaFault, ACallThatFailsInTheMiddle) {
  open();
  for (const Call call : {Call::kPostSend, Call::kPoll}) {
    for (const int device : {0, 1}) {
      for (const uint32_t skip : {0u, 2u}) {
        SCOPED_TRACE(std::to_string(static_cast<int>(call)) + " of " + std::to_string(device));
        standin::fail_calls({.call = call, .err = ENOMEM, .device = device, .skip = skip});
        for (const mp_op op : {MP_WRITE, MP_READ}) expect_moved(op, everything());
        standin::clear_faults();
      }
    }
  }
}

// ---------------------------------------------------------------- arming

// As if no time-out would ever find a lane that nobody is woken for.
void without_time_out(mp_config &config) { config.progress_timeout_ms = 3'600'000; }

TEST_F(EngineRdmaFault, AQueueThatCannotBeArmedCostsItsLaneAtOnce) {
  open(without_time_out);
  const auto errors = [&] { return source_->stat({"lane_errors"}); };
  for (const mp_op op : {MP_WRITE, MP_READ}) {
    for (const int64_t bytes : {int64_t{4096}, static_cast<int64_t>(bytes_)}) {
      SCOPED_TRACE(bytes);
      const int64_t before = errors();
      // A queue that is armed since the last transfer is not armed again.
      EXPECT_TRUE(eventually([&] {
        standin::fail_calls({.call = Call::kArm, .err = EIO, .device = 0});
        standin::fail_calls({.call = Call::kArm, .err = EIO, .device = 1});
        standin::hold_requests(true);
        std::thread later([&] {
          EXPECT_TRUE(eventually([&] { return errors() > before || standin::requests_waiting() > 0; }));
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
          standin::hold_requests(false);
        });
        expect_moved(op, {{0, 0, bytes}});
        later.join();
        standin::clear_faults();
        return errors() > before || HasFailure();
      }));
    }
  }
}

TEST_F(EngineRdmaFault, UnderRequireQueuesThatCannotBeArmedAreTheError) {
  open([](mp_config &config) {
    without_time_out(config);
    config.require = "rdma";
  });
  for (const int device : {0, 1}) {
    standin::fail_calls({.call = Call::kArm, .err = EIO, .times = kAlways, .device = device});
  }
  standin::hold_requests(true);
  const TransferHandle moving = start(MP_READ, everything());
  EXPECT_EQ(finish(moving), MP_FAILED);
  const mp_error error = error_of(moving);
  EXPECT_EQ(error.code, MP_TRANSPORT_UNAVAILABLE) << text_of(moving);
  EXPECT_STREQ(error.path, "rdma");
  EXPECT_TRUE(contains(error.message, "rail standin")) << error.message;
  EXPECT_TRUE(contains(error.message, "the completion queue cannot be armed")) << error.message;
  EXPECT_TRUE(contains(error.cause, "Input/output error")) << error.cause;
  EXPECT_EQ(source_->stat({"paths", "rdma", "failed"}), 1);
}

// ---------------------------------------------------------------- ports

TEST_F(EngineRdmaFault, APortThatGoesDownInATransfer) {
  open();
  for (const int device : {0, 1, 2, 3}) {
    SCOPED_TRACE(device);
    shuffle(static_cast<uint32_t>(device) + 500);
    const Bytes expected = local_memory_;
    standin::hold_requests(true);
    const TransferHandle moving = start(MP_WRITE, everything());
    ASSERT_TRUE(eventually([] { return standin::requests_waiting() > 0; }));
    standin::set_port(device, false);
    standin::hold_requests(false);
    ASSERT_EQ(finish(moving), MP_COMPLETED) << text_of(moving);
    EXPECT_TRUE(remote_memory_ == expected);
    standin::set_port(device, true);
    // Every rail is in use again.
    for (int at = 0; at < 2; ++at) {
      const int64_t before = rail(*source_, at, "written_bytes");
      EXPECT_TRUE(eventually([&] {
        expect_moved(MP_WRITE, everything());
        return rail(*source_, at, "written_bytes") > before;
      })) << "rail "
          << at;
    }
  }
  EXPECT_EQ(moved_by("tcp"), 0);
}

TEST_F(EngineRdmaFault, EveryPortGoesDownAndUp) {
  standin::set_deferred(true);
  open();
  for (const bool at_target : {false, true}) {
    SCOPED_TRACE(at_target);
    const std::vector<int> devices = at_target ? std::vector<int>{2, 3} : std::vector<int>{0, 1};
    const TransferHandle moving = start(MP_READ, everything());
    for (const int device : devices) standin::set_port(device, false);
    ASSERT_EQ(finish(moving), MP_COMPLETED) << text_of(moving);
    EXPECT_TRUE(same(everything()));
    ASSERT_TRUE(eventually([&] {
      expect_moved(MP_WRITE, {{0, 0, 4096}});
      return contains(fallback(), "port");
    })) << fallback();
    const int64_t before = moved_by("tcp");
    expect_moved(MP_WRITE, everything());
    EXPECT_GT(moved_by("tcp"), before);
    for (const int device : devices) standin::set_port(device, true);
    EXPECT_TRUE(eventually([&] { return moves_over_rdma(); })) << fallback();
  }
}

TEST_F(EngineRdmaFault, PortsThatGoDownWhileNothingMoves) {
  for (const bool at_target : {false, true}) {
    SCOPED_TRACE(at_target);
    open();
    // Some lanes have never been needed and rest, so there are ways that nobody has tried.
    expect_moved(MP_WRITE, {{0, 0, 100}});
    const std::vector<int> devices = at_target ? std::vector<int>{2, 3} : std::vector<int>{0, 1};
    for (const int device : devices) standin::set_port(device, false);
    ASSERT_TRUE(
        eventually([&] { return rail(*source_, 0, "queue_pairs") == 0 && rail(*source_, 1, "queue_pairs") == 0; }));
    expect_moved(MP_WRITE, {{0, 0, 100}});
    EXPECT_GT(moved_by("tcp"), 0);
    EXPECT_TRUE(contains(fallback(), "port")) << fallback();
    for (const int device : devices) standin::set_port(device, true);
    EXPECT_TRUE(eventually([&] { return moves_over_rdma(); })) << fallback();
    close();
    standin::reset();
  }
}

TEST_F(EngineRdmaFault, ThePathIsWhatWouldCarryTheNextTransfer) {
  for (const bool at_target : {false, true}) {
    SCOPED_TRACE(at_target);
    open();
    EXPECT_STREQ(info().path, "rdma");
    EXPECT_EQ(fallback(), "");
    const std::vector<int> devices = at_target ? std::vector<int>{2, 3} : std::vector<int>{0, 1};
    for (const int device : devices) standin::set_port(device, false);
    // Before anything is sent that would find out.
    ASSERT_TRUE(eventually([&] { return info().path == std::string("tcp"); })) << info().path << fallback();
    EXPECT_TRUE(contains(fallback(), "rdma: ")) << fallback();
    EXPECT_TRUE(contains(fallback(), "port")) << fallback();
    expect_moved(MP_WRITE, everything());
    EXPECT_EQ(moved_by("tcp"), static_cast<int64_t>(bytes_));
    EXPECT_EQ(moved_by("rdma"), 0);
    EXPECT_STREQ(info().path, "tcp");
    for (const int device : devices) standin::set_port(device, true);
    ASSERT_TRUE(eventually([&] { return info().path == std::string("rdma"); })) << fallback();
    EXPECT_EQ(fallback(), "");
    expect_moved(MP_WRITE, everything());
    EXPECT_EQ(moved_by("rdma"), static_cast<int64_t>(bytes_));
    close();
    standin::reset();
  }
}

TEST_F(EngineRdmaFault, UnderRequireWithEveryPortDownThereIsNoPath) {
  open([](mp_config &config) { config.require = "rdma"; });
  for (const int device : {0, 1}) standin::set_port(device, false);
  ASSERT_TRUE(eventually([&] { return info().path == std::string(); })) << info().path;
  EXPECT_TRUE(contains(fallback(), "the port is down")) << fallback();
  ASSERT_TRUE(eventually([&] { return rail(*source_, 0, "queue_pairs") + rail(*source_, 1, "queue_pairs") == 0; }));
  for (int64_t failed = 1; failed <= 2; ++failed) {
    EXPECT_EQ(finish(start(MP_WRITE, everything())), MP_FAILED);
    EXPECT_EQ(source_->stat({"paths", "rdma", "failed"}), failed);
  }
  EXPECT_EQ(source_->stat({"paths", "tcp", "failed"}), 0);
  for (const int device : {0, 1}) standin::set_port(device, true);
  EXPECT_TRUE(eventually([&] { return info().path == std::string("rdma"); })) << fallback();
  expect_moved(MP_WRITE, everything());
}

TEST_F(EngineRdmaFault, UnderRequireWithEveryPortDownItFailsAndComesBack) {
  open([](mp_config &config) { config.require = "rdma"; });
  standin::hold_requests(true);
  const TransferHandle moving = start(MP_WRITE, everything());
  ASSERT_TRUE(eventually([] { return standin::requests_waiting() > 0; }));
  for (const int device : {0, 1}) standin::set_port(device, false);
  standin::hold_requests(false);
  EXPECT_EQ(finish(moving), MP_FAILED);
  EXPECT_EQ(error_of(moving).code, MP_TRANSPORT_UNAVAILABLE) << text_of(moving);
  EXPECT_TRUE(contains(error_of(moving).message, ": the port is down")) << text_of(moving);
  for (const int device : {0, 1}) standin::set_port(device, true);
  EXPECT_TRUE(eventually([&] {
    mp_error why{};
    const TransferHandle again = submit(peer_, MP_WRITE, local_, remote_, everything(), {}, &why);
    return again != nullptr && finish(again) == MP_COMPLETED;
  }));
}

TEST_F(EngineRdmaFault, PortsThatFlap) {
  standin::set_deferred(true);
  open();
  std::atomic<bool> over{false};
  std::thread flapping([&] {
    std::mt19937 random(3);
    while (!over.load()) {
      const auto device = static_cast<int>(random() % 4);
      standin::set_port(device, false);
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
      standin::set_port(device, true);
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 10000));
    }
  });
  for (uint32_t round = 0; round < rounds(30); ++round) expect_moved(round % 2 == 0 ? MP_WRITE : MP_READ, everything());
  over.store(true);
  flapping.join();
  EXPECT_TRUE(eventually([&] { return moves_over_rdma(); })) << fallback();
}

}  // namespace
}  // namespace moonpool
