// SPDX-License-Identifier: Apache-2.0
#include "cuda_direct.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

#include "io_thread.hpp"
#include "system.hpp"

namespace moonpool::cuda {

namespace {

// As many copies at a time have a stream of their own.
constexpr size_t kLanesMax = 16;
constexpr int64_t kFirstPauseNs = 20'000;
constexpr int64_t kLongestPauseNs = 1'000'000;

}  // namespace

DirectCopier::DirectCopier(std::shared_ptr<const DeviceMemory> memory, uint32_t spin_us, int64_t patience_ns)
    : memory_(std::move(memory)),
      driver_(memory_->driver()),
      spin_ns_(int64_t{spin_us} * 1000),
      patience_ns_(patience_ns),
      copier_(std::make_unique<PieceCopier>(driver_, memory_->context(), patience_ns)) {}

DirectCopier::~DirectCopier() {
  const ContextScope scope(driver_, memory_->context());
  if (scope.result() != kSuccess) return;  // it has taken everything with it
  for (const auto &lane : lanes_) {
    // A kernel that still reads its table keeps it, and the driver would wait for that.
    if (driver_.event_query(lane->event) == kNotReady) static_cast<void>(copier_.release());
    driver_.event_destroy(lane->event);
    driver_.stream_destroy(lane->stream);
  }
}

Error DirectCopier::copy(std::vector<Piece> pieces, Reach reach, int64_t timeout_ns, Stream *late) {
  *late = nullptr;
  const ContextScope scope(driver_, memory_->context());
  Lane *lane = nullptr;
  Result result = scope.result();
  if (result == kSuccess) result = take(&lane);
  if (result == kSuccess) {
    bool begun = false;
    result = copier_->enqueue(std::move(pieces), reach, lane->stream, &begun);
    if (begun) {
      // Part of a copy that could not be begun whole is waited for, too.
      const Result recorded = driver_.event_record(lane->event, lane->stream);
      const Result ended = wait(*lane, recorded == kSuccess, now_ns() + timeout_ns);
      if (ended == kNotReady) {
        *late = lane->stream;  // and nobody takes the lane again
        return make_error(MP_DEADLINE, "a copy in memory of a GPU makes no progress");
      }
      if (result == kSuccess) result = recorded;
      if (result == kSuccess) result = ended;
    }
    give_back(lane);
  }
  if (result == kNotReady) {
    return make_error(MP_DEADLINE, "copies before this one in memory of a GPU make no progress",
                      "see whether the GPU hangs (nvidia-smi); a longer progress_timeout where it is only busy");
  }
  return result == kSuccess ? Error{} : call_error(driver_, result, "cannot copy in memory of a GPU");
}

Result DirectCopier::take(Lane **out) {
  std::unique_lock lock(mutex_);
  if (idle_.empty() && lanes_.size() < kLanesMax) {
    auto lane = std::make_unique<Lane>();
    Result result = driver_.stream_create(&lane->stream, kStreamNonBlocking, 0);
    if (result != kSuccess) return result;
    result = driver_.event_create(&lane->event, kEventDisableTiming);
    if (result != kSuccess) {
      driver_.stream_destroy(lane->stream);
      return result;
    }
    *out = lane.get();
    lanes_.push_back(std::move(lane));
    return kSuccess;
  }
  // All of them late: the device hangs.
  const auto patience = std::chrono::nanoseconds(patience_ns_);
  if (!returned_.wait_for(lock, patience, [this] { return !idle_.empty(); })) return kNotReady;
  *out = idle_.back();
  idle_.pop_back();
  return kSuccess;
}

void DirectCopier::give_back(Lane *lane) {
  {
    std::lock_guard lock(mutex_);
    idle_.push_back(lane);
  }
  returned_.notify_one();
}

// Without its event a copy has ended when its stream has nothing left. kNotReady: it was not there in time.
Result DirectCopier::wait(const Lane &lane, bool recorded, int64_t until) const {
  const int64_t look_until = now_ns() + spin_ns_;
  for (int64_t pause = kFirstPauseNs;;) {
    const Result result = recorded ? driver_.event_query(lane.event) : driver_.stream_query(lane.stream);
    const int64_t now = now_ns();
    if (result != kNotReady || now >= until) return result;
    if (now < look_until && ActiveThreads::may_look(true) && yield_core()) continue;
    std::this_thread::sleep_for(std::chrono::nanoseconds(pause));
    pause = std::min(2 * pause, kLongestPauseNs);
  }
}

}  // namespace moonpool::cuda
