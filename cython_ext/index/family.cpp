// SPDX-License-Identifier: Apache-2.0
#include "family.hpp"

namespace moonpool::index {

void Family::join(uint32_t slot, uint32_t parent, uint32_t *steps) {
  if (slot == parent) return;
  // Without children it is nobody's ancestor.
  if (chunks_[slot].child != kNone) {
    for (uint32_t above = chunks_[parent].parent; above != kNone; above = chunks_[above].parent) {
      if (above == slot || *steps == 0) return;
      --*steps;
    }
  }
  Chunk &chunk = chunks_[slot];
  Chunk &its = chunks_[parent];
  chunk.parent = parent;
  chunk.younger = kNone;
  chunk.older = its.child;
  if (its.child != kNone) chunks_[its.child].younger = slot;
  its.child = slot;
  if (!chunk.cold) ++its.warm_children;
}

void Family::unlink(uint32_t slot) {
  Chunk &chunk = chunks_[slot];
  if (chunk.parent == kNone) return;
  if (!chunk.cold) --chunks_[chunk.parent].warm_children;
  if (chunk.older != kNone) chunks_[chunk.older].younger = chunk.younger;
  if (chunk.younger != kNone) {
    chunks_[chunk.younger].older = chunk.older;
  } else {
    chunks_[chunk.parent].child = chunk.older;
  }
  chunk.parent = chunk.older = chunk.younger = kNone;
}

void Family::leave(uint32_t slot) {
  unlink(slot);
  while (chunks_[slot].child != kNone) unlink(chunks_[slot].child);
}

}  // namespace moonpool::index
