// SPDX-License-Identifier: Apache-2.0
//
// What most native tests need: random bytes that can be had again, waiting for a condition, sockets.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "system.hpp"

namespace moonpool::testing {

// How long a test waits for what must happen. It only ends a test that has failed: sanitizers on a busy machine are
// slow.
constexpr int64_t kPatienceNs = 60'000 * kMillisecond;

using Bytes = std::vector<uint8_t>;

inline Bytes random_data(size_t n, uint32_t seed) {
  std::mt19937_64 random(seed);
  Bytes out(n);
  for (size_t at = 0; at < n; at += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(out.data() + at, &word, std::min(sizeof word, n - at));
  }
  return out;
}

// True once `condition` holds. For conditions that nothing announces; the pause only saves CPU.
template <class Condition>
bool eventually(Condition condition) {
  const int64_t until = now_ns() + kPatienceNs;
  while (!condition()) {
    if (now_ns() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// A listening loopback socket and its port.
Fd listen_on_loopback(uint16_t *port);
Fd connect_to_loopback(uint16_t port, int buffer_bytes = 0);
// Two connected TCP sockets. `buffer_bytes` > 0 makes their buffers as small as the kernel allows.
std::pair<Fd, Fd> tcp_pair(int buffer_bytes = 0);
void set_buffers(int fd, int bytes);
// The next close of this socket is a reset: what is under way is lost.
void reset_on_close(int fd);

// These wait; false when the connection ended or patience did.
bool send_all(int fd, const void *data, size_t n);
bool receive_all(int fd, void *out, size_t n);
// True when the other side closes or resets the connection. Whatever arrives before is thrown away.
bool ends(int fd);

template <class T>
bool send_struct(int fd, const T &value) {
  return send_all(fd, &value, sizeof value);
}
template <class T>
bool receive_struct(int fd, T *value) {
  return receive_all(fd, value, sizeof *value);
}

}  // namespace moonpool::testing
