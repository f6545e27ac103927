// SPDX-License-Identifier: Apache-2.0
//
// Moves that are under way: one replica of one shard of a chunk is copied to another segment, or to nowhere: then it
// goes. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "chunk.hpp"

namespace moonpool::index {

struct Move {
  uint64_t id;
  uint32_t slot, shard;  // kNone: the chunk has gone, and `to` is kept until nothing can be written there
  Place from, to;
  bool committed;  // the copy is good, and the record that says so is on its way to the store

  bool nowhere() const { return to.piece == kNone; }
};

class Moves {
 public:
  // Of a chunk that has none. Throws std::bad_alloc, before anything has changed.
  Move &add(uint32_t slot, uint32_t shard, Place from, Place to);
  // Null: there is none.
  Move *find(uint64_t id);
  Move *of(uint32_t slot);
  // Its chunk has gone, or this shard of it.
  void leave(Move &move);
  void remove(const Move &move);

  size_t count() const { return all_.size(); }
  size_t bytes() const;
  // Calls `look(move)` for each.
  template <class Look>
  void each(Look look) const {
    for (const auto &[id, move] : all_) look(move);
  }

 private:
  std::unordered_map<uint64_t, Move> all_;
  std::unordered_map<uint32_t, uint64_t> by_slot_;
  uint64_t last_ = 0;
};

}  // namespace moonpool::index
