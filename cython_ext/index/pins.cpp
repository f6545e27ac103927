// SPDX-License-Identifier: Apache-2.0
#include "pins.hpp"

namespace moonpool::index {

void Pins::add(uint32_t owner, uint64_t pin, Pinned pinned) {
  all_[{owner, pin}].push_back(pinned);
  ++count_;
}

std::vector<Pinned> Pins::take(uint32_t owner, uint64_t pin) {
  auto node = all_.extract({owner, pin});
  if (node.empty()) return {};
  count_ -= node.mapped().size();
  return std::move(node.mapped());
}

std::vector<Pinned> Pins::take_owner(uint32_t owner) {
  std::vector<Pinned> taken;
  auto at = all_.lower_bound({owner, 0});
  size_t count = 0;
  for (auto each = at; each != all_.end() && each->first.first == owner; ++each) count += each->second.size();
  taken.reserve(count);
  while (at != all_.end() && at->first.first == owner) {
    taken.insert(taken.end(), at->second.begin(), at->second.end());
    at = all_.erase(at);
  }
  count_ -= taken.size();
  return taken;
}

size_t Pins::bytes() const {
  constexpr size_t kNode = 96;  // of a map, with what the heap adds
  return all_.size() * kNode + count_ * sizeof(Pinned);
}

}  // namespace moonpool::index
