// SPDX-License-Identifier: Apache-2.0
#include "control.hpp"

#include <sys/socket.h>

#include <cerrno>

#include "stream.hpp"

namespace moonpool {

ControlConnection::ControlConnection(IoThread &io, Fd fd, ControlHooks hooks) : io_(io), hooks_(std::move(hooks)) {
  fd_ = std::move(fd);
}

void ControlConnection::start() {
  Error error;
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    error = io_.add(shared_from_this(), EPOLLIN);
  }
  if (error) lose(error, false);
}

void ControlConnection::send(wire::Message type, std::string_view body) {
  std::lock_guard lock(mutex_);
  if (closed_ || write_failed_) return;
  wire::append_message(&out_, type, body);
  flush_locked();
}

void ControlConnection::flush_locked() {
  while (out_at_ < out_.size()) {
    const ssize_t n = ::send(fd(), out_.data() + out_at_, out_.size() - out_at_, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) break;
    if (n <= 0) {
      write_failed_ = true;
      if (errno != EPIPE && errno != ECONNRESET) given_up_ = errno_text(errno);
      break;
    }
    out_at_ += static_cast<size_t>(n);
  }
  if (out_at_ == out_.size()) {
    out_.clear();
    out_at_ = 0;
  } else if (out_at_ > out_.size() / 2) {
    out_.erase(0, out_at_);
    out_at_ = 0;
  }
  if (out_.size() - out_at_ > kBacklogMax) {
    write_failed_ = true;
    given_up_ = "it does not read what is sent to it";
  }
  // A failed write is reported by the I/O thread: shutting down makes it readable.
  if (write_failed_) ::shutdown(fd(), SHUT_RDWR);
  const bool want_out = !out_.empty() && !write_failed_;
  if (want_out != watching_out_) {
    watching_out_ = want_out;
    io_.modify(*this, want_out ? EPOLLIN | EPOLLOUT : EPOLLIN);
  }
}

void ControlConnection::on_events(uint32_t events) {
  const auto self = shared_from_this();
  char buffer[65536];
  for (int round = 0; round < 64; ++round) {
    Step step;
    {
      std::lock_guard lock(mutex_);
      if (closed_) return;
      if ((events & EPOLLOUT) != 0 && round == 0) flush_locked();
      step = receive_bytes(fd(), buffer, sizeof buffer);
    }
    if (step.kind == Step::kBlocked) return;
    if (step.kind == Step::kMoved) {
      in_.append(buffer, step.bytes);
      parse();
      continue;
    }
    Error error = make_error(MP_PEER_LOST, "the connection was lost", "the next transfer connects again");
    error.sys_errno = step.err;
    bool peer_closed = step.kind == Step::kEnded || step.err == ECONNRESET;
    error.cause = step.kind == Step::kEnded ? "closed by the peer" : errno_text(step.err);
    {
      std::lock_guard lock(mutex_);
      // Then the end of the stream is our own doing and says nothing about the other side.
      if (!given_up_.empty()) {
        error.cause = given_up_;
        peer_closed = false;
      }
    }
    lose(error, peer_closed);
    return;
  }
}

void ControlConnection::parse() {
  size_t at = 0;
  while (in_.size() - at >= sizeof(wire::MessageHeader)) {
    wire::MessageHeader header;
    std::memcpy(&header, in_.data() + at, sizeof header);
    Error error;
    if (header.bytes > wire::kControlMessageMax) {
      error = make_error(MP_PROTOCOL, "a control message of " + std::to_string(header.bytes) + " bytes");
    } else if (in_.size() - at - sizeof header < header.bytes) {
      break;
    } else {
      error = hooks_.message(static_cast<wire::Message>(header.type),
                             std::string_view(in_).substr(at + sizeof header, header.bytes));
    }
    if (error) {
      if (error.code == MP_PROTOCOL && hooks_.malformed) hooks_.malformed();
      lose(error, false);
      return;
    }
    at += sizeof header + header.bytes;
  }
  in_.erase(0, at);
}

void ControlConnection::close() {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  closed_ = true;
  io_.remove(*this);
  fd_.reset();
}

void ControlConnection::lose(const Error &cause, bool peer_closed) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
  }
  close();
  hooks_.lost(cause, peer_closed);
}

}  // namespace moonpool
