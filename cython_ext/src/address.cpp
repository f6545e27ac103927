// SPDX-License-Identifier: Apache-2.0
#include "address.hpp"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <memory>

#include "system.hpp"

namespace moonpool {

namespace {

// Everything a running look-up points into. glibc may still write here after we gave up, so it is freed only when the
// look-up ended.
struct LookUp {
  std::string host, service;
  addrinfo hints{};
  gaicb request{};
  ~LookUp() {
    if (request.ar_result != nullptr) freeaddrinfo(request.ar_result);
  }
};

int look_up(LookUp &job, int64_t deadline, const Interrupt &interrupt, bool *abandoned) {
  job.request.ar_name = job.host.c_str();
  job.request.ar_service = job.service.c_str();
  job.request.ar_request = &job.hints;
  gaicb *list[1] = {&job.request};
  int rc = getaddrinfo_a(GAI_NOWAIT, list, 1, nullptr);
  if (rc != 0) return rc;
  for (;;) {
    rc = gai_error(&job.request);
    if (rc != EAI_INPROGRESS) return rc;
    const int64_t left = deadline - now_ns();
    if (left <= 0 || interrupt()) {
      const int cancelled = gai_cancel(&job.request);
      *abandoned = cancelled == EAI_NOTCANCELED;
      return EAI_AGAIN;
    }
    const int64_t step = std::min(left, kInterruptEveryNs);
    const timespec timeout{step / 1'000'000'000, step % 1'000'000'000};
    gai_suspend(list, 1, &timeout);
  }
}

}  // namespace

bool SocketAddress::loopback() const {
  if (family() == AF_INET) {
    const auto *v4 = reinterpret_cast<const sockaddr_in *>(&storage);
    return (ntohl(v4->sin_addr.s_addr) >> 24) == 127;
  }
  if (family() == AF_INET6) {
    const auto *v6 = reinterpret_cast<const sockaddr_in6 *>(&storage);
    if (IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr)) return v6->sin6_addr.s6_addr[12] == 127;
    return IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
  }
  return false;
}

std::string SocketAddress::text() const {
  if (family() == AF_UNIX) {
    const auto *name = reinterpret_cast<const sockaddr_un *>(&storage);
    return "@" + std::string(name->sun_path + 1, length - offsetof(sockaddr_un, sun_path) - 1);
  }
  char host[INET6_ADDRSTRLEN] = "?";
  if (family() == AF_INET) {
    const auto *v4 = reinterpret_cast<const sockaddr_in *>(&storage);
    inet_ntop(AF_INET, &v4->sin_addr, host, sizeof host);
    return std::string(host) + ":" + std::to_string(ntohs(v4->sin_port));
  }
  const auto *v6 = reinterpret_cast<const sockaddr_in6 *>(&storage);
  inet_ntop(AF_INET6, &v6->sin6_addr, host, sizeof host);
  return "[" + std::string(host) + "]:" + std::to_string(ntohs(v6->sin6_port));
}

SocketAddress SocketAddress::abstract(const std::string &name) {
  SocketAddress address;
  auto *unix_name = reinterpret_cast<sockaddr_un *>(&address.storage);
  unix_name->sun_family = AF_UNIX;
  const size_t n = std::min(name.size(), sizeof unix_name->sun_path - 1);
  std::memcpy(unix_name->sun_path + 1, name.data(), n);
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + n);
  return address;
}

Error split_address(const std::string &text, bool allow_port_zero, std::string *host, uint16_t *port) {
  const char *hint = "write \"host:port\", for IPv6 \"[::1]:7700\"";
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) return make_error(MP_ADDRESS, "address \"" + text + "\" has no port", hint);
  *host = text.substr(0, colon);
  const char *first = text.data() + colon + 1, *last = text.data() + text.size();
  unsigned value = 0;
  const auto parsed = std::from_chars(first, last, value);
  if (parsed.ec != std::errc{} || parsed.ptr != last || value > 65535 || (value == 0 && !allow_port_zero)) {
    return make_error(MP_ADDRESS, "address \"" + text + "\" has a bad port \"" + std::string(first, last) + "\"",
                      allow_port_zero ? "ports are 0 to 65535" : "ports are 1 to 65535");
  }
  *port = static_cast<uint16_t>(value);
  if (host->size() >= 2 && host->front() == '[' && host->back() == ']') {
    *host = host->substr(1, host->size() - 2);
    in6_addr ignored;
    const size_t scope = std::min(host->find('%'), host->size());
    if (inet_pton(AF_INET6, host->substr(0, scope).c_str(), &ignored) != 1 ||
        host->find_first_of(":[] \t\n", scope) != std::string::npos) {
      return make_error(MP_ADDRESS, "address \"" + text + "\": \"" + *host + "\" is no IPv6 address", hint);
    }
  } else if (host->find_first_of(":[] \t\n") != std::string::npos) {
    return make_error(MP_ADDRESS, "address \"" + text + "\" is ambiguous", hint);
  }
  if (host->empty()) return make_error(MP_ADDRESS, "address \"" + text + "\" has no host", hint);
  return {};
}

Error resolve_address(const std::string &text, bool allow_port_zero, int64_t deadline, const Interrupt &interrupt,
                      std::vector<SocketAddress> *out) {
  std::string host;
  uint16_t port = 0;
  if (Error error = split_address(text, allow_port_zero, &host, &port)) return error;
  auto job = std::make_unique<LookUp>();
  job->host = host;
  job->service = std::to_string(port);
  job->hints.ai_socktype = SOCK_STREAM;
  job->hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  int rc = getaddrinfo(host.c_str(), job->service.c_str(), &job->hints, &job->request.ar_result);
  if (rc == EAI_NONAME) {
    job->hints.ai_flags = AI_NUMERICSERV;
    bool abandoned = false;
    rc = look_up(*job, deadline, interrupt, &abandoned);
    if (abandoned) job.release();  // still owned by the resolver's thread
  }
  if (rc != 0) {
    Error error = make_error(MP_ADDRESS, "cannot resolve \"" + text + "\"",
                             "check the name with `getent hosts " + host + "`, or use a numeric address");
    error.cause = gai_strerror(rc);
    return error;
  }
  out->clear();
  for (const addrinfo *info = job->request.ar_result; info != nullptr; info = info->ai_next) {
    if (info->ai_family != AF_INET && info->ai_family != AF_INET6) continue;
    SocketAddress address;
    std::memcpy(&address.storage, info->ai_addr, info->ai_addrlen);
    address.length = info->ai_addrlen;
    out->push_back(address);
  }
  if (out->empty()) return make_error(MP_ADDRESS, "\"" + text + "\" has no IPv4 or IPv6 address", "check the name");
  return {};
}

SocketAddress local_address(int fd) {
  SocketAddress address;
  address.length = sizeof address.storage;
  getsockname(fd, reinterpret_cast<sockaddr *>(&address.storage), &address.length);
  return address;
}

}  // namespace moonpool
