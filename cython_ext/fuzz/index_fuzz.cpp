// SPDX-License-Identifier: Apache-2.0
//
// The chunk index: calls in any order with keys, owners and segments from a handful, and restarts from records that are
// right, damaged, or well-formed nonsense. After each call nothing in the index contradicts itself.
#include <algorithm>
#include <cstdio>
#include <set>

#include "index.hpp"
#include "script.hpp"
#include "seeds.hpp"
#include "world.hpp"

using namespace moonpool::fuzz;
using namespace moonpool::index;

namespace {

enum Step : uint8_t {
  kAddSegment,
  kSetSegment,
  kDropSegment,
  kSweep,
  kStart,
  kCommit,
  kPublish,
  kRevoke,
  kAbort,
  kExpire,
  kDropOwner,
  kFenced,
  kRead,
  kPin,
  kUnpin,
  kRemove,
  kRemovePrefix,
  kEvict,
  kReclaim,
  kRestart,
  kRestore,
  kWait,
  kMoveOut,
  kMoveTo,
  kCommitMoves,
  kEndMoves,
  kMend,
  kDemoteMore,
  kEvictDisk,
  kPromote,
  kSpoilt,
  kSteps,
};

constexpr uint32_t kChunksMax = 24;
constexpr const char *kPolicies[] = {"lru", "s3fifo", "prefix"};

class Run {
 public:
  explicit Run(uint8_t policy) : policy_(kPolicies[policy % 3]) { restart(); }

  void step(const ScriptStep &step) {
    Source source(step.bytes);
    puts(step.what % kSteps, source);
    others(step.what % kSteps, source);
    moves(step.what % kSteps, source);
    std::string wrong;
    FUZZ_CHECK(index_->check(&wrong) == Outcome::kOk);
    if (!wrong.empty()) std::fprintf(stderr, "after a step %u: %s\n", step.what % kSteps, wrong.c_str());
    FUZZ_CHECK(wrong.empty());
  }

 private:
  struct Put {
    uint32_t owner, shard;
    uint8_t hash[kHashBytes];
    uint32_t name_space;
    uint64_t generation;
  };
  struct Row {
    uint32_t slot;
    std::string record;
  };
  // Moves whose records are not durable yet.
  struct Moved {
    std::string ids;
    std::vector<Row> rows;
  };

  void restart() {
    index_ = ChunkIndex::make(policy_, kChunksMax, ++epoch_, 7);
    FUZZ_CHECK(index_ != nullptr);
    puts_.clear();
    waiting_.clear();
    removed_.clear();
    moves_.clear();
    moved_.clear();
  }

  // Up to eight keys of one namespace.
  Hashes batch(Source &source) {
    const size_t count = 1 + source.below(8);
    hashes_.assign(count * kHashBytes, 0);
    for (size_t i = 0; i < count; ++i) hashes_[i * kHashBytes + 5] = static_cast<uint8_t>(source.below(20));
    return {hashes_.data(), count, static_cast<uint32_t>(source.below(2))};
  }
  static uint32_t owner(Source &source) { return static_cast<uint32_t>(source.below(3)); }
  static uint32_t segment(Source &source) { return static_cast<uint32_t>(source.below(5)); }

  void start(Source &source) {
    const Hashes hashes = batch(source);
    std::vector<uint8_t> lengths(8 * hashes.count), statuses(hashes.count);
    for (size_t i = 0; i < hashes.count; ++i) lengths[i * 8 + 1] = source.get<uint8_t>();
    StartCall call{};
    call.owner = owner(source);
    call.hashes = hashes;
    std::vector<uint8_t> parents(hashes.count * kHashBytes);
    const uint8_t chained = source.get<uint8_t>();
    for (size_t i = 0; i < hashes.count; ++i) parents[i * kHashBytes + 5] = static_cast<uint8_t>(source.below(21));
    call.parents = {parents.data(), chained < 80 ? 0 : chained < 160 ? kHashBytes : parents.size()};
    call.lengths = lengths.data();
    call.one_length = false;
    call.shard = static_cast<uint32_t>(source.below(3));
    call.shards = 1 + static_cast<uint32_t>(source.below(3));
    call.replicas = 1 + static_cast<uint32_t>(source.below(3));
    call.avoid = {segment(source)};
    call.host = static_cast<uint32_t>(source.below(3));
    call.now = now_;
    call.deadline = now_ + source.get<uint8_t>();
    std::vector<uint8_t> extents(hashes.count * call.replicas * kExtentBytes);
    FUZZ_CHECK(index_->start(call, statuses.data(), extents.data()) == Outcome::kOk);
    for (size_t i = 0; i < hashes.count; ++i) {
      if (statuses[i] != 0) continue;
      Put put{call.owner, call.shard, {}, hashes.name_space, load_u64(&extents[i * call.replicas * kExtentBytes])};
      std::copy_n(hashes[i], kHashBytes, put.hash);
      puts_.push_back(put);
    }
  }

