// SPDX-License-Identifier: Apache-2.0
#include "work_queue.hpp"

#include <algorithm>

#include "cuda_stager.hpp"

namespace moonpool {

void fail_work(const std::vector<Work> &work, const Error &cause) {
  for (const Work &one : work) {
    one.transfer->descs_failed(one.begin, one.end, one.transfer->stopping() ? one.transfer->stop_cause() : cause);
  }
}

bool WorkQueue::push(const std::shared_ptr<Transfer> &transfer, uint64_t slice_bytes) {
  const auto descs = static_cast<uint32_t>(transfer->descs.size());
  const bool single = transfer->bytes <= slice_bytes && descs <= descs_max_;
  std::lock_guard lock(mutex_);
  if (closed_) return false;
  (single ? small_ : large_).push_back({{transfer, 0, descs, transfer->bytes, 0}, slice_bytes});
  return true;
}

bool WorkQueue::push_front(Work work, uint64_t slice_bytes) {
  std::lock_guard lock(mutex_);
  if (closed_) return false;
  small_.push_front({std::move(work), slice_bytes});
  return true;
}

void WorkQueue::carve(Entry &entry, Work *work) {
  Work &rest = entry.rest;
  const std::vector<Desc> &descs = rest.transfer->descs;
  work->transfer = rest.transfer;
  work->begin = rest.begin;
  work->attempts = rest.attempts;
  work->bytes = 0;
  const uint64_t bytes_max =
      rest.transfer->in_pieces() ? std::min(entry.slice_bytes, cuda::kPieceBytes) : entry.slice_bytes;
  uint32_t end = rest.begin;
  do {
    work->bytes += descs[end].length;
    ++end;
  } while (end < rest.end && end - rest.begin < descs_max_ && work->bytes + descs[end].length <= bytes_max);
  work->end = end;
  rest.begin = end;
  rest.bytes -= work->bytes;
}

WorkQueue::Entries::iterator WorkQueue::first_in_time(Entries &queue, int64_t now) {
  return std::find_if(queue.begin(), queue.end(), [now](const Entry &entry) {
    const Transfer &transfer = *entry.rest.transfer;
    return transfer.deadline_ns > now || transfer.stopping();
  });
}

bool WorkQueue::pull(Work *work) {
  std::lock_guard lock(mutex_);
  if (small_.empty() && large_.empty()) return false;
  const int64_t now = now_ns();
  const auto small = first_in_time(small_, now);
  const auto large = first_in_time(large_, now);
  const bool take_small = small != small_.end() && (small_in_a_row_ < 4 || large == large_.end());
  if (!take_small && large == large_.end()) return false;
  small_in_a_row_ = take_small ? small_in_a_row_ + 1 : 0;
  const auto chosen = take_small ? small : large;
  carve(*chosen, work);
  if (chosen->rest.begin == chosen->rest.end) (take_small ? small_ : large_).erase(chosen);
  return true;
}

std::vector<Work> WorkQueue::remove(const Transfer &transfer) {
  std::vector<Work> removed;
  std::lock_guard lock(mutex_);
  for (Entries *queue : {&small_, &large_}) {
    for (auto it = queue->begin(); it != queue->end();) {
      if (it->rest.transfer.get() == &transfer) {
        removed.push_back(std::move(it->rest));
        it = queue->erase(it);
      } else {
        ++it;
      }
    }
  }
  return removed;
}

std::vector<Work> WorkQueue::take() {
  std::lock_guard lock(mutex_);
  return take_locked();
}

std::vector<Work> WorkQueue::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  return take_locked();
}

std::vector<Work> WorkQueue::take_locked() {
  std::vector<Work> left;
  for (Entries *queue : {&small_, &large_}) {
    for (Entry &entry : *queue) left.push_back(std::move(entry.rest));
    queue->clear();
  }
  return left;
}

bool WorkQueue::empty() const {
  std::lock_guard lock(mutex_);
  return small_.empty() && large_.empty();
}

}  // namespace moonpool
