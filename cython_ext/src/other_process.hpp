// SPDX-License-Identifier: Apache-2.0
// The process on the other side of a Unix socket, whose memory this one may be allowed to reach.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstdint>
#include <vector>

#include "system.hpp"

namespace moonpool {

class OtherProcess {
 public:
  // Eight bytes that only that process has at that address.
  struct Proof {
    uint64_t address = 0;
    uint64_t content = 0;
  };

  // Pieces of its memory and where they go.
  class Pieces {
   public:
    void add(uint32_t place, uint8_t *to, uint64_t address, uint64_t length);
    bool empty() const { return places_.empty(); }

   private:
    friend class OtherProcess;
    // The first of each is room for a proof.
    std::vector<iovec> ours_ = std::vector<iovec>(1), theirs_ = std::vector<iovec>(1);
    std::vector<uint32_t> places_;
  };
  struct ReadFault {
    enum Kind {
      kNone,
      kForbidden,   // `err`: why this process may not look
      kElsewhere,   // it is not the process of the proof any more, or what the proof was part of is gone
      kUnreadable,  // `place`: the first piece that cannot be read as a whole
    };
    Kind kind = kNone;
    int err = 0;
    uint32_t place = 0;
  };

  OtherProcess() = default;
  // Nobody when `fd` is no Unix socket, or the other side runs as another user.
  static OtherProcess behind(int fd);

  // By that number it is reached. It could come to mean another process: exited() tells.
  pid_t pid() const { return pid_; }
  explicit operator bool() const { return pid_ > 0; }
  bool exited() const;
  // Readable once the process is gone; not there when the kernel cannot make one.
  const Fd &pidfd() const { return pidfd_; }
  // 0 when this is the process that named the proof, and it lets this one look; otherwise errno.
  int prove(const Proof &proof) const;
  // Reads all pieces, each once: `pieces` is used up. `digests`: nullptr, or one for each place. What was read is worth
  // nothing before exited() has been asked as well.
  ReadFault read(const Proof &proof, Pieces *pieces, uint64_t *digests) const;

 private:
  pid_t pid_ = -1;
  Fd pidfd_;
};

}  // namespace moonpool