  void commit(const Put &put, uint8_t written) {
    uint8_t generation[8], status = 0;
    std::memcpy(generation, &put.generation, 8);
    std::string slots, records;
    FUZZ_CHECK(index_->commit(put.owner, {put.hash, 1, put.name_space}, generation, put.shard, &written, &status,
                              &slots, &records) == Outcome::kOk);
    FUZZ_CHECK(slots.size() == (status == 0 ? 4u : 0u));
    if (status == 0) waiting_.push_back({load_u32(reinterpret_cast<uint8_t *>(slots.data())), records.substr(4)});
  }

  // The oldest commit is durable, or is not.
  void settle(bool durable) {
    if (waiting_.empty()) return;
    const Row row = waiting_.front();
    waiting_.erase(waiting_.begin());
    const auto *slot = reinterpret_cast<const uint8_t *>(&row.slot);
    std::string keys;
    FUZZ_CHECK((durable ? index_->publish(slot, 1, &keys) : index_->revoke(slot, 1)) == Outcome::kOk);
    if (!durable) return;
    drop_row(row.slot);
    rows_.push_back(row);
  }
  void drop_row(uint32_t slot) {
    std::erase_if(rows_, [&](const Row &row) { return row.slot == slot; });
  }

  void puts(uint8_t what, Source &source) {
    std::string out;
    if (what == kStart) start(source);
    if ((what == kCommit || what == kAbort) && !puts_.empty()) {
      const Put put = puts_[source.below(puts_.size())];
      if (what == kCommit) {
        commit(put, source.get<uint8_t>());
      } else {
        uint8_t generation[8], status = 0;
        std::memcpy(generation, &put.generation, 8);
        index_->abort(put.owner, {put.hash, 1, put.name_space}, generation, put.shard, source.below(2) == 0, &status);
      }
    }
    if (what == kPublish || what == kRevoke) settle(what == kPublish);
    if (what == kExpire) index_->expire(now_, &out);
    if (what == kDropOwner) index_->drop_owner(owner(source), &out);
    uint64_t bytes = 0;
    if (what == kFenced) index_->fenced(owner(source), segment(source), &bytes);
    if (what == kWait) now_ += source.get<uint8_t>();
  }

  void others(uint8_t what, Source &source) {
    std::string out, keys;
    uint8_t statuses[8];
    size_t count = 0;
    if (what == kAddSegment) {
      const uint32_t number = segment(source), host = static_cast<uint32_t>(source.below(3));
      const uint64_t capacity = 64 + source.get<uint16_t>() * uint64_t{8};
      const int64_t ramp_up = source.get<uint8_t>();
      // A disk is some blocks; it may be restored as what it is not, too.
      const bool disk = source.below(3) == 2;
      const uint32_t above = disk ? segment(source) : kNone;
      if (index_->add_segment(number, capacity * (disk ? 64 : 1), host, ramp_up, now_, above) == Outcome::kOk && disk) {
        disks_.insert(number);
      }
    }
    if (what == kSetSegment) {
      const uint32_t number = segment(source);
      index_->set_segment(number, source.below(2) == 0, source.below(2) == 0);
    }
    if (what == kDropSegment) index_->drop_segment(segment(source));
    bool complete = false;
    if (what == kSweep) index_->sweep(1 + static_cast<uint32_t>(source.below(30)), &removed_, &complete);
    if (what == kRead) read(source);
    if (what == kPin) {
      const Hashes hashes = batch(source);
      index_->pin(owner(source), source.below(2), hashes, statuses);
    }
    if (what == kUnpin) {
      const uint32_t its = owner(source);
      index_->unpin(its, source.below(2), &count);
    }
    if (what == kRemove) index_->remove(batch(source), statuses, &removed_);
    if (what == kRemovePrefix) {
      const Hashes hashes = batch(source);
      index_->remove_prefix(hashes.name_space, hashes.data, &removed_, &count);
    }
    uint64_t bytes = 0;
    if (what == kReclaim) {
      for (size_t i = 0; i < removed_.size(); i += 4) {
        const uint32_t slot = load_u32(at(removed_, i));
        drop_row(slot);
        for (Moved &moved : moved_) std::erase_if(moved.rows, [&](const Row &row) { return row.slot == slot; });
      }
      index_->reclaim(at(removed_, 0), removed_.size() / 4, now_, &bytes);
      removed_.clear();
    }
    if (what == kRestart) {
      restart();
      for (const uint32_t disk : disks_) index_->know_disk(disk);
      for (const Row &row : rows_) restore(row.slot, row.record);
    }
    if (what == kRestore) restore_nonsense(source);
  }

