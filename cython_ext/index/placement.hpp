// SPDX-License-Identifier: Apache-2.0
//
// Where the extents of one call go: replicas to different hosts, the first to the preferred one where there is room,
// and otherwise by chance, weighted by free space. A segment that is new has a smaller weight at first. What one call
// places stays together for a few MiB, so that readers of a batch find neighbours.
#pragma once

#include <cstdint>
#include <vector>

#include "segments.hpp"

namespace moonpool::index {

class Placement {
 public:
  enum class Result { kPlaced, kNoSpace, kTooLarge };

  Placement(Segments &segments, const std::vector<uint32_t> &avoid, uint32_t host, uint32_t replicas, int64_t now,
            Random &random);

  // Extents of so many units on as many hosts as there are, at most `replicas`: all of them or none.
  Result place(uint64_t units, Place *places, uint32_t *count);
  // One extent more, on another host than those at `others`, or else in another segment.
  bool place_beside(uint64_t units, const Place *others, uint32_t count, Place *place);

 private:
  struct Candidate {
    Segment *segment;
    double weight;
    uint16_t at;
    uint32_t tried;  // the item for which it had no room
  };
  struct Sticky {
    uint32_t candidate = kNone;
    uint64_t units_left = 0;
  };

  bool place_one(uint64_t units, uint32_t replica, Place *places);
  bool try_at(uint32_t candidate, uint64_t units, Place *place);
  uint32_t choose(uint32_t replica, const Place *places, bool on_host);
  bool fits(const Candidate &candidate, uint32_t replica, const Place *places, bool on_host) const;

  Segments &segments_;
  Random &random_;
  const uint32_t host_;
  uint32_t replicas_;  // at most one per host
  uint64_t units_max_;
  uint64_t no_room_for_ = UINT64_MAX;
  uint32_t item_ = 0;
  bool one_per_host_ = true;  // otherwise one per segment
  std::vector<Candidate> candidates_;
  Sticky sticky_[kReplicasMax];
};

}  // namespace moonpool::index
