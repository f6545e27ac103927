// SPDX-License-Identifier: Apache-2.0
//
// Extents whose chunk is gone and that nobody may have yet: because a writer may still write there, or because a reader
// may still read there. Room for them is made before: giving something up must not need memory. Not thread-safe.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>

#include "chunk.hpp"
#include "undo.hpp"

namespace moonpool::index {

class Condemned {
 public:
  // ---- until the owner can write there no more

  // Room for so many more, and back. The first throws std::bad_alloc, before anything has changed.
  void reserve(size_t count) { spare_fences_.add(count); }
  void release(size_t count) { spare_fences_.drop(count); }
  // There is room.
  void until_fenced(uint32_t owner, uint64_t generation, Place place);
  // Each calls `give(place)` for what waits no longer.
  template <class Give>
  void take_fenced(uint32_t owner, uint16_t segment, Give give) {
    for (auto at = fences_.lower_bound({owner, segment, 0}); at != fences_.end() && of_pair(at, owner, segment);) {
      at = take(at, give);
    }
  }
  template <class Give>
  void take_segment(uint16_t segment, Give give) {
    for (auto at = fences_.begin(); at != fences_.end();) {
      at = at->first.segment == segment ? take(at, give) : std::next(at);
    }
  }
  // The owner says that of this put nothing can be written any more.
  template <class Give>
  void take_settled(uint32_t owner, uint64_t generation, Give give) {
    for (auto at = fences_.lower_bound({owner, 0, 0}); at != fences_.end() && at->first.owner == owner;) {
      const uint16_t segment = at->first.segment;
      if (const auto found = fences_.find({owner, segment, generation}); found != fences_.end()) take(found, give);
      at = fences_.upper_bound({owner, segment, UINT64_MAX});
    }
  }
  // Pairs of owner and segment (its place) that extents wait for.
  template <class Look>
  void each_pair(Look look) const {
    for (auto at = fences_.begin(); at != fences_.end();) {
      const Fence pair = at->first;
      look(pair.owner, pair.segment);
      at = fences_.upper_bound({pair.owner, pair.segment, UINT64_MAX});
    }
  }

  // ---- until readers are through

  // As above.
  void reserve_reads(size_t count) { spare_reads_.add(count); }
  void release_reads(size_t count) { spare_reads_.drop(count); }
  // There is room.
  void until_read(int64_t until, Place place);
  bool take_read(int64_t now, Place *place);

  size_t count() const { return fences_.size() + reads_.size(); }
  // Room that was reserved, and not used yet.
  size_t reserved() const { return spare_fences_.size(); }
  size_t reads_reserved() const { return spare_reads_.size(); }
  size_t bytes() const;

 private:
  struct Fence {
    uint32_t owner = 0;
    uint16_t segment = 0;
    uint64_t generation = 0;
    auto operator<=>(const Fence &) const = default;
  };
  using Fences = std::multimap<Fence, uint32_t>;  // -> piece
  using Reads = std::multimap<int64_t, Place>;

  static bool of_pair(Fences::const_iterator at, uint32_t owner, uint16_t segment) {
    return at->first.owner == owner && at->first.segment == segment;
  }
  template <class Give>
  Fences::iterator take(Fences::iterator at, Give give) {
    give(Place{at->second, at->first.segment});
    return fences_.erase(at);
  }

  Fences fences_;
  Reads reads_;
  SpareNodes<Fences> spare_fences_;
  SpareNodes<Reads> spare_reads_;
};

}  // namespace moonpool::index
