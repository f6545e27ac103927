// SPDX-License-Identifier: Apache-2.0
//
// Moves that are under way: one replica of one shard of a chunk is copied to another segment, instead of the old one or
// beside it, or goes; or all that a chunk has in memory goes. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "chunk.hpp"

namespace moonpool::index {

constexpr Place kNowhere{kNone, 0};

enum class MoveKind : uint8_t {
  kMove,   // the copy takes the place of the old extent
  kDrop,   // nothing is copied: the old extent is given up
  kAdd,    // the copy is one more replica
  kChill,  // as kAdd, and then the whole chunk is on disks: its extents in memory are given up
  kShed,   // nothing is copied: the chunk is on disks already, and its extents in memory are given up
};

struct Move {
  uint64_t id;
  uint32_t slot, shard;  // kNone: the chunk has gone, and `to` is kept until nothing can be written there
  Place from, to;        // to: kNowhere where nothing is copied
  MoveKind kind;
  bool committed;   // the copy is good, and the record that says so is on its way to the store
  uint32_t leaves;  // committed: extents that room is reserved for, which may have readers when they are given up

  bool adds() const { return kind == MoveKind::kAdd || kind == MoveKind::kChill; }
  bool sheds() const { return kind == MoveKind::kChill || kind == MoveKind::kShed; }
  bool nowhere() const { return kind == MoveKind::kDrop || kind == MoveKind::kShed; }
};

class Moves {
 public:
  // Of a chunk that has none. Throws std::bad_alloc, before anything has changed.
  Move &add(uint32_t slot, uint32_t shard, Place from, Place to, MoveKind kind);
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
