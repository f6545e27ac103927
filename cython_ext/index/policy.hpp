// SPDX-License-Identifier: Apache-2.0
//
// Which chunk goes first. A policy keeps its state in the chunks (two links and two numbers each) and is told of
// every committed chunk that comes, is hit or goes. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "chunk.hpp"

namespace moonpool::index {

class Policy {
 public:
  using MayGo = std::function<bool(uint32_t slot)>;

  // Null: there is none of this name.
  static std::unique_ptr<Policy> make(std::string_view name, Chunks &chunks, uint64_t seed);

  virtual ~Policy() = default;
  // How many chunks fit, as far as can be said now. Called often.
  virtual void set_capacity(size_t) {}
  // `parent`: a slot that the policy may or may not know, or kNone.
  virtual void on_insert(uint32_t slot, uint32_t parent) = 0;
  virtual void on_touch(uint32_t slot) = 0;
  // Before it leaves its parent.
  virtual void on_remove(uint32_t slot, bool evicted) = 0;
  // The last child of a chunk that it knows, but for those on disks, is gone, or has another parent.
  virtual void on_leaf(uint32_t, uint32_t) {}
  // What goes next of those that `may_go`; it stays where it is. kNone: nothing was found within `looks`, which is
  // lowered by one for each chunk that was looked at.
  virtual uint32_t victim(const MayGo &may_go, uint32_t *looks) = 0;
  // How often it was used, as far as that is counted: 1 is what was put and not used since.
  virtual uint32_t uses(uint32_t slot) const = 0;
  virtual size_t bytes() const { return 0; }

 protected:
  // Whether a capacity is so little more or less that what was learnt under the other one holds.
  static bool alike(uint64_t old, uint64_t chunks) { return chunks > old - old / 4 && chunks < old + old / 3 + 1; }
};

}  // namespace moonpool::index
