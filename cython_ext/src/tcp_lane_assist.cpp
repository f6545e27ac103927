// SPDX-License-Identifier: Apache-2.0
// The part of a lane that a waiting thread runs: it drives the lane of its transfer itself, looks for a short time,
// then sleeps on the socket.
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

#include "engine.hpp"
#include "tcp_lane.hpp"

namespace moonpool {

void TcpLane::wake_waiter_locked() {
  const uint64_t one = 1;
  // It can only fail when the counter is full, and then the waiter is woken anyway.
  [[maybe_unused]] const ssize_t n = write(wake_.get(), &one, sizeof one);
}

bool TcpLane::carries_locked(const Transfer &transfer) const {
  return std::any_of(frames_.begin(), frames_.end(),
                     [&](const Frame &frame) { return frame.work.transfer.get() == &transfer && !frame.resolved; });
}

void TcpLane::assist(Transfer &transfer, int64_t until) {
  bool mine = false;
  with_lock([&] {
    if (assisted_ || !ready_.load() || transfer.finished()) return;
    mine = assisted_ = true;
    assist_mask_ = EPOLLIN | EPOLLOUT;
  });
  if (!mine) return;
  const bool bulk = transfer.bytes >= kBulkBytes;
  int64_t spin_until = now_ns() + int64_t{engine_.config.spin_us} * 1000;
  bool usable = true;
  ActiveThreads::enter();
  // Once nothing of it is on this lane, its end comes another way: over another lane or the control connection.
  const auto over = [&] { return transfer.finished() || transfer.stopping() || !carries_locked(transfer); };
  while (usable) {
    const int64_t now = now_ns();
    if (now >= until) break;
    pollfd fds[2] = {};
    if (now >= spin_until || !ActiveThreads::may_look(bulk)) {
      with_lock([&] {
        usable = ready_.load() && !over();
        fds[0] = {fd(), static_cast<short>(POLLIN | (sending_ ? POLLOUT : 0)), 0};
        if (!wake_) wake_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
        fds[1] = {wake_.get(), POLLIN, 0};
        // Other events than these are the I/O thread's while this one sleeps.
        assist_mask_ = sending_ ? EPOLLIN | EPOLLOUT : EPOLLIN;
        asleep_ = usable;
        if (asleep_) arm_locked();
      });
      if (!usable) break;
      const int64_t left = std::min(until, deadline_after(3600LL * 1'000'000'000)) - now;
      const timespec timeout{left / 1'000'000'000, left % 1'000'000'000};
      ActiveThreads::leave();
      ppoll(fds, 2, &timeout, nullptr);
      ActiveThreads::enter();
      if ((fds[1].revents & POLLIN) != 0) {
        uint64_t count = 0;
        [[maybe_unused]] const ssize_t n = read(fds[1].fd, &count, sizeof count);
      }
    } else if (!yield_core() && bulk) {
      spin_until = now;
    }
    with_lock([&] {
      asleep_ = false;
      assist_mask_ = EPOLLIN | EPOLLOUT;
      drive_locked();
      usable = ready_.load() && !over();
    });
  }
  ActiveThreads::leave();
  with_lock([&] {
    assisted_ = false;
    assist_mask_ = 0;
    if (shut_) wake_.reset();
    if (ready_.load()) {
      arm_locked();
    } else if (fd_) {
      fd_.reset();
      schedule_dial_locked();
    }
  });
}

}  // namespace moonpool
