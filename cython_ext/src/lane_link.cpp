// SPDX-License-Identifier: Apache-2.0
#include "lane_link.hpp"

#include <algorithm>
#include <functional>
#include <thread>

#include "engine.hpp"
#include "peer.hpp"

namespace moonpool {

namespace {

constexpr uint64_t kSliceBytesMax = 4u << 20;
constexpr uint32_t kAttemptsMax = 5;

}  // namespace

LaneLink::LaneLink(const std::shared_ptr<Peer> &peer, const char *path, uint32_t descs_per_frame)
    : session(peer->session()),
      addresses(peer->resolved()),
      engine_(peer->engine()),
      peer_(peer),
      path_(path),
      descs_per_frame_(descs_per_frame),
      queue_(descs_per_frame) {}

void LaneLink::start(std::vector<std::shared_ptr<Lane>> lanes, size_t first) {
  lanes_ = std::move(lanes);
  for (size_t i = first; i < lanes_.size(); ++i) lanes_[i]->begin_resting();
  for (size_t i = 0; i < first; ++i) lanes_[i]->dial_now();
}

int64_t LaneLink::opening_ns() const { return int64_t{engine_.config.connect_timeout_ms} * kMillisecond; }

uint64_t LaneLink::slice_bytes(uint64_t transfer_bytes) const {
  return std::max(engine_.config.slice_bytes, std::min(kSliceBytesMax, transfer_bytes / (lanes_.size() * 4)));
}

void LaneLink::submit(const std::shared_ptr<Transfer> &transfer) {
  const uint64_t slice = slice_bytes(transfer->bytes);
  const auto descs = static_cast<uint32_t>(transfer->descs.size());
  const bool single = transfer->bytes <= slice && descs <= descs_per_frame_;
  // Chosen while the transfer is still this thread's: once it is queued it may end, and give up its regions.
  Lane *const chosen = single ? &lane_for_small(*transfer) : nullptr;
  if (!queue_.push(transfer, slice)) {
    transfer->fail(connection_ended(transfer->peer->label(), path_));
    return;
  }
  if (chosen != nullptr) {
    if (chosen->load() > 0) rouse(1);
    chosen->submitted();
    if (!chosen->ready()) wake_lanes(1);  // it broke since it was chosen
  } else {
    wake_lanes(std::max<uint64_t>(transfer->bytes / slice, descs / descs_per_frame_) + 1);
  }
  if (!promising()) stranded(make_error(MP_PEER_LOST, "no lane to the peer is connected"));
}

// The nearest idle lane if there is one, so that threads do not wait for each other; otherwise the least loaded.
Lane &LaneLink::lane_for_small(const Transfer &transfer) {
  const size_t first = std::hash<std::thread::id>{}(std::this_thread::get_id()) % lanes_.size();
  Lane *best = lanes_[first].get();
  uint64_t least = UINT64_MAX;
  for (size_t i = 0; i < lanes_.size() && least > 0; ++i) {
    Lane *lane = lanes_[(first + i) % lanes_.size()].get();
    if (!lane->ready()) continue;
    const uint64_t cost = lane->load() + lane->distance(transfer);
    if (cost < least) best = lane;
    least = std::min(least, cost);
  }
  return *best;
}

// Who queued it may have counted on a lane that does not take it after all.
void LaneLink::pass_on_work() {
  if (has_work()) wake_lanes(1);
}

void LaneLink::wake_lanes(size_t n) {
  const uint32_t first = round_robin_.fetch_add(1);
  for (size_t i = 0; i < lanes_.size() && n > 0; ++i) {
    const std::shared_ptr<Lane> &lane = lanes_[(first + i) % lanes_.size()];
    if (!lane->ready()) continue;  // looks at the queue by itself as soon as it is connected
    --n;
    lane->io().post([weak = std::weak_ptr<Lane>(lane)] {
      if (auto self = weak.lock()) self->kick();
    });
  }
  rouse(n);
}

void LaneLink::rouse(size_t n) {
  for (const auto &lane : lanes_) {
    if (lane->promising() && !lane->ready() && !lane->resting() && n > 0) --n;  // it is coming already
  }
  for (size_t i = 0; i < lanes_.size() && n > 0; ++i) {
    const std::shared_ptr<Lane> &lane = lanes_[i];
    if (!lane->resting()) continue;
    --n;
    // Not here: the caller may hold another lane's lock.
    lane->io().post([weak = std::weak_ptr<Lane>(lane)] {
      if (auto self = weak.lock()) self->dial_now();
    });
  }
}

void LaneLink::cancel(Transfer &transfer) {
  fail_work(queue_.remove(transfer), transfer.stop_cause());
  for (const auto &lane : lanes_) lane->cancel(transfer);
}

void LaneLink::assist(Transfer &transfer, int64_t until) {
  // Several lanes are better served by their own threads.
  if (transfer.bytes > engine_.config.slice_bytes) return;
  const void *driver = transfer.driver.load(std::memory_order_relaxed);
  for (const auto &lane : lanes_) {
    if (lane.get() == driver) return lane->assist(transfer, until);
  }
}

void LaneLink::lane_cut(uint64_t lane_id, std::vector<Work> work, const Error &cause) {
  const std::shared_ptr<Peer> peer = peer_.lock();
  Error error = peer == nullptr ? cause : peer->describe(cause, path_);
  const auto first_write =
      std::partition(work.begin(), work.end(), [](const Work &one) { return one.transfer->op == MP_READ; });
  std::vector<Work> writes(std::make_move_iterator(first_write), std::make_move_iterator(work.end()));
  work.erase(first_write, work.end());
  retry(std::move(work), error);
  // Others may have counted on the lane to take what is queued.
  if (has_work()) wake_lanes(lanes_.size());
  if (writes.empty()) return;
  bool settled;
  {
    std::lock_guard lock(mutex_);
    settled = settled_;
    if (!closed_) fencing_[lane_id] = {std::move(writes), error};
  }
  if (writes.empty()) {
    if (peer != nullptr) peer->send_fence(lane_id);
  } else if (settled || peer == nullptr) {
    fail_work(writes, error);
  } else {
    peer->orphan(std::move(writes), error);
  }
}

void LaneLink::fenced(uint64_t lane_id) {
  Fencing fencing;
  {
    std::lock_guard lock(mutex_);
    const auto it = fencing_.find(lane_id);
    if (it == fencing_.end()) return;
    fencing = std::move(it->second);
    fencing_.erase(it);
  }
  retry(std::move(fencing.work), fencing.cause);
}

void LaneLink::retry(std::vector<Work> work, const Error &cause) {
  for (Work &one : work) {
    if (one.transfer->stopping() || ++one.attempts > kAttemptsMax) {
      fail_work({one}, cause);
    } else {
      engine_.stats.retries.fetch_add(1);
      if (!queue_.push_front(one, std::max(engine_.config.slice_bytes, kSliceBytesMax))) fail_work({one}, cause);
    }
  }
  wake_lanes(work.size());
  if (!promising()) stranded(cause);
}

void LaneLink::shutdown(const Error &cause, bool settled) {
  std::vector<Work> writes;
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    settled_ = settled;
    for (auto &entry : fencing_) {
      for (Work &one : entry.second.work) writes.push_back(std::move(one));
    }
    fencing_.clear();
  }
  std::vector<Work> never_sent = queue_.close();
  for (const auto &lane : lanes_) {
    for (Work &one : lane->shutdown()) {
      (one.transfer->op == MP_READ ? never_sent : writes).push_back(std::move(one));
    }
  }
  fail_work(never_sent, cause);
  if (writes.empty()) return;
  const std::shared_ptr<Peer> peer = peer_.lock();
  if (settled || peer == nullptr) {
    fail_work(writes, cause);
  } else {
    peer->orphan(std::move(writes), cause);
  }
}

bool LaneLink::promising() const {
  return std::any_of(lanes_.begin(), lanes_.end(), [](const auto &lane) { return lane->promising(); });
}

size_t LaneLink::lanes_ready() const {
  return static_cast<size_t>(
      std::count_if(lanes_.begin(), lanes_.end(), [](const auto &lane) { return lane->ready(); }));
}

}  // namespace moonpool
