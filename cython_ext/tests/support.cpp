// SPDX-License-Identifier: Apache-2.0
#include "support.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>

namespace moonpool::testing {

namespace {

sockaddr_in loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

// False when nothing happens within what is left of the patience.
bool ready(int fd, short events, int64_t until) {
  pollfd entry{fd, events, 0};
  const int64_t left = until - now_ns();
  return left > 0 && poll(&entry, 1, static_cast<int>(left / kMillisecond) + 1) > 0;
}

bool again() { return errno == EAGAIN || errno == EINTR; }

}  // namespace

void set_buffers(int fd, int bytes) {
  setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
  setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
}

void reset_on_close(int fd) {
  const linger hard{1, 0};
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
}

Fd listen_on_loopback(uint16_t *port) {
  Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = loopback(0);
  EXPECT_EQ(bind(fd.get(), reinterpret_cast<sockaddr *>(&address), sizeof address), 0) << strerror(errno);
  EXPECT_EQ(listen(fd.get(), 128), 0) << strerror(errno);
  socklen_t size = sizeof address;
  getsockname(fd.get(), reinterpret_cast<sockaddr *>(&address), &size);
  *port = ntohs(address.sin_port);
  return fd;
}

Fd connect_to_loopback(uint16_t port, int buffer_bytes) {
  Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (buffer_bytes > 0) set_buffers(fd.get(), buffer_bytes);
  const sockaddr_in address = loopback(port);
  if (connect(fd.get(), reinterpret_cast<const sockaddr *>(&address), sizeof address) != 0) return {};
  const int on = 1;
  setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return fd;
}

std::pair<Fd, Fd> tcp_pair(int buffer_bytes) {
  uint16_t port = 0;
  const Fd listener = listen_on_loopback(&port);
  if (buffer_bytes > 0) set_buffers(listener.get(), buffer_bytes);
  Fd one = connect_to_loopback(port, buffer_bytes);
  Fd other(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  EXPECT_TRUE(one && other) << strerror(errno);
  const int on = 1;
  setsockopt(other.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return {std::move(one), std::move(other)};
}

bool send_all(int fd, const void *data, size_t n) {
  const int64_t until = now_ns() + kPatienceNs;
  const auto *bytes = static_cast<const uint8_t *>(data);
  while (n > 0) {
    const ssize_t sent = send(fd, bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && again()) {
      if (!ready(fd, POLLOUT, until)) return false;
      continue;
    }
    if (sent < 0) return false;
    bytes += sent;
    n -= static_cast<size_t>(sent);
  }
  return true;
}

bool receive_all(int fd, void *out, size_t n) {
  const int64_t until = now_ns() + kPatienceNs;
  auto *bytes = static_cast<uint8_t *>(out);
  while (n > 0) {
    const ssize_t got = recv(fd, bytes, n, MSG_DONTWAIT);
    if (got < 0 && again()) {
      if (!ready(fd, POLLIN, until)) return false;
      continue;
    }
    if (got <= 0) return false;
    bytes += got;
    n -= static_cast<size_t>(got);
  }
  return true;
}

bool ends(int fd) {
  const int64_t until = now_ns() + kPatienceNs;
  char buffer[65536];
  for (;;) {
    const ssize_t got = recv(fd, buffer, sizeof buffer, MSG_DONTWAIT);
    if (got == 0) return true;
    if (got < 0 && !again()) return errno == ECONNRESET;
    if (got < 0 && !ready(fd, POLLIN, until)) return false;
  }
}

}  // namespace moonpool::testing
