// SPDX-License-Identifier: Apache-2.0
#include "lane.hpp"

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

#include "engine.hpp"
#include "lane_link.hpp"
#include "peer.hpp"

namespace moonpool {

Error Lane::not_ready_locked() const {
  return make_error(MP_CONNECT, "a lane was not ready within the connect deadline",
                    "check that the peer is not stopped, or raise connect_timeout");
}

Lane::Lane(LaneLink &link, IoThread &io, wire::Kind kind) : link_(link), engine_(link.engine()), io_(io), kind_(kind) {
  engine_.stats.lanes.fetch_add(1);
}

Lane::~Lane() { engine_.stats.lanes.fetch_sub(1); }

// ---------------------------------------------------------------- connecting

void Lane::dial_now() {
  const Error hindered = hindrance();
  std::lock_guard lock(mutex_);
  if (shut_ || dialing_ || ready_.load()) return;
  const std::shared_ptr<Peer> peer = link_.peer();
  if (peer == nullptr) return;
  if (resting_.exchange(false)) promising_.store(true);
  if (hindered) return failed_to_dial_locked(hindered);
  if (!admitted_locked()) return;  // dials when its turn comes
  dialing_ = true;
  const uint64_t attempt = ++attempt_;
  lane_id_ = peer->next_lane_id();
  const int64_t deadline = now_ns() + int64_t{engine_.config.connect_timeout_ms} * kMillisecond;
  dial(engine_.identity, io_, {link_.addresses, kind_, link_.session, lane_id_, deadline},
       [weak = weak_from_this(), attempt](Dialed dialed) {
         if (auto self = weak.lock()) self->on_dialed(attempt, std::move(dialed));
       });
}

void Lane::on_dialed(uint64_t attempt, Dialed dialed) {
  with_lock([&] {
    if (attempt != attempt_) return;
    if (shut_ || dialed.error) {
      dialing_ = false;
      if (shut_) return give_up_turn_locked();
      return failed_to_dial_locked(dialed.error);
    }
    fd_ = std::move(dialed.fd);
    begin_locked();
    if (ready_.load() || !fd_) return;
    // The transport has more to arrange over the socket.
    io_.call_at(now_ns() + link_.opening_ns(), [weak = weak_from_this(), attempt] {
      if (auto self = weak.lock()) self->check_opened(attempt);
    });
  });
}

void Lane::failed_to_dial_locked(const Error &cause) {
  give_up_turn_locked();
  engine_.stats.lane_errors.fetch_add(1);
  promising_.store(false);
  schedule_dial_locked();
  io_.post([link = link_.weak_from_this(), cause] {
    if (auto self = link.lock()) self->lane_refused(cause);
  });
}

void Lane::opened_locked() {
  dialing_ = false;
  backoff_.reset();
  ready_.store(true);
  io_.post([link = link_.weak_from_this()] {
    if (auto self = link.lock()) self->lane_opened();
  });
  drive_locked();
}

void Lane::check_opened(uint64_t attempt) {
  with_lock([&] {
    if (attempt != attempt_ || shut_ || ready_.load() || !fd_) return;
    cut_locked(not_ready_locked());
  });
}

void Lane::schedule_dial_locked() {
  if (shut_) return;
  io_.call_at(now_ns() + backoff_.wait_ns(), [weak = weak_from_this()] {
    if (auto self = weak.lock()) self->dial_now();
  });
  backoff_.grow();
}

// ---------------------------------------------------------------- driving

void Lane::submitted() {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return kick();
  if (!ready_.load(std::memory_order_relaxed)) return;
  send_first_locked();
  if (ready_.load(std::memory_order_relaxed)) arm_submitted_locked();
  lock.unlock();
  if (attention_.load()) kick();
}

void Lane::kick() {
  attention_.store(true);
  while (attention_.load()) {
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return;  // the holder looks at attention_ after it unlocks
    attention_.store(false);
    drive_locked();
  }
}

void Lane::progressed_locked() {
  progress_at_ = now_ns();
  // The waiter would not see what another thread has taken from its socket.
  if (asleep_) wake_waiter_locked();
}

void Lane::refuse(Transfer &transfer, uint32_t desc, mp_status code) const {
  Error error = refused_by_peer(code);
  if (code == MP_DIGEST) error.message = "bytes arrived that are not the bytes sent";
  const std::shared_ptr<Peer> peer = link_.peer();
  if (peer != nullptr) error = peer->describe(std::move(error), link_.path());
  transfer.descs_failed(desc, desc + 1, error);
}

// ---------------------------------------------------------------- ending

void Lane::cut_locked(Error cause) {
  const bool was_ready = ready_.exchange(false);
  promising_.store(was_ready && returns_soon_locked());
  dialing_ = false;
  engine_.stats.lane_errors.fetch_add(1);
  std::vector<Work> work = take_unfinished_locked();
  load_.store(0);
  // A waiter may be asleep on the descriptor; it is closed when the waiter has left.
  ::shutdown(fd(), SHUT_RDWR);
  io_.remove(*this);
  if (asleep_) wake_waiter_locked();
  if (!assisted_) fd_.reset();
  const uint64_t lane_id = lane_id_;
  // The link takes locks of its own and calls the peer, so it hears of it outside this lane's lock.
  io_.post([link = link_.weak_from_this(), lane_id, was_ready, work = std::move(work), cause]() mutable {
    const auto self = link.lock();
    if (self == nullptr) return;
    if (!was_ready) self->lane_refused(cause);
    self->lane_cut(lane_id, std::move(work), cause);
  });
  if (!assisted_) schedule_dial_locked();
}

void Lane::leave_locked(bool again) {
  ready_.store(false);
  dialing_ = false;
  promising_.store(again);
  resting_.store(!again);
  take_unfinished_locked();
  ::shutdown(fd(), SHUT_RDWR);
  io_.remove(*this);
  fd_.reset();
  if (again) schedule_dial_locked();
}

bool Lane::rest() {
  {
    std::lock_guard lock(mutex_);
    if (shut_ || !can_leave_locked()) return false;
    leave_locked(false);
  }
  link_.pass_on_work();
  return true;
}

void Lane::cancel(const Transfer &transfer) {
  with_lock([&] {
    cancel_locked(transfer);
    if (asleep_) wake_waiter_locked();
  });
}

std::vector<Work> Lane::shutdown() {
  std::vector<Work> work;
  std::lock_guard lock(mutex_);
  shut_ = true;
  if (!assisted_) wake_.reset();
  ready_.store(false);
  promising_.store(false);
  // It need not be the socket that it sleeps on.
  if (asleep_) wake_waiter_locked();
  if (fd_) {
    ::shutdown(fd(), SHUT_RDWR);
    io_.remove(*this);
    work = take_unfinished_locked();
    load_.store(0);
    if (!assisted_) fd_.reset();
  } else {
    give_up_turn_locked();
  }
  return work;
}

void Lane::watch_progress_locked() {
  if (progress_watched_) return;
  progress_watched_ = true;
  const int64_t limit = int64_t{engine_.config.progress_timeout_ms} * kMillisecond;
  io_.call_at(std::max(progress_at_ + limit, now_ns()), [weak = weak_from_this()] {
    if (auto self = weak.lock()) self->check_progress();
  });
}

void Lane::check_progress() {
  with_lock([&] {
    progress_watched_ = false;
    if (!ready_.load() || !busy_locked()) return;
    const int64_t limit = int64_t{engine_.config.progress_timeout_ms} * kMillisecond;
    if (now_ns() - progress_at_ < limit) return watch_progress_locked();
    cut_locked(make_error(MP_DEADLINE, "no byte moved on a lane for " + std::to_string(limit / kMillisecond) + " ms",
                          "check that the peer is not stopped, or raise progress_timeout"));
  });
}

// ---------------------------------------------------------------- waiting

// A waiting thread drives the lane of its transfer itself, looks for a short time, then sleeps.
void Lane::assist(Transfer &transfer, int64_t until) {
  bool mine = false;
  with_lock([&] {
    if (assisted_ || !ready_.load() || transfer.finished()) return;
    mine = assisted_ = true;
  });
  if (!mine) return;
  const bool bulk = transfer.bytes >= kBulkBytes && copies();
  int64_t spin_until = now_ns() + int64_t{engine_.config.spin_us} * 1000;
  bool usable = true;
  ActiveThreads::enter();
  // Once nothing of it is on this lane, its end comes another way: over another lane or the control connection.
  const auto over = [&] { return transfer.finished() || transfer.stopping() || !carries_locked(transfer); };
  while (usable) {
    const int64_t now = now_ns();
    if (now >= until) break;
    if (now >= spin_until || !ActiveThreads::may_look(bulk)) {
      pollfd fds[2] = {};
      bool sleeps = false;
      with_lock([&] {
        usable = ready_.load() && !over();
        if (!usable) return;
        if (!wake_) wake_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
        const std::optional<pollfd> one = sleep_on_locked();
        asleep_ = sleeps = one.has_value();
        if (sleeps) fds[0] = *one;
        fds[1] = {wake_.get(), POLLIN, 0};
      });
      if (!usable) break;
      if (sleeps) {
        const int64_t left = std::min(until, deadline_after(3600LL * 1'000'000'000)) - now;
        const timespec timeout{left / 1'000'000'000, left % 1'000'000'000};
        ActiveThreads::leave();
        ppoll(fds, 2, &timeout, nullptr);
        ActiveThreads::enter();
      }
      if ((fds[1].revents & POLLIN) != 0) {
        uint64_t count = 0;
        [[maybe_unused]] const ssize_t n = read(fds[1].fd, &count, sizeof count);
      }
    } else if (!yield_core() && bulk) {
      spin_until = now;
    }
    with_lock([&] {
      if (asleep_) sleep_ended_locked();
      asleep_ = false;
      drive_locked();
      usable = ready_.load() && !over();
    });
  }
  ActiveThreads::leave();
  with_lock([&] {
    assisted_ = false;
    if (shut_) wake_.reset();
    if (ready_.load()) {
      arm_locked();
    } else if (fd_) {
      fd_.reset();
      schedule_dial_locked();
    }
  });
}

void Lane::wake_waiter_locked() {
  const uint64_t one = 1;
  // It can only fail when the counter is full, and then the waiter is woken anyway.
  [[maybe_unused]] const ssize_t n = write(wake_.get(), &one, sizeof one);
}

}  // namespace moonpool
