// SPDX-License-Identifier: Apache-2.0
// How far two devices of this host are from each other, as the kernel draws the bus: from the same switch to the other
// side of the machine.
#pragma once

#include <cstdint>
#include <string>

namespace moonpool::pci {

// The more the farther. Fits into four bits.
enum Distance : uint8_t {
  kSameSwitch = 0,      // or the two are one device, or nobody knows
  kSameHostBridge = 1,  // through the root complex
  kSameNode = 2,        // through the processor's own interconnect
  kOtherNode = 3,       // from socket to socket
};

struct Place {
  std::string path;    // "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"; "" when it is on no bus
  int numa_node = -1;  // -1: it makes no difference, or nobody knows
};

// Of what a link below /sys points to.
Place place_at(const std::string &link);
// "0000:01:00.0", in whatever case the driver writes it.
Place place_of_bus_id(const std::string &bus_id);
Distance distance(const Place &a, const Place &b);
// For people: "the same switch".
const char *distance_text(Distance distance);

}  // namespace moonpool::pci
