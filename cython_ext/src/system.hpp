// SPDX-License-Identifier: Apache-2.0
// The thin layer over the operating system: clock, owned descriptors, random bytes, fork detection.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <utility>

namespace moonpool {

using Id128 = std::array<uint8_t, 16>;

inline int64_t now_ns() {
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return int64_t{ts.tv_sec} * 1'000'000'000 + ts.tv_nsec;
}

constexpr int64_t kNever = INT64_MAX;
constexpr int64_t kMillisecond = 1'000'000;

// now + delta without overflow.
inline int64_t deadline_after(int64_t delta_ns) {
  const int64_t now = now_ns();
  return delta_ns >= kNever - now ? kNever : now + delta_ns;
}

// The same instant for the standard library's timed waits.
inline std::chrono::steady_clock::time_point steady_point(int64_t ns) {
  return std::chrono::steady_clock::time_point{std::chrono::nanoseconds(ns)};
}

// Fills from the kernel's generator; ends the process when there is none (no key may ever be predictable).
void random_bytes(void *out, size_t n);
uint64_t random_u64();
Id128 random_id();

// Counts the forks this process is a child of. State made under another epoch belongs to the parent.
uint64_t fork_epoch();

// An owned descriptor. A forked child closes every one of them at once (they would keep connections of a dead parent
// open), so a descriptor of the parent is never closed twice there.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd);
  Fd(Fd &&other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd &operator=(Fd &&other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  Fd(const Fd &) = delete;
  Fd &operator=(const Fd &) = delete;
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

unsigned cpu_count();
// Cores of this host for which the kernel has nothing to run at this moment; 0 where it does not say.
unsigned idle_cpus();
// The NUMA node of the page at `address`; -1 when it has none yet, or the kernel does not say.
int numa_node_of(const void *address);

}  // namespace moonpool
