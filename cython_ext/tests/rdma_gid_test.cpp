// SPDX-License-Identifier: Apache-2.0
//
// The choice of a GID, on tables as NICs have them: a routable address is never passed over for a link-local one.
#include "rdma_gid.hpp"

#include <arpa/inet.h>
#include <gtest/gtest.h>

#include "rdma_device.hpp"

namespace moonpool {
namespace {

constexpr auto kV1 = GidType::kRoceV1, kV2 = GidType::kRoceV2, kIb = GidType::kInfiniBand;

// "10.0.0.1" is what the table has as ::ffff:10.0.0.1.
Gid gid(const std::string &text) {
  Gid out{};
  const std::string full = text.find(':') == std::string::npos ? "::ffff:" + text : text;
  EXPECT_EQ(inet_pton(AF_INET6, full.c_str(), out.data()), 1) << text;
  return out;
}

struct Row {
  uint32_t index;
  GidType type;
  const char *address;
};

std::vector<GidEntry> table(const std::vector<Row> &rows) {
  std::vector<GidEntry> out;
  for (const Row &row : rows) out.push_back({row.index, row.type, gid(row.address)});
  return out;
}

// A ConnectX port with IPv4 and IPv6: every address once for RoCE v1 and once for v2, link-local first.
const std::vector<Row> kDualStack = {
    {0, kV1, "fe80::bace:f6ff:fe1a:2b3c"},
    {1, kV2, "fe80::bace:f6ff:fe1a:2b3c"},
    {2, kV1, "10.1.2.3"},
    {3, kV2, "10.1.2.3"},
    {4, kV1, "2001:db8::17"},
    {5, kV2, "2001:db8::17"},
};

TEST(RdmaGid, RoutableIpv4OverRoceV2ComesFirst) {
  const GidChoice choice = choose_gid(table(kDualStack), true, -1);
  ASSERT_TRUE(choice.found);
  EXPECT_EQ(choice.entry.index, 3u);
  EXPECT_EQ(choice.entry.gid, gid("10.1.2.3"));
  EXPECT_EQ(choice.reason, "index 3, 10.1.2.3 (RoCE v2, IPv4), the best of 6");
}

TEST(RdmaGid, TheOrderOfTheTableDoesNotMatterButAmongEquals) {
  std::vector<GidEntry> reversed = table(kDualStack);
  std::reverse(reversed.begin(), reversed.end());
  EXPECT_EQ(choose_gid(reversed, true, -1).entry.index, 3u);
  EXPECT_EQ(choose_gid(table({{1, kV2, "10.0.0.1"}, {2, kV2, "10.0.0.2"}}), true, -1).entry.index, 1u);
}

TEST(RdmaGid, WithoutIpv4TheRoutableIpv6IsTaken) {
  const GidChoice choice = choose_gid(
      table({{0, kV1, "fe80::1"}, {1, kV2, "fe80::1"}, {2, kV1, "2001:db8::1"}, {3, kV2, "2001:db8::1"}}), true, -1);
  EXPECT_EQ(choice.entry.index, 3u);
  EXPECT_NE(choice.reason.find("RoCE v2, global IPv6"), std::string::npos) << choice.reason;
}

TEST(RdmaGid, GlobalBeforeUniqueLocalBeforeLinkLocal) {
  std::vector<Row> rows = {{0, kV2, "fe80::1"}, {1, kV2, "fd00:1::1"}, {2, kV2, "2001:db8::1"}};
  EXPECT_EQ(choose_gid(table(rows), true, -1).entry.index, 2u);
  rows.pop_back();
  const GidChoice unique_local = choose_gid(table(rows), true, -1);
  EXPECT_EQ(unique_local.entry.index, 1u);
  EXPECT_NE(unique_local.reason.find("unique local IPv6"), std::string::npos) << unique_local.reason;
  rows.pop_back();
  const GidChoice link_local = choose_gid(table(rows), true, -1);
  EXPECT_EQ(link_local.entry.index, 0u) << "better than none";
  EXPECT_EQ(link_local.reason, "index 0, fe80::1 (RoCE v2, link-local), the only one");
}

TEST(RdmaGid, SelfAssignedIpv4IsLinkLocal) {
  EXPECT_TRUE(gid_is_link_local(gid("169.254.7.7")));
  EXPECT_FALSE(gid_is_link_local(gid("169.253.7.7")));
  EXPECT_FALSE(gid_is_link_local(gid("10.254.7.7")));
  const std::vector<Row> rows = {{0, kV2, "169.254.7.7"}, {1, kV2, "fd00::1"}};
  EXPECT_EQ(choose_gid(table(rows), true, -1).entry.index, 1u);
}

TEST(RdmaGid, TheWholeLinkLocalPrefixCounts) {
  EXPECT_TRUE(gid_is_link_local(gid("fe80::1")));
  EXPECT_TRUE(gid_is_link_local(gid("febf::1")));
  EXPECT_FALSE(gid_is_link_local(gid("fec0::1")));
  EXPECT_FALSE(gid_is_link_local(gid("fd80::1")));
}

TEST(RdmaGid, RoceV1IsTakenWhereThereIsNoV2) {
  const std::vector<Row> rows = {{0, kV1, "fe80::1"}, {1, kV1, "10.0.0.1"}};
  const GidChoice choice = choose_gid(table(rows), true, -1);
  EXPECT_EQ(choice.entry.index, 1u);
  EXPECT_NE(choice.reason.find("RoCE v1, IPv4"), std::string::npos) << choice.reason;
}

TEST(RdmaGid, NullEntriesAreNeverTaken) {
  EXPECT_TRUE(gid_is_null(gid("::")));
  EXPECT_TRUE(gid_is_null(gid("fe80::")));
  EXPECT_FALSE(gid_is_null(gid("fe80::1")));
  const GidChoice choice = choose_gid(table({{0, kV2, "::"}, {1, kV2, "fe80::"}, {2, kV2, "fe80::2"}}), true, -1);
  EXPECT_EQ(choice.entry.index, 2u);
  EXPECT_NE(choice.reason.find("the only one"), std::string::npos) << "null entries are no choice: " << choice.reason;
}

TEST(RdmaGid, AnInfiniBandPortUsesItsFirstGid) {
  const std::vector<GidEntry> rows =
      table({{0, kIb, "fe80::506b:4b03:c7:1a2b"}, {1, kIb, "fec0::506b:4b03:c7:1a2b"}, {2, kV2, "10.0.0.1"}});
  const GidChoice choice = choose_gid(rows, false, -1);
  EXPECT_EQ(choice.entry.index, 0u);
  EXPECT_NE(choice.reason.find("the InfiniBand GID"), std::string::npos) << choice.reason;
  EXPECT_EQ(choose_gid(rows, false, 1).entry.index, 1u);
}

TEST(RdmaGid, EntriesOfTheOtherLinkLayerAreNeverTaken) {
  EXPECT_FALSE(choose_gid(table({{0, kV1, "10.0.0.1"}, {1, kV2, "10.0.0.1"}}), false, -1).found);
  EXPECT_FALSE(choose_gid(table({{0, kIb, "2001:db8::1"}}), true, -1).found);
}

TEST(RdmaGid, TheIndexThatTheUserWantsIsTakenWhateverElseThereIs) {
  const GidChoice choice = choose_gid(table(kDualStack), true, 1);
  ASSERT_TRUE(choice.found);
  EXPECT_EQ(choice.entry.index, 1u);
  EXPECT_NE(choice.reason.find("as it was asked for"), std::string::npos) << choice.reason;
}

TEST(RdmaGid, AWantedIndexThatCannotBeUsedIsNotReplaced) {
  const std::vector<GidEntry> rows = table({{0, kV2, "10.0.0.1"}, {1, kV2, "::"}, {2, kIb, "2001:db8::1"}});
  for (const int wanted : {1, 2, 3, 255}) {
    const GidChoice choice = choose_gid(rows, true, wanted);
    EXPECT_FALSE(choice.found) << wanted;
    EXPECT_EQ(choice.reason, "GID index " + std::to_string(wanted) + " is empty or of another link layer");
  }
}

TEST(RdmaGid, AnEmptyTableSaysWhatToDo) {
  const GidChoice choice = choose_gid({}, true, -1);
  EXPECT_FALSE(choice.found);
  EXPECT_NE(choice.reason.find("give its network device an address"), std::string::npos) << choice.reason;
}

TEST(RdmaGid, EntriesBeyondWhatARequestCanNameAreNeverTaken) {
  const GidChoice choice = choose_gid(table({{255, kV1, "fe80::1"}, {256, kV2, "10.0.0.1"}}), true, -1);
  ASSERT_TRUE(choice.found);
  EXPECT_EQ(choice.entry.index, 255u);
  EXPECT_FALSE(choose_gid(table({{256, kV2, "10.0.0.1"}}), true, -1).found);
}

TEST(RdmaGid, AddressesArePrintedAsTheyAreKnown) {
  EXPECT_EQ(gid_text(gid("192.168.0.17")), "192.168.0.17");
  EXPECT_EQ(gid_text(gid("2001:db8:0:0::1")), "2001:db8::1");
}

TEST(RdmaGid, CommonBitsAreCountedFromTheLeft) {
  EXPECT_EQ(gid_common_bits(gid("10.0.0.1"), gid("10.0.0.1")), 128u);
  EXPECT_EQ(gid_common_bits(gid("10.0.0.0"), gid("10.0.0.1")), 127u);
  EXPECT_EQ(gid_common_bits(gid("10.0.0.1"), gid("10.0.128.1")), 96u + 16u);
  EXPECT_EQ(gid_common_bits(gid("8000::"), gid("::")), 0u);
}

// ---------------------------------------------------------------- rdma_devices

TEST(RdmaDevices, AreNamedWithPortAndGidIndex) {
  std::vector<DeviceChoice> choices;
  ASSERT_FALSE(parse_device_choices("mlx5_0:1@3,mlx5_1,rxe0@0,irdma-a:255", &choices));
  ASSERT_EQ(choices.size(), 4u);
  EXPECT_EQ(choices[0].name, "mlx5_0");
  EXPECT_EQ(choices[0].port, 1);
  EXPECT_EQ(choices[0].gid_index, 3);
  EXPECT_EQ(choices[1].name, "mlx5_1");
  EXPECT_EQ(choices[1].port, 0) << "every port";
  EXPECT_EQ(choices[1].gid_index, -1) << "the engine chooses";
  EXPECT_EQ(choices[2].name, "rxe0");
  EXPECT_EQ(choices[2].gid_index, 0);
  EXPECT_EQ(choices[3].port, 255);
}

TEST(RdmaDevices, NoTextIsNoChoice) {
  std::vector<DeviceChoice> choices;
  EXPECT_FALSE(parse_device_choices("", &choices));
  EXPECT_TRUE(choices.empty());
}

TEST(RdmaDevices, WhatNamesNoDeviceIsRefusedWithTheForm) {
  for (const char *text : {",",
                           "mlx5_0,",
                           ",mlx5_0",
                           "mlx5_0,,mlx5_1",
                           ":1",
                           "@3",
                           "mlx5_0:",
                           "mlx5_0:0",
                           "mlx5_0:256",
                           "mlx5_0:-1",
                           "mlx5_0:+1",
                           "mlx5_0:1x",
                           "mlx5_0: 1",
                           "mlx5_0@",
                           "mlx5_0@-1",
                           "mlx5_0@256",
                           "mlx5_0@3:1",
                           "mlx5_0@1@2",
                           "mlx5_0:1:2",
                           "mlx5_0 mlx5_1",
                           "mlx5_0\t",
                           "/dev/infiniband/uverbs0",
                           "mlx5_0:99999999999999999999"}) {
    std::vector<DeviceChoice> choices;
    const Error error = parse_device_choices(text, &choices);
    EXPECT_EQ(error.code, MP_CONFIG) << text;
    EXPECT_NE(error.message.find("rdma_devices"), std::string::npos) << error.message;
    EXPECT_NE(error.hint.find("NAME:PORT@GID_INDEX"), std::string::npos) << error.hint;
  }
}

TEST(RdmaDevices, APortIsNamedOnce) {
  for (const char *text : {"mlx5_0,mlx5_0", "mlx5_0:1,mlx5_0:1@3", "mlx5_0,mlx5_1,mlx5_0:2", "mlx5_0:1,mlx5_0"}) {
    std::vector<DeviceChoice> choices;
    const Error error = parse_device_choices(text, &choices);
    EXPECT_EQ(error.code, MP_CONFIG) << text;
    EXPECT_NE(error.message.find("twice"), std::string::npos) << error.message;
  }
  std::vector<DeviceChoice> choices;
  EXPECT_FALSE(parse_device_choices("mlx5_0:1,mlx5_0:2,mlx5_1", &choices));
}

TEST(RdmaDevices, TheErrorQuotesTheOneThatIsWrong) {
  std::vector<DeviceChoice> choices;
  const Error error = parse_device_choices("mlx5_0,mlx5_1:x,mlx5_2", &choices);
  EXPECT_NE(error.message.find("\"mlx5_1:x\""), std::string::npos) << error.message;
}

}  // namespace
}  // namespace moonpool
