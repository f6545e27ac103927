// SPDX-License-Identifier: Apache-2.0
#include "notifications.hpp"

namespace moonpool {

bool NotificationQueue::push(Notice notice) {
  std::lock_guard lock(mutex_);
  if (closed_ || notices_.size() >= capacity_ || bytes_ + notice.payload.size() > kBytesMax) return false;
  bytes_ += notice.payload.size();
  notices_.push_back(std::move(notice));
  arrived_.notify_one();
  return true;
}

bool NotificationQueue::take(int64_t timeout_ns, Notice *notice) {
  std::unique_lock lock(mutex_);
  const auto ready = [this] { return closed_ || !notices_.empty(); };
  if (timeout_ns < 0) {
    arrived_.wait(lock, ready);
  } else if (timeout_ns > 0) {
    arrived_.wait_until(lock, steady_point(deadline_after(timeout_ns)), ready);
  }
  if (notices_.empty()) return false;
  *notice = std::move(notices_.front());
  notices_.pop_front();
  bytes_ -= notice->payload.size();
  return true;
}

void NotificationQueue::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  arrived_.notify_all();
}

bool NotificationQueue::closed() const {
  std::lock_guard lock(mutex_);
  return closed_;
}

size_t NotificationQueue::size() const {
  std::lock_guard lock(mutex_);
  return notices_.size();
}

}  // namespace moonpool
