// SPDX-License-Identifier: Apache-2.0
//
// How the two sides of a raw-socket run meet. All of it is outside the timed window.
#include <fcntl.h>

#include <memory>
#include <string>

#include "limits_link.hpp"
#include "same_host.hpp"

using namespace moonpool::limits;

namespace {

// What a connection says first: garbage on the port never becomes a lane.
struct Greeting {
  uint64_t magic = Header::kMagic;
  uint8_t token[MPL_TOKEN_BYTES] = {};
  uint32_t index = 0;
  uint32_t connections = 0;
};

class Deadline {
 public:
  explicit Deadline(uint32_t timeout_ms) : end_ns_(now_ns() + timeout_ms * 1'000'000LL) {}
  int left_ms() const { return static_cast<int>(std::max<int64_t>(0, (end_ns_ - now_ns() + 999'999) / 1'000'000)); }

 private:
  int64_t end_ns_;
};

mpl_status resolve(const char *host, uint16_t port, sockaddr_storage *address, socklen_t *length, mpl_error *error) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  if (host == nullptr) return fail(error, MPL_INVALID, 0, "no host given");
  const int problem = getaddrinfo(host, std::to_string(port).c_str(), &hints, &found);
  if (problem != 0) return fail(error, MPL_INVALID, 0, "%s is not a numeric address: %s", host, gai_strerror(problem));
  std::memcpy(address, found->ai_addr, found->ai_addrlen);
  *length = found->ai_addrlen;
  freeaddrinfo(found);
  return MPL_OK;
}

bool prepare(int fd, uint32_t timeout_ms) {
  const int on = 1;
  const timeval bound{timeout_ms / 1000, static_cast<suseconds_t>(timeout_ms % 1000) * 1000};
  const int flags = fcntl(fd, F_GETFL);
  moonpool::tune_same_host(fd);
  return flags >= 0 && fcntl(fd, F_SETFL, flags & ~O_NONBLOCK) == 0 &&
         setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0 &&
         setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &bound, sizeof bound) == 0 &&
         setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &bound, sizeof bound) == 0;
}

// A stranger may connect and say nothing: each gets a second at most.
bool read_greeting(int fd, const Deadline &whole, Greeting *greeting) {
  const Deadline own(1000);
  size_t have = 0;
  while (have < sizeof *greeting) {
    pollfd wait{fd, POLLIN, 0};
    if (poll(&wait, 1, std::min(own.left_ms(), whole.left_ms())) <= 0) return false;
    const ssize_t got = recv(fd, reinterpret_cast<char *>(greeting) + have, sizeof *greeting - have, MSG_DONTWAIT);
    if (got <= 0) return false;
    have += static_cast<size_t>(got);
  }
  return true;
}

bool known(const Greeting &greeting, const uint8_t *token, const std::vector<Socket> &taken) {
  uint8_t difference = 0;
  for (size_t i = 0; i < MPL_TOKEN_BYTES; ++i) difference |= greeting.token[i] ^ token[i];
  return greeting.magic == Header::kMagic && difference == 0 && greeting.connections == taken.size() &&
         greeting.index < taken.size() && taken[greeting.index].fd() < 0;
}

mpl_status connect_one(const char *host, uint16_t port, const Greeting &greeting, uint32_t timeout_ms, Socket *made,
                       mpl_error *error) {
  sockaddr_storage address{};
  socklen_t length = 0;
  if (const mpl_status status = resolve(host, port, &address, &length, error); status != MPL_OK) return status;
  Socket socket(::socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket.fd() < 0) return fail(error, MPL_SYSTEM, errno, "socket");
  if (connect(socket.fd(), reinterpret_cast<sockaddr *>(&address), length) != 0 && errno != EINPROGRESS)
    return fail(error, MPL_SYSTEM, errno, "connect to %s port %u", host, port);
  pollfd wait{socket.fd(), POLLOUT, 0};
  if (poll(&wait, 1, static_cast<int>(timeout_ms)) <= 0)
    return fail(error, MPL_TIMEOUT, 0, "connect to %s port %u: no answer within %u ms", host, port, timeout_ms);
  int problem = 0;
  socklen_t size = sizeof problem;
  if (getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &problem, &size) != 0 || problem != 0)
    return fail(error, MPL_SYSTEM, problem, "connect to %s port %u", host, port);
  if (!prepare(socket.fd(), timeout_ms)) return fail(error, MPL_SYSTEM, errno, "socket options");
  char answer = 0;
  if (send(socket.fd(), &greeting, sizeof greeting, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof greeting) ||
      recv(socket.fd(), &answer, 1, 0) != 1)
    return fail(error, MPL_CLOSED, 0, "%s port %u turned the connection away: another token, or not our counterpart",
                host, port);
  *made = std::move(socket);
  return MPL_OK;
}

}  // namespace

