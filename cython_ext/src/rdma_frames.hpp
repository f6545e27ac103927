// SPDX-License-Identifier: Apache-2.0
// What the two ends of an RDMA lane say over its socket, and what an engine offers. docs/protocol.md has the exchange.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "rdma_gid.hpp"
#include "wire.hpp"

namespace moonpool::rdma {

// More than any host has; what an offer has room for.
constexpr size_t kRailsMax = 16;
// Registrations that one region may be split into.
constexpr uint32_t kPiecesMax = 4096;

// One port, as its engine offers it. Its place in the offer is its number.
struct RailOffer {
  Gid gid;
  uint16_t lid;
  uint8_t ethernet;
  uint8_t up;  // when the offer was made
  uint8_t mtu;
  uint8_t reserved[3];
};
static_assert(sizeof(RailOffer) == 24);

std::string encode_offer(const std::vector<RailOffer> &rails);
bool decode_offer(std::string_view blob, std::vector<RailOffer> *rails);

// Local rails with the remote rails that they connect to: one of the subnet that has most in common with its own,
// another one for each as far as there are. Only rails that are up and of one link layer.
struct RailPair {
  size_t local;
  size_t remote;
};
std::vector<RailPair> pair_rails(const std::vector<RailOffer> &local, const std::vector<RailOffer> &remote);

// For every local rail, up or not: the remote rails that it may connect to, the one that it is meant for first.
struct RailChoices {
  size_t local;
  std::vector<uint32_t> remotes;
};
std::vector<RailChoices> choose_rails(const std::vector<RailOffer> &local, const std::vector<RailOffer> &remote);

// What one queue pair has to know of the other.
struct QueuePairInfo {
  Gid gid;
  uint32_t number;
  uint32_t psn;
  uint16_t lid;
  uint8_t mtu;              // ibv_mtu
  uint8_t reads_initiated;  // reads that this side has outstanding at most
  uint8_t reads_served;     // ... and that it serves at once
  uint8_t reserved[3];
};
static_assert(sizeof(QueuePairInfo) == 32);

enum Type : uint16_t {
  kConnect = 1,    // client: its queue pair, for rail `rail` of the server
  kConnected = 2,  // server: its own, or why not
  kFind = 3,       // client: the keys of a region
  kFound = 4,      // server: them, or why not
  kRail = 5,       // server: rail `rail` is up (OK) or not
};

constexpr uint32_t kMagic = 0x3152504d;  // "MPR1"

struct Header {
  uint32_t magic;
  uint16_t type;
  uint16_t status;  // mp_status
  uint32_t bytes;   // of what follows
  uint32_t rail;
  uint64_t key;  // of a region
};
static_assert(sizeof(Header) == 24);

struct Found {
  mp_status status = MP_OK;  // otherwise why there are no keys
  uint64_t length = 0;
  uint64_t piece_bytes = 0;    // a registration ends at each multiple of it, counted from `start` before the region
  uint64_t start = 0;          // the address of the region's first byte in the first of them; the others begin at 0
  std::vector<uint32_t> keys;  // rkeys, in order
};

struct Frame {
  Header header{};
  QueuePairInfo queue_pair{};  // kConnect, kConnected
  Found found;                 // kFound
  std::string message;         // kConnected, when it is refused
};

void encode(const Frame &frame, std::string *out);

enum class Decoded { kFrame, kMore, kBad };
// Takes the next frame off `in`.
Decoded decode(std::string_view *in, Frame *frame);

}  // namespace moonpool::rdma
