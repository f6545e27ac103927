// SPDX-License-Identifier: Apache-2.0
// The local transport, serving side: the engine of the client is in this process and copies by itself. It asks here
// before each copy, so that nothing is copied any more once the session has ended.
#pragma once

#include <atomic>
#include <cstdint>

#include "server_lane.hpp"

namespace moonpool {

class LocalServerLane final : public ServerLane {
 public:
  // Around a copy. False: memory of the session's engine must not be touched any more.
  bool begin_copy() {
    if ((copies_.fetch_add(1) & kClosed) == 0) return true;
    end_copy();
    return false;
  }
  void end_copy() {
    if (copies_.fetch_sub(1) == kClosed + 1) copies_.notify_all();
  }

  void start() override {}
  void close() override {
    for (uint32_t now = copies_.fetch_or(kClosed) | kClosed; now != kClosed; now = copies_.load()) copies_.wait(now);
  }
  bool closed() const override { return (copies_.load() & kClosed) != 0; }
  // A release waits for those who have pinned the region, and copies have.
  void drop_region(const Region &) override {}

 private:
  static constexpr uint32_t kClosed = uint32_t{1} << 31;
  std::atomic<uint32_t> copies_{0};  // under way, and whether it is closed
};

}  // namespace moonpool
