// SPDX-License-Identifier: Apache-2.0
#include "system.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace moonpool {

namespace {

// One bit per descriptor owned by the core. Plain atomics, because the child handler of fork may use nothing else.
constexpr int kTrackedFds = 1 << 20;
std::atomic<uint64_t> g_owned[kTrackedFds / 64];
std::atomic<uint64_t> g_fork_epoch{0};

void after_fork_in_child() {
  g_fork_epoch.fetch_add(1);
  for (int word = 0; word < kTrackedFds / 64; ++word) {
    uint64_t bits = g_owned[word].exchange(0);
    while (bits != 0) {
      const int bit = __builtin_ctzll(bits);
      bits &= bits - 1;
      ::close(word * 64 + bit);
    }
  }
}

void install_fork_handler() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, after_fork_in_child); });
}

}  // namespace

void random_bytes(void *out, size_t n) {
  auto *bytes = static_cast<uint8_t *>(out);
  while (n > 0) {
    const ssize_t got = getrandom(bytes, n, 0);
    if (got < 0) {
      if (errno == EINTR) continue;
      std::abort();
    }
    bytes += got;
    n -= static_cast<size_t>(got);
  }
}

uint64_t random_u64() {
  uint64_t value = 0;
  random_bytes(&value, sizeof value);
  return value;
}

Id128 random_id() {
  Id128 id;
  random_bytes(id.data(), id.size());
  return id;
}

uint64_t fork_epoch() { return g_fork_epoch.load(std::memory_order_relaxed); }

Fd::Fd(int fd) : fd_(fd) {
  if (fd >= 0 && fd < kTrackedFds) {
    install_fork_handler();
    g_owned[fd / 64].fetch_or(uint64_t{1} << (fd % 64));
  }
}

void Fd::reset() {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0) return;
  if (fd < kTrackedFds) {
    const uint64_t bit = uint64_t{1} << (fd % 64);
    if ((g_owned[fd / 64].fetch_and(~bit) & bit) == 0) return;  // already closed by the fork handler
  }
  ::close(fd);
}

int numa_node_of(const void *address) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  void *start = reinterpret_cast<void *>(reinterpret_cast<uintptr_t>(address) / page * page);
  int node = -1;
  // Without nodes to move to it only tells where the page is.
  if (syscall(SYS_move_pages, 0, 1ul, &start, nullptr, &node, 0) != 0) return -1;
  return std::max(node, -1);
}

unsigned cpu_count() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return static_cast<unsigned>(CPU_COUNT(&set));
  const long n = sysconf(_SC_NPROCESSORS_ONLN);
  return n > 0 ? static_cast<unsigned>(n) : 1;
}

unsigned idle_cpus() {
  // Three averages, then what runs or wants to, this thread among it (proc_loadavg(5)).
  Fd file(open("/proc/loadavg", O_RDONLY | O_CLOEXEC));
  char text[128] = {};
  unsigned running = 0;
  if (!file || read(file.get(), text, sizeof text - 1) <= 0 || sscanf(text, "%*f %*f %*f %u", &running) != 1) return 0;
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online > static_cast<long>(running) ? static_cast<unsigned>(online) - running : 0;
}

}  // namespace moonpool
