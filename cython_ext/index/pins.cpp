// SPDX-License-Identifier: Apache-2.0
#include "pins.hpp"

#include "undo.hpp"

namespace moonpool::index {

void Pins::add(uint32_t owner, uint64_t pin, const std::vector<Pinned> &pinned) {
  const auto [at, fresh] = all_.try_emplace({owner, pin});
  Undo undo([&, at = at, fresh = fresh] {
    if (fresh) all_.erase(at);
  });
  at->second.insert(at->second.end(), pinned.begin(), pinned.end());
  undo.keep();
  count_ += pinned.size();
}

std::vector<Pinned> Pins::take(uint32_t owner, uint64_t pin) {
  auto node = all_.extract({owner, pin});
  if (node.empty()) return {};
  count_ -= node.mapped().size();
  return std::move(node.mapped());
}

size_t Pins::bytes() const {
  constexpr size_t kNode = 96;  // of a map, with what the heap adds
  return all_.size() * kNode + count_ * sizeof(Pinned);
}

}  // namespace moonpool::index
