// SPDX-License-Identifier: Apache-2.0
// The page or two that both ends of a same-host connection share: which regions the client is copying to or from by
// itself, and whether the owner is copying to or from the client's memory. With it each side knows, even of one that is
// stopped, that it touches nothing any more, or that it will not believe what it reads.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "memory.hpp"
#include "other_process.hpp"

namespace moonpool {

class UseTable {
 public:
  // Regions of one peer that a client can reach by itself at the same time. More are copied by their owner.
  static constexpr uint32_t kSlots = 4096;

  // By the owner of the regions; `fd` is for the client.
  static std::shared_ptr<UseTable> make(Fd *fd);
  // By the client.
  static std::shared_ptr<UseTable> open(const Fd &fd, std::string *why_not);

  // Of the process that calls it, if that is the owner. It is where the owner has the table, which a forked child and
  // another program in the same process do not have.
  OtherProcess::Proof proof() const { return {reinterpret_cast<uintptr_t>(&page_->proof), page_->proof}; }

  // ---- a slot is one region that the client reaches by itself
  void reset(uint32_t slot) { word(slot).store(0); }
  // The client, around each copy. False: the region was withdrawn, hands off.
  bool begin_use(uint32_t slot);
  // False: the owner did not wait for it, and what was copied went nowhere or came from nowhere.
  bool end_use(uint32_t slot);
  // The owner: no use begins any more.
  void withdraw(uint32_t slot) { word(slot).fetch_or(kWithdrawn); }
  bool used(uint32_t slot) const { return (word(slot).load() & kCount) != 0; }
  // Until it is unused or `until`; true when unused.
  bool wait_unused(uint32_t slot, int64_t until);
  // After a withdrawal: what is in use from now on is void. True when nothing is.
  bool abandon(uint32_t slot);
  // The client has ended, or has said that it uses it no more: whoever waits for it need not.
  void end_uses(uint32_t slot);

  // ---- the client's own memory
  // The owner, around each copy. False: the client has revoked its memory, hands off.
  bool begin_service();
  void end_service();
  // The client: no service begins any more. wait_idle() is true when none is under way.
  void revoke() { page_->revoked.store(1); }
  bool wait_idle(int64_t until);

 private:
  struct alignas(64) Slot {
    std::atomic<uint32_t> uses;  // and the flags below
  };
  struct Page {
    alignas(64) std::atomic<uint32_t> revoked;
    std::atomic<uint32_t> services;
    uint64_t proof;
    Slot slots[kSlots];
  };
  static_assert(std::atomic<uint32_t>::is_always_lock_free, "shared between processes");
  // Part of the counter, so that counting and refusing is one step.
  static constexpr uint32_t kWithdrawn = 1u << 31, kAbandoned = 1u << 30, kCount = kAbandoned - 1;

  std::atomic<uint32_t> &word(uint32_t slot) const { return page_->slots[slot].uses; }

  std::shared_ptr<Mapping> mapping_;
  Page *page_ = nullptr;
};

}  // namespace moonpool
