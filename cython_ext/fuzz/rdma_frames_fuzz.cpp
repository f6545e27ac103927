// SPDX-License-Identifier: Apache-2.0
//
// Frames on the socket of an RDMA lane, offers of ports, and the names of devices: what is taken is within the bounds
// and encodes to the same bytes again; a frame that is cut anywhere is waited for; pairs of rails are pairs of what was
// offered.
#include "rdma_device.hpp"
#include "rdma_frames.hpp"
#include "script.hpp"
#include "seeds.hpp"
#include "world.hpp"

using namespace moonpool;
using namespace moonpool::fuzz;
using rdma::Decoded;

namespace {

void check(const rdma::Frame &frame) {
  const rdma::Header &header = frame.header;
  FUZZ_CHECK(header.type >= rdma::kConnect && header.type <= rdma::kRail && header.status <= kLastStatus);
  FUZZ_CHECK(frame.message.size() <= 512);
  if (header.type != rdma::kFound || header.status != MP_OK) {
    FUZZ_CHECK(frame.found.keys.empty());
    return;
  }
  // Every byte of the region lies in a piece that has a key, and every piece has bytes.
  const rdma::Found &found = frame.found;
  FUZZ_CHECK(!found.keys.empty() && found.keys.size() <= rdma::kPiecesMax);
  FUZZ_CHECK(found.length > 0 && found.start < found.piece_bytes && found.start + found.length >= found.start);
  FUZZ_CHECK((found.start + found.length - 1) / found.piece_bytes == found.keys.size() - 1);
}

// Decodes frame after frame, each also with less than all of it.
void check_stream(std::string_view in, size_t cut) {
  for (;;) {
    const std::string_view before = in;
    rdma::Frame frame;
    if (rdma::decode(&in, &frame) != Decoded::kFrame) return;
    check(frame);
    const std::string_view taken = before.substr(0, before.size() - in.size());
    std::string again;
    rdma::encode(frame, &again);
    FUZZ_CHECK(again == taken);
    std::string_view part = taken.substr(0, cut % taken.size());
    const std::string_view all_of_it = part;
    FUZZ_CHECK(rdma::decode(&part, &frame) == Decoded::kMore && part.data() == all_of_it.data());
  }
}

void check_pairs(const std::vector<rdma::RailOffer> &local, const std::vector<rdma::RailOffer> &remote) {
  std::vector<bool> paired(local.size(), false);
  for (const rdma::RailPair &pair : rdma::pair_rails(local, remote)) {
    FUZZ_CHECK(pair.local < local.size() && pair.remote < remote.size());
    FUZZ_CHECK(!paired[pair.local]);
    paired[pair.local] = true;
    FUZZ_CHECK(local[pair.local].up != 0 && remote[pair.remote].up != 0);
    FUZZ_CHECK((local[pair.local].ethernet != 0) == (remote[pair.remote].ethernet != 0));
  }
  // A rail is left out only where nothing fits.
  for (size_t i = 0; i < local.size(); ++i) {
    for (const rdma::RailOffer &other : remote) {
      FUZZ_CHECK(paired[i] || local[i].up == 0 || other.up == 0 || (local[i].ethernet != 0) != (other.ethernet != 0));
    }
  }
}

void check_choices(const std::vector<rdma::RailOffer> &local, const std::vector<rdma::RailOffer> &remote) {
  for (const rdma::RailChoices &one : rdma::choose_rails(local, remote)) {
    FUZZ_CHECK(one.local < local.size() && !one.remotes.empty());
    std::vector<bool> chosen(remote.size(), false);
    for (const uint32_t j : one.remotes) {
      FUZZ_CHECK(j < remote.size() && !chosen[j]);
      chosen[j] = true;
      FUZZ_CHECK((local[one.local].ethernet != 0) == (remote[j].ethernet != 0));
    }
  }
}

// Two offers: so many bytes are the first one.
void check_offers(std::string_view in, size_t cut) {
  std::vector<rdma::RailOffer> offers[2];
  const std::string_view blobs[2] = {in.substr(0, cut), in.substr(std::min(cut, in.size()))};
  for (size_t i = 0; i < 2; ++i) {
    if (!rdma::decode_offer(blobs[i], &offers[i])) return;
    FUZZ_CHECK(offers[i].size() <= rdma::kRailsMax && blobs[i].size() <= wire::kOfferBytesMax);
    FUZZ_CHECK(rdma::encode_offer(offers[i]) == blobs[i]);
  }
  check_pairs(offers[0], offers[1]);
  check_choices(offers[0], offers[1]);
}

void check_devices(const std::string &text) {
  std::vector<DeviceChoice> choices;
  if (const Error error = parse_device_choices(text, &choices)) {
    FUZZ_CHECK(error.code == MP_CONFIG && !error.message.empty() && !error.hint.empty());
    return;
  }
  FUZZ_CHECK(choices.empty() == text.empty());
  std::string canonical;
  for (const DeviceChoice &choice : choices) {
    FUZZ_CHECK(!choice.name.empty() && choice.name.find_first_of(",:@/ \t") == std::string::npos);
    FUZZ_CHECK(choice.port >= 0 && choice.port <= 255 && choice.gid_index >= -1 && choice.gid_index <= 255);
    if (!canonical.empty()) canonical += ',';
    canonical += choice.name;
    if (choice.port != 0) canonical += ':' + std::to_string(choice.port);
    if (choice.gid_index >= 0) canonical += '@' + std::to_string(choice.gid_index);
  }
  std::vector<DeviceChoice> again;
  FUZZ_CHECK(!parse_device_choices(canonical, &again) && again.size() == choices.size());
  for (size_t i = 0; i < again.size(); ++i) {
    FUZZ_CHECK(again[i].name == choices[i].name && again[i].port == choices[i].port &&
               again[i].gid_index == choices[i].gid_index);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  Source source(data, size);
  const auto which = source.get<uint8_t>();
  const auto cut = source.get<uint16_t>();
  switch (which % 3) {
    case 0:
      check_stream(source.rest(), cut);
      break;
    case 1:
      check_offers(source.rest(), cut);
      break;
    default:
      check_devices(std::string(source.rest()));
  }
  return 0;
}

Seeds fuzz::seeds() {
  const auto input = [](uint8_t which, uint16_t cut, std::string_view rest) {
    std::string bytes(1, static_cast<char>(which));
    bytes.append(reinterpret_cast<const char *>(&cut), sizeof cut);
    return bytes.append(rest);
  };
  std::string frames, answers;
  const auto add = [](std::string *to, rdma::Type type, mp_status status, const auto &change) {
    rdma::Frame frame;
    frame.header.type = type;
    frame.header.status = static_cast<uint16_t>(status);
    frame.header.key = 7;
    change(frame);
    rdma::encode(frame, to);
  };
  const auto nothing = [](rdma::Frame &) {};
  const auto queue_pair = [](rdma::Frame &frame) { frame.queue_pair = {{10}, 17, 0xabcdef, 3, 5, 16, 16, {}}; };
  const auto found = [](rdma::Frame &frame) {
    frame.found.length = (4u << 20) + 1;
    frame.found.piece_bytes = 2u << 20;
    frame.found.start = 4095;
    frame.found.keys = {1, 2, 3};
  };
  const auto reason = [](rdma::Frame &frame) { frame.message = "the port is DOWN"; };
  add(&frames, rdma::kConnect, MP_OK, queue_pair);
  add(&frames, rdma::kFind, MP_OK, nothing);
  add(&answers, rdma::kConnected, MP_OK, queue_pair);
  add(&answers, rdma::kConnected, MP_TRANSPORT_UNAVAILABLE, reason);
  add(&answers, rdma::kFound, MP_OK, found);
  add(&answers, rdma::kFound, MP_REGION_RELEASED, nothing);
  const auto rail = [](uint8_t subnet, uint8_t host, uint8_t ethernet, uint8_t up) {
    return rdma::RailOffer{{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, subnet, host}, 1, ethernet, up, 5, {}};
  };
  const std::string ours = rdma::encode_offer({rail(1, 1, 1, 1), rail(2, 1, 1, 1), rail(3, 1, 1, 0)});
  const std::string theirs = rdma::encode_offer({rail(2, 2, 1, 1), rail(1, 2, 1, 1), rail(1, 3, 0, 1)});
  return Seeds()
      .add("frames", input(0, 33, frames))
      .add("answers", input(0, 33, answers))
      .add("offers", input(1, static_cast<uint16_t>(ours.size()), ours + theirs))
      .add("devices", input(2, 0, "mlx5_0:1@3,mlx5_1,rxe0@0"));
}
