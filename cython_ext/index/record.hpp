// SPDX-License-Identifier: Apache-2.0
//
// What is kept of a chunk in the metadata store: key, parent, shards with their extents, and a checksum that also
// covers the slot. 116 bytes with one shard and one replica.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "chunk.hpp"

namespace moonpool::index {

struct RecordExtent {
  uint32_t segment;  // its number
  uint64_t offset;   // bytes
};

struct RecordShard {
  uint16_t shard;
  uint64_t generation, length;
  std::vector<RecordExtent> extents;
};

struct Record {
  uint8_t hash[kHashBytes];
  uint8_t parent[kHashBytes];  // zeros: none
  uint32_t name_space;
  uint16_t shards;
  std::vector<RecordShard> present;  // by rising number
};

// Appends it.
void encode(const Record &record, uint32_t slot, std::string *out);
// False when it is damaged, or anything but what encode() made for this slot.
bool decode(const uint8_t *bytes, size_t size, uint32_t slot, Record *record);

}  // namespace moonpool::index