mpl_status mpl_listen(const char *host, uint16_t port, mpl_listener **listener, uint16_t *bound_port,
                      mpl_error *error) {
  return guarded(error, [&] {
    sockaddr_storage address{};
    socklen_t length = 0;
    if (const mpl_status status = resolve(host, port, &address, &length, error); status != MPL_OK) return status;
    Socket socket(::socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int on = 1;
    if (socket.fd() < 0 || setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
        bind(socket.fd(), reinterpret_cast<sockaddr *>(&address), length) != 0 ||
        listen(socket.fd(), MPL_CONNECTIONS_MAX) != 0 ||
        getsockname(socket.fd(), reinterpret_cast<sockaddr *>(&address), &length) != 0)
      return fail(error, MPL_SYSTEM, errno, "listen on %s port %u", host, port);
    *bound_port = ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6 *>(&address)->sin6_port
                                                      : reinterpret_cast<sockaddr_in *>(&address)->sin_port);
    auto made = std::make_unique<mpl_listener>();
    made->socket = std::move(socket);
    *listener = made.release();
    return MPL_OK;
  });
}

mpl_status mpl_accept(mpl_listener *listener, const uint8_t token[MPL_TOKEN_BYTES], size_t connections,
                      uint32_t timeout_ms, mpl_link **link, mpl_error *error) {
  if (connections == 0 || connections > MPL_CONNECTIONS_MAX)
    return fail(error, MPL_INVALID, 0, "connections is %zu, not 1 to %d", connections, MPL_CONNECTIONS_MAX);
  return guarded(error, [&] {
    auto made = std::make_unique<mpl_link>();
    made->sockets.resize(connections);
    const Deadline deadline(timeout_ms);
    for (size_t have = 0; have < connections;) {
      pollfd wait{listener->socket.fd(), POLLIN, 0};
      const int ready = poll(&wait, 1, deadline.left_ms());
      if (listener->aborted) return fail(error, MPL_ABORTED, 0, "aborted");
      if (ready < 0 && errno == EINTR) continue;
      if (ready <= 0)
        return fail(error, MPL_TIMEOUT, 0, "%zu of %zu connections came within %u ms", have, connections, timeout_ms);
      Socket socket(accept4(listener->socket.fd(), nullptr, nullptr, SOCK_CLOEXEC));
      Greeting greeting;
      const char answer = 1;
      if (socket.fd() < 0 || !read_greeting(socket.fd(), deadline, &greeting) ||
          !known(greeting, token, made->sockets) || !prepare(socket.fd(), timeout_ms) ||
          send(socket.fd(), &answer, 1, MSG_NOSIGNAL) != 1)
        continue;  // a stranger, or gone again: the counterpart reports its own failure
      made->sockets[greeting.index] = std::move(socket);
      ++have;
    }
    *link = made.release();
    return MPL_OK;
  });
}

void mpl_listener_abort(mpl_listener *listener) {
  listener->aborted = true;
  ::shutdown(listener->socket.fd(), SHUT_RDWR);
}

void mpl_listener_free(mpl_listener *listener) { delete listener; }

mpl_status mpl_connect(const char *host, uint16_t port, const uint8_t token[MPL_TOKEN_BYTES], size_t connections,
                       uint32_t timeout_ms, mpl_link **link, mpl_error *error) {
  if (connections == 0 || connections > MPL_CONNECTIONS_MAX)
    return fail(error, MPL_INVALID, 0, "connections is %zu, not 1 to %d", connections, MPL_CONNECTIONS_MAX);
  return guarded(error, [&] {
    auto made = std::make_unique<mpl_link>();
    made->sockets.resize(connections);
    Greeting greeting;
    std::memcpy(greeting.token, token, MPL_TOKEN_BYTES);
    greeting.connections = static_cast<uint32_t>(connections);
    for (Socket &socket : made->sockets) {
      const mpl_status status = connect_one(host, port, greeting, timeout_ms, &socket, error);
      if (status != MPL_OK) return status;
      ++greeting.index;
    }
    *link = made.release();
    return MPL_OK;
  });
}

void mpl_link_abort(mpl_link *link) {
  link->aborted = true;
  for (const Socket &socket : link->sockets) ::shutdown(socket.fd(), SHUT_RDWR);
}

void mpl_link_free(mpl_link *link) { delete link; }
