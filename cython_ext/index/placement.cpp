// SPDX-License-Identifier: Apache-2.0
#include "placement.hpp"

#include <algorithm>
#include <unordered_set>

#include "undo.hpp"

namespace moonpool::index {

namespace {

constexpr uint64_t kTogether = (4u << 20) / kUnit;
// The share that a new segment begins with: enough that its first use is not a surprise later.
constexpr double kRampFrom = 1.0 / 16;

double weight_of(const Segment &segment, int64_t now) {
  const auto room = static_cast<double>(segment.space.free());
  const int64_t age = now - segment.added_ms;
  if (age >= segment.ramp_up_ms) return room;
  const double ramp = static_cast<double>(std::max<int64_t>(0, age)) / static_cast<double>(segment.ramp_up_ms);
  return room * std::max(kRampFrom, ramp);
}

}  // namespace

Placement::Placement(Segments &segments, const std::vector<uint32_t> &avoid, uint32_t host, uint32_t replicas,
                     int64_t now, Random &random)
    : segments_(segments), random_(random), host_(host), units_max_(segments.capacity_max()) {
  std::unordered_set<uint32_t> hosts;
  segments.each_writable([&](Segment &segment, uint32_t at) {
    if (std::find(avoid.begin(), avoid.end(), segment.number) != avoid.end()) return;
    hosts.insert(segment.host);
    candidates_.push_back({&segment, weight_of(segment, now), static_cast<uint16_t>(at), 0});
  });
  replicas_ = static_cast<uint32_t>(std::min<size_t>(replicas, hosts.size()));
}

bool Placement::fits(const Candidate &candidate, uint32_t replica, const Place *places, bool on_host) const {
  if (candidate.tried == item_ || (on_host && candidate.segment->host != host_)) return false;
  for (uint32_t r = 0; r < replica; ++r) {
    const Segment &other = segments_[places[r].segment];
    if (one_per_host_ ? other.host == candidate.segment->host : &other == candidate.segment) return false;
  }
  return true;
}

// One that has not been tried, by chance; kNone: there is none.
uint32_t Placement::choose(uint32_t replica, const Place *places, bool on_host) {
  double sum = 0;
  uint32_t last = kNone;
  for (uint32_t i = 0; i < candidates_.size(); ++i) {
    if (!fits(candidates_[i], replica, places, on_host)) continue;
    sum += candidates_[i].weight;
    last = i;
  }
  double at = random_.fraction() * sum;
  for (uint32_t i = 0; last != kNone && i < last; ++i) {
    if (!fits(candidates_[i], replica, places, on_host)) continue;
    at -= candidates_[i].weight;
    if (at < 0) return i;
  }
  return last;
}

bool Placement::try_at(uint32_t candidate, uint64_t units, Place *place) {
  Candidate &its = candidates_[candidate];
  const uint32_t piece = its.segment->space.take(units);
  if (piece == kNone) {
    its.tried = item_;
    return false;
  }
  *place = {piece, its.at};
  return true;
}

bool Placement::place_one(uint64_t units, uint32_t replica, Place *places) {
  Sticky &sticky = sticky_[replica];
  if (sticky.candidate != kNone && sticky.units_left >= units &&
      fits(candidates_[sticky.candidate], replica, places, false) &&
      try_at(sticky.candidate, units, &places[replica])) {
    sticky.units_left -= units;
    return true;
  }
  for (const bool on_host : {true, false}) {
    if (on_host && (replica != 0 || host_ == 0)) continue;
    for (;;) {
      const uint32_t candidate = choose(replica, places, on_host);
      if (candidate == kNone) break;
      if (!try_at(candidate, units, &places[replica])) continue;
      sticky = {candidate, kTogether - std::min(kTogether, units)};
      return true;
    }
  }
  return false;
}

bool Placement::place_beside(uint64_t units, const Place *others, uint32_t count, Place *place) {
  Place places[kReplicasMax] = {};
  std::copy_n(others, count, places);
  ++item_;
  bool placed = place_one(units, count, places);
  if (!placed && count > 0) {
    one_per_host_ = false;
    placed = place_one(units, count, places);
    one_per_host_ = true;
  }
  *place = places[count];
  return placed;
}

Placement::Result Placement::place(uint64_t units, Place *places, uint32_t *count) {
  *count = 0;
  if (units > units_max_ && units_max_ != 0) return Result::kTooLarge;
  if (replicas_ == 0 || units >= no_room_for_) return Result::kNoSpace;
  ++item_;
  Undo undo([&] {
    for (uint32_t r = 0; r < *count; ++r) segments_.give(places[r]);
    *count = 0;
  });
  for (; *count < replicas_; ++*count) {
    if (place_one(units, *count, places)) continue;
    no_room_for_ = units;
    return Result::kNoSpace;
  }
  undo.keep();
  return Result::kPlaced;
}

}  // namespace moonpool::index
