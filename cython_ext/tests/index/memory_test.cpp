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
#include "world.hpp"

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
