// SPDX-License-Identifier: Apache-2.0
#include "extent_tree.hpp"

namespace moonpool::index {

bool ExtentTree::is_free(uint64_t offset, uint64_t units) const {
  for (uint32_t at = root_; at != kNone;) {
    const Piece &piece = pieces_[at];
    if (piece.offset() >= offset + units) {
      at = piece.before;
    } else if (piece.end() <= offset) {
      at = piece.after;
    } else {
      return false;
    }
  }
  return true;
}

void ExtentTree::insert(uint32_t made) {
  const uint64_t offset = pieces_[made].offset();
  uint32_t *at = &root_;
  while (*at != kNone && priority(*at) >= priority(made)) {
    Piece &piece = pieces_[*at];
    at = offset < piece.offset() ? &piece.before : &piece.after;
  }
  // What is below falls into two: before and after the new one.
  uint32_t rest = *at;
  *at = made;
  uint32_t *left = &pieces_[made].before, *right = &pieces_[made].after;
  while (rest != kNone) {
    Piece &piece = pieces_[rest];
    if (piece.offset() < offset) {
      *left = rest;
      left = &piece.after;
      rest = *left;
    } else {
      *right = rest;
      right = &piece.before;
      rest = *right;
    }
  }
  *left = *right = kNone;
}

uint32_t ExtentTree::merge(uint32_t left, uint32_t right) {
  uint32_t merged = kNone;
  uint32_t *at = &merged;
  while (left != kNone && right != kNone) {
    if (priority(left) >= priority(right)) {
      *at = left;
      at = &pieces_[left].after;
      left = *at;
    } else {
      *at = right;
      at = &pieces_[right].before;
      right = *at;
    }
  }
  *at = left != kNone ? left : right;
  return merged;
}

void ExtentTree::erase(uint32_t gone) {
  const uint64_t offset = pieces_[gone].offset();
  uint32_t *at = &root_;
  while (*at != gone) {
    Piece &piece = pieces_[*at];
    at = offset < piece.offset() ? &piece.before : &piece.after;
  }
  *at = merge(pieces_[gone].before, pieces_[gone].after);
}

uint64_t ExtentTree::end() const {
  uint64_t end = 0;
  for (uint32_t at = root_; at != kNone; at = pieces_[at].after) end = pieces_[at].end();
  return end;
}

std::vector<uint32_t> ExtentTree::sorted(size_t count) const {
  std::vector<uint32_t> sorted, above;
  sorted.reserve(count);
  for (uint32_t at = root_; at != kNone || !above.empty();) {
    if (at != kNone) {
      above.push_back(at);
      at = pieces_[at].before;
    } else {
      sorted.push_back(above.back());
      at = pieces_[above.back()].after;
      above.pop_back();
    }
  }
  return sorted;
}

}  // namespace moonpool::index
