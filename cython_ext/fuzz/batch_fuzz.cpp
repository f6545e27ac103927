// SPDX-License-Identifier: Apache-2.0
//
// Batches: arrays of any offsets, lengths, indices and strides. What is accepted lies within the regions it names, what
// is refused is refused for its own reason, and a plan says the same as a submission.
#include <algorithm>
#include <cstring>

#include "batch.hpp"
#include "engine.hpp"
#include "handles.hpp"
#include "pieces.hpp"
#include "script.hpp"
#include "seeds.hpp"
#include "wire.hpp"
#include "world.hpp"

using namespace moonpool;
using namespace moonpool::fuzz;

namespace {

constexpr size_t kItemsMax = 64;
constexpr size_t kRemotes = 4;

// An engine with a peer that is never reached, so that transfers wait and can be looked at. It is made once: no input
// changes it.
struct Stage {
  mp_engine *engine = nullptr;
  mp_peer *peer = nullptr;
  std::vector<mp_region *> locals;  // the pieces, and one that was released
  std::vector<mp_remote_region> remotes;

  Stage() {
    World::get().reset();
    mp_config config;
    mp_config_init(&config);
    config.transports = "tcp";
    config.slice_bytes = 64u << 10;
    config.io_threads = 1;
    FUZZ_CHECK(mp_engine_open(&config, &engine, nullptr) == MP_OK);
    peer = new mp_peer{Peer::make(engine->engine, "nowhere:1", {})};
    for (const Piece &piece : pieces()) add(piece.base, piece.bytes, piece.writable);
    add(pieces()[0].base, pieces()[0].bytes, true);
    FUZZ_CHECK(mp_region_release(locals.back(), nullptr) == MP_OK);
    constexpr uint64_t lengths[kRemotes] = {4096, uint64_t{1} << 40, UINT64_MAX, 0};
    for (size_t i = 0; i < kRemotes; ++i) {
      mp_remote_region remote{};
      remote.key = 100 + i;
      remote.length = lengths[i];
      remote.flags = i == 1 ? 0 : MP_REGION_WRITABLE;
      remotes.push_back(remote);
    }
  }
  void add(uint8_t *base, size_t bytes, bool writable) {
    mp_region *handle = nullptr;
    FUZZ_CHECK(mp_region_register(engine, base, bytes, nullptr, writable ? MP_REGION_WRITABLE : 0, &handle, nullptr) ==
               MP_OK);
    locals.push_back(handle);
  }
};

struct Input {
  std::vector<int64_t> local_offsets, remote_offsets, lengths;
  std::vector<uint32_t> local_index, remote_index;
  mp_batch batch{};

