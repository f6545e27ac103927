// SPDX-License-Identifier: Apache-2.0
//
// For calls that find no memory in the middle: what was done is undone, or what is needed was there before.
#pragma once

#include <cstddef>
#include <iterator>
#include <utility>

namespace moonpool::index {

// Undoes a step when the ones after it throw. `undo` itself does not throw.
template <class Call>
class Undo {
 public:
  explicit Undo(Call undo) : undo_(std::move(undo)) {}
  Undo(const Undo &) = delete;
  Undo &operator=(const Undo &) = delete;
  ~Undo() {
    if (armed_) undo_();
  }
  // All steps are done.
  void keep() { armed_ = false; }

 private:
  Call undo_;
  bool armed_ = true;
};

// Nodes of a map that are not in it yet: putting one in takes no memory any more.
template <class Map>
class SpareNodes {
 public:
  // Throws std::bad_alloc, before anything has changed.
  void add(size_t count) {
    Undo undo([this, before = nodes_.size()] { drop(nodes_.size() - before); });
    for (; count > 0; --count) nodes_.emplace_hint(nodes_.end(), typename Map::key_type{}, typename Map::mapped_type{});
    undo.keep();
  }
  void drop(size_t count) {
    for (; count > 0; --count) nodes_.erase(nodes_.begin());
  }
  // There is one.
  typename Map::node_type take() { return nodes_.extract(nodes_.begin()); }
  size_t size() const { return nodes_.size(); }

 private:
  Map nodes_;
};

}  // namespace moonpool::index
