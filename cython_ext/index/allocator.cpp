// SPDX-License-Identifier: Apache-2.0
#include "allocator.hpp"

#include <algorithm>
#include <bit>

namespace moonpool::index {

uint32_t Allocator::class_of(uint64_t units) {
  if (units < 8) return static_cast<uint32_t>(units);
  const auto doubling = static_cast<uint32_t>(std::bit_width(units)) - 1;
  return (doubling - 2) * 8 + static_cast<uint32_t>(units >> (doubling - 3) & 7);
}

uint32_t Allocator::class_from(uint32_t at) const {
  for (uint32_t word = at / 64; word < filled_.size(); ++word) {
    const uint64_t bits = filled_[word] & (word == at / 64 ? ~uint64_t{0} << at % 64 : ~uint64_t{0});
    if (bits != 0) return word * 64 + static_cast<uint32_t>(std::countr_zero(bits));
  }
  return kClasses;
}

void Allocator::list(uint32_t at) {
  Piece &piece = pieces_[at];
  const uint32_t its = class_of(piece.size());
  piece.list_next = heads_[its];
  piece.list_before = kNone;
  if (heads_[its] != kNone) pieces_[heads_[its]].list_before = at;
  heads_[its] = at;
  filled_[its / 64] |= uint64_t{1} << its % 64;
}

void Allocator::unlist(uint32_t at) {
  const Piece &piece = pieces_[at];
  const uint32_t its = class_of(piece.size());
  if (piece.list_next != kNone) pieces_[piece.list_next].list_before = piece.list_before;
  if (piece.list_before != kNone) {
    pieces_[piece.list_before].list_next = piece.list_next;
  } else {
    heads_[its] = piece.list_next;
    if (piece.list_next == kNone) filled_[its / 64] &= ~(uint64_t{1} << its % 64);
  }
}

// Behind `before` (kNone: at the front), in the list of neighbours.
void Allocator::link(uint32_t at, uint32_t before) {
  Piece &piece = pieces_[at];
  uint32_t &behind = before == kNone ? first_ : pieces_[before].after;
  piece.before = before;
  piece.after = behind;
  behind = at;
  (piece.after == kNone ? last_ : pieces_[piece.after].before) = at;
}

void Allocator::unlink(uint32_t at) {
  const Piece &piece = pieces_[at];
  (piece.before == kNone ? first_ : pieces_[piece.before].after) = piece.after;
  (piece.after == kNone ? last_ : pieces_[piece.after].before) = piece.before;
}

// It is in no list yet.
uint32_t Allocator::make(uint64_t offset, uint64_t units, PieceState state) {
  const uint32_t made = pieces_.take();
  Piece &piece = pieces_[made];
  piece.set_offset(offset);
  piece.set_size(units);
  piece.state = state;
  piece.committed = false;
  return made;
}

void Allocator::add_free(uint64_t offset, uint64_t units, uint32_t before) {
  const uint32_t made = make(offset, units, PieceState::kFree);
  link(made, before);
  list(made);
}

bool Allocator::set_capacity(uint64_t units) {
  if (loose_) {
    if (units < tree_.end()) return false;
    capacity_ = units;
    return true;
  }
  const bool free_end = last_ != kNone && pieces_[last_].state == PieceState::kFree;
  const uint64_t taken = last_ == kNone ? 0 : free_end ? pieces_[last_].offset() : pieces_[last_].end();
  if (units < taken) return false;
  if (free_end) {
    unlist(last_);
    if (units == taken) {
      const uint32_t gone = last_;
      unlink(gone);
      pieces_.give(gone);
    } else {
      pieces_[last_].set_size(units - taken);
      list(last_);
    }
  } else if (units > taken) {
    add_free(taken, units - taken, last_);
  }
  capacity_ = units;
  return true;
}

uint32_t Allocator::take(uint64_t units) {
  settle();
  uint32_t found = kNone;
  const uint32_t own = class_of(units);
  uint32_t looks = 0;
  for (uint32_t at = heads_[own]; at != kNone && looks < kLooks; at = pieces_[at].list_next, ++looks) {
    if (pieces_[at].size() >= units) {
      found = at;
      break;
    }
  }
  if (found == kNone) {
    const uint32_t above = class_from(own + 1);
    if (above == kClasses) return kNone;
    found = heads_[above];
  }
  if (pieces_[found].size() == units) {
    unlist(found);
  } else {
    // The front is taken, so that one after the other lies side by side, and the rest stays the same piece.
    Piece &rest = pieces_[found];
    const uint32_t made = make(rest.offset(), units, PieceState::kUsed);
    const bool moves = class_of(rest.size()) != class_of(rest.size() - units);
    if (moves) unlist(found);
    link(made, rest.before);
    rest.set_offset(rest.offset() + units);
    rest.set_size(rest.size() - units);
    if (moves) list(found);
    found = made;
  }
  pieces_[found].state = PieceState::kUsed;
  pieces_[found].slot = kNone;
  pieces_[found].committed = false;
  used_ += units;
  ++extents_;
  return found;
}

uint32_t Allocator::take_at(uint64_t offset, uint64_t units, uint32_t slot) {
  loosen();
  if (offset > capacity_ || units > capacity_ - offset || !tree_.is_free(offset, units)) return kNone;
  const uint32_t made = make(offset, units, PieceState::kUsed);
  pieces_[made].slot = slot;
  tree_.insert(made);
  used_ += units;
  ++extents_;
  return made;
}

void Allocator::set_committed(uint32_t at) {
  Piece &piece = pieces_[at];
  committed_ += piece.committed ? 0 : 1;
  piece.committed = true;
}

void Allocator::leave(Piece &piece) {
  committed_ -= piece.committed ? 1 : 0;
  piece.committed = false;
}

void Allocator::set_waiting(uint32_t at) {
  Piece &piece = pieces_[at];
  leave(piece);
  piece.state = PieceState::kWaiting;
  used_ -= piece.size();
  waiting_ += piece.size();
}

void Allocator::give(uint32_t at) {
  Piece &piece = pieces_[at];
  (piece.state == PieceState::kWaiting ? waiting_ : used_) -= piece.size();
  --extents_;
  leave(piece);
  if (loose_) {
    tree_.erase(at);
    pieces_.give(at);
    return;
  }
  piece.state = PieceState::kFree;
  const uint32_t after = piece.after, before = piece.before;
  if (after != kNone && pieces_[after].state == PieceState::kFree) {
    unlist(after);
    piece.set_size(piece.size() + pieces_[after].size());
    unlink(after);
    pieces_.give(after);
  }
  if (before != kNone && pieces_[before].state == PieceState::kFree) {
    Piece &front = pieces_[before];
    unlist(before);
    front.set_size(front.size() + piece.size());
    unlink(at);
    pieces_.give(at);
    at = before;
  }
  list(at);
}

void Allocator::clear() {
  tree_.clear();
  pieces_.clear();
  heads_.fill(kNone);
  filled_.fill(0);
  first_ = last_ = kNone;
  capacity_ = used_ = waiting_ = 0;
  extents_ = committed_ = 0;
  loose_ = false;
}

uint64_t Allocator::largest_free() {
  settle();
  uint32_t top = kClasses;
  for (uint32_t word = static_cast<uint32_t>(filled_.size()); word-- > 0;) {
    if (filled_[word] == 0) continue;
    top = word * 64 + 63 - static_cast<uint32_t>(std::countl_zero(filled_[word]));
    break;
  }
  uint64_t largest = 0;
  uint32_t looks = 0;
  for (uint32_t at = top == kClasses ? kNone : heads_[top]; at != kNone && looks < kLargestLooks;
       at = pieces_[at].list_next, ++looks) {
    largest = std::max(largest, pieces_[at].size());
  }
  return largest;
}

// From the tree to the list of neighbours, with the gaps as free pieces.
void Allocator::settle() {
  if (!loose_) return;
  const std::vector<uint32_t> sorted = tree_.sorted(extents_);
  size_t gaps = 1;
  for (size_t i = 0; i < sorted.size(); ++i) {
    gaps += pieces_[sorted[i]].offset() > (i == 0 ? 0 : pieces_[sorted[i - 1]].end()) ? 1 : 0;
  }
  pieces_.reserve(gaps);
  // From here on nothing throws.
  tree_.clear();
  loose_ = false;
  first_ = last_ = kNone;
  uint64_t end = 0;
  for (const uint32_t at : sorted) {
    if (pieces_[at].offset() > end) add_free(end, pieces_[at].offset() - end, last_);
    link(at, last_);
    end = pieces_[at].end();
  }
  if (end < capacity_) add_free(end, capacity_ - end, last_);
}

void Allocator::loosen() {
  if (loose_) return;
  uint32_t at = first_;
  heads_.fill(kNone);
  filled_.fill(0);
  loose_ = true;
  while (at != kNone) {
    const uint32_t after = pieces_[at].after;
    if (pieces_[at].state == PieceState::kFree) {
      pieces_.give(at);
    } else {
      tree_.insert(at);
    }
    at = after;
  }
  first_ = last_ = kNone;
}

const char *Allocator::check() {
  settle();
  uint64_t end = 0, used = 0, waiting = 0;
  size_t extents = 0, free_ones = 0, listed = 0, committed = 0;
  bool free_before = false;
  uint32_t before = kNone;
  for (uint32_t at = first_; at != kNone; at = pieces_[at].after) {
    const Piece &piece = pieces_[at];
    if (!pieces_.used(at) || piece.before != before) return "the neighbours of a piece are not its neighbours";
    if (piece.offset() != end || piece.size() == 0) return "pieces overlap, or leave a gap";
    const bool is_free = piece.state == PieceState::kFree;
    if (is_free && free_before) return "two free pieces side by side";
    if (piece.state == PieceState::kUsed) used += piece.size();
    if (piece.state == PieceState::kWaiting) waiting += piece.size();
    committed += piece.committed ? 1 : 0;
    (is_free ? free_ones : extents) += 1;
    free_before = is_free;
    before = at;
    end = piece.end();
  }
  if (before != last_ || end != capacity_) return "the pieces do not fill the segment";
  if (used != used_ || waiting != waiting_ || extents != extents_ || committed != committed_)
    return "the sums of an allocator are wrong";
  if (extents + free_ones != pieces_.count()) return "a piece is lost";
  for (uint32_t its = 0; its < kClasses; ++its) {
    if ((heads_[its] != kNone) != ((filled_[its / 64] >> its % 64 & 1) != 0)) return "a size class is marked wrongly";
    for (uint32_t at = heads_[its]; at != kNone; at = pieces_[at].list_next, ++listed) {
      if (pieces_[at].state != PieceState::kFree || class_of(pieces_[at].size()) != its)
        return "a wrong piece is listed";
    }
  }
  return listed == free_ones ? "" : "a free piece is not listed";
}

}  // namespace moonpool::index
