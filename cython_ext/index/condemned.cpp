// SPDX-License-Identifier: Apache-2.0
#include "condemned.hpp"

namespace moonpool::index {

void Condemned::until_fenced(uint32_t owner, uint64_t generation, Place place) {
  fences_[{owner, place.segment}].emplace(generation, place.piece);
  ++fenced_;
}

std::vector<Place> Condemned::all_of(std::map<std::pair<uint32_t, uint16_t>, Waiting>::iterator at) {
  std::vector<Place> places;
  places.reserve(at->second.size());
  for (const auto &[generation, piece] : at->second) places.push_back({piece, at->first.second});
  fenced_ -= places.size();
  fences_.erase(at);
  return places;
}

std::vector<Place> Condemned::take_fenced(uint32_t owner, uint16_t segment) {
  const auto found = fences_.find({owner, segment});
  return found == fences_.end() ? std::vector<Place>() : all_of(found);
}

std::vector<Place> Condemned::take_segment(uint16_t segment) {
  std::vector<Place> places;
  for (auto at = fences_.begin(); at != fences_.end();) {
    const auto here = at++;
    if (here->first.second != segment) continue;
    const std::vector<Place> its = all_of(here);
    places.insert(places.end(), its.begin(), its.end());
  }
  return places;
}

std::vector<Place> Condemned::take_settled(uint32_t owner, uint64_t generation) {
  std::vector<Place> places;
  for (auto at = fences_.lower_bound({owner, 0}); at != fences_.end() && at->first.first == owner;) {
    const auto here = at++;
    const auto found = here->second.find(generation);
    if (found == here->second.end()) continue;
    places.push_back({found->second, here->first.second});
    here->second.erase(found);
    --fenced_;
    if (here->second.empty()) fences_.erase(here);
  }
  return places;
}

bool Condemned::take_read(int64_t now, Place *place) {
  if (leased_.empty() || leased_.begin()->first > now) return false;
  *place = leased_.begin()->second;
  leased_.erase(leased_.begin());
  return true;
}

size_t Condemned::bytes() const {
  constexpr size_t kNode = 48;  // of a map, with what the heap adds
  return (fences_.size() * 2 + fenced_ + leased_.size()) * kNode;
}

}  // namespace moonpool::index
