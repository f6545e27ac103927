// SPDX-License-Identifier: Apache-2.0
#include "transfer.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "digest.hpp"
#include "engine.hpp"
#include "peer.hpp"

namespace moonpool {

Transfer::Transfer(std::shared_ptr<Peer> target, mp_op operation, bool with_digest, int64_t deadline)
    : peer(std::move(target)), op(operation), digest(with_digest), deadline_ns(deadline), pending_(0) {}

Transfer::~Transfer() {
  // Only a transfer that was never armed or that settled gets here, so the uses are its own to give back.
  for (const auto &region : locals) region->end_use();
}

void Transfer::arm() {
  pending_.store(static_cast<uint32_t>(descs.size()));
  desc_status_.assign(descs.size(), MP_PENDING);
  if (digest) desc_digests_.assign(descs.size(), 0);
  if (!rejected.empty()) {
    failed_.store(true);
    first_error_ = rejection;
  }
}

void Transfer::set_carrier(std::shared_ptr<Carrier> carrier) {
  std::lock_guard lock(mutex_);
  carrier_ = std::move(carrier);
}

std::shared_ptr<Carrier> Transfer::carrier() const {
  std::lock_guard lock(mutex_);
  return carrier_;
}

const char *Transfer::carried_by() const {
  std::lock_guard lock(mutex_);
  return carrier_ == nullptr ? nullptr : carrier_->path();
}

void Transfer::descs_done(uint32_t begin, uint32_t end, const uint64_t *digests) {
  std::memset(desc_status_.data() + begin, MP_OK, end - begin);
  if (digest && digests != nullptr) std::copy(digests, digests + (end - begin), desc_digests_.begin() + begin);
  resolved(end - begin);
}

void Transfer::descs_failed(uint32_t begin, uint32_t end, const Error &error) {
  std::memset(desc_status_.data() + begin, error.code, end - begin);
  failed_.store(true);
  {
    std::lock_guard lock(mutex_);
    if (!first_error_) {
      first_error_ = error;
      if (first_error_.item < 0) first_error_.item = descs[begin].item;
    }
  }
  resolved(end - begin);
}

void Transfer::resolved(uint32_t n) {
  if (pending_.fetch_sub(n) != n) return;
  if (has_notify && !failed_.load() && !stopping()) {
    peer->send_notify(shared_from_this());
  } else {
    finish();
  }
}

void Transfer::note_mark(uint64_t lane_id, uint32_t mark) {
  std::lock_guard lock(mutex_);
  const auto it = std::find_if(marks_.begin(), marks_.end(), [&](const auto &one) { return one.lane == lane_id; });
  if (it == marks_.end()) {
    marks_.push_back({lane_id, mark, 0});
  } else {
    it->mark = mark;
  }
}

std::vector<wire::Mark> Transfer::marks() const {
  std::lock_guard lock(mutex_);
  return marks_;
}

void Transfer::notify_done(const Error &error) {
  {
    std::lock_guard lock(mutex_);
    if (error) {
      if (!first_error_) first_error_ = error;
    } else {
      notified_ = true;
    }
  }
  finish();
}

Error Transfer::stop_cause() const {
  std::lock_guard lock(mutex_);
  return stop_cause_;
}

mp_transfer_state Transfer::outcome_locked() const {
  const bool bytes_arrived =
      std::all_of(desc_status_.begin(), desc_status_.end(), [](uint8_t status) { return status == MP_OK; });
  if (bytes_arrived && rejected.empty() && (!has_notify || notified_)) return MP_COMPLETED;
  if (!stop_cause_) return MP_FAILED;
  if (stop_cause_.code == MP_DEADLINE) return MP_EXPIRED;
  return stop_cause_.code == MP_CANCELLED || stop_cause_.code == MP_CLOSED ? MP_STOPPED : MP_FAILED;
}

void Transfer::set_state_locked(mp_transfer_state state) {
  state_.store(state, std::memory_order_release);
  if (event_fd_ >= 0) {
    const uint64_t one = 1;
    // The counter can only be full when the reader already has something to wake for.
    [[maybe_unused]] const ssize_t n = write(event_fd_, &one, sizeof one);
    event_fd_ = -1;
  }
}

void Transfer::finish() {
  const std::shared_ptr<Transfer> self = peer->engine().running.remove(*this);
  if (self == nullptr) return;  // a stop and the last descriptor met; one of them ended it
  std::unique_lock lock(mutex_);
  const mp_transfer_state state = outcome_locked();
  if (state != MP_COMPLETED) {
    const mp_status left_undone = stop_cause_ ? stop_cause_.code : MP_INTERNAL;
    item_status_ = rejected.empty() ? std::vector<uint8_t>(count, MP_OK) : rejected;
    for (size_t i = 0; i < descs.size(); ++i) {
      uint8_t status = desc_status_[i];
      if (status == MP_OK) continue;
      if (status == MP_PENDING) status = static_cast<uint8_t>(left_undone);
      std::memset(item_status_.data() + descs[i].item, status, descs[i].items);
    }
    // A stop explains everything that follows from it, so it is the first cause.
    if (stop_cause_) first_error_ = stop_cause_;
  }
  for (const auto &region : locals) region->end_use();
  locals.clear();
  const std::string &require = peer->engine().config.require;
  const char *const without = require.empty() ? "tcp" : require.c_str();
  peer->engine().stats.count_transfer(*this, carrier_ == nullptr ? without : carrier_->path(), state);
  carrier_.reset();
  set_state_locked(state);
  // Woken after the unlock, a waiter does not run into the mutex at once.
  lock.unlock();
  changed_.notify_all();
}

void Transfer::stop(const Error &cause) {
  std::shared_ptr<Carrier> carrier;
  {
    std::lock_guard lock(mutex_);
    if (settled_state(state_.load())) return;
    if (!stop_cause_) stop_cause_ = cause;
    stopping_.store(true, std::memory_order_release);
    carrier = carrier_;
  }
  if (carrier != nullptr) carrier->cancel(*this);
  peer->forget(*this);
  {
    std::lock_guard lock(mutex_);
    if (state_.load() == MP_RUNNING) set_state_locked(MP_UNSETTLED);
  }
  changed_.notify_all();
}

// How long to wait when the caller does not say. The deadline ends a running transfer; settling takes the far side,
// which may never answer.
int64_t Transfer::own_bound(bool settled) const {
  if (!settled) return kNever;
  const int64_t grace = int64_t{peer->engine().config.progress_timeout_ms} * kMillisecond;
  const int64_t from = std::max(deadline_ns, now_ns());
  return from > kNever - grace ? kNever : from + grace;
}

mp_status Transfer::wait(int64_t timeout_ns, bool settled) {
  const auto reached = [this, settled] {
    const int state = state_.load(std::memory_order_acquire);
    return settled ? settled_state(state) : state != MP_RUNNING;
  };
  if (reached()) return MP_OK;
  const int64_t until = timeout_ns < 0 ? own_bound(settled) : deadline_after(timeout_ns);
  if (timeout_ns != 0) {
    std::shared_ptr<Carrier> carrier;
    {
      std::lock_guard lock(mutex_);
      carrier = carrier_;
    }
    if (carrier != nullptr) carrier->assist(*this, until);
    if (reached()) return MP_OK;
  }
  std::unique_lock lock(mutex_);
  if (until == kNever) {
    changed_.wait(lock, reached);
    return MP_OK;
  }
  return changed_.wait_until(lock, steady_point(until), reached) ? MP_OK : MP_WAIT_TIMEOUT;
}

Error Transfer::error() const {
  std::lock_guard lock(mutex_);
  const int state = state_.load();
  if (state == MP_COMPLETED || state == MP_RUNNING) return {};
  if (state == MP_UNSETTLED || !first_error_) return stop_cause_ ? stop_cause_ : first_error_;
  return first_error_;
}

void Transfer::item_status(uint8_t *out, size_t n) const {
  std::lock_guard lock(mutex_);
  n = std::min(n, count);
  const int state = state_.load();
  if (state == MP_COMPLETED) {
    std::memset(out, MP_OK, n);
  } else if (settled_state(state)) {
    std::copy_n(item_status_.begin(), n, out);
  } else if (!rejected.empty()) {
    for (size_t i = 0; i < n; ++i) out[i] = rejected[i] == MP_OK ? static_cast<uint8_t>(MP_PENDING) : rejected[i];
  } else {
    std::memset(out, MP_PENDING, n);
  }
}

void Transfer::digests(uint64_t *out, size_t n) const {
  std::fill_n(out, n, 0);
  // With digests a descriptor is one leaf of one item, in order.
  for (size_t i = 0; i < descs.size();) {
    size_t end = i;
    bool all_there = true;
    while (end < descs.size() && descs[end].item == descs[i].item) all_there &= desc_status_[end++] == MP_OK;
    if (all_there && descs[i].item < n) out[descs[i].item] = combine_leaves(&desc_digests_[i], end - i);
    i = end;
  }
}

void Transfer::set_eventfd(int fd) {
  std::lock_guard lock(mutex_);
  event_fd_ = fd;
  if (fd >= 0 && state_.load() != MP_RUNNING) set_state_locked(static_cast<mp_transfer_state>(state_.load()));
}

}  // namespace moonpool
