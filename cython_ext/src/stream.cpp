// SPDX-License-Identifier: Apache-2.0
#include "stream.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "digest.hpp"

namespace moonpool {

namespace {

constexpr size_t kIovMax = 1024;  // IOV_MAX of Linux

Step classify(ssize_t n) {
  if (n > 0) return {Step::kMoved, static_cast<size_t>(n), 0};
  if (n == 0) return {Step::kEnded, 0, 0};
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return {Step::kBlocked, 0, 0};
  return {Step::kFailed, 0, errno};
}

}  // namespace

Step receive_bytes(int fd, void *out, size_t n) { return classify(recv(fd, out, n, MSG_DONTWAIT)); }

Step receive_with_fds(int fd, void *out, size_t n, std::deque<Fd> *fds, bool *lost) {
  iovec piece{out, n};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const Step step = classify(recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC));
  if (step.kind != Step::kMoved) return step;
  for (cmsghdr *header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = 0; at + sizeof(int) <= header->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int number;
      std::memcpy(&number, CMSG_DATA(header) + at, sizeof number);
      fds->emplace_back(number);
    }
  }
  *lost = (message.msg_flags & MSG_CTRUNC) != 0;
  return step;
}

ssize_t send_with_fd(int fd, const std::string &bytes, const Fd *passed) {
  iovec piece{const_cast<char *>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (passed != nullptr) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    const int number = passed->get();
    std::memcpy(CMSG_DATA(header), &number, sizeof number);
  }
  return sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void send_bytes(int fd, std::string *bytes) {
  while (!bytes->empty()) {
    const ssize_t n = send(fd, bytes->data(), bytes->size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0) return;
    bytes->erase(0, static_cast<size_t>(n));
  }
}

void PayloadReader::begin(bool digest) {
  digest_ = digest;
  iov_.clear();
  pos_ = 0;
  payload_left_ = 0;
  trailer_left_ = 0;
  pieces_.clear();
  hashed_ = 0;
  computed_.clear();
  expected_.clear();
}

void PayloadReader::add(uint8_t *address, uint64_t nbytes) {
  iov_.push_back({address, nbytes});
  payload_left_ += nbytes;
  if (digest_) {
    pieces_.push_back({address, nbytes});
    computed_.push_back(0);
    expected_.push_back(0);
    trailer_left_ += sizeof(uint64_t);
  }
}

void PayloadReader::discard(const uint8_t *low, const uint8_t *high) {
  for (size_t i = pos_; i < iov_.size(); ++i) {
    auto *base = static_cast<uint8_t *>(iov_[i].iov_base);
    if (base >= low && base < high) iov_[i].iov_base = nullptr;
  }
  for (size_t i = hashed_; i < pieces_.size(); ++i) {
    auto *base = static_cast<uint8_t *>(pieces_[i].iov_base);
    if (base >= low && base < high) pieces_[i].iov_base = nullptr;
  }
}

void PayloadReader::discard_all() {
  for (size_t i = pos_; i < iov_.size(); ++i) iov_[i].iov_base = nullptr;
  for (size_t i = hashed_; i < pieces_.size(); ++i) pieces_[i].iov_base = nullptr;
}

Step PayloadReader::step(int fd, uint8_t *next, size_t next_bytes, size_t *next_got) {
  // The place of a descriptor that failed is empty, and receiving nothing looks like the end of the connection.
  while (pos_ < iov_.size() && iov_[pos_].iov_len == 0) ++pos_;
  iovec tail[2];  // what may follow the payload in the same call
  size_t tails = 0;
  if (trailer_left_ > 0) {
    tail[tails++] = {reinterpret_cast<uint8_t *>(expected_.data() + expected_.size()) - trailer_left_, trailer_left_};
  }
  tail[tails++] = {next, next_bytes};

  ssize_t n;
  if (payload_left_ == 0) {
    n = readv(fd, tail, static_cast<int>(tails));
  } else if (iov_[pos_].iov_base == nullptr) {
    // TCP throws received bytes away without copying them when MSG_TRUNC comes with no buffer, see tcp(7).
    n = recv(fd, nullptr, iov_[pos_].iov_len, MSG_TRUNC | MSG_DONTWAIT);
  } else {
    size_t count = 0;
    uint64_t bytes = 0;
    while (pos_ + count < iov_.size() && count < kIovMax - 2 && iov_[pos_ + count].iov_base != nullptr) {
      bytes += iov_[pos_ + count].iov_len;
      ++count;
      if (digest_ && bytes >= kDigestLeafBytes) break;
    }
    if (bytes == payload_left_) {
      // The tail is lent a place behind the payload for this one call.
      iov_.insert(iov_.end(), tail, tail + tails);
      n = readv(fd, &iov_[pos_], static_cast<int>(count + tails));
      iov_.resize(iov_.size() - tails);
    } else if (count == 1) {
      n = recv(fd, iov_[pos_].iov_base, iov_[pos_].iov_len, MSG_DONTWAIT);
    } else {
      n = readv(fd, &iov_[pos_], static_cast<int>(count));
    }
  }
  const Step result = classify(n);
  if (result.kind != Step::kMoved) return result;

  uint64_t moved = result.bytes;
  const uint64_t payload = std::min(moved, payload_left_);
  payload_left_ -= payload;
  moved -= payload;
  for (uint64_t left = payload; left > 0;) {
    iovec &front = iov_[pos_];
    const uint64_t part = std::min<uint64_t>(left, front.iov_len);
    if (front.iov_base != nullptr) front.iov_base = static_cast<uint8_t *>(front.iov_base) + part;
    front.iov_len -= part;
    left -= part;
    if (front.iov_len == 0) ++pos_;
  }
  if (digest_) hash_arrived();
  const size_t trailer = std::min<uint64_t>(moved, trailer_left_);
  trailer_left_ -= trailer;
  *next_got = moved - trailer;
  return result;
}

void PayloadReader::hash_arrived() {
  for (; hashed_ < pos_; ++hashed_) {
    const iovec &piece = pieces_[hashed_];
    if (piece.iov_base != nullptr) computed_[hashed_] = leaf_digest(piece.iov_base, piece.iov_len);
  }
}

size_t PayloadReader::next_mismatch(size_t from) const {
  while (from < computed_.size() && (pieces_[from].iov_base == nullptr || computed_[from] == expected_[from])) ++from;
  return from;
}

void PayloadWriter::begin(const void *head, size_t head_bytes, bool digest) {
  digest_ = digest;
  iov_.clear();
  iov_.push_back({const_cast<void *>(head), head_bytes});
  pos_ = 0;
  left_ = head_bytes;
  ready_bytes_ = head_bytes;
  hashed_end_ = 1;
  digest_slots_.clear();
  digests_.clear();
  trailer_added_ = false;
}

void PayloadWriter::add(const uint8_t *address, uint64_t nbytes) {
  iov_.push_back({const_cast<uint8_t *>(address), nbytes});
  left_ += nbytes;
  if (digest_) {
    digest_slots_.push_back(digests_.size());
    digests_.push_back(0);
    left_ += sizeof(uint64_t);
  }
}

void PayloadWriter::add_absent() {
  if (!digest_) return;
  digests_.push_back(0);
  left_ += sizeof(uint64_t);
}

// Hashes until a leaf's worth of bytes is ready to go; returns how many iovecs from pos_ on may be sent.
size_t PayloadWriter::hash_ahead() {
  const size_t payload_end = digest_slots_.size() + 1;
  for (; hashed_end_ < payload_end && ready_bytes_ < kDigestLeafBytes; ++hashed_end_) {
    const iovec &piece = iov_[hashed_end_];
    digests_[digest_slots_[hashed_end_ - 1]] = leaf_digest(piece.iov_base, piece.iov_len);
    ready_bytes_ += piece.iov_len;
  }
  if (hashed_end_ == payload_end && !trailer_added_) {
    iov_.push_back({digests_.data(), digests_.size() * sizeof(uint64_t)});
    trailer_added_ = true;
  }
  return (trailer_added_ ? iov_.size() : hashed_end_) - pos_;
}

Step PayloadWriter::step(int fd) {
  size_t count = iov_.size() - pos_;
  if (digest_) count = hash_ahead();
  msghdr message{};
  message.msg_iov = &iov_[pos_];
  message.msg_iovlen = std::min(count, kIovMax);
  const ssize_t n = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  Step result = classify(n);
  if (result.kind != Step::kMoved) return result;
  left_ -= result.bytes;
  ready_bytes_ -= std::min<uint64_t>(ready_bytes_, result.bytes);
  for (size_t moved = result.bytes; moved > 0;) {
    iovec &front = iov_[pos_];
    const size_t part = std::min(moved, front.iov_len);
    front.iov_base = static_cast<uint8_t *>(front.iov_base) + part;
    front.iov_len -= part;
    moved -= part;
    if (front.iov_len == 0) ++pos_;
  }
  return result;
}

bool PayloadWriter::touches(const uint8_t *low, const uint8_t *high) const {
  for (size_t i = pos_; i < iov_.size(); ++i) {
    const auto *base = static_cast<const uint8_t *>(iov_[i].iov_base);
    if (base >= low && base < high) return true;
  }
  return false;
}

}  // namespace moonpool
