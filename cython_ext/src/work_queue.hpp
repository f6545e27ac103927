// SPDX-License-Identifier: Apache-2.0
// Descriptors that no lane has taken yet. Idle lanes carve the next slice off it.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "transfer.hpp"
#include "wire.hpp"

namespace moonpool {

// Descriptors [begin, end) of one transfer.
struct Work {
  std::shared_ptr<Transfer> transfer;
  uint32_t begin = 0;
  uint32_t end = 0;
  uint64_t bytes = 0;
  uint32_t attempts = 0;
};

// Reports every descriptor as failed, with why its transfer was stopped if it was.
void fail_work(const std::vector<Work> &work, const Error &cause);

// Reports a slice of which some descriptors failed, given in order: `refuse(descriptor, status)` reports those.
// `digests`: one for each descriptor of the slice, or nullptr.
template <class Refuse>
void report_work(const Work &work, const std::vector<wire::FailedDesc> &failed, const uint64_t *digests,
                 Refuse refuse) {
  uint32_t at = work.begin;
  const auto done_until = [&](uint32_t end) {
    if (at < end) work.transfer->descs_done(at, end, digests == nullptr ? nullptr : digests + (at - work.begin));
    at = end + 1;
  };
  for (const wire::FailedDesc &one : failed) {
    done_until(work.begin + one.desc);
    refuse(work.begin + one.desc, one.status);
  }
  done_until(work.end);
}

class WorkQueue {
 public:
  // `descs_max`: of one slice.
  explicit WorkQueue(uint32_t descs_max) : descs_max_(descs_max) {}

  // False when the queue was closed.
  bool push(const std::shared_ptr<Transfer> &transfer, uint64_t slice_bytes);
  // What a broken lane or path gives back goes first.
  bool push_front(Work work, uint64_t slice_bytes);
  // The next slice, or false. Single-slice transfers overtake large ones, but never more than four in a row.
  // Nothing of a transfer is begun after its deadline, however late this thread gets to look: who asks for a slice is
  // connected already, so a peer that cuts this engine off after the deadline has ended all that can still be under
  // way. What is late stays until the deadline's own end of the transfer takes it out.
  bool pull(Work *work);
  // Everything queued for `transfer`, in pieces.
  std::vector<Work> remove(const Transfer &transfer);
  // Everything queued.
  std::vector<Work> take();
  std::vector<Work> close();
  bool empty() const;

 private:
  struct Entry {
    Work rest;
    uint64_t slice_bytes;
  };
  using Entries = std::deque<Entry>;
  static Entries::iterator first_in_time(Entries &queue, int64_t now);
  void carve(Entry &entry, Work *work);
  std::vector<Work> take_locked();

  const uint32_t descs_max_;
  mutable std::mutex mutex_;
  Entries small_, large_;
  unsigned small_in_a_row_ = 0;
  bool closed_ = false;
};

}  // namespace moonpool
