// SPDX-License-Identifier: Apache-2.0
//
// Frames on the socket of an RDMA lane and the offer: what was sent comes out, and nothing else is taken for it. Which
// local rail goes with which remote one.
#include "rdma_frames.hpp"

#include <cstddef>

#include "status.hpp"
#include "support.hpp"

namespace moonpool::rdma {
namespace {

using namespace moonpool::testing;

QueuePairInfo some_queue_pair() {
  QueuePairInfo info{};
  for (size_t i = 0; i < info.gid.size(); ++i) info.gid[i] = static_cast<uint8_t>(0xa0 + i);
  info.number = 0x123456;
  info.psn = 0xabcdef;
  info.lid = 0x77;
  info.mtu = 5;
  info.reads_initiated = 16;
  info.reads_served = 17;
  return info;
}

Frame frame_of(Type type, mp_status status = MP_OK) {
  Frame frame;
  frame.header.type = type;
  frame.header.status = static_cast<uint16_t>(status);
  frame.header.rail = 3;
  frame.header.key = 0x6b6579;
  return frame;
}

Frame connect_frame() {
  Frame frame = frame_of(kConnect);
  frame.queue_pair = some_queue_pair();
  return frame;
}

Frame connected_frame() {
  Frame frame = frame_of(kConnected);
  frame.queue_pair = some_queue_pair();
  return frame;
}

Frame found_frame(uint32_t pieces) {
  Frame frame = frame_of(kFound);
  frame.found.piece_bytes = 2u << 20;
  frame.found.length = frame.found.piece_bytes * (pieces - 1) + 1;
  frame.found.start = 4095;
  for (uint32_t i = 0; i < pieces; ++i) frame.found.keys.push_back(0x1000 + i);
  return frame;
}

Frame refused_frame() {
  Frame frame = frame_of(kConnected, MP_TRANSPORT_UNAVAILABLE);
  frame.message = "the port is DOWN";
  return frame;
}

std::vector<Frame> one_of_each() {
  return {connect_frame(),
          connected_frame(),
          refused_frame(),
          frame_of(kFind),
          found_frame(1),
          found_frame(3),
          frame_of(kFound, MP_REGION_RELEASED),
          frame_of(kRail),
          frame_of(kRail, MP_TRANSPORT_UNAVAILABLE)};
}

std::string encoded(const Frame &frame) {
  std::string out;
  encode(frame, &out);
  return out;
}

Decoded decoded(std::string_view bytes) {
  Frame frame;
  return decode(&bytes, &frame);
}

template <class T>
void set(std::string *bytes, size_t at, T value) {
  ASSERT_LE(at + sizeof value, bytes->size());
  std::memcpy(bytes->data() + at, &value, sizeof value);
}

TEST(RdmaFrames, ComeOutAsTheyWentIn) {
  std::string bytes;
  for (const Frame &frame : one_of_each()) encode(frame, &bytes);
  std::string_view rest = bytes;
  for (const Frame &sent : one_of_each()) {
    Frame frame = found_frame(5);  // nothing of an earlier frame is left over
    frame.message = "old";
    ASSERT_EQ(decode(&rest, &frame), Decoded::kFrame);
    EXPECT_EQ(frame.header.type, sent.header.type);
    EXPECT_EQ(frame.header.status, sent.header.status);
    EXPECT_EQ(frame.header.rail, 3u);
    EXPECT_EQ(frame.header.key, 0x6b6579u);
    EXPECT_EQ(std::memcmp(&frame.queue_pair, &sent.queue_pair, sizeof sent.queue_pair), 0);
    EXPECT_EQ(frame.found.length, sent.found.length);
    EXPECT_EQ(frame.found.piece_bytes, sent.found.piece_bytes);
    EXPECT_EQ(frame.found.start, sent.found.start);
    EXPECT_EQ(frame.found.keys, sent.found.keys);
    EXPECT_EQ(frame.message, sent.message);
  }
  EXPECT_TRUE(rest.empty());
  Frame frame;
  EXPECT_EQ(decode(&rest, &frame), Decoded::kMore);
}

TEST(RdmaFrames, EveryPartOfAFrameWaitsForMoreAndTakesNothing) {
  for (const Frame &frame : one_of_each()) {
    const std::string bytes = encoded(frame);
    for (size_t n = 0; n < bytes.size(); ++n) {
      std::string_view part(bytes.data(), n);
      Frame out;
      EXPECT_EQ(decode(&part, &out), Decoded::kMore) << "type " << frame.header.type << ", " << n << " bytes";
      EXPECT_EQ(part.size(), n);
    }
  }
}

TEST(RdmaFrames, AWrongHeaderIsBad) {
  for (const Frame &frame : one_of_each()) {
    SCOPED_TRACE(frame.header.type);
    const std::string good = encoded(frame);
    const auto with = [&](size_t at, auto value) {
      std::string bad = good;
      set(&bad, at, value);
      return decoded(bad);
    };
    EXPECT_EQ(with(offsetof(Header, magic), uint32_t{0x3252504d}), Decoded::kBad);
    EXPECT_EQ(with(offsetof(Header, type), uint16_t{0}), Decoded::kBad);
    EXPECT_EQ(with(offsetof(Header, type), uint16_t{6}), Decoded::kBad);
    EXPECT_EQ(with(offsetof(Header, status), static_cast<uint16_t>(kLastStatus + 1)), Decoded::kBad);
    EXPECT_EQ(with(offsetof(Header, bytes), UINT32_MAX), Decoded::kBad) << "nobody waits for that much";
  }
}

TEST(RdmaFrames, ABodyOfAnotherLengthIsBad) {
  for (const Frame &frame : one_of_each()) {
    if (frame.header.type == kConnected && frame.header.status != MP_OK) continue;  // a text of any length
    SCOPED_TRACE(frame.header.type);
    std::string longer = encoded(frame);
    const auto bytes = static_cast<uint32_t>(longer.size() - sizeof(Header));
    longer += 'x';
    set(&longer, offsetof(Header, bytes), bytes + 1);
    EXPECT_EQ(decoded(longer), Decoded::kBad);
    if (bytes == 0) continue;
    std::string shorter = encoded(frame);
    shorter.pop_back();
    set(&shorter, offsetof(Header, bytes), bytes - 1);
    EXPECT_EQ(decoded(shorter), Decoded::kBad);
  }
}

TEST(RdmaFrames, AReasonHasABound) {
  Frame frame = refused_frame();
  frame.message.assign(10000, 'r');
  std::string bytes = encoded(frame);
  std::string_view rest = bytes;
  Frame out;
  ASSERT_EQ(decode(&rest, &out), Decoded::kFrame) << "what is sent is cut to what is taken";
  EXPECT_EQ(out.message, std::string(512, 'r'));
  bytes += 'r';
  set(&bytes, offsetof(Header, bytes), uint32_t{513});
  EXPECT_EQ(decoded(bytes), Decoded::kBad);
}

TEST(RdmaFrames, AsManyPiecesAsARegionMayHave) {
  EXPECT_EQ(decoded(encoded(found_frame(kPiecesMax))), Decoded::kFrame);
  EXPECT_EQ(decoded(encoded(found_frame(kPiecesMax + 1))), Decoded::kBad);
}

TEST(RdmaFrames, KeysThatDoNotCoverTheRegionAreBad) {
  const auto with = [](auto change) {
    Frame frame = found_frame(3);
    change(frame.found);
    return decoded(encoded(frame));
  };
  EXPECT_EQ(with([](Found &) {}), Decoded::kFrame);
  EXPECT_EQ(with([](Found &found) { found.keys.clear(); }), Decoded::kBad);
  EXPECT_EQ(with([](Found &found) { found.keys.pop_back(); }), Decoded::kBad) << "the last piece has no key";
  EXPECT_EQ(with([](Found &found) { found.keys.push_back(1); }), Decoded::kBad) << "a key without a piece";
  EXPECT_EQ(with([](Found &found) { found.length = 0; }), Decoded::kBad);
  EXPECT_EQ(with([](Found &found) { found.length = UINT64_MAX; }), Decoded::kBad);
  EXPECT_EQ(with([](Found &found) { found.length = found.piece_bytes * 3 - found.start; }), Decoded::kFrame)
      << "three whole pieces";
  EXPECT_EQ(with([](Found &found) { found.length = found.piece_bytes * 2 - found.start; }), Decoded::kBad);
  EXPECT_EQ(with([](Found &found) { found.piece_bytes = 0; }), Decoded::kBad);
  EXPECT_EQ(with([](Found &found) { found.start = found.piece_bytes - 1; }), Decoded::kFrame);
  EXPECT_EQ(with([](Found &found) { found.start = found.piece_bytes; }), Decoded::kBad) << "not in the first piece";
  Frame whole = found_frame(1);
  whole.found.start = 0;
  whole.found.length = whole.found.piece_bytes = UINT64_MAX;
  EXPECT_EQ(decoded(encoded(whole)), Decoded::kFrame);
}

TEST(RdmaFrames, ACountThatTheBodyDoesNotHaveIsBad) {
  constexpr size_t kCountAt = sizeof(Header) + 3 * sizeof(uint64_t);
  for (const uint32_t count : {0u, 2u, 4u, kPiecesMax, UINT32_MAX}) {
    std::string bytes = encoded(found_frame(3));
    set(&bytes, kCountAt, count);
    EXPECT_EQ(decoded(bytes), Decoded::kBad) << count;
  }
}

// ---------------------------------------------------------------- the offer

// 10.0.SUBNET.HOST
RailOffer in_subnet(uint8_t subnet, uint8_t host, bool up = true, bool ethernet = true) {
  RailOffer offer{};
  offer.gid = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, subnet, host};
  offer.up = up ? 1 : 0;
  offer.ethernet = ethernet ? 1 : 0;
  offer.mtu = 5;
  offer.lid = 9;
  return offer;
}

TEST(RdmaOffer, ComesOutAsItWentIn) {
  for (const size_t n : {size_t{0}, size_t{1}, kRailsMax}) {
    std::vector<RailOffer> sent, taken = {in_subnet(9, 9)};
    for (size_t i = 0; i < n; ++i) sent.push_back(in_subnet(static_cast<uint8_t>(i), 7, i % 2 == 0, i % 3 == 0));
    const std::string blob = encode_offer(sent);
    EXPECT_LE(blob.size(), wire::kOfferBytesMax) << "a blob has to fit into an offer";
    ASSERT_TRUE(decode_offer(blob, &taken));
    ASSERT_EQ(taken.size(), n);
    EXPECT_EQ(encode_offer(taken), blob);
  }
}

TEST(RdmaOffer, WhatIsMalformedIsNotTaken) {
  const std::string good = encode_offer({in_subnet(1, 1), in_subnet(2, 1)});
  std::vector<RailOffer> taken;
  for (size_t n = 0; n < good.size(); ++n) {
    EXPECT_FALSE(decode_offer(std::string_view(good).substr(0, n), &taken)) << n << " bytes";
  }
  EXPECT_FALSE(decode_offer(good + "x", &taken));
  std::string version = good;
  version[0] = 3;
  EXPECT_FALSE(decode_offer(version, &taken));
  EXPECT_FALSE(decode_offer(encode_offer(std::vector<RailOffer>(kRailsMax + 1)), &taken));
}

// ---------------------------------------------------------------- pairs

using Pairs = std::vector<std::pair<size_t, size_t>>;

Pairs pairs_of(const std::vector<RailOffer> &local, const std::vector<RailOffer> &remote) {
  Pairs out;
  for (const RailPair &pair : pair_rails(local, remote)) out.emplace_back(pair.local, pair.remote);
  return out;
}

TEST(RdmaPairs, RailsOfOneSubnetGoTogether) {
  EXPECT_EQ(pairs_of({in_subnet(1, 1), in_subnet(2, 1), in_subnet(3, 1)},
                     {in_subnet(3, 2), in_subnet(1, 2), in_subnet(2, 2)}),
            (Pairs{{0, 1}, {1, 2}, {2, 0}}));
}

TEST(RdmaPairs, RailsOfOneSubnetAreSpreadOverTheRemoteOnes) {
  const std::vector<RailOffer> local = {in_subnet(1, 1), in_subnet(1, 2), in_subnet(1, 3), in_subnet(1, 4)};
  std::vector<unsigned> taken(2, 0);
  for (const auto &[i, j] : pairs_of(local, {in_subnet(1, 7), in_subnet(1, 200)})) ++taken[j];
  EXPECT_EQ(taken, (std::vector<unsigned>{2, 2}));
}

// All ports of a fabric have one prefix, and the rest of their GIDs are numbers that a vendor gave.
TEST(RdmaPairs, InfiniBandPortsAreSpreadWhateverTheirNumbersAre) {
  std::vector<RailOffer> local, remote;
  std::mt19937 random(3);
  for (size_t i = 0; i < 8; ++i) {
    for (std::vector<RailOffer> *side : {&local, &remote}) {
      RailOffer offer = in_subnet(0, 0, true, false);
      offer.gid = {0xfe, 0x80};
      for (size_t at = 8; at < 16; ++at) offer.gid[at] = static_cast<uint8_t>(random());
      side->push_back(offer);
    }
  }
  std::vector<unsigned> taken(remote.size(), 0);
  for (const auto &[i, j] : pairs_of(local, remote)) ++taken[j];
  EXPECT_EQ(taken, std::vector<unsigned>(8, 1));
}

TEST(RdmaPairs, CablesWithoutASwitchAreFollowed) {
  // Networks of two addresses each, in one /24.
  EXPECT_EQ(pairs_of({in_subnet(1, 0), in_subnet(1, 2)}, {in_subnet(1, 3), in_subnet(1, 1)}), (Pairs{{0, 1}, {1, 0}}));
}

TEST(RdmaPairs, ASecondRailOfASubnetDoesNotGoToAnotherSubnet) {
  EXPECT_EQ(pairs_of({in_subnet(1, 1), in_subnet(1, 3)}, {in_subnet(1, 2), in_subnet(2, 2)}), (Pairs{{0, 0}, {1, 0}}));
}

TEST(RdmaPairs, EveryLocalRailIsUsedWhenTheRemoteSideHasFewer) {
  EXPECT_EQ(pairs_of({in_subnet(1, 1), in_subnet(2, 1)}, {in_subnet(1, 2)}), (Pairs{{0, 0}, {1, 0}}));
}

TEST(RdmaPairs, RemoteRailsMayBeLeftOver) {
  EXPECT_EQ(pairs_of({in_subnet(2, 1)}, {in_subnet(1, 2), in_subnet(2, 2), in_subnet(3, 2)}), (Pairs{{0, 1}}));
}

TEST(RdmaPairs, RailsThatAreDownAreLeftOut) {
  EXPECT_EQ(pairs_of({in_subnet(1, 1, false), in_subnet(2, 1)}, {in_subnet(1, 2), in_subnet(2, 2)}), (Pairs{{1, 1}}));
  EXPECT_EQ(pairs_of({in_subnet(1, 1), in_subnet(2, 1)}, {in_subnet(1, 2, false), in_subnet(2, 2)}),
            (Pairs{{0, 1}, {1, 1}}))
      << "the rail of another subnet, which may be routed, is better than none";
  EXPECT_EQ(pairs_of({in_subnet(1, 1)}, {in_subnet(1, 2, false)}), Pairs{});
}

TEST(RdmaPairs, InfiniBandNeverGoesWithEthernet) {
  const RailOffer ib = in_subnet(1, 1, true, false), ethernet = in_subnet(1, 2);
  EXPECT_EQ(pairs_of({ib}, {ethernet}), Pairs{});
  EXPECT_EQ(pairs_of({ib, ethernet}, {ethernet, ib}), (Pairs{{0, 1}, {1, 0}}));
}

TEST(RdmaChoices, EveryRailIsThereAndItsPartnerComesFirst) {
  const std::vector<RailOffer> local = {in_subnet(1, 1), in_subnet(2, 1)}, remote = {in_subnet(2, 2), in_subnet(1, 2)};
  const auto choices = choose_rails(local, remote);
  ASSERT_EQ(choices.size(), 2u);
  EXPECT_EQ(choices[0].remotes, (std::vector<uint32_t>{1, 0}));
  EXPECT_EQ(choices[1].remotes, (std::vector<uint32_t>{0, 1}));
}

TEST(RdmaChoices, ARailThatIsDownKeepsItsPartner) {
  const auto choices =
      choose_rails({in_subnet(1, 1), in_subnet(2, 1, false)}, {in_subnet(1, 2, false), in_subnet(2, 2)});
  ASSERT_EQ(choices.size(), 2u);
  EXPECT_EQ(choices[0].remotes, (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ(choices[1].remotes, (std::vector<uint32_t>{1, 0}));
}

TEST(RdmaChoices, ARailWithoutAnAddressTakesWhatNobodyElseIsMeantFor) {
  RailOffer nameless = in_subnet(0, 0, false);
  nameless.gid = {};
  const auto choices = choose_rails({nameless, in_subnet(1, 1)}, {in_subnet(1, 2), in_subnet(1, 3)});
  ASSERT_EQ(choices.size(), 2u);
  EXPECT_EQ(choices[0].remotes.front(), choices[1].remotes.back());
}

TEST(RdmaChoices, InfiniBandNeverGoesWithEthernet) {
  const auto choices = choose_rails({in_subnet(1, 1, true, false)}, {in_subnet(1, 2), in_subnet(1, 3, true, false)});
  ASSERT_EQ(choices.size(), 1u);
  EXPECT_EQ(choices[0].remotes, std::vector<uint32_t>{1});
  EXPECT_TRUE(choose_rails({in_subnet(1, 1, true, false)}, {in_subnet(1, 2)}).empty());
}

TEST(RdmaPairs, WithoutRailsThereAreNone) {
  EXPECT_EQ(pairs_of({}, {in_subnet(1, 1)}), Pairs{});
  EXPECT_EQ(pairs_of({in_subnet(1, 1)}, {}), Pairs{});
}

}  // namespace
}  // namespace moonpool::rdma
