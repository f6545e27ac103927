// SPDX-License-Identifier: Apache-2.0
// Memory that the engine allocates. What peers may name is a sealed memfd, so that peers on the same host can map it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "status.hpp"
#include "system.hpp"

namespace moonpool {

struct Allocation {
  uint64_t nbytes = 0;
  bool shared = false;                      // a peer may name it
  bool peers_write = true;                  // with `shared`: peers may map it for writing
  int32_t huge_pages = MP_HUGE_PAGES_AUTO;  // MP_HUGE_PAGES_*
  int32_t numa_node = -1;                   // -1: wherever it is touched first
};

class Memory {
 public:
  static Error allocate(const Allocation &wanted, std::unique_ptr<Memory> *out);
  ~Memory();
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;

  uint8_t *base() const { return base_; }
  // For peers to map. nullptr when they cannot: it has no name, descriptors are short, or nobody may map it any more.
  std::shared_ptr<const Fd> fd() const { return fd_; }
  void forget_fd();
  uint64_t page_bytes() const { return page_bytes_; }
  // For a peer that does not stop: what it has mapped is not this memory any more. Address and content stay.
  // False when there is no memory for it.
  bool detach();

 private:
  Memory() = default;
  bool map(bool shared, bool reserved_pages);

  uint8_t *base_ = nullptr;
  uint64_t mapped_bytes_ = 0;  // whole pages
  uint64_t page_bytes_ = 0;
  bool shared_ = false;
  std::shared_ptr<const Fd> fd_;
};

// A peer's memory, or a table, that came as a descriptor. Unmapped when the last user is gone.
class Mapping {
 public:
  // Refuses what is smaller than `nbytes` or could shrink: touching it would end this process. Writable unless sealed.
  static std::shared_ptr<Mapping> open(const Fd &fd, uint64_t nbytes, std::string *why_not);
  ~Mapping();
  Mapping(const Mapping &) = delete;
  Mapping &operator=(const Mapping &) = delete;
  uint8_t *base() const { return base_; }
  bool writable() const { return writable_; }

 private:
  Mapping(uint8_t *base, uint64_t mapped_bytes, bool writable)
      : base_(base), mapped_bytes_(mapped_bytes), writable_(writable) {}
  uint8_t *const base_;
  const uint64_t mapped_bytes_;
  const bool writable_;
};

// "" when memory can be shared on this host, otherwise why not.
std::string why_no_shared_memory();

}  // namespace moonpool
