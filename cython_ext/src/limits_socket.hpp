// SPDX-License-Identifier: Apache-2.0
//
// Blocking sockets that move whole shares: errors with a cause, a time-out on every operation.
#pragma once

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "limits_share.hpp"

namespace moonpool::limits {

[[gnu::format(printf, 4, 5)]] inline mpl_status fail(mpl_error *error, mpl_status code, int sys_errno,
                                                     const char *format, ...) {
  if (error == nullptr) return code;
  error->code = code;
  error->sys_errno = sys_errno;
  va_list arguments;
  va_start(arguments, format);
  const int used = std::vsnprintf(error->message, sizeof error->message, format, arguments);
  va_end(arguments);
  if (sys_errno != 0 && used >= 0 && static_cast<size_t>(used) < sizeof error->message) {
    char text[96];
    std::snprintf(error->message + used, sizeof error->message - static_cast<size_t>(used), ": %s",
                  strerror_r(sys_errno, text, sizeof text));
  }
  return code;
}

inline int64_t now_ns() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  Socket(Socket &&other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket &operator=(Socket &&other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  int fd() const { return fd_; }

 private:
  int fd_;
};

// Travels ahead of every batch on every connection, in the same system call.
struct Header {
  enum Kind : uint32_t { kBatch = 1, kEnd = 2 };
  static constexpr uint64_t kMagic = 0x31746d696c706f6dULL;

  uint64_t magic = kMagic;
  uint64_t batch = 0;
  uint32_t kind = kBatch;
  uint32_t op = 0;
  int64_t duration_ns = 0;  // MPL_STREAM reads: how long to send
  uint64_t unused[4] = {};
};
static_assert(sizeof(Header) == 64);

// The first failure of a run. It also makes every other thread of the run end: their sockets are shut down.
class Failure {
 public:
  Failure(const std::vector<Socket> &sockets, const std::atomic<bool> &aborted)
      : sockets_(sockets), aborted_(aborted) {}

  bool failed() const { return failed_.load(std::memory_order_acquire); }

  [[gnu::format(printf, 4, 5)]] bool set(mpl_status code, int sys_errno, const char *format, ...) {
    char message[192];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    const std::lock_guard lock(mutex_);
    if (failed_) return false;
    if (aborted_) {
      fail(&first_, MPL_ABORTED, 0, "aborted");
    } else {
      fail(&first_, code, sys_errno, "%s", message);
    }
    failed_.store(true, std::memory_order_release);
    for (const Socket &socket : sockets_) ::shutdown(socket.fd(), SHUT_RDWR);
    return false;
  }

  mpl_status result(mpl_error *error) const {
    if (!failed()) return MPL_OK;
    if (error != nullptr) *error = first_;
    return static_cast<mpl_status>(first_.code);
  }

 private:
  const std::vector<Socket> &sockets_;
  const std::atomic<bool> &aborted_;
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  mpl_error first_{};
};

// One connection during one run. Used by one thread.
class Lane {
 public:
  Lane(const Socket &socket, Failure &failure) : fd_(socket.fd()), failure_(failure) { iovecs_.reserve(IOV_MAX); }

  bool send(Header &header, Pieces pieces) { return send_from(&header, pieces); }
  bool send_pieces(Pieces pieces) { return send_from(nullptr, pieces); }

  // Receives the header and, when it announces a batch, the pieces behind it. What announces the end travels alone:
  // its sender waits for an answer, so nothing that follows can land in the pieces.
  bool receive(Header &header, Pieces pieces) {
    iovecs_.assign(1, {&header, sizeof header});
    at_ = 0;
    uint64_t left = sizeof header + pieces.fill(iovecs_);
    if (!receive_least(left, sizeof header)) return false;
    if (header.magic != Header::kMagic)
      return failure_.set(MPL_PROTOCOL, 0, "received something that is not a batch of the raw-socket limit");
    return header.kind == Header::kEnd || receive_rest(left, pieces);
  }

  bool receive_pieces(Pieces pieces) {
    iovecs_.clear();
    at_ = 0;
    return receive_rest(pieces.fill(iovecs_), pieces);
  }

  bool send_byte() {
    char byte = 1;
    iovecs_.assign(1, {&byte, 1});
    return send_iovecs(1);
  }

  bool receive_byte() {
    char byte = 0;
    uint64_t left = 1;
    iovecs_.assign(1, {&byte, 1});
    at_ = 0;
    return receive_least(left, 1);
  }

 private:
  bool send_from(Header *header, Pieces &pieces) {
    iovecs_.clear();
    uint64_t bytes = 0;
    if (header != nullptr) {
      iovecs_.push_back({header, sizeof *header});
      bytes = sizeof *header;
    }
    bytes += pieces.fill(iovecs_);
    for (;;) {
      if (!send_iovecs(bytes)) return false;
      if (pieces.empty()) return true;
      iovecs_.clear();
      bytes = pieces.fill(iovecs_);
    }
  }

  bool send_iovecs(uint64_t left) {
    at_ = 0;
    while (left > 0) {
      msghdr message{};
      message.msg_iov = iovecs_.data() + at_;
      message.msg_iovlen = iovecs_.size() - at_;
      const ssize_t moved = ::sendmsg(fd_, &message, MSG_NOSIGNAL);
      if (moved < 0) {
        if (errno == EINTR) continue;
        return io_error("send");
      }
      left -= static_cast<uint64_t>(moved);
      skip(static_cast<uint64_t>(moved));
    }
    return true;
  }

  bool receive_rest(uint64_t left, Pieces &pieces) {
    for (;;) {
      if (!receive_least(left, left)) return false;
      if (pieces.empty()) return true;
      iovecs_.clear();
      at_ = 0;
      left = pieces.fill(iovecs_);
    }
  }

  // Receives at least `least` of the `left` bytes that iovecs_ has room for.
  bool receive_least(uint64_t &left, uint64_t least) {
    const uint64_t enough = left - least;
    while (left > enough) {
      msghdr message{};
      message.msg_iov = iovecs_.data() + at_;
      message.msg_iovlen = iovecs_.size() - at_;
      const ssize_t moved = ::recvmsg(fd_, &message, 0);
      if (moved == 0) return failure_.set(MPL_CLOSED, 0, "receive: the other side closed the connection");
      if (moved < 0) {
        if (errno == EINTR) continue;
        return io_error("receive");
      }
      left -= static_cast<uint64_t>(moved);
      skip(static_cast<uint64_t>(moved));
    }
    return true;
  }

  void skip(uint64_t bytes) {
    while (bytes > 0) {
      iovec &piece = iovecs_[at_];
      if (bytes < piece.iov_len) {
        piece.iov_base = static_cast<char *>(piece.iov_base) + bytes;
        piece.iov_len -= bytes;
        return;
      }
      bytes -= piece.iov_len;
      ++at_;
    }
  }

  bool io_error(const char *what) {
    if (errno == EAGAIN || errno == EWOULDBLOCK)
      return failure_.set(MPL_TIMEOUT, 0, "%s: the other side made no progress within the time-out", what);
    if (errno == EPIPE || errno == ECONNRESET)
      return failure_.set(MPL_CLOSED, errno, "%s: the other side closed the connection", what);
    return failure_.set(MPL_SYSTEM, errno, "%s", what);
  }

  int fd_;
  Failure &failure_;
  std::vector<iovec> iovecs_;
  size_t at_ = 0;  // first entry of iovecs_ that is not done
};

}  // namespace moonpool::limits
