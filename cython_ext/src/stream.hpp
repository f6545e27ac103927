// SPDX-License-Identifier: Apache-2.0
// Payload between a non-blocking socket and scattered memory, without a copy in user space. With digests every piece is
// one leaf, hashed while it is in the cache: just before it is sent, or right after it arrived.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "system.hpp"

namespace moonpool {

struct Step {
  enum Kind { kMoved, kBlocked, kEnded, kFailed } kind;
  size_t bytes = 0;
  int err = 0;
};

Step receive_bytes(int fd, void *out, size_t n);
// The same over a Unix socket. Descriptors that come along are added to `fds`; `*lost`: this process had no room for
// one.
Step receive_with_fds(int fd, void *out, size_t n, std::deque<Fd> *fds, bool *lost);
// As send(), over a Unix socket, with a descriptor unless `passed` is nullptr.
ssize_t send_with_fd(int fd, const std::string &bytes, const Fd *passed);
// Takes off `bytes` what the socket takes now. A broken socket takes nothing; receiving reports it.
void send_bytes(int fd, std::string *bytes);

class PayloadReader {
 public:
  void begin(bool digest);
  // nullptr: the bytes are read and thrown away.
  void add(uint8_t *address, uint64_t nbytes);
  // Afterwards no byte goes to [low, high) any more.
  void discard(const uint8_t *low, const uint8_t *high);
  void discard_all();

  // One system call. Bytes beyond the payload go to the first bytes of `next` (the head of the next frame), so that
  // pipelined frames need no call of their own for it; `*next_got` counts them.
  Step step(int fd, uint8_t *next, size_t next_bytes, size_t *next_got);
  bool done() const { return payload_left_ == 0 && trailer_left_ == 0; }
  uint64_t payload_left() const { return payload_left_; }
  // With digests, after done(): the index of the first piece from `from` on whose digest differs from the sender's,
  // or the number of pieces.
  size_t next_mismatch(size_t from) const;
  const std::vector<uint64_t> &digests() const { return computed_; }

 private:
  void hash_arrived();

  bool digest_ = false;
  std::vector<iovec> iov_;
  size_t pos_ = 0;
  uint64_t payload_left_ = 0;
  size_t trailer_left_ = 0;
  std::vector<iovec> pieces_;  // as added, for hashing
  size_t hashed_ = 0;
  std::vector<uint64_t> computed_, expected_;
};

class PayloadWriter {
 public:
  // `head` is sent first; it must stay valid until done().
  void begin(const void *head, size_t head_bytes, bool digest);
  void add(const uint8_t *address, uint64_t nbytes);
  // A piece that is not sent but has a place in the digest trailer.
  void add_absent();
  // One system call.
  Step step(int fd);
  bool done() const { return left_ == 0; }
  // After done(): one per piece, empty without digests.
  std::vector<uint64_t> take_digests() { return std::move(digests_); }
  bool touches(const uint8_t *low, const uint8_t *high) const;

 private:
  size_t hash_ahead();

  bool digest_ = false;
  std::vector<iovec> iov_;
  size_t pos_ = 0;
  uint64_t left_ = 0;
  uint64_t ready_bytes_ = 0;          // hashed and not sent yet
  size_t hashed_end_ = 1;             // iov_[1 .. hashed_end_) are hashed; iov_[0] is the head
  std::vector<size_t> digest_slots_;  // of iov_[1 + i] in digests_
  std::vector<uint64_t> digests_;
  bool trailer_added_ = false;
};

}  // namespace moonpool
