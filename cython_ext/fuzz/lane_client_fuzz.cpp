// SPDX-License-Identifier: Apache-2.0
//
// Responses on a lane: header, failed descriptors, payload and digests, in any pieces, while transfers are cancelled,
// expire and lose their lanes.
#include "client_side.hpp"
#include "digest.hpp"
#include "seeds.hpp"

using namespace moonpool;
using namespace moonpool::fuzz;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  return run_client_script(ClientSide::Start::kLanes, data, size);
}

Seeds fuzz::seeds() {
  using S = ClientSide;
  struct Item {
    size_t local;
    uint8_t remote;
    int32_t local_offset, remote_offset, length;
  };
  const auto submit = [](uint8_t flags, const std::vector<Item> &items) {
    std::string bytes{static_cast<char>(flags), 0, static_cast<char>(items.size())};
    wire::Writer writer(&bytes);
    for (const Item &item : items) {
      writer.put(static_cast<uint8_t>(item.local));
      writer.put(item.remote);
      writer.put(item.local_offset);
      writer.put(item.remote_offset);
      writer.put(item.length);
    }
    return ScriptWriter().step_bytes(S::kSubmit, bytes).text();
  };
  // On both lanes, since either may have taken the request.
  const auto answer = [](std::string_view bytes = {}) {
    return ScriptWriter().step(S::kResponse, uint8_t{1}, bytes).step(S::kResponse, uint8_t{2}, bytes).text();
  };
  const auto fault = [](uint8_t header_at, uint8_t change, uint8_t payload_at = 0, uint8_t payload_change = 0) {
    return std::string{static_cast<char>(header_at), static_cast<char>(change), static_cast<char>(payload_at),
                       static_cast<char>(payload_change)};
  };
  const auto both = [](S::Step step, uint32_t value) {
    return ScriptWriter().step(step, uint8_t{1}, value).step(step, uint8_t{2}, value).text();
  };
  const std::vector<Item> one = {{kSmall, 1, 10, 20, 3000}};
  const std::vector<Item> many = {{kSmall, 0, 0, 0, 100},
                                  {kLarge, 1, 5, 100, 70000},
                                  {kNeighbour, 2, 0, 9, 64},
                                  {kSmall, 0, 0, 4096, 1},
                                  {kNeighbours, 3, 0, 0, 64}};
  const std::vector<Item> large = {{kLarge, 1, 0, 0, 262144 + 10000}};
  const std::string cancel = ScriptWriter().step(S::kCancel, uint8_t{0}).text();
  const std::string cut = ScriptWriter().step(S::kCut, uint8_t{1}, uint8_t{1}).step(S::kCut, uint8_t{2}).text();
  const std::string later = ScriptWriter().step(S::kAdvance, uint16_t{120}).text();
  Seeds all;
  all.add("read", submit(0, one) + answer());
  all.add("write", submit(S::kWrite, one) + answer());
  all.add("read-digest", submit(S::kDigest, one) + answer());
  all.add("read-wrong-digest", submit(S::kDigest, one) + answer(fault(0, 0, 3, 1)));
  all.add("write-digest", submit(S::kWrite | S::kDigest, one) + answer());
  all.add("write-notify", submit(S::kWrite | S::kNotify, one) + answer());
  all.add("plan", submit(S::kPlan, one) + answer());
  all.add("read-many", submit(0, many) + answer() + answer() + answer());
  all.add("read-large", submit(S::kDigest, large) + answer() + answer() + answer() + answer());
  all.add("write-large", submit(S::kWrite, large) + answer() + answer() + answer() + answer());
  all.add("failed-descriptors", submit(0, many) + answer(fault(0, 0) + std::string{1, MP_REGION_RELEASED}) + answer());
  all.add("failed-all", submit(0, one) + answer(fault(0, 0) + std::string{0, MP_OUT_OF_RANGE}));
  all.add("failed-twice", submit(0, many) + answer(fault(0, 0) + std::string{1, 7, 1, 7}));
  all.add("wrong-magic", submit(0, one) + answer(fault(0, 1)) + later + answer());
  all.add("wrong-id", submit(0, one) + answer(fault(16, 1)));
  all.add("wrong-payload", submit(0, one) + answer(fault(24, 1)));
  all.add("wrong-count", submit(0, one) + answer(fault(8, 1)));
  all.add("in-pieces", both(S::kCuts, 77) + submit(S::kDigest, many) + answer() + answer());
  all.add("cancelled-read", submit(0, large) + answer() + cancel + answer() + answer());
  all.add("cancelled-write", both(S::kRoom, 500) + submit(S::kWrite, large) + cancel + later);
  all.add("cut-read", submit(0, one) + cut + later + answer() + answer());
  all.add("cut-write", submit(S::kWrite, one) + cut + later + answer() + answer());
  all.add("stalled", both(S::kRoom, 100) + submit(S::kWrite, large) + later + later);
  all.add("unasked", ScriptWriter().step(S::kRaw, uint8_t{1}, "MPRS", std::string_view("\0\0\0\0", 4)).text() +
                         submit(0, one) + answer());
  return all;
}
