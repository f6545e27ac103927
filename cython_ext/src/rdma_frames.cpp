// SPDX-License-Identifier: Apache-2.0
#include "rdma_frames.hpp"

#include <algorithm>
#include <optional>
#include <tuple>

#include "status.hpp"

namespace moonpool::rdma {

namespace {

constexpr uint8_t kOfferVersion = 2;
constexpr size_t kMessageMax = 512;
constexpr unsigned kSubnetBits = 64, kIpv4SubnetBits = 96 + 24;
constexpr uint32_t kBodyMax = sizeof(uint64_t) * 3 + sizeof(uint32_t) + kPiecesMax * sizeof(uint32_t);

bool get_found(wire::Reader &reader, Found *found) {
  uint32_t count = 0;
  if (!reader.get(&found->length) || !reader.get(&found->piece_bytes) || !reader.get(&found->start) ||
      !reader.get(&count))
    return false;
  if (count == 0 || count > kPiecesMax || found->start >= found->piece_bytes || found->length == 0 ||
      found->length > UINT64_MAX - found->start)
    return false;
  if ((found->start + found->length - 1) / found->piece_bytes + 1 != count) return false;
  found->keys.resize(count);
  return std::all_of(found->keys.begin(), found->keys.end(), [&](uint32_t &key) { return reader.get(&key); });
}

}  // namespace

std::string encode_offer(const std::vector<RailOffer> &rails) {
  std::string blob;
  wire::Writer writer(&blob);
  writer.put(kOfferVersion);
  writer.put(static_cast<uint8_t>(rails.size()));
  for (const RailOffer &rail : rails) writer.put(rail);
  return blob;
}

bool decode_offer(std::string_view blob, std::vector<RailOffer> *rails) {
  wire::Reader reader(blob);
  uint8_t version = 0, count = 0;
  if (!reader.get(&version) || version != kOfferVersion || !reader.get(&count) || count > kRailsMax) return false;
  rails->resize(count);
  for (RailOffer &rail : *rails) {
    if (!reader.get(&rail)) return false;
  }
  return reader.done();
}

std::vector<RailPair> pair_rails(const std::vector<RailOffer> &local, const std::vector<RailOffer> &remote) {
  const auto fits = [&](size_t i, size_t j) {
    return local[i].up != 0 && remote[j].up != 0 && (local[i].ethernet != 0) == (remote[j].ethernet != 0);
  };
  const auto bits = [&](size_t i, size_t j) { return gid_common_bits(local[i].gid, remote[j].gid); };
  // Nobody says how long a subnet's prefix is; within these bits two addresses count as of one.
  const auto near = [&](size_t i, size_t j) {
    return std::min(bits(i, j), gid_is_ipv4(local[i].gid) ? kIpv4SubnetBits : kSubnetBits);
  };
  std::vector<unsigned> nearest(local.size(), 0);
  for (size_t i = 0; i < local.size(); ++i) {
    for (size_t j = 0; j < remote.size(); ++j) {
      if (fits(i, j)) nearest[i] = std::max(nearest[i], near(i, j));
    }
  }
  std::vector<RailPair> pairs;
  std::vector<unsigned> taken(remote.size(), 0);
  std::vector<bool> paired(local.size(), false);
  for (;;) {
    std::optional<RailPair> best;
    for (size_t i = 0; i < local.size(); ++i) {
      for (size_t j = 0; j < remote.size(); ++j) {
        if (paired[i] || !fits(i, j) || near(i, j) < nearest[i]) continue;
        const bool better = !best || taken[j] < taken[best->remote] ||
                            (taken[j] == taken[best->remote] && bits(i, j) > bits(best->local, best->remote));
        if (better) best = RailPair{i, j};
      }
    }
    if (!best) break;
    paired[best->local] = true;
    ++taken[best->remote];
    pairs.push_back(*best);
  }
  std::sort(pairs.begin(), pairs.end(), [](const RailPair &a, const RailPair &b) { return a.local < b.local; });
  return pairs;
}

std::vector<RailChoices> choose_rails(const std::vector<RailOffer> &local, const std::vector<RailOffer> &remote) {
  // A rail that is down for the moment keeps its partner; without an address nobody can tell which one that is.
  const auto as_if_up = [](std::vector<RailOffer> rails) {
    for (RailOffer &rail : rails) rail.up = rail.up != 0 || !gid_is_null(rail.gid) ? 1 : 0;
    return rails;
  };
  std::vector<size_t> partner(local.size(), remote.size());
  std::vector<unsigned> taken(remote.size(), 0);
  for (const RailPair &pair : pair_rails(as_if_up(local), as_if_up(remote))) {
    partner[pair.local] = pair.remote;
    ++taken[pair.remote];
  }
  std::vector<RailChoices> choices;
  for (size_t i = 0; i < local.size(); ++i) {
    RailChoices one{i, {}};
    for (uint32_t j = 0; j < remote.size(); ++j) {
      if ((local[i].ethernet != 0) == (remote[j].ethernet != 0)) one.remotes.push_back(j);
    }
    const auto rank = [&](uint32_t j) {
      const auto far = 128 - static_cast<int>(gid_common_bits(local[i].gid, remote[j].gid));
      return std::tuple(j != partner[i], far, taken[j], j);
    };
    std::sort(one.remotes.begin(), one.remotes.end(), [&](uint32_t a, uint32_t b) { return rank(a) < rank(b); });
    if (!one.remotes.empty()) choices.push_back(std::move(one));
  }
  return choices;
}

void encode(const Frame &frame, std::string *out) {
  std::string body;
  wire::Writer writer(&body);
  const bool good = frame.header.status == MP_OK;
  if (frame.header.type == kConnect || (frame.header.type == kConnected && good)) writer.put(frame.queue_pair);
  if (frame.header.type == kConnected && !good) body = frame.message.substr(0, kMessageMax);
  if (frame.header.type == kFound && good) {
    writer.put(frame.found.length);
    writer.put(frame.found.piece_bytes);
    writer.put(frame.found.start);
    writer.put(static_cast<uint32_t>(frame.found.keys.size()));
    for (const uint32_t key : frame.found.keys) writer.put(key);
  }
  Header header = frame.header;
  header.magic = kMagic;
  header.bytes = static_cast<uint32_t>(body.size());
  wire::Writer(out).put(header);
  *out += body;
}

Decoded decode(std::string_view *in, Frame *frame) {
  if (in->size() < sizeof(Header)) return Decoded::kMore;
  Header header;
  wire::Reader(*in).get(&header);
  if (header.magic != kMagic || header.bytes > kBodyMax || header.status > kLastStatus) return Decoded::kBad;
  if (in->size() < sizeof header + header.bytes) return Decoded::kMore;
  const std::string_view body = in->substr(sizeof header, header.bytes);
  *frame = {};
  frame->header = header;
  wire::Reader reader(body);
  const bool good = header.status == MP_OK;
  bool right = false;
  switch (header.type) {
    case kConnect:
      right = reader.get(&frame->queue_pair) && reader.done();
      break;
    case kConnected:
      if (good) {
        right = reader.get(&frame->queue_pair) && reader.done();
      } else {
        right = body.size() <= kMessageMax;
        frame->message = body;
      }
      break;
    case kFind:
    case kRail:
      right = body.empty();
      break;
    case kFound:
      frame->found.status = static_cast<mp_status>(header.status);
      right = good ? get_found(reader, &frame->found) && reader.done() : body.empty();
      break;
    default:
      break;
  }
  if (!right) return Decoded::kBad;
  in->remove_prefix(sizeof header + header.bytes);
  return Decoded::kFrame;
}

}  // namespace moonpool::rdma
