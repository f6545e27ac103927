// SPDX-License-Identifier: Apache-2.0
// "host:port" and "[v6]:port": parsing, resolving with a deadline, printing.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <string>
#include <vector>

#include "status.hpp"

namespace moonpool {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  const sockaddr *get() const { return reinterpret_cast<const sockaddr *>(&storage); }
  int family() const { return storage.ss_family; }
  bool loopback() const;
  std::string text() const;

  // A Unix socket without a place in the file system: nothing stays behind.
  static SocketAddress abstract(const std::string &name);
};

// Splits at the last colon; an IPv6 host needs brackets. Port 0 only when `allow_port_zero`.
Error split_address(const std::string &text, bool allow_port_zero, std::string *host, uint16_t *port);
// Numeric addresses never ask a resolver; names are given up at `deadline` (monotonic ns).
Error resolve_address(const std::string &text, bool allow_port_zero, int64_t deadline, const Interrupt &interrupt,
                      std::vector<SocketAddress> *out);
SocketAddress local_address(int fd);

}  // namespace moonpool
