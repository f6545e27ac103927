// SPDX-License-Identifier: Apache-2.0
// What a peer does for its transfers: hands them to the link or keeps them until it is connected, carries their
// notifications, and settles what a lost connection left open.
#include <algorithm>
#include <iterator>

#include "engine.hpp"
#include "peer.hpp"
#include "staged_run.hpp"

namespace moonpool {

void Peer::submit(const std::shared_ptr<Transfer> &transfer) {
  Error error;
  bool stale = false;
  const bool begun = transfer->session != Id128{};
  Id128 session;
  {
    std::lock_guard lock(mutex_);
    session = session_;
    // What has begun ends with its connection, and waits for no other one.
    switch (begun && state_ != State::kReady ? State::kClosed : state_) {
      case State::kReady:
        stale = transfer->target_incarnation != incarnation_;
        break;
      case State::kClosed:
        error = last_error_;
        break;
      case State::kConnecting:
        waiting_.push_back(transfer);
        return;
      case State::kIdle:
      case State::kLost:
        if (now_ns() < retry_at_) {
          error = last_error_;
        } else {
          waiting_.push_back(transfer);
          start_dial_locked(now_ns() + int64_t{engine_->config.connect_timeout_ms} * kMillisecond);
          return;
        }
    }
  }
  // The peer may have come back as another one since the handles were checked, or since a plan was made.
  if (stale) {
    return transfer->fail(describe(make_error(MP_REGION_STALE, "the peer was restarted; its regions are new ones",
                                              "look the region up again among those of the peer"),
                                   "tcp"));
  }
  if (error) return transfer->fail(error);
  const bool reached = transfer->device == nullptr || reaches_device(*transfer);
  const std::shared_ptr<Link> link = reached ? route(*transfer, nullptr, &error) : nullptr;
  const bool staged = transfer->device != nullptr && (!reached || (link == nullptr && error));
  // Looked at when the link is known: one of this session is of no use once that is over.
  if (begun && transfer->session != this->session()) return transfer->fail(connection_ended(label(), "tcp"));
  if (!begun && (staged || link != nullptr)) transfer->session = session;
  if (staged) return StagedRun::begin(transfer);
  if (link == nullptr && error) return transfer->fail(describe(std::move(error), ""));
  if (link == nullptr) return keep(transfer);
  transfer->set_carrier(link);
  link->submit(transfer);
}

// Whether a path moves memory of a device by itself, or may when it is connected.
bool Peer::reaches_device(const Transfer &transfer) const {
  std::lock_guard lock(mutex_);
  return std::any_of(paths_.begin(), paths_.end(), [&](const Path &path) {
    if (path.link != nullptr) return path.link->takes(transfer);
    return path.possible && path.transport->suits(transfer) && (path.connecting || path.retry_at <= now_ns());
  });
}

// Until the path is connected that route() found on its way.
void Peer::keep(const std::shared_ptr<Transfer> &transfer) {
  {
    std::lock_guard lock(mutex_);
    const bool coming = state_ == State::kConnecting ||
                        std::any_of(paths_.begin(), paths_.end(), [](const Path &p) { return p.connecting; });
    if (coming) {
      waiting_.push_back(transfer);
      return;
    }
  }
  submit(transfer);  // it came or failed meanwhile
}

void Peer::send_notify(const std::shared_ptr<Transfer> &transfer) {
  std::string body;
  wire::Writer writer(&body);
  std::unique_lock lock(mutex_);
  if (state_ != State::kReady) {
    const Error error = last_error_;
    lock.unlock();
    transfer->notify_done(error);
    return;
  }
  const uint64_t id = next_notify_++;
  wire::encode_notify(writer, {id, transfer->marks(), transfer->notify});
  notifying_.emplace(id, transfer);
  control_->send(wire::kNotify, body);
}

void Peer::forget(Transfer &transfer) {
  std::shared_ptr<Transfer> waiting, notifying;
  std::vector<Orphan> parked;
  {
    std::lock_guard lock(mutex_);
    const auto others = std::partition(parked_.begin(), parked_.end(),
                                       [&](const Orphan &one) { return one.work.front().transfer.get() != &transfer; });
    std::move(others, parked_.end(), std::back_inserter(parked));
    parked_.erase(others, parked_.end());
    const auto it = std::find_if(waiting_.begin(), waiting_.end(), [&](const auto &t) { return t.get() == &transfer; });
    if (it != waiting_.end()) {
      waiting = std::move(*it);
      waiting_.erase(it);
    }
    for (auto n = notifying_.begin(); n != notifying_.end(); ++n) {
      if (n->second.get() != &transfer) continue;
      notifying = std::move(n->second);
      notifying_.erase(n);
      break;
    }
  }
  const Error cause = transfer.stop_cause();
  if (waiting != nullptr) waiting->fail(cause);
  for (const Orphan &one : parked) fail_work(one.work, cause);
  if (notifying != nullptr) notifying->notify_done(cause);
}

void Peer::send_fence(uint64_t lane_id) {
  std::string body;
  wire::Writer(&body).put(lane_id);
  std::lock_guard lock(mutex_);
  if (control_ != nullptr) control_->send(wire::kFence, body);
}

void Peer::orphan(std::vector<Work> work, const Error &cause) {
  // Whoever waits learns of it now; the buffers stay owned until it is settled.
  for (const Work &one : work) one.transfer->stop(cause);
  std::vector<Orphan> orphans;
  orphans.push_back({std::move(work), cause});
  std::unique_lock lock(mutex_);
  // Ready means connected anew, since only the link of a lost connection leaves work behind.
  if (state_ == State::kClosed || state_ == State::kReady) {
    lock.unlock();
    return settle(std::move(orphans));
  }
  orphans_.push_back(std::move(orphans.front()));
  settle_later_locked();
}

void Peer::settle_later_locked() {
  if (orphans_.empty()) return;
  // Connecting again is what settles them.
  const int64_t when = std::max(retry_at_, now_ns() + Backoff::kFirstNs);
  io_.call_at(when, [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (self == nullptr) return;
    std::lock_guard inner(self->mutex_);
    if (self->state_ == State::kLost && !self->orphans_.empty()) {
      self->start_dial_locked(now_ns() + int64_t{self->engine_->config.connect_timeout_ms} * kMillisecond);
    }
  });
}

void Peer::settle(std::vector<Orphan> orphans) {
  for (Orphan &orphan : orphans) {
    for (Work &work : orphan.work) work.transfer->descs_failed(work.begin, work.end, orphan.cause);
  }
}

}  // namespace moonpool
