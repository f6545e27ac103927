// SPDX-License-Identifier: Apache-2.0
// Sockets between two processes of one host. The engine's lanes and the benchmark's raw sockets are tuned alike, so
// that the limit is the strongest that sockets offer.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

namespace moonpool {

// Few bytes in flight stay in the cache: the receiver reads what the sender has just written, and the kernel uses the
// same pages again. The kernel doubles the value. docs/decisions/0002-tcp-engine.md has the measurement.
constexpr int kSameHostSendBytes = 512 * 1024;

inline bool same_host(int fd) {
  sockaddr_storage ours{}, theirs{};
  socklen_t ours_bytes = sizeof ours, theirs_bytes = sizeof theirs;
  if (getsockname(fd, reinterpret_cast<sockaddr *>(&ours), &ours_bytes) != 0 ||
      getpeername(fd, reinterpret_cast<sockaddr *>(&theirs), &theirs_bytes) != 0 ||
      ours.ss_family != theirs.ss_family) {
    return false;
  }
  if (ours.ss_family == AF_INET) {
    return reinterpret_cast<sockaddr_in &>(ours).sin_addr.s_addr ==
           reinterpret_cast<sockaddr_in &>(theirs).sin_addr.s_addr;
  }
  return ours.ss_family == AF_INET6 && IN6_ARE_ADDR_EQUAL(&reinterpret_cast<sockaddr_in6 &>(ours).sin6_addr,
                                                          &reinterpret_cast<sockaddr_in6 &>(theirs).sin6_addr);
}

// For a connected socket. Across a network the kernel's own sizing follows the path; there more in flight fills it.
inline void tune_same_host(int fd) {
  const int bytes = kSameHostSendBytes;
  if (same_host(fd)) setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
}

}  // namespace moonpool