  void moves(uint8_t what, Source &source) {
    std::string begun;
    if (what == kMoveOut) {
      MoveOutCall call{
          segment(source), static_cast<uint32_t>(source.below(8)), 20, 4, 4000, 9000, {segment(source)}, now_};
      uint32_t next = 0;
      uint64_t no_room = 0;
      index_->move_out(call, &begun, &next, &no_room);
    }
    if (what == kMoveTo) {
      const Hashes hashes = batch(source);
      uint8_t statuses[8];
      index_->move_to({hashes, segment(source), static_cast<uint32_t>(source.below(8)), 4000}, statuses, &begun);
    }
    if (what == kMend) mend(source, &begun);
    disks(what, source, &begun);
    for (size_t i = 0; i < begun.size(); i += kMoveBytes) moves_ += begun.substr(i, 8);
    if (what == kCommitMoves) commit_moves(source);
    if (what == kEndMoves) end_moves(source);
  }
  // Any copy of these is spoilt.
  void mend(Source &source, std::string *begun) {
    const Hashes hashes = batch(source);
    uint8_t statuses[8];
    uint32_t replicas = 0;
    std::string extents, spoilt;
    FUZZ_CHECK(index_->locate(hashes, 0, now_, 0, statuses, &extents, &replicas) == Outcome::kOk);
    for (size_t i = 0; i < hashes.count; ++i) {
      spoilt += extents.substr((i * replicas + source.below(replicas)) * kExtentBytes, kExtentBytes);
    }
    FUZZ_CHECK(index_->mend({hashes, 0, at(spoilt, 0), source.below(2) != 0, now_}, statuses, begun, &removed_) ==
               Outcome::kOk);
  }
  void disks(uint8_t what, Source &source, std::string *begun) {
    std::string keys;
    uint64_t bytes = 0;
    if (what == kEvict) {
      Evicted evicted;
      const uint64_t want = source.get<uint16_t>();
      const DemoteCall demote{static_cast<uint32_t>(source.below(3)), 3, 4000, {segment(source)}};
      // Ranges that follow from the time.
      const auto first = static_cast<uint64_t>(now_ % 64);
      const uint64_t range[2] = {epoch_ << 40 | first, epoch_ << 40 | (first + 8)};
      const bool spare = now_ % 2 == 1;
      index_->evict(
          want, now_, demote, &evicted,
          {reinterpret_cast<const uint8_t *>(range), spare ? size_t{1} : 0, {}, spare ? range[1] : UINT64_MAX});
      removed_ += evicted.slots;
      *begun = evicted.moves;
    }
    if (what == kDemoteMore) {
      std::string slots;
      for (size_t i = 1 + source.below(4); i > 0; --i) append_u32(&slots, static_cast<uint32_t>(source.below(24)));
      index_->demote_more(at(slots, 0), slots.size() / 4, {1, 3, 4000, {}}, begun);
    }
    if (what == kEvictDisk) index_->evict_disk(segment(source), source.get<uint16_t>(), now_, &removed_, &keys, &bytes);
    if (what == kPromote) {
      const Hashes hashes = batch(source);
      uint8_t statuses[8];
      const auto shard = static_cast<uint32_t>(source.below(3));
      FUZZ_CHECK(index_->promote({hashes, shard, static_cast<uint32_t>(source.below(8)), 4000}, statuses, begun,
                                 &bytes) == Outcome::kOk);
    }
    if (what == kSpoilt && !moves_.empty()) {
      const size_t from = source.below(moves_.size() / 8) * 8;
      index_->spoilt(at(moves_, from), (moves_.size() - from) / 8, &removed_, &keys);
      index_->abort_moves(at(moves_, from), (moves_.size() - from) / 8, &bytes);
      moves_.resize(from);
    }
  }
  void commit_moves(Source &source) {
    if (moves_.empty()) return;
    const size_t from = source.below(moves_.size() / 8) * 8;
    Moved moved{moves_.substr(from), {}};
    moves_.resize(from);
    std::vector<uint8_t> statuses(moved.ids.size() / 8);
    std::string slots, records;
    FUZZ_CHECK(index_->commit_moves(at(moved.ids, 0), statuses.size(), statuses.data(), &slots, &records) ==
               Outcome::kOk);
    for (size_t i = 0, begin = 0; i < slots.size(); i += 4) {
      const uint32_t size = load_u32(at(records, begin));
      moved.rows.push_back({load_u32(at(slots, i)), records.substr(begin + 4, size)});
      begin += 4 + size;
    }
    moved_.push_back(moved);
  }
  // The oldest are durable, or are not; or copies of others have failed.
  void end_moves(Source &source) {
    const uint64_t how = source.below(4);
    uint64_t bytes = 0;
    if (how == 3) {
      index_->abort_moves(at(moves_, 0), moves_.size() / 8, &bytes);
      moves_.clear();
    }
    if (moved_.empty() || how == 3) return;
    const Moved moved = moved_.front();
    moved_.erase(moved_.begin());
    if (how == 0) {
      index_->abort_moves(at(moved.ids, 0), moved.ids.size() / 8, &bytes);
      return;
    }
    for (const Row &row : moved.rows) {
      drop_row(row.slot);
      rows_.push_back(row);
    }
    index_->publish_moves(at(moved.ids, 0), moved.ids.size() / 8, now_, &bytes);
  }

