// SPDX-License-Identifier: Apache-2.0
// Which entry of a port's GID table a queue pair uses. A pure function, so it is tested on tables of real NICs.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace moonpool {

using Gid = std::array<uint8_t, 16>;

enum class GidType : uint8_t { kInfiniBand = 0, kRoceV1 = 1, kRoceV2 = 2 };  // as in ibv_gid_type

struct GidEntry {
  uint32_t index;
  GidType type;
  Gid gid;
};

struct GidChoice {
  bool found = false;
  GidEntry entry{};
  std::string reason;  // why this one, or why none
};

// What the address of a queue pair has room for.
constexpr uint32_t kGidIndexMax = 255;

// RoCE: version 2 before 1; IPv4-mapped, then routable IPv6 (global before unique local), link-local last. Entries that
// are null, of the other kind of link layer or beyond kGidIndexMax are never taken. `wanted`: an index that the user
// insists on, or -1.
GidChoice choose_gid(const std::vector<GidEntry> &table, bool ethernet, int wanted);

bool gid_is_null(const Gid &gid);
bool gid_is_ipv4(const Gid &gid);
bool gid_is_link_local(const Gid &gid);
// "10.0.0.1" or "fe80::1".
std::string gid_text(const Gid &gid);
// How many leading bits two have in common.
unsigned gid_common_bits(const Gid &a, const Gid &b);

}  // namespace moonpool
