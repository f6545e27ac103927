// SPDX-License-Identifier: Apache-2.0
//
// The client's side of the handshake: control connections and lanes that the other side answers as it likes, or not.
#include "client_side.hpp"
#include "seeds.hpp"

using namespace moonpool;
using namespace moonpool::fuzz;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  return run_client_script(ClientSide::Start::kNothing, data, size);
}

Seeds fuzz::seeds() {
  using S = ClientSide;
  const auto answer = [](uint8_t connection, uint8_t at = 0, uint8_t change = 0) {
    return ScriptWriter().step(S::kAnswer, connection, at, change).text();
  };
  const std::string announce = ScriptWriter().step(S::kAnnounce, uint8_t{0}).text();
  const std::string control = answer(0) + answer(0) + announce;
  const std::string later = ScriptWriter().step(S::kAdvance, uint16_t{150}).text();
  const std::string again = ScriptWriter().step(S::kConnect).text();
  const std::string refuse = ScriptWriter().step(S::kRefuse).text();
  Seeds all;
  all.add("control", control);
  all.add("lanes", control + answer(1) + answer(2) + answer(1) + answer(2));
  all.add("automatic", ScriptWriter().step(S::kAuto, uint8_t{1}).text());
  all.add("refused", refuse + refuse + later + again);
  all.add("no-answer", later + again);
  all.add("other-magic", answer(0, 0, 1) + later + again + answer(1) + answer(1));
  all.add("other-version", answer(0, 8, 6));
  all.add("refused-with-status", answer(0, 10, MP_AUTH));
  all.add("refused-late", answer(0) + answer(0, 0, MP_LIMIT));
  all.add("wrong-proof", answer(0) + answer(0, 9, 1));
  all.add("another-incarnation", answer(0, 17, 1) + answer(0) + announce);
  all.add("nothing-offered",
          answer(0) + answer(0) + ScriptWriter().step(S::kMessage, uint8_t{0}, uint8_t{wire::kSync}).text());
  all.add("other-service", ScriptWriter().step(S::kRaw, uint8_t{0}, "HTTP/1.1 400 Bad Request\r\n\r\n").text());
  all.add("in-pieces", ScriptWriter().step(S::kCuts, uint8_t{0}, uint32_t{5}).text() + control);
  all.add("cut", answer(0) + ScriptWriter().step(S::kCut, uint8_t{0}, uint8_t{1}).text() + later + again);
  // A transfer that waits for the connection ends with what ends that.
  const std::string submit = ScriptWriter()
                                 .step(S::kSubmit, uint8_t{S::kRemembered}, uint8_t{0}, uint8_t{1}, uint8_t{0},
                                       uint8_t{0}, int32_t{0}, int32_t{0}, int32_t{8})
                                 .text();
  all.add("refused-again", control + submit + ScriptWriter().step(S::kCut, uint8_t{0}).text() + later + submit + again +
                               answer(3, 10, MP_PENDING));
  all.add("lane-refused", control + answer(1, 10, MP_PEER_LOST) + later + later);
  return all;
}
