// SPDX-License-Identifier: Apache-2.0
#include "pci.hpp"

#include <gtest/gtest.h>

namespace moonpool::pci {
namespace {

// A host with two sockets. Behind the first port of the first one there are two switches, one behind the other.
const Place kGpu{"/sys/devices/pci0000:40/0000:40:01.0/0000:41:00.0/0000:42:00.0/0000:43:00.0", 0};
const Place kNicAtItsSwitch{"/sys/devices/pci0000:40/0000:40:01.0/0000:41:00.0/0000:42:04.0/0000:44:00.0", 0};
const Place kNicAtTheSameBridge{"/sys/devices/pci0000:40/0000:40:03.0/0000:48:00.0", 0};
const Place kNicAtAnotherBridge{"/sys/devices/pci0000:60/0000:60:01.0/0000:61:00.0", 0};
const Place kNicOfTheOtherSocket{"/sys/devices/pci0000:c0/0000:c0:01.0/0000:c1:00.0", 1};

TEST(Pci, TheMoreOfTheWayIsSharedTheNearer) {
  EXPECT_EQ(distance(kGpu, kGpu), kSameSwitch);
  EXPECT_EQ(distance(kGpu, kNicAtItsSwitch), kSameSwitch);
  EXPECT_EQ(distance(kGpu, kNicAtTheSameBridge), kSameHostBridge);
  EXPECT_EQ(distance(kGpu, kNicAtAnotherBridge), kSameNode);
  EXPECT_EQ(distance(kGpu, kNicOfTheOtherSocket), kOtherNode);
}

TEST(Pci, ItIsTheSameBothWays) {
  for (const Place &nic : {kNicAtItsSwitch, kNicAtTheSameBridge, kNicAtAnotherBridge, kNicOfTheOtherSocket}) {
    EXPECT_EQ(distance(kGpu, nic), distance(nic, kGpu)) << nic.path;
  }
}

TEST(Pci, WhatIsOnNoBusIsNearUnlessItsNodeSaysOtherwise) {
  EXPECT_EQ(distance({"", -1}, kGpu), kSameSwitch);
  EXPECT_EQ(distance({"", 0}, kGpu), kSameSwitch);
  EXPECT_EQ(distance({"", 1}, kGpu), kOtherNode);
}

TEST(Pci, NumbersThatBeginAlikeAreNotTheSamePort) {
  const Place other{"/sys/devices/pci0000:40/0000:40:01.1/0000:41:00.0", 0};
  EXPECT_EQ(distance(kGpu, other), kSameHostBridge);
}

TEST(Pci, AHostWithoutSuchADeviceHasNoPlaceForIt) {
  const Place nowhere = place_of_bus_id("FFFF:FF:1F.7");
  EXPECT_EQ(nowhere.path, "");
  EXPECT_EQ(nowhere.numa_node, -1);
}

}  // namespace
}  // namespace moonpool::pci