  static const uint8_t *at(const std::string &bytes, size_t i) {
    return reinterpret_cast<const uint8_t *>(bytes.data()) + i;
  }

  void read(Source &source) {
    const Hashes hashes = batch(source);
    uint8_t there[8], statuses[8];
    size_t matched = 0;
    uint32_t replicas = 0;
    std::string extents;
    const int64_t lease = source.get<uint8_t>();
    FUZZ_CHECK(index_->exists(hashes, there) == Outcome::kOk);
    FUZZ_CHECK(index_->match_prefix(hashes, now_, lease, &matched) == Outcome::kOk);
    for (size_t i = 0; i < matched; ++i) FUZZ_CHECK(there[i] == 0);
    FUZZ_CHECK(matched == hashes.count || there[matched] != 0);
    FUZZ_CHECK(index_->locate(hashes, 0, now_, lease, statuses, &extents, &replicas) == Outcome::kOk);
    for (size_t i = 0; i < hashes.count; ++i) {
      const bool has = load_u32(at(extents, i * replicas * kExtentBytes + 24)) != kNone;
      FUZZ_CHECK(has == (statuses[i] == 0));
      // What is on a disk is there, and readers are given no place of it.
      FUZZ_CHECK(there[i] != 0 || has || statuses[i] == static_cast<uint8_t>(ItemStatus::kLoading));
    }
  }

  void restore(uint32_t slot, const std::string &record) {
    std::string packed;
    append_u32(&packed, static_cast<uint32_t>(record.size()));
    packed += record;
    size_t taken = 0;
    FUZZ_CHECK(index_->restore(reinterpret_cast<const uint8_t *>(&slot), 1, at(packed, 0), packed.size(), &taken) ==
               Outcome::kOk);
  }

  void restore_nonsense(Source &source) {
    const auto slot = static_cast<uint32_t>(source.below(kChunksMax + 2));
    if (!rows_.empty() && source.below(2) == 0) {
      std::string record = rows_[source.below(rows_.size())].record;
      record[source.below(record.size())] ^= static_cast<char>(source.get<uint8_t>());
      if (source.below(4) == 0) record.resize(source.below(record.size()));
      restore(slot, record);
      return;
    }
    Record record{};
    record.hash[5] = static_cast<uint8_t>(source.below(20));
    record.parent[5] = static_cast<uint8_t>(source.below(21));
    record.name_space = static_cast<uint32_t>(source.below(2));
    record.shards = source.get<uint8_t>();
    for (size_t n = source.below(4); n > 0; --n) {
      RecordShard &shard = record.present.emplace_back();
      shard.shard = static_cast<uint16_t>(source.below(4));
      shard.generation = source.get<uint64_t>();
      shard.length = source.get<uint8_t>() < 250 ? source.get<uint16_t>() : source.get<uint64_t>();
      for (size_t m = source.below(4); m > 0; --m) {
        const uint64_t offset = source.get<uint8_t>() < 250 ? source.get<uint8_t>() * kUnit : source.get<uint64_t>();
        shard.extents.push_back({segment(source), offset});
      }
    }
    std::string bytes;
    encode(record, slot, &bytes);
    restore(slot, bytes);
  }

