// SPDX-License-Identifier: Apache-2.0
//
// Every call, with its first, second, third, ... request for memory refused: the index contradicts itself nowhere, what
// is all or nothing has done nothing, and when all is given back, all of it is free.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <array>
#include <cstdlib>
#include <functional>
#include <new>

#include "index.hpp"

namespace {

// Requests of this thread until one is refused; negative: none is.
thread_local long refuse_after = -1;
thread_local long live = 0;

bool refused() { return refuse_after >= 0 && refuse_after-- == 0; }

}  // namespace

// Not inlined: the compiler takes a pair of these for a mistake otherwise.
[[gnu::noinline]] void *operator new(size_t size) {
  void *memory = refused() ? nullptr : std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  ++live;
  return memory;
}
[[gnu::noinline]] void operator delete(void *memory) noexcept {
  if (memory != nullptr) --live;
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void *memory, size_t) noexcept { operator delete(memory); }

// The linker puts these in the place of mmap (CMakeLists.txt).
extern "C" void *__real_mmap(void *, size_t, int, int, int, off_t);
extern "C" void *__wrap_mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset) {
  return refused() ? MAP_FAILED : __real_mmap(at, size, protection, flags, fd, offset);
}

namespace moonpool::index {
namespace {

constexpr size_t kBatch = 6;
constexpr uint32_t kShards = 2, kReplicas = 2, kSegments = 3;
constexpr uint64_t kLength = 1000, kCapacity = 1 << 20;
constexpr int64_t kNow = 100, kDeadline = 1000, kLate = 5000;

// Nothing here takes memory: it would be refused too.
std::array<uint8_t, kBatch * kHashBytes> names(uint8_t batch) {
  std::array<uint8_t, kBatch * kHashBytes> made{};
  for (size_t i = 0; i < kBatch; ++i) {
    made[i * kHashBytes] = batch;
    made[i * kHashBytes + 1] = static_cast<uint8_t>(i + 1);
  }
  return made;
}

const uint8_t *bytes(const std::string &text) { return reinterpret_cast<const uint8_t *>(text.data()); }

// An index in use, and what its user knows.
class World {
 public:
  World() : index(ChunkIndex::make("prefix", 10'000, 1, 1)) {
    for (uint32_t segment = 1; segment <= kSegments; ++segment) index->add_segment(segment, kCapacity, segment, 0, 0);
  }

  Outcome start(uint32_t owner, uint8_t batch, uint32_t shard) {
    const auto its = names(batch);
    const uint8_t none[kHashBytes] = {9};
    StartCall call{};
    call.owner = owner;
    call.hashes = {its.data(), kBatch, 1};
    call.parents = {none, kHashBytes};
    call.lengths = reinterpret_cast<const uint8_t *>(&kLength);
    call.one_length = true;
    call.shard = shard;
    call.shards = kShards;
    call.replicas = kReplicas;
    call.now = kNow;
    call.deadline = kDeadline;
    uint8_t extents[kBatch * kReplicas * kExtentBytes];
    const Outcome outcome = index->start(call, statuses, extents);
    for (size_t i = 0; i < kBatch; ++i) std::memcpy(&generations[i * 8], extents + i * kReplicas * kExtentBytes, 8);
    return outcome;
  }
  Outcome commit(uint32_t owner, uint8_t batch, uint32_t shard, uint8_t written) {
    const auto its = names(batch);
    std::array<uint8_t, kBatch> masks;
    masks.fill(written);
    slots.clear();
    records.clear();
    return index->commit(owner, {its.data(), kBatch, 1}, generations, shard, masks.data(), statuses, &slots, &records);
  }
  Outcome publish() {
    std::string keys;
    return index->publish(bytes(slots), slots.size() / 4, &keys);
  }
  void put(uint8_t batch) {
    for (uint32_t shard = 0; shard < kShards; ++shard) {
      ASSERT_EQ(start(1, batch, shard), Outcome::kOk);
      ASSERT_EQ(commit(1, batch, shard, 0xff), Outcome::kOk);
      ASSERT_EQ(publish(), Outcome::kOk);
    }
  }
  Outcome pin(uint32_t owner, uint64_t number, uint8_t batch) {
    const auto its = names(batch);
    return index->pin(owner, number, {its.data(), kBatch, 1}, statuses);
  }
  Outcome abort(bool settled) {
    const auto its = names(2);
    return index->abort(2, {its.data(), kBatch, 1}, generations, 0, settled, statuses);
  }
  Outcome locate(int64_t lease) {
    const auto its = names(1);
    std::string extents;
    uint32_t replicas = 0;
    return index->locate({its.data(), kBatch, 1}, 0, kNow, lease, statuses, &extents, &replicas);
  }
  Outcome remove(uint8_t batch) {
    const auto its = names(batch);
    slots.clear();
    return index->remove({its.data(), kBatch, 1}, statuses, &slots);
  }
  Outcome reclaim(int64_t now) {
    uint64_t freed = 0;
    return index->reclaim(bytes(slots), slots.size() / 4, now, &freed);
  }
  // With a segment that is empty.
  void put_and_add() {
    put(1);
    index->add_segment(kSegments + 1, kCapacity, kSegments + 1, 0, 0);
  }
  Outcome move_to_it() {
    std::string moved;
    const auto its = names(1);
    const Outcome outcome = index->move_to({{its.data(), kBatch, 1}, kSegments + 1, 100, UINT64_MAX}, statuses, &moved);
    if (outcome == Outcome::kOk) keep_moves(moved);
    return outcome;
  }
  // The first replica of each chunk of the batch is spoilt.
  void put_and_find() {
    put(1);
    uint32_t replicas = 0;
    std::string extents;
    const auto its = names(1);
    index->locate({its.data(), kBatch, 1}, 0, kNow, 0, statuses, &extents, &replicas);
    for (size_t i = 0; i < kBatch; ++i) {
      std::memcpy(&spoilt[i * kExtentBytes], &extents[i * replicas * kExtentBytes], kExtentBytes);
    }
  }
  Outcome mend(bool replace) {
    std::string moved;
    const auto its = names(1);
    slots.clear();
    const Outcome outcome = index->mend({{its.data(), kBatch, 1}, 0, spoilt, replace, kNow}, statuses, &moved, &slots);
    if (outcome == Outcome::kOk) keep_moves(moved);
    return outcome;
  }
  Outcome move_out(uint32_t segment) {
    std::string moved;
    uint32_t next = 0;
    uint64_t no_room = 0;
    const Outcome outcome =
        index->move_out({segment, 0, 1000, 100, UINT64_MAX, UINT64_MAX, {}, kNow}, &moved, &next, &no_room);
    if (outcome == Outcome::kOk) keep_moves(moved);
    return outcome;
  }
  // A disk below each segment, and all that is put was used twice.
  void put_above_disks() {
    for (uint32_t segment = 1; segment <= kSegments; ++segment) {
      index->add_segment(10 + segment, kCapacity, segment, 0, 0, segment);
    }
    put(1);
    locate(0);
  }
  Outcome demote() {
    Evicted evicted;
    const Outcome outcome = index->evict(UINT64_MAX, kNow, {1, 100, UINT64_MAX, {}}, &evicted);
    slots = evicted.slots;
    keep_moves(evicted.moves);
    return outcome;
  }
  Outcome demote_more() {
    std::string moved;
    const Outcome outcome = index->demote_more(bytes(slots), slots.size() / 4, {1, 100, UINT64_MAX, {}}, &moved);
    if (outcome == Outcome::kOk) keep_moves(moved);
    return outcome;
  }
  // All of it is on disks only.
  void press_down() {
    put_above_disks();
    demote();
    for (uint32_t shard = 0; shard < kShards; ++shard) {
      commit_moves();
      publish_moves();
      demote_more();
    }
  }
  Outcome promote() {
    std::string moved;
    uint64_t no_room = 0;
    const auto its = names(1);
    const Outcome outcome = index->promote({{its.data(), kBatch, 1}, 0, 100, UINT64_MAX}, statuses, &moved, &no_room);
    if (outcome == Outcome::kOk) keep_moves(moved);
    return outcome;
  }
  void keep_moves(const std::string &moved) {
    moves_count = moved.size() / kMoveBytes;
    for (size_t i = 0; i < moves_count; ++i) std::memcpy(&moves[i * 8], moved.data() + i * kMoveBytes, 8);
  }
  Outcome commit_moves() {
    slots.clear();
    records.clear();
    return index->commit_moves(moves, moves_count, move_statuses, &slots, &records);
  }
  Outcome publish_moves() {
    uint64_t freed = 0;
    return index->publish_moves(moves, moves_count, kNow, &freed);
  }
  Outcome abort_moves() {
    uint64_t freed = 0;
    return index->abort_moves(moves, moves_count, &freed);
  }
  // Ends everything as its owners would; returns what is left then.
  std::string give_back() {
    std::string pairs, gone, more;
    uint64_t freed = 0;
    bool complete = false;
    publish();  // what was committed, if anything was
    publish_moves();
    abort_moves();
    for (uint32_t owner = 1; owner <= 3; ++owner) index->drop_owner(owner, &pairs);
    pairs.clear();
    index->to_fence(&pairs);
    for (size_t at = 0; at < pairs.size(); at += 8) {
      index->fenced(load_u32(bytes(pairs) + at), load_u32(bytes(pairs) + at + 4), &freed);
    }
    index->reclaim(bytes(slots), slots.size() / 4, kLate, &freed);
    for (uint8_t batch = 1; batch <= 3; ++batch) {
      remove(batch);
      index->reclaim(bytes(slots), slots.size() / 4, kLate, &freed);
    }
    // Chunks of which a shard is missing are found by nobody.
    Evicted evicted;
    index->evict(UINT64_MAX, kLate, {}, &evicted);
    gone += evicted.slots;
    index->sweep(1000, &gone, &complete);
    index->reclaim(bytes(gone), gone.size() / 4, kLate, &freed);
    IndexStats stats{};
    index->stats(&stats);
    if (stats.chunks != 0 || stats.writing != 0 || stats.pinned != 0) return "chunks, writes or pins are left";
    return stats.free_bytes == stats.capacity_bytes ? "" : "space is left";
  }
  std::vector<uint64_t> state() {
    IndexStats stats{};
    index->stats(&stats);
    return {stats.moving,
            stats.chunks,
            stats.writing,
            stats.pinned,
            stats.used_bytes,
            stats.free_bytes,
            stats.condemned_bytes,
            stats.evicted,
            stats.refused_records,
            stats.capacity_bytes,
            static_cast<uint64_t>(stats.leased_until_ms)};
  }
  std::string wrong() {
    std::string found;
    index->check(&found);
    return found;
  }

  std::unique_ptr<ChunkIndex> index;
  uint8_t statuses[kBatch], generations[kBatch * 8];
  uint8_t spoilt[kBatch * kExtentBytes];
  uint8_t moves[2 * kBatch * kShards * 8], move_statuses[2 * kBatch * kShards];
  size_t moves_count = 0;
  std::string slots, records;
};

struct Case {
  const char *name;
  std::function<void(World &)> before;
  std::function<Outcome(World &)> call;
  bool all_or_nothing = true;
};

void commit_both(World &world) {
  world.put(1);
  world.start(2, 2, 0);
  world.commit(2, 2, 0, 0xff);
}

void lose_one(World &world) {
  world.put(1);
  world.index->drop_segment(1);
  world.index->drop_segment(2);
}

const Case kCases[] = {
    {"start", [](World &world) { world.put(1); }, [](World &world) { return world.start(2, 2, 0); }},
    {"start_second_shard", [](World &world) { world.start(2, 2, 0); },
     [](World &world) { return world.start(2, 2, 1); }},
    {"start_what_is_there", [](World &world) { world.put(1); }, [](World &world) { return world.start(2, 1, 0); }},
    {"commit", [](World &world) { world.start(2, 2, 0); }, [](World &world) { return world.commit(2, 2, 0, 0xff); }},
    {"commit_some_replicas", [](World &world) { world.start(2, 2, 0); },
     [](World &world) { return world.commit(2, 2, 0, 0x2); }},
    {"publish", commit_both, [](World &world) { return world.publish(); }},
    {"revoke", commit_both,
     [](World &world) { return world.index->revoke(bytes(world.slots), world.slots.size() / 4); }},
    {"abort", [](World &world) { world.start(2, 2, 0); }, [](World &world) { return world.abort(false); }},
    {"abort_settled", [](World &world) { world.start(2, 2, 0); }, [](World &world) { return world.abort(true); }},
    {"settle_later",
     [](World &world) {
       world.start(2, 2, 0);
       world.abort(false);
     },
     [](World &world) { return world.abort(true); }},
    {"expire", [](World &world) { world.start(2, 2, 0); },
     [](World &world) {
       std::string pairs;
       return world.index->expire(kLate, &pairs);
     }},
    {"drop_owner",
     [](World &world) {
       world.put(1);
       world.pin(2, 1, 1);
       world.start(2, 2, 0);
     },
     [](World &world) {
       std::string pairs;
       return world.index->drop_owner(2, &pairs);
     }},
    {"fenced",
     [](World &world) {
       world.start(2, 2, 0);
       world.abort(false);
     },
     [](World &world) {
       uint64_t freed = 0;
       return world.index->fenced(2, 1, &freed);
     }},
    {"to_fence",
     [](World &world) {
       world.start(2, 2, 0);
       world.abort(false);
     },
     [](World &world) {
       std::string pairs;
       return world.index->to_fence(&pairs);
     }},
    {"match_prefix", [](World &world) { world.put(1); },
     [](World &world) {
       size_t matched = 0;
       const auto its = names(1);
       return world.index->match_prefix({its.data(), kBatch, 1}, kNow, 50, &matched);
     }},
    {"locate", [](World &world) { world.put(1); }, [](World &world) { return world.locate(50); }},
    {"pin", [](World &world) { world.put(1); }, [](World &world) { return world.pin(2, 1, 1); }},
    {"pin_more",
     [](World &world) {
       world.put(1);
       world.put(2);
       world.pin(2, 1, 1);
     },
     [](World &world) { return world.pin(2, 1, 2); }},
    {"unpin",
     [](World &world) {
       world.put(1);
       world.pin(2, 1, 1);
     },
     [](World &world) {
       size_t count = 0;
       return world.index->unpin(2, 1, &count);
     }},
    {"remove", [](World &world) { world.put(1); }, [](World &world) { return world.remove(1); }},
    {"remove_prefix", [](World &world) { world.put(1); },
     [](World &world) {
       size_t pinned = 0;
       world.slots.clear();
       return world.index->remove_prefix(1, names(1).data(), &world.slots, &pinned);
     }},
    {"evict", [](World &world) { world.put(1); },
     [](World &world) {
       Evicted evicted;
       const Outcome outcome = world.index->evict(UINT64_MAX, kNow, {}, &evicted);
       world.slots = evicted.slots;
       return outcome;
     }},
    {"evict_others", [](World &world) { world.put(1); },
     [](World &world) {
       Evicted evicted;
       const auto its = names(1);
       const uint64_t range[2] = {1, 2};
       const Spared spared{reinterpret_cast<const uint8_t *>(range), 1, {its.data(), 1, 1}};
       const Outcome outcome = world.index->evict(UINT64_MAX, kNow, {}, &evicted, spared);
       world.slots = evicted.slots;
       return outcome;
     }},
    {"reclaim",
     [](World &world) {
       world.put(1);
       world.locate(500);
       world.remove(1);
     },
     [](World &world) { return world.reclaim(kNow); }},
    {"drop_segment", lose_one, [](World &world) { return world.index->drop_segment(3); }},
    {"sweep", lose_one,
     [](World &world) {
       bool complete = false;
       world.slots.clear();
       return world.index->sweep(1000, &world.slots, &complete);
     }},
    {"start_anew_what_was_lost",
     [](World &world) {
       lose_one(world);
       world.index->drop_segment(3);
       world.index->add_segment(4, kCapacity, 4, 0, 0);
       world.index->add_segment(5, kCapacity, 5, 0, 0);
     },
     [](World &world) { return world.start(2, 1, 0); }, false},
    {"move_to", [](World &world) { world.put_and_add(); }, [](World &world) { return world.move_to_it(); }},
    {"move_out", [](World &world) { world.put(1); },
     [](World &world) {
       for (uint32_t segment = 1; segment <= kSegments; ++segment) {
         const Outcome outcome = world.move_out(segment);
         if (outcome != Outcome::kOk || world.moves_count != 0) return outcome;
       }
       return Outcome::kOk;
     }},
    {"mend", [](World &world) { world.put_and_find(); }, [](World &world) { return world.mend(true); }},
    {"mend_to_nowhere", [](World &world) { world.put_and_find(); }, [](World &world) { return world.mend(false); }},
    {"mend_the_last_copy",
     [](World &world) {
       world.put_and_find();
       for (uint32_t segment = 1; segment <= kSegments; ++segment) {
         if (segment != load_u32(&world.spoilt[24])) world.index->drop_segment(segment);
       }
     },
     [](World &world) { return world.mend(true); }},
    {"commit_moves",
     [](World &world) {
       world.put_and_add();
       world.locate(500);
       world.move_to_it();
     },
     [](World &world) { return world.commit_moves(); }},
    {"publish_moves",
     [](World &world) {
       world.put_and_add();
       world.locate(500);
       world.move_to_it();
       world.commit_moves();
     },
     [](World &world) { return world.publish_moves(); }},
    {"abort_moves",
     [](World &world) {
       world.put_and_add();
       world.move_to_it();
       world.commit_moves();
     },
     [](World &world) { return world.abort_moves(); }},
    {"demote", [](World &world) { world.put_above_disks(); }, [](World &world) { return world.demote(); }, false},
    {"demote_more",
     [](World &world) {
       world.put_above_disks();
       world.demote();
       world.commit_moves();
       world.publish_moves();
     },
     [](World &world) { return world.demote_more(); }},
    {"commit_what_is_demoted",
     [](World &world) {
       world.put_above_disks();
       world.locate(500);
       world.demote();
     },
     [](World &world) { return world.commit_moves(); }},
    {"promote", [](World &world) { world.press_down(); }, [](World &world) { return world.promote(); }},
    {"publish_what_is_promoted",
     [](World &world) {
       world.press_down();
       world.promote();
       world.commit_moves();
     },
     [](World &world) { return world.publish_moves(); }},
    {"spoilt",
     [](World &world) {
       world.press_down();
       world.promote();
     },
     [](World &world) {
       std::string keys;
       world.slots.clear();
       return world.index->spoilt(world.moves, world.moves_count, &world.slots, &keys);
     },
     false},
    {"evict_disk", [](World &world) { world.press_down(); },
     [](World &world) {
       std::string keys;
       uint64_t freed = 0;
       world.slots.clear();
       for (uint32_t disk = 11; disk <= 10 + kSegments; ++disk) {
         const Outcome outcome = world.index->evict_disk(disk, UINT64_MAX, kLate, &world.slots, &keys, &freed);
         if (outcome != Outcome::kOk) return outcome;
       }
       return Outcome::kOk;
     },
     false},
    {"know_disk", [](World &) {}, [](World &world) { return world.index->know_disk(20); }, false},
    {"add_segment", [](World &) {}, [](World &world) { return world.index->add_segment(7, kCapacity, 7, 0, 0); }},
    {"set_segment", [](World &) {}, [](World &world) { return world.index->set_segment(1, true, false); }},
    {"chunks_in", [](World &world) { world.put(1); },
     [](World &world) {
       std::string keys;
       return world.index->chunks_in(1, 100, &keys);
     }},
    {"check", [](World &world) { world.put(1); },
     [](World &world) {
       std::string wrong;
       return world.index->check(&wrong);
     }},
};

void PrintTo(const Case &its, std::ostream *out) { *out << its.name; }

class Memory : public ::testing::TestWithParam<Case> {};

TEST_P(Memory, NothingIsHalfDoneWithoutIt) {
  const Case &its = GetParam();
  const long live_before = live;
  long refusals = 0;
  for (bool through = false; !through; ++refusals) {
    ASSERT_LT(refusals, 1000);
    World world;
    its.before(world);
    const std::vector<uint64_t> before = world.state();
    refuse_after = refusals;
    const Outcome outcome = its.call(world);
    through = refuse_after >= 0;
    refuse_after = -1;
    ASSERT_EQ(world.wrong(), "") << "request " << refusals;
    // A request may have been one that the index can do without.
    if (outcome != Outcome::kOk) {
      ASSERT_EQ(outcome, Outcome::kNoMemory) << "request " << refusals;
      if (its.all_or_nothing) {
        ASSERT_EQ(world.state(), before) << "request " << refusals;
      }
      ASSERT_EQ(its.call(world), Outcome::kOk) << "request " << refusals;
      ASSERT_EQ(world.wrong(), "") << "request " << refusals;
    }
    ASSERT_EQ(world.give_back(), "") << "request " << refusals;
    ASSERT_EQ(world.wrong(), "") << "request " << refusals;
  }
  EXPECT_EQ(live, live_before);
}

INSTANTIATE_TEST_SUITE_P(Calls, Memory, ::testing::ValuesIn(kCases),
                         [](const ::testing::TestParamInfo<Case> &its) { return its.param.name; });

// A record at a time, as a restart does, into an index that then has gaps to find.
TEST(Memory, RestoringTakesARecordOrDoesNot) {
  World source;
  source.put(1);
  source.put(2);
  std::vector<std::pair<std::string, std::string>> rows;
  for (uint32_t shard = 0; shard < kShards; ++shard) {
    source.start(1, 3, shard);
    source.commit(1, 3, shard, 0xff);
    source.publish();
    if (shard + 1 == kShards) rows.emplace_back(source.slots, source.records);
  }
  const std::string &slots = rows[0].first, &records = rows[0].second;
  long refusals = 0;
  for (bool through = false; !through; ++refusals) {
    ASSERT_LT(refusals, 10'000);
    World world;
    size_t taken = 0;
    refuse_after = refusals;
    Outcome outcome = world.index->restore(bytes(slots), slots.size() / 4, bytes(records), records.size(), &taken);
    if (outcome == Outcome::kOk) outcome = world.start(2, 2, 0);  // the gaps become free pieces
    through = refuse_after >= 0;
    refuse_after = -1;
    ASSERT_TRUE(outcome == Outcome::kOk || outcome == Outcome::kNoMemory);
    ASSERT_EQ(world.wrong(), "") << "request " << refusals;
    ASSERT_EQ(world.start(2, 2, 0), Outcome::kOk);
    ASSERT_EQ(world.wrong(), "") << "request " << refusals;
    ASSERT_EQ(world.give_back(), "") << "request " << refusals;
  }
}

TEST(Memory, ASegmentThatOnlyARecordNamesCanBeDropped) {
  World source;
  source.put(1);
  source.start(1, 2, 0);
  source.commit(1, 2, 0, 0xff);
  const auto fresh = ChunkIndex::make("prefix", 10'000, 1, 1);
  size_t taken = 0;
  ASSERT_EQ(fresh->restore(bytes(source.slots), kBatch, bytes(source.records), source.records.size(), &taken),
            Outcome::kOk);
  std::vector<uint32_t> named;
  SegmentStats stats{};
  for (uint32_t segment = 1; segment <= kSegments; ++segment) {
    if (fresh->segment_stats(segment, &stats) == Outcome::kOk) named.push_back(segment);
  }
  ASSERT_GE(named.size(), kReplicas);
  ASSERT_EQ(fresh->drop_unknown({named[0]}), Outcome::kOk);
  for (const uint32_t segment : named) {
    const Outcome expected = segment == named[0] ? Outcome::kOk : Outcome::kUnknownSegment;
    EXPECT_EQ(fresh->segment_stats(segment, &stats), expected);
  }
  std::string wrong;
  ASSERT_EQ(fresh->check(&wrong), Outcome::kOk);
  EXPECT_EQ(wrong, "");
}

TEST(Memory, WithoutItThereIsNoIndex) {
  bool made = false;
  for (long refusals = 0; !made; ++refusals) {
    ASSERT_LT(refusals, 100);
    refuse_after = refusals;
    made = ChunkIndex::make("prefix", 100, 1, 1) != nullptr;
    refuse_after = -1;
  }
}

}  // namespace
}  // namespace moonpool::index
