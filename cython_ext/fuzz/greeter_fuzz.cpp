// SPDX-License-Identifier: Apache-2.0
//
// The server's side of the handshake, and everything a client can do from there on.
#include "seeds.hpp"
#include "server_side.hpp"

using namespace moonpool;
using namespace moonpool::fuzz;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  return run_server_script(ServerSide::Start::kNothing, data, size);
}

Seeds fuzz::seeds() {
  using S = ServerSide;
  constexpr uint8_t kControl = 0, kLane = 1;  // as kHello counts them
  const auto opened = [](uint8_t connection, uint8_t kind, uint8_t lane) {
    ScriptWriter script;
    script.step(S::kConnect).step(S::kHello, connection, kind, uint8_t{0}, lane).step(S::kProof, connection);
    return script.text() + ScriptWriter().step(S::kTake, connection, UINT32_MAX).text();
  };
  const auto spoilt = [](uint8_t at, uint8_t change) {
    return ScriptWriter().step(S::kConnect).step(S::kHello, uint8_t{0}, kControl, uint8_t{0}, uint8_t{0}, at, change);
  };
  const wire::Hello hello{};
  const std::string_view zeros(reinterpret_cast<const char *>(&hello), sizeof hello);
  Seeds all;
  all.add("control", opened(0, kControl, 0));
  all.add("control-and-lane", opened(0, kControl, 0) + opened(1, kLane, 1));
  all.add("control-again", opened(0, kControl, 0) + opened(1, kControl, 0));
  all.add("five-clients", opened(0, kControl, 0) + opened(1, kControl, 0) + opened(2, kControl, 0) +
                              opened(3, kControl, 0) + opened(4, kControl, 0));
  all.add("lane-without-control", opened(0, kLane, 1));
  all.add("other-magic", spoilt(0, 1).text());
  all.add("other-version", spoilt(8, 4).text());
  all.add("other-kind", spoilt(10, 8).text());
  all.add("wrong-proof", spoilt(16, 1).step(S::kProof, uint8_t{0}, uint8_t{3}, uint8_t{1}).text());
  all.add(
      "half-a-hello-and-nothing",
      ScriptWriter().step(S::kConnect).step(S::kRaw, uint8_t{0}, "MOONPOOL").step(S::kAdvance, uint16_t{200}).text());
  all.add("other-service", ScriptWriter().step(S::kConnect).step(S::kRaw, uint8_t{0}, "GET / HTTP/1.1\r\n\r\n").text());
  all.add("zeros", ScriptWriter().step(S::kConnect).step(S::kRaw, uint8_t{0}, zeros).text());
  all.add("byte-by-byte", ScriptWriter()
                              .step(S::kConnect)
                              .step(S::kCuts, uint8_t{0}, uint32_t{7})
                              .step(S::kHello, uint8_t{0}, kControl)
                              .step(S::kProof, uint8_t{0})
                              .step(S::kTake, uint8_t{0}, UINT32_MAX)
                              .text());
  all.add("cut-after-hello", spoilt(0, 0).step(S::kCut, uint8_t{0}, uint8_t{1}).text());
  all.add("does-not-read", ScriptWriter()
                               .step(S::kConnect)
                               .step(S::kRoom, uint8_t{0}, uint32_t{170})
                               .step(S::kHello, uint8_t{0}, kControl)
                               .step(S::kProof, uint8_t{0})
                               .text());
  return all;
}
