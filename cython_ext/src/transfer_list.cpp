// SPDX-License-Identifier: Apache-2.0
#include "transfer.hpp"

namespace moonpool {

void TransferList::add(const std::shared_ptr<Transfer> &transfer) {
  std::lock_guard lock(mutex_);
  transfer->keep_ = transfer;
  transfer->next_ = first_;
  if (first_ != nullptr) first_->previous_ = transfer.get();
  first_ = transfer.get();
  ++size_;
}

std::shared_ptr<Transfer> TransferList::remove(Transfer &transfer) {
  std::lock_guard lock(mutex_);
  if (transfer.keep_ == nullptr) return nullptr;
  if (transfer.previous_ != nullptr) {
    transfer.previous_->next_ = transfer.next_;
  } else {
    first_ = transfer.next_;
  }
  if (transfer.next_ != nullptr) transfer.next_->previous_ = transfer.previous_;
  transfer.previous_ = transfer.next_ = nullptr;
  --size_;
  return std::move(transfer.keep_);
}

std::vector<std::shared_ptr<Transfer>> TransferList::all() const {
  std::vector<std::shared_ptr<Transfer>> transfers;
  std::lock_guard lock(mutex_);
  for (Transfer *t = first_; t != nullptr; t = t->next_) transfers.push_back(t->keep_);
  return transfers;
}

std::vector<std::shared_ptr<Transfer>> TransferList::expired(int64_t now, int64_t *next) const {
  std::vector<std::shared_ptr<Transfer>> transfers;
  *next = kNever;
  std::lock_guard lock(mutex_);
  for (Transfer *t = first_; t != nullptr; t = t->next_) {
    if (t->stopping()) continue;
    if (t->deadline_ns <= now) {
      transfers.push_back(t->keep_);
    } else if (t->deadline_ns < *next) {
      *next = t->deadline_ns;
    }
  }
  return transfers;
}

size_t TransferList::size() const {
  std::lock_guard lock(mutex_);
  return size_;
}

}  // namespace moonpool
