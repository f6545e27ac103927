// SPDX-License-Identifier: Apache-2.0
//
// Gives out the space of one segment in units of 64 bytes. Free pieces are in lists by size class (8 classes to a
// doubling), neighbours that are free become one, and each step looks at a bounded number of pieces. Not thread-safe.
//
// After a restart, extents come with their places, in any order and before the capacity is known; then the pieces are
// kept as a tree (extent_tree.hpp) until somebody needs the gaps between them.
#pragma once

#include <array>
#include <cstdint>

#include "arena.hpp"
#include "extent_tree.hpp"
#include "piece.hpp"

namespace moonpool::index {

constexpr uint64_t kUnit = 64;
constexpr uint64_t kUnitsMax = (uint64_t{1} << 40) - 1;  // of a segment: 64 TiB

class Allocator {
 public:
  Allocator() : tree_(pieces_) { heads_.fill(kNone); }
  Allocator(const Allocator &) = delete;
  Allocator &operator=(const Allocator &) = delete;

  // What there is to give, at first nothing. False: extents lie beyond, and nothing has changed.
  bool set_capacity(uint64_t units);

  // A piece of so many units; kNone: there is none. Whose it is comes with set_slot().
  uint32_t take(uint64_t units);
  // The piece at this place; kNone: something there is taken, or it is beyond the capacity.
  uint32_t take_at(uint64_t offset, uint64_t units, uint32_t slot);
  void give(uint32_t piece);
  // All of it is gone; no piece is valid any more.
  void clear();
  // It was written, and is that of a chunk now.
  void set_committed(uint32_t piece);
  // It is still taken, but its chunk is gone.
  void set_waiting(uint32_t piece);

  uint64_t offset(uint32_t piece) const { return pieces_[piece].offset(); }
  uint64_t units(uint32_t piece) const { return pieces_[piece].size(); }
  uint32_t slot(uint32_t piece) const { return pieces_[piece].slot; }
  bool committed(uint32_t piece) const { return pieces_[piece].committed; }
  void set_slot(uint32_t piece, uint32_t slot) { pieces_[piece].slot = slot; }
  void prefetch(uint32_t piece) const { __builtin_prefetch(&pieces_[piece]); }

  uint64_t capacity() const { return capacity_; }
  uint64_t used() const { return used_; }  // without what waits
  uint64_t waiting() const { return waiting_; }
  uint64_t free() const { return capacity_ - used_ - waiting_; }
  size_t extents() const { return extents_; }
  size_t committed() const { return committed_; }  // extents
  size_t free_pieces() { return settle(), pieces_.count() - extents_; }
  // Of the largest free piece. Where a class has thousands of pieces, of the largest among some.
  uint64_t largest_free();
  size_t bytes() const { return pieces_.bytes(); }

  // Calls `look(piece, slot)` for each extent by rising offset, until it returns false.
  template <class Look>
  void each(Look look) {
    settle();
    for (uint32_t at = first_; at != kNone; at = pieces_[at].after) {
      if (pieces_[at].state == PieceState::kUsed && !look(at, pieces_[at].slot)) return;
    }
  }
  // The same in no order, from the piece at `at` on. Returns the piece at which it ended, or kNone. Pieces may come and
  // go between the calls of one round; what is there all the time is seen.
  template <class Look>
  uint32_t each_from(uint32_t at, Look look) const {
    for (at = pieces_.next_used(at); at < pieces_.end(); at = pieces_.next_used(at + 1)) {
      if (pieces_[at].state == PieceState::kUsed && !look(at, pieces_[at].slot)) return at;
    }
    return kNone;
  }
  // What is wrong with it, or "". For tests.
  const char *check();

 private:
  static constexpr uint32_t kClasses = 320;
  static constexpr uint32_t kLooks = 8;  // at pieces of the own class, which may be too small
  static constexpr uint32_t kLargestLooks = 4096;

  static uint32_t class_of(uint64_t units);
  uint32_t class_from(uint32_t at) const;  // the first at `at` or above with a free piece, or kClasses
  void list(uint32_t piece);
  void unlist(uint32_t piece);
  void settle();
  void loosen();
  uint32_t make(uint64_t offset, uint64_t units, PieceState state);
  void add_free(uint64_t offset, uint64_t units, uint32_t before);
  void link(uint32_t piece, uint32_t before);
  void unlink(uint32_t piece);
  void leave(Piece &piece);

  Arena<Piece> pieces_;
  ExtentTree tree_;
  bool loose_ = false;  // in the tree
  uint32_t first_ = kNone, last_ = kNone;
  std::array<uint32_t, kClasses> heads_;
  std::array<uint64_t, kClasses / 64> filled_{};
  uint64_t capacity_ = 0, used_ = 0, waiting_ = 0;
  size_t extents_ = 0, committed_ = 0;
};

}  // namespace moonpool::index
