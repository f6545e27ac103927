// SPDX-License-Identifier: Apache-2.0
//
// A fork in the middle of transfers: the child is told, and holds nothing of the parent open.
#include <sys/wait.h>
#include <unistd.h>

#include "moonpool/testing.h"
#include "support_engine.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

constexpr uint64_t kBytes = 8u << 20;

int lowest_free_descriptor() {
  const int fd = dup(0);
  close(fd);
  return fd;
}

TEST(EngineFork, AChildIsToldAndTheParentGoesOn) {
  TestEngine target, source;
  Bytes memory = random_data(kBytes, 1), remote_memory = random_data(kBytes, 2);
  const RegionHandle remote_region = target.add(remote_memory, "kv"), region = source.add(memory, nullptr);
  const PeerHandle peer = source.connect(target);
  const mp_remote_region remote = look_up(peer, "kv");
  const int64_t zero = 0, length = 8;
  mp_region *locals[1] = {region.get()};
  const mp_remote_region *remotes[1] = {&remote};
  const mp_batch batch{1, &zero, 0, &zero, 0, &length, 0, locals, 1, nullptr, remotes, 1, nullptr};
  mp_plan *plan = nullptr;
  ASSERT_EQ(mp_plan_create(peer.get(), &batch, &plan, nullptr), MP_OK);
  const PlanHandle planned(plan);
  uint8_t client[16];
  mp_engine_incarnation(source.get(), client);
  const TransferHandle moving = submit(peer, MP_READ, region, remote, {{0, 0, kBytes}});
  const int free_before = lowest_free_descriptor();

  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // Numbers name the line that failed; an assertion would run in the wrong process.
    mp_error error;
    mp_region *out_region = nullptr;
    mp_peer *out_peer = nullptr;
    mp_notification notification;
    mp_remote_region found;
    int wrong = 0;
    auto expect_forked = [&wrong, line = 0](int status) mutable {
      ++line;
      if (status != MP_FORKED && wrong == 0) wrong = line;
    };
    expect_forked(mp_region_allocate(source.get(), 4096, "x", nullptr, &out_region, &error));
    expect_forked(mp_region_register(source.get(), memory.data(), 64, "y", 0, &out_region, &error));
    expect_forked(mp_region_register_cuda(source.get(), memory.data(), 64, MP_CUDA_ANY, "z", 0, &out_region, &error));
    expect_forked(mp_region_release(region.get(), &error));
    expect_forked(mp_region_copy_batch(region.get(), nullptr, 0, nullptr, 0, nullptr, nullptr, 0, nullptr, 0, nullptr,
                                       0, 0, &error));
    expect_forked(mp_engine_fence(target.get(), client, nullptr, &error));
    expect_forked(mp_peer_connect(source.get(), target.address().c_str(), 100, nullptr, nullptr, &out_peer, &error));
    expect_forked(mp_peer_ensure(peer.get(), 100, nullptr, nullptr, &error));
    expect_forked(mp_peer_close(peer.get(), &error));
    expect_forked(mp_peer_find_region(peer.get(), "kv", 0, &found, &error));
    expect_forked(mp_transfer_wait(moving.get(), 0));
    expect_forked(mp_transfer_wait_settled(moving.get(), 0));
    expect_forked(mp_transfer_cancel(moving.get(), 0));
    uint64_t digest = 0;
    expect_forked(mp_transfer_digests(moving.get(), &digest, 1));
    expect_forked(mp_transfer_set_eventfd(moving.get(), -1));
    expect_forked(mp_notification_take(source.get(), 0, &notification));
    mp_transfer *out = nullptr;
    expect_forked(mp_submit(peer.get(), MP_READ, &batch, nullptr, &out, &error));
    mp_plan *out_plan = nullptr;
    expect_forked(mp_plan_create(peer.get(), &batch, &out_plan, &error));
    expect_forked(mp_plan_post(planned.get(), MP_READ, nullptr, 0, nullptr, &out, &error));
    mp_faults faults;
    mp_faults_init(&faults);
    mp_faults_made made;
    expect_forked(mp_testing_set_faults(source.get(), &faults, &error));
    expect_forked(mp_testing_faults_made(source.get(), &made, &error));
    // Those without a status answer too, and do not wait for locks of threads that exist in the parent only.
    mp_region_location(region.get(), nullptr, 0);
    mp_peer_info info;
    mp_peer_get_info(peer.get(), &info);
    mp_peer_list_regions(peer.get(), nullptr, 0);
    mp_transfer_get_error(moving.get(), &error);
    mp_transfer_get_state(moving.get());
    uint8_t status = 0;
    mp_transfer_item_status(moving.get(), &status, 1);
    mp_engine_stats_json(source.get(), nullptr, 0);
    // Every socket of the parent is closed here, or a dead parent would look alive to its peers.
    if (lowest_free_descriptor() >= free_before && wrong == 0) wrong = 50;
    if (mp_engine_close(source.get(), &error) != MP_OK && wrong == 0) wrong = 51;
    mp_transfer_free(moving.get());
    mp_plan_free(planned.get());
    mp_peer_free(peer.get());
    mp_region_free(region.get());
    mp_engine_free(source.get());
    _exit(wrong);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0) << "which check failed in the child";
  EXPECT_EQ(target.stat({"serving", "sessions"}), 1);
  EXPECT_EQ(finish(moving), MP_COMPLETED);
  EXPECT_TRUE(memory == remote_memory);
  EXPECT_EQ(transfer(peer, MP_WRITE, region, remote, {{0, 0, kBytes}}), MP_COMPLETED);
}

}  // namespace
}  // namespace moonpool