  const int64_t &length(size_t i) const { return lengths[i * batch.lengths_stride]; }
  mp_status expected(const Stage &stage, size_t i, mp_op op) const;
};

// What has to become of an item, in wider arithmetic than the core's.
mp_status Input::expected(const Stage &stage, size_t i, mp_op op) const {
  using Wide = __int128;
  const uint32_t local = batch.local_index == nullptr ? 0 : local_index[i];
  const uint32_t remote = batch.remote_index == nullptr ? 0 : remote_index[i];
  if (local >= batch.locals_count || remote >= batch.remotes_count) return MP_INVALID_ARGUMENT;
  if (local >= kPieces) return MP_REGION_RELEASED;
  const Wide from = local_offsets[i * batch.local_offsets_stride];
  const Wide to = remote_offsets[i * batch.remote_offsets_stride], n = length(i);
  const Piece &piece = pieces()[local];
  const mp_remote_region &region = stage.remotes[remote];
  if (n <= 0 || from < 0 || to < 0 || from + n > piece.bytes || to + n > region.length) return MP_OUT_OF_RANGE;
  const bool writable = op == MP_WRITE ? (region.flags & MP_REGION_WRITABLE) != 0 : piece.writable;
  return writable ? MP_OK : MP_REGION_READ_ONLY;
}

// A number of 1, 2, 4 or 8 bytes, so that small ones are as likely as the borders of 64 bits.
int64_t number(Source &source) {
  const auto kind = source.get<uint8_t>();
  switch (kind % 4) {
    case 0:
      return source.get<uint8_t>();
    case 1:
      return source.get<int16_t>();
    case 2:
      return source.get<int32_t>();
    default:
      return source.get<int64_t>();
  }
}

void fill(Source &source, size_t count, size_t stride, std::vector<int64_t> *out) {
  // Exactly as long as the batch may read, so that the sanitizer sees one element too many.
  out->resize(stride == 0 ? 1 : (count - 1) * stride + 1);
  for (int64_t &value : *out) value = number(source);
}

// Pieces of accepted items lie within both regions, and cover each item exactly.
void check_descs(const Stage &stage, const Input &input, const Transfer &transfer, mp_op op) {
  uint64_t bytes = 0, wanted = 0;
  for (size_t i = 0; i < input.batch.count; ++i) {
    if (input.expected(stage, i, op) == MP_OK) wanted += static_cast<uint64_t>(input.length(i));
  }
  for (const Desc &desc : transfer.descs) {
    const auto remote = std::find_if(stage.remotes.begin(), stage.remotes.end(),
                                     [&](const mp_remote_region &region) { return region.key == desc.key; });
    FUZZ_CHECK(remote != stage.remotes.end());
    FUZZ_CHECK(desc.length > 0 && desc.length <= remote->length && desc.offset <= remote->length - desc.length);
    // Neighbours in memory may have become one piece, so every byte is looked up.
    for (uint64_t at = 0; at < desc.length;) {
      const uint8_t *byte = desc.local + at;
      const auto piece = std::find_if(pieces().begin(), pieces().end(), [&](const Piece &one) {
        return byte >= one.base && byte < one.base + one.bytes;
      });
      FUZZ_CHECK(piece != pieces().end() && (op == MP_WRITE || piece->writable));
      at += static_cast<uint64_t>(piece->base + piece->bytes - byte);
    }
    FUZZ_CHECK(desc.item + desc.items <= input.batch.count && desc.items >= 1);
    bytes += desc.length;
  }
  FUZZ_CHECK(bytes == wanted && transfer.bytes == wanted);
}

void check_statuses(const Stage &stage, const Input &input, mp_transfer *transfer, mp_op op) {
  std::vector<uint8_t> statuses(input.batch.count);
  mp_transfer_item_status(transfer, statuses.data(), statuses.size());
  for (size_t i = 0; i < statuses.size(); ++i) {
    const mp_status expected = input.expected(stage, i, op);
    FUZZ_CHECK(statuses[i] == (expected == MP_OK ? MP_CANCELLED : expected));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const auto *stage = new Stage();
  Source source(data, size);
  const auto flags = source.get<uint8_t>();
  const mp_op op = (flags & 1) != 0 ? MP_WRITE : MP_READ;
  Input input;
  mp_batch &batch = input.batch;
  batch.count = source.get<uint8_t>() % (kItemsMax + 1);
  if (batch.count == 0) return 0;
  const auto strides = source.get<uint8_t>();
  batch.local_offsets_stride = strides & 3;
  batch.remote_offsets_stride = (strides >> 2) & 3;
  batch.lengths_stride = (strides >> 4) & 3;
  fill(source, batch.count, batch.local_offsets_stride, &input.local_offsets);
  fill(source, batch.count, batch.remote_offsets_stride, &input.remote_offsets);
  fill(source, batch.count, batch.lengths_stride, &input.lengths);
  const size_t locals = 1 + source.below(stage->locals.size()), remotes = 1 + source.below(kRemotes);
  for (size_t i = 0; i < batch.count; ++i) {
    input.local_index.push_back(source.get<uint8_t>() % (kPieces + 3));
    input.remote_index.push_back(source.get<uint8_t>() % (kRemotes + 2));
  }
  std::vector<const mp_remote_region *> handles;
  for (const mp_remote_region &remote : stage->remotes) handles.push_back(&remote);
  batch.local_offsets = input.local_offsets.data();
  batch.remote_offsets = input.remote_offsets.data();
  batch.lengths = input.lengths.data();
  batch.locals = stage->locals.data();
  batch.locals_count = locals;
  batch.local_index = (flags & 2) != 0 ? nullptr : input.local_index.data();
  batch.remotes = handles.data();
  batch.remotes_count = remotes;
  batch.remote_index = (flags & 4) != 0 ? nullptr : input.remote_index.data();
  mp_options options{};
  options.digest = (flags & 8) != 0 ? 1 : 0;

  bool any = false, all = true, all_in_range = true;
  for (size_t i = 0; i < batch.count; ++i) {
    const mp_status expected = input.expected(*stage, i, op);
    any = any || expected == MP_OK;
    all = all && expected == MP_OK;
    all_in_range = all_in_range && (expected == MP_OK || expected == MP_REGION_READ_ONLY);
  }
  mp_transfer *transfer = nullptr;
  mp_error error{};
  const mp_status status = mp_submit(stage->peer, op, &batch, &options, &transfer, &error);
  FUZZ_CHECK((status == MP_OK) == any);
  if (status == MP_OK) {
    check_descs(*stage, input, *transfer->transfer, op);
    FUZZ_CHECK(mp_transfer_cancel(transfer, 0) == MP_OK);
    check_statuses(*stage, input, transfer, op);
    mp_transfer_free(transfer);
  } else {
    FUZZ_CHECK(error.code == status && error.item == 0);
  }
  mp_plan *plan = nullptr;
  const mp_status planned = mp_plan_create(stage->peer, &batch, &plan, &error);
  FUZZ_CHECK((planned == MP_OK) == all_in_range);
  if (planned != MP_OK) return 0;
  // Indices as they come, most of them of the plan.
  std::vector<int64_t> indices;
  while (!source.empty() && indices.size() < kItemsMax) {
    const int64_t index = number(source);
    indices.push_back((index & 7) == 7 ? index : index % static_cast<int64_t>(batch.count));
  }
  if (!indices.empty() &&
      mp_plan_post(plan, op, indices.data(), indices.size(), &options, &transfer, &error) == MP_OK) {
    mp_transfer_cancel(transfer, 0);
    std::vector<uint8_t> statuses(indices.size());
    mp_transfer_item_status(transfer, statuses.data(), statuses.size());
    for (size_t i = 0; i < indices.size(); ++i) {
      const bool known = indices[i] >= 0 && indices[i] < static_cast<int64_t>(batch.count);
      const mp_status expected = known ? input.expected(*stage, static_cast<size_t>(indices[i]), op) : MP_OUT_OF_RANGE;
      FUZZ_CHECK(statuses[i] == (expected == MP_OK ? MP_CANCELLED : expected));
    }
    mp_transfer_free(transfer);
  }
  mp_plan_free(plan);
  return 0;
}

Seeds fuzz::seeds() {
  struct Item {
    int64_t local, remote, length;
    uint8_t local_index, remote_index;
  };
  const auto batch = [](uint8_t flags, const std::vector<Item> &items, std::string_view indices = {}) {
    std::string bytes{static_cast<char>(flags), static_cast<char>(items.size()), 0x15};
    wire::Writer writer(&bytes);
    const auto put = [&](int64_t value) {
      writer.put(uint8_t{3});
      writer.put(value);
    };
    for (const Item &item : items) put(item.local);
    for (const Item &item : items) put(item.remote);
    for (const Item &item : items) put(item.length);
    writer.put(uint8_t{kPieces});
    writer.put(uint8_t{kRemotes - 1});
    for (const Item &item : items) {
      writer.put(item.local_index);
      writer.put(item.remote_index);
    }
    return bytes.append(indices);
  };
  Seeds all;
  all.add("read", batch(0, {{0, 0, 100, 0, 0}, {100, 100, 100, 0, 0}, {0, 0, 64, 4, 2}}));
  all.add("write", batch(1, {{0, 0, 100, 1, 0}, {5, 7, 4000, 0, 2}}));
  all.add(
      "mixed",
      batch(0,
            {{0, 0, 8, 0, 0}, {-1, 0, 8, 0, 0}, {0, 0, 0, 0, 0}, {0, 0, 8, 1, 0}, {0, 0, 8, 5, 0}, {0, 0, 8, 6, 5}}));
  all.add("neighbours", batch(0, {{0, 0, 64, 3, 1}, {0, 64, 64, 4, 1}}));
  all.add("leaves", batch(8, {{0, 0, 282151, 2, 1}, {0, 0, 262144, 2, 2}}));
  all.add("borders", batch(1, {{INT64_MAX, 0, 1, 0, 2},
                               {0, INT64_MAX, INT64_MAX, 0, 2},
                               {0, INT64_MAX, 1, 0, 2},
                               {1, 1, INT64_MIN, 0, 0}}));
  all.add("repeated", std::string("\x01\x03\x00\x00\x05\x00\x05\x00\x05\x00\x00", 11));
  all.add("plan", batch(0, {{0, 0, 8, 0, 0}, {8, 8, 8, 0, 0}},
                        std::string("\x00\x01\x00\x00\x00\x07\x03\xff\xff\xff\xff\xff\xff\xff\xff", 15)));
  return all;
}
