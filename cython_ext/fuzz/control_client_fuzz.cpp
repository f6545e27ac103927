// SPDX-License-Identifier: Apache-2.0
//
// Control messages of a server: what it offers and announces, its acknowledgements, and everything it must not say.
#include "client_side.hpp"
#include "seeds.hpp"

using namespace moonpool;
using namespace moonpool::fuzz;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  return run_client_script(ClientSide::Start::kControl, data, size);
}

Seeds fuzz::seeds() {
  using S = ClientSide;
  constexpr uint8_t kControl = 0;
  const auto message = [](wire::Message type, std::string_view body) {
    return ScriptWriter().step(S::kMessage, kControl, static_cast<uint8_t>(type), body).text();
  };
  const auto region = [&](uint64_t key, uint64_t length, const std::string &name) {
    std::string body;
    wire::Writer writer(&body);
    wire::encode_region(writer, {key, length, 1, MP_REGION_WRITABLE, name});
    return message(wire::kRegions, body);
  };
  const auto numbered = [&](wire::Message type, uint64_t id, bool with_status) {
    std::string body;
    wire::Writer writer(&body);
    writer.put(id);
    if (with_status) writer.put(uint32_t{MP_NOTIFY_FULL});
    return message(type, body);
  };
  // One item from the read-only piece to the region with this number.
  const auto write = [](uint8_t flags, uint8_t remote) {
    return ScriptWriter()
        .step(S::kSubmit, static_cast<uint8_t>(S::kWrite | flags), uint8_t{0}, uint8_t{1}, uint8_t{kReadOnly}, remote,
              int32_t{0}, int32_t{0}, int32_t{50})
        .text();
  };
  const std::string answer = ScriptWriter().step(S::kResponse, uint8_t{1}).step(S::kResponse, uint8_t{2}).text();
  const std::string cut_lane = ScriptWriter().step(S::kCut, uint8_t{1}, uint8_t{1}).text();
  const std::string later = ScriptWriter().step(S::kAdvance, uint16_t{100}).text();
  std::string offer;
  wire::Writer offers(&offer);
  wire::encode_offer(offers, {"tcp", ""});
  wire::encode_offer(offers, {"rdma", "something that only it knows"});
  Seeds all;
  all.add("region", region(7, 4096, "kv") + write(0, 0) + answer);
  all.add("region-renamed", region(7, 4096, "a") + region(7, 64, "b") + numbered(wire::kRegionGone, 7, false));
  all.add("region-replaced", region(7, 4096, "a") + region(8, 64, "a") + numbered(wire::kRegionGone, 7, false));
  all.add("region-gone", numbered(wire::kRegionGone, 0x100, false) + write(0, 0));
  all.add("region-huge", region(7, UINT64_MAX, "all") + write(0, 0) + answer);
  all.add("region-torn", message(wire::kRegions, "torn"));
  all.add("offer-and-sync-again", message(wire::kOffer, offer) + message(wire::kSync, ""));
  all.add("offer-torn", message(wire::kOffer, "\x10"));
  all.add("notify-acknowledged", write(S::kNotify, 0) + answer + numbered(wire::kNotifyAck, 1, true));
  all.add("notify-unknown", numbered(wire::kNotifyAck, 99, true));
  all.add("fenced", write(0, 1) + cut_lane + numbered(wire::kFenced, 1, false) + answer);
  all.add("fenced-unknown", numbered(wire::kFenced, 77, false));
  all.add("from-the-wrong-side", numbered(wire::kFence, 1, false));
  all.add("unknown", message(static_cast<wire::Message>(200), ""));
  all.add("lost-and-back", write(0, 0) +
                               ScriptWriter()
                                   .step(S::kCut, kControl, uint8_t{0})
                                   .step(S::kAuto, uint8_t{1})
                                   .step(S::kAdvance, uint16_t{50})
                                   .step(S::kConnect)
                                   .text() +
                               write(0, 1));
  all.add("in-pieces", ScriptWriter().step(S::kCuts, kControl, uint32_t{3}).text() + region(7, 9, "x") +
                           numbered(wire::kFenced, 1, false) + later);
  return all;
}
