// SPDX-License-Identifier: Apache-2.0
//
// Memory of GPUs over RDMA: as dma-bufs, by its address with nvidia-peermem, or not at all and why.
#include "support_gpu.hpp"
#include "support_rdma.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

constexpr uint64_t kMiB = 1u << 20;
constexpr uint32_t kAlways = 1'000'000;

class EngineGpuRdma : public EngineRdma {
 protected:
  EngineGpuRdma() : EngineRdma(kMiB) {}
  void TearDown() override {
    EngineRdma::TearDown();
    fakeCudaSet("fail=;attribute.124=1;attribute.118=0;attribute.117=1");
  }
  // Both sides read and write, block by block in another order, and every byte is looked at.
  void expect_moved_between(const RegionHandle &local, const mp_remote_region &remote, GpuMemory &here,
                            GpuMemory &there) {
    for (const mp_op op : {MP_WRITE, MP_READ}) {
      here.set(random_data(here.nbytes(), op == MP_WRITE ? 5 : 6));
      there.set(random_data(there.nbytes(), op == MP_WRITE ? 7 : 8));
      const auto block = static_cast<int64_t>(here.nbytes() / 16 - 1);
      std::vector<Item> items;
      for (int64_t i = 0; i < 16; ++i) items.push_back({i * block, (15 - i) * block, block});
      ASSERT_EQ(transfer(peer_, op, local, remote, items), MP_COMPLETED);
      for (const Item &item : items) {
        ASSERT_TRUE(here.get(static_cast<uint64_t>(item.local), static_cast<uint64_t>(block)) ==
                    there.get(static_cast<uint64_t>(item.remote), static_cast<uint64_t>(block)));
      }
    }
  }

  Gpu gpu_;
};

TEST_F(EngineGpuRdma, GoesFromDeviceToDeviceAsDmabuf) {
  open();
  GpuMemory here(3 * kMiB + 4096), there(3 * kMiB + 4096);
  {
    const RegionHandle local = add_gpu(*source_, here, nullptr), served = add_gpu(*target_, there, "gpu");
    EXPECT_EQ(source_->stat({"regions_dmabuf"}), 1);
    EXPECT_EQ(target_->stat({"regions_peermem"}), 0);
    expect_moved_between(local, look_up(peer_, "gpu"), here, there);
    EXPECT_EQ(moved_by("tcp"), 0);
    EXPECT_EQ(standin::counters().inlined, 0u) << "no processor may read it";
  }
  close();
}

TEST_F(EngineGpuRdma, WritesThatWouldTravelInTheRequestAreFetchedByTheDevice) {
  open();
  GpuMemory here(4096), there(4096);
  {
    const RegionHandle local = add_gpu(*source_, here, nullptr), served = add_gpu(*target_, there, "gpu");
    const Bytes content = random_data(4096, 3);
    here.set(content);
    ASSERT_EQ(transfer(peer_, MP_WRITE, local, look_up(peer_, "gpu"), {{1, 100, 8}}), MP_COMPLETED);
    EXPECT_TRUE(there.get(100, 8) == here.get(1, 8));
    EXPECT_EQ(standin::counters().inlined, 0u);
  }
  close();
}

