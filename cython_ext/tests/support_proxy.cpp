// SPDX-License-Identifier: Apache-2.0
#include "support_proxy.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>

#include "wire.hpp"

namespace moonpool::testing {

namespace {

constexpr size_t kWaitingMax = 256 * 1024;

}  // namespace

Proxy::Proxy(uint16_t target_port) : target_port_(target_port), listener_(listen_on_loopback(&port_)) {
  thread_ = std::thread([this] { run(); });
}

Proxy::~Proxy() {
  stopping_.store(true);
  ::shutdown(listener_.get(), SHUT_RDWR);
  thread_.join();
}

void Proxy::cut_lanes(int cuts, uint64_t bytes_min, uint64_t bytes_max, uint32_t seed) {
  std::lock_guard lock(mutex_);
  cuts_left_ = cuts;
  bytes_min_ = bytes_min;
  bytes_max_ = bytes_max;
  random_.seed(seed);
  limit_ = next_limit();
  for (Connection &connection : connections_) connection.bytes = 0;
}

uint64_t Proxy::next_limit() { return bytes_min_ + random_() % (bytes_max_ - bytes_min_ + 1); }

void Proxy::cut_lane(size_t n) {
  std::lock_guard lock(mutex_);
  for (Connection &connection : connections_) {
    if (connection.lane && connection.client && n-- == 0) reset(connection);
  }
}

// What is in the sockets is lost, as when a firewall forgets a connection. Descriptors stay until the loop sees it.
void Proxy::reset(Connection &connection) {
  for (Fd *fd : {&connection.client, &connection.target}) {
    reset_on_close(fd->get());
    fd->reset();
  }
}

bool Proxy::may_go_on(Connection &connection, const Pipe &pipe) {
  // The kind is in the first bytes of the client's Hello.
  if (!connection.known && &pipe == &connection.up && pipe.waiting.size() >= sizeof(wire::Hello)) {
    connection.known = true;
    uint16_t kind = 0;
    std::memcpy(&kind, pipe.waiting.data() + offsetof(wire::Hello, kind), sizeof kind);
    connection.lane = kind == wire::kLane;
    if (connection.lane) {
      lanes_open_.fetch_add(1);
      if (refuse_lanes_.load()) return false;
    }
  }
  if (!connection.lane || cuts_left_ == 0 || connection.bytes < limit_) return true;
  --cuts_left_;
  limit_ = next_limit();
  cuts_made_.fetch_add(1);
  return false;
}

bool Proxy::forward(Connection &connection, int from, int to, Pipe &pipe) {
  if (!pipe.ended && pipe.waiting.size() < kWaitingMax) {
    char buffer[64 * 1024];
    const ssize_t got = recv(from, buffer, sizeof buffer, MSG_DONTWAIT);
    if (got > 0) {
      pipe.waiting.append(buffer, static_cast<size_t>(got));
      if (!may_go_on(connection, pipe)) return false;
      connection.bytes += static_cast<uint64_t>(got);
    } else if (got == 0) {
      pipe.ended = true;
    } else if (errno != EAGAIN) {
      return false;
    }
  }
  if (!pipe.waiting.empty()) {
    const ssize_t sent = send(to, pipe.waiting.data(), pipe.waiting.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) return false;
    if (sent > 0) pipe.waiting.erase(0, static_cast<size_t>(sent));
  }
  return !(pipe.ended && pipe.waiting.empty());
}

void Proxy::run() {
  while (!stopping_.load()) {
    std::vector<pollfd> fds = {{listener_.get(), POLLIN, 0}};
    {
      std::lock_guard lock(mutex_);
      for (Connection &c : connections_) {
        fds.push_back({c.client.get(), static_cast<short>(POLLIN | (c.down.waiting.empty() ? 0 : POLLOUT)), 0});
        fds.push_back({c.target.get(), static_cast<short>(POLLIN | (c.up.waiting.empty() ? 0 : POLLOUT)), 0});
      }
    }
    // Not for ever: another thread may have reset a connection meanwhile.
    poll(fds.data(), fds.size(), 20);
    if ((fds[0].revents & POLLIN) != 0) {
      Fd client(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      Fd target = client ? connect_to_loopback(target_port_) : Fd();
      if (client && target) {
        std::lock_guard lock(mutex_);
        connections_.push_back({std::move(client), std::move(target), {}, {}, 0, false, false});
      }
    }
    std::lock_guard lock(mutex_);
    for (auto it = connections_.begin(); it != connections_.end();) {
      Connection &c = *it;
      if (c.client && forward(c, c.client.get(), c.target.get(), c.up) &&
          forward(c, c.target.get(), c.client.get(), c.down)) {
        ++it;
        continue;
      }
      if (c.lane) lanes_open_.fetch_sub(1);
      if (c.client && !c.up.ended && !c.down.ended) reset(c);
      it = connections_.erase(it);
    }
  }
}

}  // namespace moonpool::testing
