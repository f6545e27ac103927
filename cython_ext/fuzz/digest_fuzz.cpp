// SPDX-License-Identifier: Apache-2.0
//
// The tree digest: items cut into leaves and hashed in any order give what mp_digest gives for each of them at once,
// and a stream that is hashed on its way, in whatever pieces it moves, gives the same at both ends.
#include <algorithm>
#include <numeric>

#include "batch.hpp"
#include "digest.hpp"
#include "pieces.hpp"
#include "script.hpp"
#include "seeds.hpp"
#include "stream.hpp"
#include "world.hpp"

using namespace moonpool;
using namespace moonpool::fuzz;

namespace {

constexpr size_t kBytes = 3 * kDigestLeafBytes;
constexpr uint8_t kWithLeaves = 250;  // few, because hashing them takes most of the time

const std::vector<uint8_t> &memory() {
  static const auto *bytes = [] {
    auto *made = new std::vector<uint8_t>(kBytes);
    fill_pattern(made->data(), 1, 0, kBytes);
    return made;
  }();
  return *bytes;
}

struct Range {
  uint64_t at, length;
};

// Lengths near the borders of leaves, or small ones.
std::vector<Range> ranges_of(Source &source) {
  std::vector<Range> ranges;
  for (size_t n = 1 + source.below(6); n > 0; --n) {
    const auto leaves = source.get<uint8_t>();
    const uint64_t whole = leaves < kWithLeaves ? 0 : (leaves - kWithLeaves) % 3 * kDigestLeafBytes;
    const int64_t rest = source.get<int16_t>() % 2048;
    const auto length = static_cast<uint64_t>(std::clamp<int64_t>(static_cast<int64_t>(whole) + rest, 1, kBytes));
    ranges.push_back({source.get<uint16_t>() % (kBytes - length + 1), length});
  }
  return ranges;
}

void check_tree(Source source) {
  const std::vector<Range> ranges = ranges_of(source);
  Transfer transfer(nullptr, MP_READ, true, kNever);
  transfer.count = ranges.size();
  DescBuilder builder(transfer, 1u << 20);
  auto *base = const_cast<uint8_t *>(memory().data());
  for (uint32_t i = 0; i < ranges.size(); ++i) {
    builder.add(i, {base + ranges[i].at, 1, ranges[i].at, ranges[i].length, MP_OK, true, true});
  }
  transfer.arm();
  std::vector<uint32_t> order(transfer.descs.size());
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[source.below(i)]);
  // The last one would end the transfer, which has no engine here; it is left out, and so is its item.
  const uint32_t left_out = order.back();
  order.pop_back();
  for (const uint32_t i : order) {
    const Desc &desc = transfer.descs[i];
    FUZZ_CHECK(desc.length <= kDigestLeafBytes);
    const uint64_t leaf = leaf_digest(desc.local, desc.length);
    transfer.descs_done(i, i + 1, &leaf);
  }
  std::vector<uint64_t> digests(ranges.size());
  transfer.digests(digests.data(), digests.size());
  for (uint32_t i = 0; i < ranges.size(); ++i) {
    const bool whole = transfer.descs[left_out].item != i;
    FUZZ_CHECK(digests[i] == (whole ? mp_digest(memory().data() + ranges[i].at, ranges[i].length) : 0));
  }
}

