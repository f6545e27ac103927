// SPDX-License-Identifier: Apache-2.0
#include "rdma_gid.hpp"

#include <arpa/inet.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace moonpool {

namespace {

struct Rank {
  int order;  // lower is better
  const char *what;
};

Rank rank_of(const GidEntry &entry, bool ethernet) {
  const bool v2 = entry.type == GidType::kRoceV2;
  if (!ethernet) return {0, "the InfiniBand GID"};
  const bool unique_local = (entry.gid[0] & 0xfe) == 0xfc;
  const int version = v2 ? 0 : 4;
  if (gid_is_link_local(entry.gid)) return {version + 3, v2 ? "RoCE v2, link-local" : "RoCE v1, link-local"};
  if (gid_is_ipv4(entry.gid)) return {version, v2 ? "RoCE v2, IPv4" : "RoCE v1, IPv4"};
  if (unique_local) return {version + 2, v2 ? "RoCE v2, unique local IPv6" : "RoCE v1, unique local IPv6"};
  return {version + 1, v2 ? "RoCE v2, global IPv6" : "RoCE v1, global IPv6"};
}

std::string describe(const GidEntry &entry, bool ethernet) {
  return "index " + std::to_string(entry.index) + ", " + gid_text(entry.gid) + " (" + rank_of(entry, ethernet).what +
         ")";
}

}  // namespace

bool gid_is_null(const Gid &gid) {
  // A port without an address has the prefix and nothing behind it, or nothing at all.
  return std::all_of(gid.begin() + 8, gid.end(), [](uint8_t byte) { return byte == 0; });
}

bool gid_is_ipv4(const Gid &gid) {
  static constexpr uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(gid.data(), kMapped, sizeof kMapped) == 0;
}

bool gid_is_link_local(const Gid &gid) {
  // 169.254.0.0/16 is the same for IPv4.
  return gid_is_ipv4(gid) ? gid[12] == 169 && gid[13] == 254 : gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80;
}

std::string gid_text(const Gid &gid) {
  char text[INET6_ADDRSTRLEN] = "";
  if (gid_is_ipv4(gid)) {
    inet_ntop(AF_INET, gid.data() + 12, text, sizeof text);
  } else {
    inet_ntop(AF_INET6, gid.data(), text, sizeof text);
  }
  return text;
}

unsigned gid_common_bits(const Gid &a, const Gid &b) {
  unsigned bits = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const auto differ = static_cast<uint8_t>(a[i] ^ b[i]);
    if (differ != 0) return bits + static_cast<unsigned>(std::countl_zero(differ));
    bits += 8;
  }
  return bits;
}

GidChoice choose_gid(const std::vector<GidEntry> &table, bool ethernet, int wanted) {
  GidChoice choice;
  const GidEntry *best = nullptr;
  size_t usable = 0;
  for (const GidEntry &entry : table) {
    const bool asked_for = wanted >= 0 && entry.index == static_cast<uint32_t>(wanted);
    if (wanted >= 0 && !asked_for) continue;
    if (entry.index > kGidIndexMax || gid_is_null(entry.gid) || ethernet != (entry.type != GidType::kInfiniBand))
      continue;
    ++usable;
    if (best == nullptr || rank_of(entry, ethernet).order < rank_of(*best, ethernet).order) best = &entry;
  }
  if (best == nullptr) {
    choice.reason = wanted >= 0 ? "GID index " + std::to_string(wanted) + " is empty or of another link layer"
                                : "the port has no GID; give its network device an address";
    return choice;
  }
  choice.found = true;
  choice.entry = *best;
  choice.reason = describe(*best, ethernet);
  if (wanted >= 0) {
    choice.reason += ", as it was asked for";
  } else if (usable > 1) {
    choice.reason += ", the best of " + std::to_string(usable);
  } else {
    choice.reason += ", the only one";
  }
  return choice;
}

}  // namespace moonpool
