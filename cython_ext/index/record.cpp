// SPDX-License-Identifier: Apache-2.0
#define XXH_INLINE_ALL
#include "record.hpp"

#include <xxhash.h>

#include <cstring>

#include "allocator.hpp"

namespace moonpool::index {

namespace {

constexpr uint32_t kVersion = 1;

template <class T>
void put(std::string *out, T value) {
  static_assert(std::endian::native == std::endian::little, "records are little-endian");
  out->append(reinterpret_cast<const char *>(&value), sizeof value);
}

class Reader {
 public:
  Reader(const uint8_t *bytes, size_t size) : at_(bytes), left_(size) {}
  template <class T>
  T get() {
    T value{};
    copy(&value, sizeof value);
    return value;
  }
  void copy(void *out, size_t size) {
    good_ = good_ && size <= left_;
    if (!good_) return;
    std::memcpy(out, at_, size);
    at_ += size;
    left_ -= size;
  }
  bool good() const { return good_; }
  bool done() const { return good_ && left_ == 0; }

 private:
  const uint8_t *at_;
  size_t left_;
  bool good_ = true;
};

bool read_shard(Reader &reader, RecordShard *shard) {
  shard->shard = reader.get<uint16_t>();
  const auto replicas = reader.get<uint16_t>();
  shard->generation = reader.get<uint64_t>();
  shard->length = reader.get<uint64_t>();
  if (!reader.good() || replicas == 0 || replicas > kReplicasMax) return false;
  if (shard->length == 0 || shard->length > kUnitsMax * kUnit) return false;
  shard->extents.resize(replicas);
  for (RecordExtent &extent : shard->extents) {
    extent.segment = reader.get<uint32_t>();
    extent.offset = reader.get<uint64_t>();
    if (extent.segment == kNone || extent.offset % kUnit != 0) return false;
  }
  return reader.good();
}

}  // namespace

void encode(const Record &record, uint32_t slot, std::string *out) {
  const size_t begin = out->size();
  put(out, kVersion);
  put(out, record.name_space);
  out->append(reinterpret_cast<const char *>(record.hash), kHashBytes);
  out->append(reinterpret_cast<const char *>(record.parent), kHashBytes);
  put(out, record.shards);
  put(out, static_cast<uint16_t>(record.present.size()));
  for (const RecordShard &shard : record.present) {
    put(out, shard.shard);
    put(out, static_cast<uint16_t>(shard.extents.size()));
    put(out, shard.generation);
    put(out, shard.length);
    for (const RecordExtent &extent : shard.extents) {
      put(out, extent.segment);
      put(out, extent.offset);
    }
  }
  put(out, XXH3_64bits_withSeed(out->data() + begin, out->size() - begin, slot));
}

bool decode(const uint8_t *bytes, size_t size, uint32_t slot, Record *record) {
  uint64_t sum = 0;
  if (size < sizeof sum) return false;
  size -= sizeof sum;
  std::memcpy(&sum, bytes + size, sizeof sum);
  if (XXH3_64bits_withSeed(bytes, size, slot) != sum) return false;
  Reader reader(bytes, size);
  const auto version = reader.get<uint32_t>();
  record->name_space = reader.get<uint32_t>();
  reader.copy(record->hash, kHashBytes);
  reader.copy(record->parent, kHashBytes);
  record->shards = reader.get<uint16_t>();
  const auto present = reader.get<uint16_t>();
  if (!reader.good() || version != kVersion || record->shards > kShardsMax) return false;
  if (present == 0 || present > record->shards) return false;
  record->present.resize(present);
  for (size_t i = 0; i < present; ++i) {
    RecordShard &shard = record->present[i];
    if (!read_shard(reader, &shard) || shard.shard >= record->shards) return false;
    if (i > 0 && shard.shard <= record->present[i - 1].shard) return false;
  }
  return reader.done();
}

}  // namespace moonpool::index