// Sends the ranges with their digests, and receives them, some of them into nothing.
void check_stream(Source source) {
  World &world = World::get();
  world.reset();
  std::vector<Range> ranges = ranges_of(source);
  // One whole leaf at most: a second one only takes time.
  for (Range &range : ranges) range.length = std::min(range.length, &range == &ranges[0] ? kDigestLeafBytes : 3000);
  const Fd sender(world.make_socket(true));
  world.connect_from_core(sender.get());
  const int middle = world.accept_from_core();
  const Fd receiver(world.make_socket(true));
  world.connect_from_core(receiver.get());
  const int far = world.accept_from_core();
  world.at(sender.get()).cuts = source.get<uint32_t>();
  world.at(receiver.get()).cuts = source.get<uint32_t>();
  const auto thrown_away = source.get<uint8_t>(), spoilt = source.get<uint8_t>();
  const std::string head(source.below(100), 'h');
  static std::vector<uint8_t> arrived(kBytes);
  PayloadWriter writer;
  PayloadReader reader;
  writer.begin(head.data(), head.size(), true);
  reader.begin(true);
  size_t at = 0;
  for (size_t i = 0; i < ranges.size(); ++i) {
    writer.add(memory().data() + ranges[i].at, ranges[i].length);
    reader.add((thrown_away & (1u << i)) != 0 ? nullptr : arrived.data() + at, ranges[i].length);
    at += ranges[i].length;
    if (at + kDigestLeafBytes > arrived.size()) {
      ranges.resize(i + 1);
      break;
    }
  }
  while (!writer.done()) FUZZ_CHECK(writer.step(sender.get()).kind <= Step::kBlocked);
  std::string bytes = world.take(middle).substr(head.size());
  const bool wrong = spoilt < 128;
  if (wrong) bytes[spoilt * size_t{977} % at] ^= 1;
  world.feed(far, bytes + "next");
  std::string next;
  while (!reader.done()) {
    uint8_t behind[2];
    size_t got = 0;
    FUZZ_CHECK(reader.step(receiver.get(), behind, sizeof behind, &got).kind <= Step::kBlocked);
    FUZZ_CHECK(got == 0 || reader.done());
    next.append(reinterpret_cast<const char *>(behind), got);
  }
  FUZZ_CHECK(next == std::string("next").substr(0, next.size()));
  const std::vector<uint64_t> sent = writer.take_digests();
  size_t from = 0, first_wrong = ranges.size();
  for (size_t i = 0; i < ranges.size(); ++i) {
    const bool kept = (thrown_away & (1u << i)) == 0;
    const uint64_t right = mp_digest(memory().data() + ranges[i].at, ranges[i].length);
    const size_t place = wrong ? spoilt * size_t{977} % at : at;
    const bool hit = place >= from && place < from + ranges[i].length;
    FUZZ_CHECK(sent[i] == right);
    if (kept) FUZZ_CHECK((reader.digests()[i] == right) != hit);
    if (kept && hit) first_wrong = std::min(first_wrong, i);
    from += ranges[i].length;
  }
  FUZZ_CHECK(reader.next_mismatch(0) == first_wrong);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  Source source(data, size);
  if ((source.get<uint8_t>() & 1) == 0) {
    check_tree(source);
  } else {
    check_stream(source);
    World::get().reset();
  }
  return 0;
}

Seeds fuzz::seeds() {
  const auto ranges = [](uint8_t kind, const std::vector<std::pair<uint8_t, int16_t>> &lengths, std::string_view rest) {
    std::string bytes{static_cast<char>(kind), static_cast<char>(lengths.size() - 1)};
    wire::Writer writer(&bytes);
    for (const auto &[leaves, length] : lengths) {
      writer.put(leaves);
      writer.put(length);
      writer.put(uint16_t{17});
    }
    return bytes.append(rest);
  };
  Seeds all;
  // kWithLeaves + n: n leaves and the rest.
  all.add("tree-small", ranges(0, {{0, 1}, {0, 100}, {0, 2000}}, "order"));
  all.add("tree-borders", ranges(0, {{251, -1}, {251, 0}, {251, 1}}, "\x05\x01\x03"));
  all.add("tree-two-leaves", ranges(0, {{252, 0}, {252, 5}}, "\x02\x01\x00\x01"));
  all.add("stream-whole", ranges(1, {{0, 10}, {0, 300}}, std::string(10, '\0') + "\xff"));
  all.add("stream-in-pieces",
          ranges(1, {{251, 0}, {0, 300}, {0, 1}}, std::string("\x01\0\0\0\x02\0\0\0\0\xff\x09", 11)));
  all.add("stream-thrown-away", ranges(1, {{0, 50}, {0, 60}}, std::string("\x01\0\0\0\x02\0\0\0\x01\xff\x09", 11)));
  all.add("stream-spoilt", ranges(1, {{0, 50}, {0, 60}}, std::string("\x01\0\0\0\x02\0\0\0\0\x01\x09", 11)));
  return all;
}