  const char *policy_;
  std::unique_ptr<ChunkIndex> index_;
  uint64_t epoch_ = 0;
  int64_t now_ = 1000;
  std::vector<uint8_t> hashes_;
  std::vector<Put> puts_;
  std::vector<Row> waiting_, rows_;  // commits that are not durable yet, and what is durable
  std::string removed_;              // slots
  std::string moves_;                // numbers of those that are copied
  std::vector<Moved> moved_;
  std::set<uint32_t> disks_;  // that there ever were
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size == 0) return 0;
  World::get().reset();
  Run run(data[0]);
  for (const ScriptStep &step : parse_script(data + 1, size - 1)) run.step(step);
  return 0;
}

moonpool::fuzz::Seeds moonpool::fuzz::seeds() {
  const auto byte = [](unsigned value) { return static_cast<uint8_t>(value); };
  Seeds all;
  for (unsigned policy = 0; policy < 3; ++policy) {
    ScriptWriter script;
    script.step(kAddSegment, byte(1), byte(1), uint16_t{4000}, byte(0));
    script.step(kAddSegment, byte(2), byte(2), uint16_t{4000}, byte(9));
    // Three keys of namespace 1, 1 KiB each, with parents, in one shard.
    script.step(kStart, byte(2), byte(1), byte(2), byte(3), byte(1), byte(4), byte(4), byte(4), byte(1), byte(100),
                byte(20), byte(1), byte(2), byte(0), byte(0), byte(1), byte(0), byte(0), byte(200));
    for (unsigned put = 0; put < 3; ++put) script.step(kCommit, byte(put), byte(255)).step(kPublish);
    script.step(kRead, byte(2), byte(1), byte(2), byte(3), byte(1), byte(20));
    script.step(kPin, byte(0), byte(1), byte(1), byte(0), byte(0)).step(kUnpin, byte(0), byte(0));
    script.step(kMoveOut, byte(2), byte(0), byte(0)).step(kCommitMoves, byte(0)).step(kEndMoves, byte(1));
    script.step(kMoveTo, byte(2), byte(1), byte(2), byte(3), byte(1), byte(2), byte(7)).step(kCommitMoves, byte(0));
    script.step(kRemove, byte(0), byte(1), byte(1)).step(kReclaim).step(kEndMoves, byte(2));
    script.step(kRestart).step(kAddSegment, byte(1), byte(1), uint16_t{4000}, byte(0));
    script.step(kEvict, uint16_t{3000}).step(kWait, byte(100)).step(kEvict, uint16_t{3000}).step(kReclaim);
    script.step(kAddSegment, byte(3), byte(1), uint16_t{4000}, byte(0), byte(2), byte(1));
    script.step(kEvict, uint16_t{3000}, byte(1), byte(0)).step(kCommitMoves, byte(0)).step(kEndMoves, byte(1));
    script.step(kPromote, byte(2), byte(1), byte(2), byte(3), byte(1), byte(0), byte(7)).step(kCommitMoves, byte(0));
    script.step(kEndMoves, byte(1)).step(kEvict, uint16_t{3000}).step(kCommitMoves, byte(0)).step(kEndMoves, byte(1));
    script.step(kEvictDisk, byte(3), uint16_t{3000}).step(kReclaim).step(kRestart);
    script.step(kDropSegment, byte(2)).step(kSweep, byte(29)).step(kReclaim);
    all.add(kPolicies[policy], std::string(1, static_cast<char>(policy)) + script.text());
  }
  ScriptWriter nonsense;
  nonsense.step(kRestore, byte(3), byte(1), byte(1), byte(0), byte(1), byte(1), byte(1), byte(0), uint64_t{5}, byte(0),
                uint16_t{100}, byte(1), byte(0), byte(4), byte(2));
  nonsense.step(kAddSegment, byte(2), byte(1), uint16_t{4000}, byte(0)).step(kSweep, byte(29)).step(kReclaim);
  all.add("restore", std::string(1, '\0') + nonsense.text());
  return all;
}
