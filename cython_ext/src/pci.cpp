// SPDX-License-Identifier: Apache-2.0
#include "pci.hpp"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <vector>

namespace moonpool::pci {

namespace {

constexpr char kBuses[] = "/sys/bus/pci/devices/";

// Host bridge, root port, ports of switches, device: "pci0000:00", "0000:00:01.0", ..., "0000:01:00.0".
std::vector<std::string> steps_of(const std::string &path) {
  std::vector<std::string> steps;
  for (size_t at = path.find("/pci"); at != std::string::npos && at < path.size();) {
    const size_t end = std::min(path.find('/', at + 1), path.size());
    steps.push_back(path.substr(at + 1, end - at - 1));
    at = end;
  }
  return steps;
}

}  // namespace

Place place_at(const std::string &link) {
  Place place;
  const std::unique_ptr<char, decltype(&std::free)> resolved(realpath(link.c_str(), nullptr), &std::free);
  if (resolved == nullptr) return place;
  place.path = resolved.get();
  std::ifstream node(place.path + "/numa_node");
  if (!(node >> place.numa_node)) place.numa_node = -1;
  if (steps_of(place.path).empty()) place.path.clear();  // a virtual device
  return place;
}

Place place_of_bus_id(const std::string &bus_id) {
  std::string lower = bus_id;
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  return place_at(kBuses + lower);
}

Distance distance(const Place &a, const Place &b) {
  const std::vector<std::string> one = steps_of(a.path), other = steps_of(b.path);
  if (!one.empty() && !other.empty()) {
    const auto [end, _] = std::mismatch(one.begin(), one.end(), other.begin(), other.end());
    const auto common = end - one.begin();
    // The first step is the host bridge, what they share beyond it is a port whose switch they are both behind.
    if (common > 1) return kSameSwitch;
    if (common == 1) return kSameHostBridge;
  }
  if (a.numa_node >= 0 && b.numa_node >= 0 && a.numa_node != b.numa_node) return kOtherNode;
  return one.empty() || other.empty() ? kSameSwitch : kSameNode;
}

const char *distance_text(Distance distance) {
  switch (distance) {
    case kSameSwitch:
      return "the same switch";
    case kSameHostBridge:
      return "the same host bridge";
    case kSameNode:
      return "the same NUMA node";
    case kOtherNode:
      return "another NUMA node";
  }
  return "unknown";
}

}  // namespace moonpool::pci
