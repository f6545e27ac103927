// SPDX-License-Identifier: Apache-2.0
//
// Control messages of a client: a control connection that has proved itself sends what it likes.
#include "seeds.hpp"
#include "server_side.hpp"

using namespace moonpool;
using namespace moonpool::fuzz;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  return run_server_script(ServerSide::Start::kControl, data, size);
}

Seeds fuzz::seeds() {
  using S = ServerSide;
  constexpr uint8_t kFirst = 0;
  const auto message = [](wire::Message type, std::string_view body) {
    return ScriptWriter().step(S::kMessage, kFirst, static_cast<uint8_t>(type), body).text();
  };
  const auto notify = [&](uint64_t id, std::string_view payload, std::vector<wire::Mark> marks = {}) {
    std::string body;
    wire::Writer writer(&body);
    wire::encode_notify(writer, {id, std::move(marks), payload});
    return message(wire::kNotify, body);
  };
  std::string lane;
  wire::Writer(&lane).put(uint64_t{7});
  const std::string fence = message(wire::kFence, lane);
  const std::string notices = ScriptWriter().step(S::kNotices).text();
  const std::string cuts = ScriptWriter().step(S::kCuts, kFirst, uint32_t{12345}).text();
  const std::string open_lane = ScriptWriter()
                                    .step(S::kConnect)
                                    .step(S::kHello, uint8_t{1}, uint8_t{1}, uint8_t{0}, uint8_t{7})
                                    .step(S::kProof, uint8_t{1})
                                    .step(S::kTake, uint8_t{1}, UINT32_MAX)
                                    .text();
  Seeds all;
  all.add("notify", notify(1, "payload") + notices);
  all.add("notify-nothing", notify(2, ""));
  all.add("notify-beyond-the-queue", notify(1, "a") + notify(2, "b") + notify(3, "c") + notify(4, "d") + notices);
  all.add("notify-after-marks", open_lane + notify(1, "a", {{7, 1, 0}, {8, UINT32_MAX, 0}}) + notices);
  all.add("notify-torn", message(wire::kNotify, "1234567"));
  all.add("fence-of-nothing", fence + fence);
  all.add("fence-of-a-lane", open_lane + fence + open_lane);
  all.add("fence-torn", message(wire::kFence, "123"));
  all.add("from-the-wrong-side", message(wire::kSync, ""));
  all.add("unknown", message(static_cast<wire::Message>(99), "?"));
  all.add("in-pieces", cuts + notify(1, "payload") + fence + notices);
  all.add("too-large", ScriptWriter().step(S::kRaw, kFirst, uint32_t{2u << 20}, uint16_t{5}, uint16_t{0}).text());
  all.add("regions-come-and-go", ScriptWriter()
                                     .step(S::kRegister, uint8_t{1})
                                     .step(S::kRelease, uint8_t{0})
                                     .step(S::kRelease, uint8_t{5})
                                     .step(S::kTake, kFirst, UINT32_MAX)
                                     .text());
  all.add("does-not-read", ScriptWriter().step(S::kRoom, kFirst, uint32_t{0}).text() + fence + notify(1, "x") +
                               ScriptWriter().step(S::kTake, kFirst, UINT32_MAX).text());
  return all;
}
