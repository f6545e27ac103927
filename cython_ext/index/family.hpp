// SPDX-License-Identifier: Apache-2.0
//
// Who hangs on whom: each chunk has at most one parent, and a list of children.
#pragma once

#include "chunk.hpp"

namespace moonpool::index {

class Family {
 public:
  explicit Family(Chunks &chunks) : chunks_(chunks) {}

  // `slot` has no parent yet. It stays so when it would be its own ancestor, or finding out takes more than `*steps`.
  void join(uint32_t slot, uint32_t parent, uint32_t *steps);
  // It leaves its parent; its children have none.
  void leave(uint32_t slot);

 private:
  void unlink(uint32_t slot);

  Chunks &chunks_;
};

}  // namespace moonpool::index
