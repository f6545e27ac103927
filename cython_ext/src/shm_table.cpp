// SPDX-License-Identifier: Apache-2.0
#include "shm_table.hpp"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace moonpool {

namespace {

// The word lies in memory of two processes, so these are not the private kind.
void futex_wait(std::atomic<uint32_t> &word, uint32_t seen, int64_t until) {
  const int64_t left = std::max<int64_t>(0, until - now_ns());
  const timespec timeout{left / 1'000'000'000, left % 1'000'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t> &word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }

}  // namespace

std::shared_ptr<UseTable> UseTable::make(Fd *fd) {
  Fd file(memfd_create("moonpool-table", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file || ftruncate(file.get(), sizeof(Page)) != 0 ||
      fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return nullptr;
  }
  std::string why_not;
  auto table = open(file, &why_not);
  if (table == nullptr) return nullptr;
  table->page_->proof = random_u64();
  *fd = std::move(file);
  return table;
}

std::shared_ptr<UseTable> UseTable::open(const Fd &fd, std::string *why_not) {
  auto mapping = Mapping::open(fd, sizeof(Page), why_not);
  if (mapping == nullptr) return nullptr;
  if (!mapping->writable()) {
    *why_not = "the peer sent a table that cannot be written";
    return nullptr;
  }
  auto table = std::make_shared<UseTable>();
  // A new file is all zeros, which is what every word begins with.
  table->page_ = reinterpret_cast<Page *>(mapping->base());
  table->mapping_ = std::move(mapping);
  return table;
}

bool UseTable::begin_use(uint32_t slot) {
  if ((word(slot).fetch_add(1) & kWithdrawn) == 0) return true;
  end_use(slot);
  return false;
}

bool UseTable::end_use(uint32_t slot) {
  const uint32_t before = word(slot).fetch_sub(1);
  if ((before & kWithdrawn) != 0 && (before & kCount) == 1) futex_wake(word(slot));
  return (before & kAbandoned) == 0;
}

bool UseTable::wait_unused(uint32_t slot, int64_t until) {
  for (;;) {
    const uint32_t seen = word(slot).load();
    if ((seen & kCount) == 0) return true;
    if (now_ns() >= until) return false;
    futex_wait(word(slot), seen, until);
  }
}

bool UseTable::abandon(uint32_t slot) {
  uint32_t seen = word(slot).load();
  while ((seen & kCount) != 0) {
    if (word(slot).compare_exchange_weak(seen, seen | kAbandoned)) return false;
  }
  return true;
}

void UseTable::end_uses(uint32_t slot) {
  word(slot).store(kWithdrawn);
  futex_wake(word(slot));
}

bool UseTable::begin_service() {
  // Counted first, checked second; the client does the opposite. One of the two always sees the other.
  page_->services.fetch_add(1);
  if (page_->revoked.load() == 0) return true;
  end_service();
  return false;
}

void UseTable::end_service() {
  if (page_->services.fetch_sub(1) == 1 && page_->revoked.load() != 0) futex_wake(page_->services);
}

bool UseTable::wait_idle(int64_t until) {
  for (;;) {
    const uint32_t seen = page_->services.load();
    if (seen == 0) return true;
    if (now_ns() >= until) return false;
    futex_wait(page_->services, seen, until);
  }
}

}  // namespace moonpool
