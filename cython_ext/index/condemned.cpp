// SPDX-License-Identifier: Apache-2.0
#include "condemned.hpp"

#include <utility>

namespace moonpool::index {

void Condemned::until_fenced(uint32_t owner, uint64_t generation, Place place) {
  auto node = spare_fences_.take();
  node.key() = {owner, place.segment, generation};
  node.mapped() = place.piece;
  fences_.insert(std::move(node));
}

void Condemned::until_read(int64_t until, Place place) {
  auto node = spare_reads_.take();
  node.key() = until;
  node.mapped() = place;
  reads_.insert(std::move(node));
}

bool Condemned::take_read(int64_t now, Place *place) {
  if (reads_.empty() || reads_.begin()->first > now) return false;
  *place = reads_.begin()->second;
  reads_.erase(reads_.begin());
  return true;
}

size_t Condemned::bytes() const {
  constexpr size_t kNode = 64;  // of a map, with what the heap adds
  return (count() + spare_fences_.size() + spare_reads_.size()) * kNode;
}

}  // namespace moonpool::index
