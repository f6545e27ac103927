// SPDX-License-Identifier: Apache-2.0
//
// What the linker gives the core instead of the kernel's calls (-Wl,--wrap). Descriptors that are not the world's go
// to the kernel.
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "world.hpp"

using moonpool::fuzz::Socket;
using moonpool::fuzz::World;

namespace {

constexpr uint16_t kFreePort = 7700;  // what a bind to port 0 gets

int failed(int err) {
  errno = err;
  return -1;
}

// Fills the places one after the other, as readv does. A place without memory throws its bytes away.
ssize_t receive(int fd, const iovec *places, size_t count) {
  World &world = World::get();
  Socket &socket = world.at(fd);
  if (socket.state != Socket::State::kOpen) return failed(EBADF);
  if (socket.reset) return failed(ECONNRESET);
  if (socket.waiting() == 0) return socket.end_of_input ? 0 : failed(EAGAIN);
  size_t left = world.part(socket, socket.waiting());
  if (left == 0) return failed(EAGAIN);
  size_t moved = 0;
  for (size_t i = 0; i < count && left > 0; ++i) {
    const size_t n = std::min(left, places[i].iov_len);
    if (places[i].iov_base != nullptr) std::memcpy(places[i].iov_base, socket.in.data() + socket.in_at, n);
    socket.in_at += n;
    moved += n;
    left -= n;
  }
  if (socket.in_at == socket.in.size()) {
    socket.in.clear();
    socket.in_at = 0;
  }
  world.note_progress();
  return static_cast<ssize_t>(moved);
}

ssize_t transmit(int fd, const iovec *places, size_t count) {
  World &world = World::get();
  Socket &socket = world.at(fd);
  if (socket.state != Socket::State::kOpen) return failed(EPIPE);
  Socket &other = world.at(socket.other);
  if (socket.reset || other.state != Socket::State::kOpen) return failed(socket.reset ? ECONNRESET : EPIPE);
  size_t total = 0;
  for (size_t i = 0; i < count; ++i) total += places[i].iov_len;
  if (other.waiting() >= other.room) return failed(EAGAIN);
  size_t left = world.part(socket, std::min(total, other.room - other.waiting()));
  if (left == 0 && total > 0) return failed(EAGAIN);
  size_t moved = 0;
  for (size_t i = 0; i < count && left > 0; ++i) {
    const size_t n = std::min(left, places[i].iov_len);
    other.in.append(static_cast<const char *>(places[i].iov_base), n);
    moved += n;
    left -= n;
  }
  world.note_progress();
  return static_cast<ssize_t>(moved);
}

void fill_loopback(uint16_t port, sockaddr *out, socklen_t *size) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::memcpy(out, &address, std::min<size_t>(*size, sizeof address));
  *size = sizeof address;
}

}  // namespace

extern "C" {

int __real_close(int fd);
int __real_clock_gettime(clockid_t clock, timespec *out);

int __wrap_socket(int, int, int) { return World::get().make_socket(true); }

int __wrap_bind(int fd, const sockaddr *address, socklen_t) {
  uint16_t port = 0;
  if (address->sa_family == AF_INET) port = reinterpret_cast<const sockaddr_in *>(address)->sin_port;
  if (address->sa_family == AF_INET6) port = reinterpret_cast<const sockaddr_in6 *>(address)->sin6_port;
  World::get().at(fd).port = port == 0 ? kFreePort : ntohs(port);
  return 0;
}

int __wrap_listen(int fd, int) {
  World::get().at(fd).state = Socket::State::kListening;
  return 0;
}

int __wrap_accept4(int fd, sockaddr *, socklen_t *, int) {
  const int accepted = World::get().accept(fd);
  return accepted >= 0 ? accepted : failed(EAGAIN);
}

int __wrap_connect(int fd, const sockaddr *, socklen_t) {
  World::get().connect_from_core(fd);
  return failed(EINPROGRESS);
}

int __wrap_getsockopt(int fd, int level, int option, void *value, socklen_t *) {
  if (level == SOL_SOCKET && option == SO_ERROR) {
    const int err = World::get().at(fd).state == Socket::State::kRefused ? ECONNREFUSED : 0;
    std::memcpy(value, &err, sizeof err);
  }
  return 0;
}

int __wrap_setsockopt(int, int, int, const void *, socklen_t) { return 0; }

int __wrap_getsockname(int fd, sockaddr *address, socklen_t *size) {
  fill_loopback(World::get().at(fd).port, address, size);
  return 0;
}

int __wrap_getpeername(int fd, sockaddr *address, socklen_t *size) {
  fill_loopback(World::get().at(fd).port, address, size);
  return 0;
}

// With MSG_TRUNC TCP throws received bytes away when there is no buffer, see tcp(7).
ssize_t __wrap_recv(int fd, void *out, size_t n, int) {
  const iovec place{out, n};
  return receive(fd, &place, 1);
}

ssize_t __wrap_readv(int fd, const iovec *places, int count) { return receive(fd, places, static_cast<size_t>(count)); }

ssize_t __wrap_send(int fd, const void *data, size_t n, int) {
  const iovec place{const_cast<void *>(data), n};
  return transmit(fd, &place, 1);
}

ssize_t __wrap_sendmsg(int fd, const msghdr *message, int) {
  return transmit(fd, message->msg_iov, message->msg_iovlen);
}

int __wrap_shutdown(int fd, int) {
  Socket &socket = World::get().at(fd);
  if (socket.state != Socket::State::kOpen) return failed(ENOTCONN);
  socket.end_of_input = true;
  if (socket.other >= 0) World::get().at(socket.other).end_of_input = true;
  return 0;
}

int __wrap_close(int fd) {
  if (!World::mine(fd)) return __real_close(fd);
  World::get().close(fd);
  return 0;
}

int __wrap_ppoll(pollfd *, nfds_t, const timespec *, const sigset_t *) {
  World::get().run();
  return 0;
}

// Nobody else runs, so nothing can end the wait but its time.
int __wrap_pthread_cond_clockwait(pthread_cond_t *, pthread_mutex_t *, clockid_t, const timespec *until) {
  World::get().sleep_until(int64_t{until->tv_sec} * 1'000'000'000 + until->tv_nsec);
  return ETIMEDOUT;
}

int __wrap_clock_gettime(clockid_t clock, timespec *out) {
  if (clock != CLOCK_MONOTONIC) return __real_clock_gettime(clock, out);
  const int64_t now = World::get().now();
  *out = {now / 1'000'000'000, now % 1'000'000'000};
  return 0;
}

// steady_clock::now(); a time_point is returned like the number of nanoseconds in it.
int64_t __wrap__ZNSt6chrono3_V212steady_clock3nowEv() { return World::get().now(); }

ssize_t __wrap_getrandom(void *out, size_t n, unsigned) {
  auto *bytes = static_cast<uint8_t *>(out);
  for (size_t i = 0; i < n; ++i) bytes[i] = static_cast<uint8_t>(World::get().random() >> 24);
  return static_cast<ssize_t>(n);
}

// Names are never resolved: a resolver would make runs differ.
int __wrap_getaddrinfo_a(int, gaicb *[], int, sigevent *) { return EAI_NONAME; }
}
