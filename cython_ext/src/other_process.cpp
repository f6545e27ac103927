// SPDX-License-Identifier: Apache-2.0
#include "other_process.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>

#include "digest.hpp"

namespace moonpool {

OtherProcess OtherProcess::behind(int fd) {
  OtherProcess other;
  ucred who{};
  socklen_t size = sizeof who;
  int domain = 0;
  socklen_t domain_size = sizeof domain;
  if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &domain_size) != 0 || domain != AF_UNIX) return other;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &size) != 0 || who.uid != geteuid() || who.pid <= 0) return other;
  other.pid_ = who.pid;
  other.pidfd_ = Fd(static_cast<int>(syscall(SYS_pidfd_open, who.pid, 0)));
  return other;
}

bool OtherProcess::exited() const {
  pollfd one{pidfd_.get(), POLLIN, 0};
  return poll(&one, 1, 0) > 0;
}

int OtherProcess::prove(const Proof &proof) const {
  uint64_t seen = 0;
  iovec ours{&seen, sizeof seen}, theirs{reinterpret_cast<void *>(proof.address), sizeof seen};
  if (process_vm_readv(pid_, &ours, 1, &theirs, 1, 0) != sizeof seen) return errno;
  return seen != proof.content || !pidfd_ || exited() ? ESRCH : 0;
}

void OtherProcess::Pieces::add(uint32_t place, uint8_t *to, uint64_t address, uint64_t length) {
  ours_.push_back({to, length});
  theirs_.push_back({reinterpret_cast<void *>(address), length});
  places_.push_back(place);
}

OtherProcess::ReadFault OtherProcess::read(const Proof &proof, Pieces *pieces, uint64_t *digests) const {
  std::vector<iovec> &ours = pieces->ours_, &theirs = pieces->theirs_;
  for (size_t at = 1; at < ours.size();) {
    // With digests no more at a time than stays in the cache until it is hashed.
    size_t n = 0;
    for (uint64_t bytes = 0; at + n < ours.size() && (digests == nullptr || bytes < kDigestLeafBytes); ++n) {
      bytes += ours[at + n].iov_len;
    }
    // The kernel looks the memory of a process up once in a call, so one proof holds for all that the call reads. It
    // takes the place of a piece that is done.
    uint64_t seen = 0;
    ours[at - 1] = {&seen, sizeof seen};
    theirs[at - 1] = {reinterpret_cast<void *>(proof.address), sizeof seen};
    const ssize_t got = process_vm_readv(pid_, &ours[at - 1], n + 1, &theirs[at - 1], n + 1, 0);
    if (got < 0 && errno != EFAULT) return {ReadFault::kForbidden, errno, 0};
    if (got < ssize_t{sizeof seen} || seen != proof.content) return {ReadFault::kElsewhere, 0, 0};
    auto left = static_cast<uint64_t>(got) - sizeof seen;
    for (; n > 0 && left >= ours[at].iov_len; --n, ++at) {
      left -= ours[at].iov_len;
      if (digests != nullptr) digests[pieces->places_[at - 1]] = leaf_digest(ours[at].iov_base, ours[at].iov_len);
    }
    if (n > 0) return {ReadFault::kUnreadable, 0, pieces->places_[at - 1]};
  }
  return {};
}

}  // namespace moonpool
