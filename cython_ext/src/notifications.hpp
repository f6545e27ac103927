// SPDX-License-Identifier: Apache-2.0
// Notifications that peers delivered and nobody took yet.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>

#include "system.hpp"

namespace moonpool {

struct Notice {
  std::string peer;
  Id128 incarnation;
  std::string payload;
};

class NotificationQueue {
 public:
  // Payloads of all that wait, whatever their number.
  static constexpr size_t kBytesMax = 64u << 20;

  explicit NotificationQueue(size_t capacity) : capacity_(capacity) {}

  // False when full.
  bool push(Notice notice);
  // False when none came within timeout_ns, or the queue is closed and empty.
  bool take(int64_t timeout_ns, Notice *notice);
  void close();
  bool closed() const;
  size_t size() const;

 private:
  const size_t capacity_;
  mutable std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<Notice> notices_;
  size_t bytes_ = 0;
  bool closed_ = false;
};

}  // namespace moonpool
