// SPDX-License-Identifier: Apache-2.0
//
// Copies between this process and another one by the kernel: process_vm_readv and process_vm_writev, and nothing else.
#pragma once

#include <sys/uio.h>

#include <cerrno>

#include "limits_streams.hpp"

namespace moonpool::limits {

class ProcessStream final : public PacedStream {
 public:
  ProcessStream(const Work &work, pid_t pid, const mpl_list &other, const Walk &own, uint64_t next_batch, size_t width,
                Failure &failure, size_t samples_capacity)
      : PacedStream(work, own, next_batch, width, samples_capacity), pid_(pid), other_(other), failure_(failure) {}

 private:
  // The kernel moves at most 2 GiB less a page in one call.
  static constexpr uint64_t kCallBytesMax = 1 << 30;

  bool move(size_t index) override {
    const mpl_list &own = *walk_.list;
    Share share = share_of(walk_, next_, index, width_);
    while (share.bytes > 0) {
      iovec ours[IOV_MAX], theirs[IOV_MAX];
      size_t count = 0;
      uint64_t bytes = 0;
      while (share.bytes > 0 && count < IOV_MAX && bytes < kCallBytesMax) {
        const uint64_t left = static_cast<uint64_t>(own.lengths[share.first]) - share.skip;
        const uint64_t length = std::min({left, share.bytes, kCallBytesMax - bytes});
        ours[count] = {static_cast<char *>(own.memory) + own.offsets[share.first] + share.skip, length};
        theirs[count++] = {static_cast<char *>(other_.memory) + other_.offsets[share.first] + share.skip, length};
        bytes += length;
        share.bytes -= length;
        share.skip = length < left ? share.skip + length : 0;
        share.first += length < left ? 0 : 1;
      }
      const auto call = work_.op == MPL_READ ? process_vm_readv : process_vm_writev;
      const ssize_t moved = call(pid_, ours, count, theirs, count, 0);
      if (moved < 0) return failure_.set(MPL_SYSTEM, errno, "process %d: %s", pid_, std::strerror(errno));
      if (static_cast<uint64_t>(moved) != bytes)
        return failure_.set(MPL_SYSTEM, 0, "process %d: %zd of %llu bytes were moved", pid_, moved,
                            static_cast<unsigned long long>(bytes));
    }
    return true;
  }
  bool failed() const override { return failure_.failed(); }
  void finish(size_t) override {}

  pid_t pid_;
  const mpl_list &other_;
  Failure &failure_;
};

}  // namespace moonpool::limits