TEST_F(EngineGpuRdma, NoRegistrationReachesOverTheEndOfAnAllocation) {
  open();
  // As torch's expandable_segments: equal parts, a region that begins and ends within one.
  const std::vector<uint64_t> parts(6, 4 * kMiB);
  GpuMemory here(parts), there(parts);
  for (const uint64_t offset : {uint64_t{0}, 3 * kMiB + 512, 5 * kMiB + 12'800}) {
    SCOPED_TRACE(offset);
    const uint64_t nbytes = 15 * kMiB + 1024;
    RegionHandle local, served;
    mp_error error;
    const std::string name = "gpu " + std::to_string(offset);
    ASSERT_EQ(add_gpu(*source_, here.address() + offset, nbytes, nullptr, MP_REGION_WRITABLE, &local, &error), MP_OK)
        << error.message;
    ASSERT_EQ(add_gpu(*target_, there.address() + offset, nbytes, name.c_str(), MP_REGION_WRITABLE, &served, &error),
              MP_OK)
        << error.message;
    const Bytes content = random_data(24 * kMiB, 9);
    here.set(content);
    there.set(random_data(24 * kMiB, 10));
    const auto all = static_cast<int64_t>(nbytes);
    ASSERT_EQ(transfer(peer_, MP_WRITE, local, look_up(peer_, name.c_str()), {{0, 0, all}}), MP_COMPLETED);
    EXPECT_TRUE(there.get(offset, nbytes) == here.get(offset, nbytes));
    EXPECT_EQ(moved_by("tcp"), 0);
  }
  // Four or five bounds each time, on two devices of either side.
  EXPECT_GE(source_->stat({"regions_dmabuf"}), 3);
  close();
}

TEST_F(EngineGpuRdma, PartsOfDifferentLengthsAreCutWhereTheyAllEnd) {
  open();
  const std::vector<uint64_t> parts{6 * kMiB, 4 * kMiB, 10 * kMiB, 2 * kMiB};
  GpuMemory here(parts), there(parts);
  {
    const RegionHandle local = add_gpu(*source_, here, nullptr), served = add_gpu(*target_, there, "gpu");
    expect_moved_between(local, look_up(peer_, "gpu"), here, there);
    EXPECT_EQ(moved_by("tcp"), 0);
  }
  close();
}

TEST_F(EngineGpuRdma, WithoutDmabufItGoesByAddressWherePeermemLetsIt) {
  fakeCudaSet("attribute.124=0");
  open();
  GpuMemory here(kMiB), there(kMiB);
  for (const GpuMemory *memory : {&here, &there}) ASSERT_EQ(fakeCudaOpen(memory->address(), kMiB, 1), 0);
  {
    const RegionHandle local = add_gpu(*source_, here, nullptr), served = add_gpu(*target_, there, "gpu");
    EXPECT_EQ(source_->stat({"regions_dmabuf"}), 0);
    EXPECT_EQ(source_->stat({"regions_peermem"}), 1);
    expect_moved_between(local, look_up(peer_, "gpu"), here, there);
    EXPECT_EQ(moved_by("tcp"), 0);
  }
  close();
}

TEST_F(EngineGpuRdma, UnderRequireTheErrorNamesEveryMissingPiece) {
  fakeCudaSet("attribute.124=0");
  open_engines([](mp_config &config) { config.require = "rdma"; });
  GpuMemory here(kMiB);
  RegionHandle region;
  mp_error error;
  EXPECT_EQ(add_gpu(*source_, here.address(), kMiB, nullptr, 0, &region, &error), MP_TRANSPORT_UNAVAILABLE);
  EXPECT_EQ(region, nullptr);
  EXPECT_TRUE(contains(error.message, "memory of cuda:0 cannot be registered for RDMA")) << error.message;
  EXPECT_TRUE(contains(error.cause, "no dma-buf support")) << error.cause;
  EXPECT_TRUE(contains(error.cause, "nvidia-peermem: the module is not loaded")) << error.cause;
  EXPECT_TRUE(contains(error.hint, "modprobe nvidia-peermem")) << error.hint;
  EXPECT_EQ(standin::alive().registrations, 0);
}

TEST_F(EngineGpuRdma, ADeviceThatRefusesTheDmabufIsTriedByAddress) {
  open_engines([](mp_config &config) { config.require = "rdma"; });
  standin::fail_calls({.call = standin::Call::kRegisterDmabuf, .err = EOPNOTSUPP, .times = kAlways, .device = 1});
  GpuMemory here(kMiB);
  RegionHandle region;
  mp_error error;
  EXPECT_EQ(add_gpu(*source_, here.address(), kMiB, nullptr, 0, &region, &error), MP_TRANSPORT_UNAVAILABLE);
  EXPECT_TRUE(contains(error.cause, "Operation not supported")) << error.cause;
  EXPECT_EQ(standin::alive().registrations, 0) << "all devices or none";
  ASSERT_EQ(fakeCudaOpen(here.address(), kMiB, 1), 0);
  EXPECT_EQ(add_gpu(*source_, here.address(), kMiB, nullptr, 0, &region, &error), MP_OK) << error.cause;
  EXPECT_EQ(source_->stat({"regions_peermem"}), 1);
}

TEST_F(EngineGpuRdma, WhatAPeersDevicesDoNotTakePassesThroughTheHost) {
  open_engines();
  standin::fail_calls({.call = standin::Call::kRegisterDmabuf, .err = EOPNOTSUPP, .times = kAlways, .device = 2});
  add_regions();
  GpuMemory here(3 * kMiB), there(3 * kMiB);
  {
    const RegionHandle local = add_gpu(*source_, here, nullptr), served = add_gpu(*target_, there, "gpu");
    EXPECT_EQ(source_->stat({"regions_dmabuf"}), 1);
    EXPECT_EQ(target_->stat({"regions_not_registered"}), 1);
    connect();
    expect_moved_between(local, look_up(peer_, "gpu"), here, there);
    EXPECT_EQ(standin::counters().written_bytes + standin::counters().read_bytes, 0u);
    // Memory of the host goes on over rdma.
    expect_moved(MP_WRITE, {{0, 0, 1000}});
    EXPECT_EQ(standin::counters().written_bytes, 1000u);
  }
  close();
}

TEST_F(EngineGpuRdma, FromTheHostToADevice) {
  open();
  GpuMemory there(kMiB);
  {
    const RegionHandle served = add_gpu(*target_, there, "gpu");
    shuffle(3);
    ASSERT_EQ(transfer(peer_, MP_WRITE, local_, look_up(peer_, "gpu"), {{0, 0, int64_t{kMiB}}}), MP_COMPLETED);
    EXPECT_TRUE(there.get() == Bytes(local_memory_.begin(), local_memory_.begin() + kMiB));
    EXPECT_EQ(moved_by("tcp"), 0);
  }
  close();
}

TEST_F(EngineGpuRdma, WhatArrivedIsFlushedBeforeItsNotificationAndAfterARead) {
  for (const bool ordered : {false, true}) {
    SCOPED_TRACE(ordered);
    fakeCudaSet(ordered ? "attribute.118=100" : "attribute.118=0");
    open();
    GpuMemory here(kMiB), there(kMiB);
    {
      const RegionHandle local = add_gpu(*source_, here, nullptr), served = add_gpu(*target_, there, "gpu");
      const mp_remote_region remote = look_up(peer_, "gpu");
      fakeCudaForgetCalls();
      SubmitOptions options;
      options.notify = "written";
      ASSERT_EQ(transfer(peer_, MP_WRITE, local, remote, {{0, 0, 1000}}, options), MP_COMPLETED);
      const uint64_t after_write = fakeCudaCalls("cuFlushGPUDirectRDMAWrites");
      EXPECT_EQ(after_write > 0, !ordered);
      ASSERT_EQ(transfer(peer_, MP_READ, local, remote, {{0, 0, 1000}}), MP_COMPLETED);
      EXPECT_EQ(fakeCudaCalls("cuFlushGPUDirectRDMAWrites") > after_write, !ordered);
      EXPECT_EQ(target_->stat({"gpu_flushes_failed"}), 0);
    }
    close();
    standin::reset();
  }
}

TEST_F(EngineGpuRdma, CopiesOfTheMemoryAreInOrderWithTheDevices) {
  open_engines();
  GpuMemory here(kMiB);
  fakeCudaForgetCalls();
  const RegionHandle region = add_gpu(*source_, here, nullptr);
  EXPECT_EQ(fakeCudaCalls("cuPointerSetAttribute"), 1u) << "SYNC_MEMOPS";
}

TEST_F(EngineGpuRdma, ReleasedMemoryIsNobodysAnyMore) {
  open();
  GpuMemory here(kMiB), there(kMiB);
  {
    const RegionHandle local = add_gpu(*source_, here, nullptr);
    RegionHandle served = add_gpu(*target_, there, "gpu");
    const mp_remote_region remote = look_up(peer_, "gpu");
    const int64_t before = standin::alive().registrations;
    ASSERT_EQ(mp_region_release(served.get(), nullptr), MP_OK);
    EXPECT_EQ(standin::alive().registrations, before - 2);
    EXPECT_EQ(transfer(peer_, MP_WRITE, local, remote, {{0, 0, 1000}}), MP_FAILED);
  }
  close();
}

}  // namespace
}  // namespace moonpool
