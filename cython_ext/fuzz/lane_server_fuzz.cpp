// SPDX-License-Identifier: Apache-2.0
//
// Requests on a lane: what is asked for, in which pieces it comes and is answered, while regions and lanes go.
#include "digest.hpp"
#include "pieces.hpp"
#include "seeds.hpp"
#include "server_side.hpp"

using namespace moonpool;
using namespace moonpool::fuzz;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  return run_server_script(ServerSide::Start::kLane, data, size);
}

Seeds fuzz::seeds() {
  using S = ServerSide;
  constexpr uint8_t kLane = 1;  // the second connection
  constexpr uint8_t kRead = 0, kWrite = 1, kDigest = 2;
  struct Desc {
    size_t region;
    uint32_t offset, length;
  };
  const auto request = [](uint8_t kind, const std::vector<Desc> &descs, uint8_t wrong_digest = 0, uint8_t at = 0,
                          uint8_t change = 0) {
    std::string bytes{static_cast<char>(kLane), static_cast<char>(kind), static_cast<char>(at),
                      static_cast<char>(change), static_cast<char>(descs.size())};
    wire::Writer writer(&bytes);
    for (const Desc &desc : descs) {
      writer.put(static_cast<uint8_t>(desc.region));
      writer.put(desc.offset);
      writer.put(desc.length);
    }
    writer.put(wrong_digest);
    return ScriptWriter().step_bytes(S::kRequest, bytes + "some payload").text();
  };
  // The same without letting the engine run before the next step.
  const auto together = [](std::string step) {
    step[0] = static_cast<char>(step[0] | 0x80);
    return step;
  };
  const std::string cuts = ScriptWriter().step(S::kCuts, kLane, uint32_t{99}).text();
  const std::string narrow = ScriptWriter().step(S::kRoom, kLane, uint32_t{60}).text();
  const std::string take = ScriptWriter().step(S::kTake, kLane, uint32_t{100}).text();
  const std::string take_all = ScriptWriter().step(S::kTake, kLane, UINT32_MAX).text();
  const auto release = [](size_t at) { return ScriptWriter().step(S::kRelease, static_cast<uint8_t>(at)).text(); };
  const std::vector<Desc> mixed = {{kSmall, 10, 100},      {kReadOnly, 0, 8192}, {9, 0, 1},
                                   {kLarge, 262000, 5000}, {kSmall, 4999, 2},    {kNeighbour, 0, 64}};
  Seeds all;
  all.add("read", request(kRead, {{kReadOnly, 0, 4096}}));
  all.add("write", request(kWrite, {{kSmall, 100, 200}}));
  all.add("write-read-only", request(kWrite, {{kReadOnly, 0, 10}, {kSmall, 0, 10}}));
  all.add("read-mixed", request(kRead, mixed));
  all.add("write-mixed", request(kWrite, mixed));
  all.add("read-digests", request(kRead | kDigest, mixed));
  all.add("write-digests", request(kWrite | kDigest, mixed));
  all.add("write-wrong-digest", request(kWrite | kDigest, mixed, 4));
  all.add("leaf-and-more", request(kRead | kDigest, {{kLarge, 0, MP_DIGEST_LEAF_BYTES + 1}}));
  all.add("nothing", request(kRead, {{kSmall, 0, 0}}));
  all.add("pipelined", together(request(kWrite, {{kSmall, 0, 7}})) + together(request(kWrite, {{kSmall, 7, 7}})) +
                           together(request(kRead, {{kSmall, 0, 14}})) + request(kWrite, {{kLarge, 1, 100000}}));
  all.add("in-pieces", cuts + request(kWrite | kDigest, mixed) + request(kRead | kDigest, mixed));
  all.add("slow-reader", narrow + request(kRead, {{kReadOnly, 0, 500}}) + take + take + take_all);
  all.add("released-while-read",
          narrow + request(kRead, {{kSmall, 0, 500}, {kLarge, 0, 500}}) + take + release(kLarge) + take_all);
  all.add("released-before", release(kSmall) + request(kWrite, {{kSmall, 0, 10}, {kLarge, 0, 10}}));
  all.add("half-a-write", ScriptWriter()
                              .step_bytes(S::kRaw, request(kWrite, {{kSmall, 0, 1000}}).substr(3))
                              .step(S::kCut, kLane, uint8_t{1})
                              .text());
  all.add("wrong-magic", request(kRead, {{kSmall, 0, 8}}, 0, 0, 1));
  all.add("wrong-sum", request(kRead, {{kSmall, 0, 8}}, 0, 24, 1));
  all.add("wrong-count", request(kRead, {{kSmall, 0, 8}, {kSmall, 8, 8}}, 0, 8, 1));
  // A write of which the middle region goes away, with payload that comes in three parts.
  wire::RequestHeader header{wire::kRequestMagic, MP_WRITE, 0, 0, 1, 0, 5, 3000};
  const wire::WireDesc unknown{1, 0, 3000};
  const auto raw = [](std::string_view bytes) { return ScriptWriter().step(S::kRaw, kLane, bytes).text(); };
  all.add("unknown-region-thrown-away", raw({reinterpret_cast<const char *>(&header), sizeof header}) +
                                            raw({reinterpret_cast<const char *>(&unknown), sizeof unknown}) +
                                            raw(std::string(2000, 'x')) + raw(std::string(1000, 'y')) + take_all);
  return all;
}
