// SPDX-License-Identifier: Apache-2.0
//
// The segments, and the extents within them. A segment that is dropped stays until nothing names it any more, because
// chunks name it by its place here. Not thread-safe; const calls may run at once.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "allocator.hpp"
#include "chunk.hpp"

namespace moonpool::index {

constexpr uint32_t kSegmentsMax = 65535;
// Extents on a disk begin at blocks and fill them, so that they can be read and written past the page cache.
constexpr uint64_t kBlockUnits = 4096 / kUnit;

struct Segment {
  uint32_t number;
  uint32_t host = 0;
  bool added = false;  // false: only a restart has named it
  bool writable = false, readable = false, dropped = false;
  bool disk = false;         // only its own node reads and writes it: readers are given no extents there
  uint32_t partner = kNone;  // of a disk the place of its node's memory, and the other way round
  int64_t added_ms = 0, ramp_up_ms = 0;
  size_t left = 0;  // dropped: places that still name it
  Allocator space;
};

class Segments {
 public:
  // The segment with this number; null: there is none, or it is dropped.
  Segment *find(uint32_t number) const;
  // Its place, also of one that is dropped; made when there is none, and then takes any extent until its capacity is
  // known. kNone: there are too many. Throws std::bad_alloc.
  uint32_t find_or_make(uint32_t number);
  // Also of one that is dropped; kNone: there is none.
  uint32_t place_of(uint32_t number) const;
  void set(Segment &segment, bool writable, bool readable);
  // This disk and this memory are of one node. What either was paired with before is so no longer.
  void pair(uint32_t disk, uint32_t memory);
  // Its extents are gone; whoever names one still has to give() it.
  void drop(uint32_t at);

  Segment &operator[](uint32_t at) const { return *all_[at]; }
  uint32_t end() const { return static_cast<uint32_t>(all_.size()); }
  bool used(uint32_t at) const { return all_[at] != nullptr; }

  bool lost(Place place) const { return all_[place.segment]->dropped; }
  bool readable(Place place) const { return all_[place.segment]->readable; }
  bool on_disk(Place place) const { return all_[place.segment]->disk; }
  bool all_readable() const { return unreadable_ == 0; }

  // Calls `look(segment, place)` for each memory that can be written.
  template <class Look>
  void each_writable(Look look) const {
    for (uint32_t at = 0; at < end(); ++at) {
      if (used(at) && all_[at]->writable && !all_[at]->disk) look(*all_[at], at);
    }
  }

  // ---- places
  uint64_t bytes(Place place) const;  // 0 when lost
  void set_committed(Place place);
  void set_waiting(Place place);
  // Returns the bytes that are free now.
  uint64_t give(Place place);

  size_t bytes() const;
  uint64_t capacity_max() const;  // units of the largest memory that was added

 private:
  void forget(uint32_t at);
  void part(Segment &segment);

  std::vector<std::unique_ptr<Segment>> all_;
  std::unordered_map<uint32_t, uint32_t> places_;
  size_t unreadable_ = 0;
};

}  // namespace moonpool::index
