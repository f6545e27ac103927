// SPDX-License-Identifier: Apache-2.0
//
// Extents whose chunk is gone and that nobody may have yet: because a writer may still write there, or because a reader
// may still read there. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "chunk.hpp"

namespace moonpool::index {

class Condemned {
 public:
  // Until the owner can write there no more. Throws std::bad_alloc, before anything has changed.
  void until_fenced(uint32_t owner, uint64_t generation, Place place);
  std::vector<Place> take_fenced(uint32_t owner, uint16_t segment);
  std::vector<Place> take_segment(uint16_t segment);
  // The owner says that of this put nothing can be written any more.
  std::vector<Place> take_settled(uint32_t owner, uint64_t generation);

  // Until readers are through.
  void until_read(int64_t until, Place place) { leased_.emplace(until, place); }
  bool take_read(int64_t now, Place *place);

  // Pairs of owner and segment (its place) that extents wait for.
  template <class Look>
  void each_pair(Look look) const {
    for (const auto &[pair, waiting] : fences_) look(pair.first, pair.second);
  }
  size_t count() const { return fenced_ + leased_.size(); }
  size_t bytes() const;

 private:
  using Waiting = std::unordered_map<uint64_t, uint32_t>;  // generation -> piece
  std::vector<Place> all_of(std::map<std::pair<uint32_t, uint16_t>, Waiting>::iterator at);

  std::map<std::pair<uint32_t, uint16_t>, Waiting> fences_;
  std::multimap<int64_t, Place> leased_;
  size_t fenced_ = 0;
};

}  // namespace moonpool::index
