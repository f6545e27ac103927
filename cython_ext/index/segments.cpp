// SPDX-License-Identifier: Apache-2.0
#include "segments.hpp"

#include <algorithm>

namespace moonpool::index {

Segment *Segments::find(uint32_t number) const {
  const uint32_t at = place_of(number);
  return at == kNone || all_[at]->dropped ? nullptr : all_[at].get();
}

uint32_t Segments::place_of(uint32_t number) const {
  const auto found = places_.find(number);
  return found == places_.end() ? kNone : found->second;
}

uint32_t Segments::find_or_make(uint32_t number) {
  if (const uint32_t at = place_of(number); at != kNone) return at;
  uint32_t at = 0;
  while (at < all_.size() && all_[at] != nullptr) ++at;
  if (at >= kSegmentsMax) return kNone;
  auto made = std::make_unique<Segment>();
  made->number = number;
  made->space.set_capacity(kUnitsMax);
  if (at == all_.size()) all_.emplace_back();
  places_.emplace(number, at);
  all_[at] = std::move(made);
  ++unreadable_;
  return at;
}

void Segments::set(Segment &segment, bool writable, bool readable) {
  if (segment.readable != readable) readable ? --unreadable_ : ++unreadable_;
  segment.writable = writable;
  segment.readable = readable;
}

void Segments::pair(uint32_t disk, uint32_t memory) {
  part(*all_[disk]);
  part(*all_[memory]);
  all_[disk]->partner = memory;
  all_[memory]->partner = disk;
}

void Segments::part(Segment &segment) {
  if (segment.partner == kNone) return;
  all_[segment.partner]->partner = kNone;
  segment.partner = kNone;
}

void Segments::drop(uint32_t at) {
  Segment &segment = *all_[at];
  if (segment.dropped) return;
  part(segment);
  set(segment, false, false);
  segment.dropped = true;
  segment.left = segment.space.extents();
  segment.space.clear();
  if (segment.left == 0) forget(at);
}

void Segments::forget(uint32_t at) {
  places_.erase(all_[at]->number);
  all_[at].reset();
  --unreadable_;
}

uint64_t Segments::bytes(Place place) const {
  const Segment &segment = *all_[place.segment];
  return segment.dropped ? 0 : segment.space.units(place.piece) * kUnit;
}

void Segments::set_committed(Place place) {
  Segment &segment = *all_[place.segment];
  if (!segment.dropped) segment.space.set_committed(place.piece);
}

void Segments::set_waiting(Place place) {
  Segment &segment = *all_[place.segment];
  if (!segment.dropped) segment.space.set_waiting(place.piece);
}

uint64_t Segments::give(Place place) {
  Segment &segment = *all_[place.segment];
  if (!segment.dropped) {
    const uint64_t bytes = segment.space.units(place.piece) * kUnit;
    segment.space.give(place.piece);
    return bytes;
  }
  if (--segment.left == 0) forget(place.segment);
  return 0;
}

size_t Segments::bytes() const {
  size_t sum = all_.capacity() * sizeof all_[0];
  for (const auto &segment : all_) {
    if (segment != nullptr) sum += sizeof(Segment) + segment->space.bytes();
  }
  return sum;
}

uint64_t Segments::capacity_max() const {
  uint64_t most = 0;
  for (const auto &segment : all_) {
    if (segment != nullptr && segment->added && !segment->dropped && !segment->disk)
      most = std::max(most, segment->space.capacity());
  }
  return most;
}

}  // namespace moonpool::index
