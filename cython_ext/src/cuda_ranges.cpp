// SPDX-License-Identifier: Apache-2.0
#include "cuda_ranges.hpp"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "capi_support.hpp"
#include "copy.hpp"
#include "engine.hpp"

namespace moonpool {

namespace {

using cuda::Copy;
using cuda::Slot;
using cuda::Stager;

// So much pinned memory is filled while what is before it is on its way.
constexpr size_t kChunksMax = 8;

// What the stager tells, and the regions that it still needs: it may outlive the call.
struct Shared {
  ~Shared() { end_uses(); }
  // Nothing is under way any more. The stager may not have let go of this yet.
  void end_uses() {
    for (const auto &region : regions) region->end_use();
    regions.clear();
  }
  std::vector<std::shared_ptr<Region>> regions;
  std::mutex mutex;
  std::condition_variable changed;
};

struct Part {
  uint8_t *host;
  uint64_t nbytes;
};

// Bytes that pass through one piece of pinned memory.
struct Chunk {
  Slot slot;
  uint64_t filled = 0;
  std::vector<Copy> copies;
  std::vector<Part> parts;  // of memory of the host, in the order of the piece
  bool ended = false;
  Error error;
};

cuda::Pointer pointer(const CopySide &side, size_t i, uint64_t skip) {
  return reinterpret_cast<cuda::Pointer>(side.base) + side.ranges.offset(i) + skip;
}

// Memory that the driver knows as pinned, all of it.
bool is_pinned(const cuda::Driver &driver, const CopySide &side) {
  cuda::PointerFacts first, last;
  const auto begin = reinterpret_cast<cuda::Pointer>(side.base);
  if (cuda::pointer_facts(driver, begin, &first) || cuda::pointer_facts(driver, begin + side.nbytes - 1, &last)) {
    return false;
  }
  return first.kind == cuda::Kind::kPinned && last.kind == first.kind && last.buffer_id == first.buffer_id;
}

class RangeCopy {
 public:
  RangeCopy(Engine &engine, const CopySide &to, const CopySide &from)
      : to_(to),
        from_(from),
        direction_(to.region == nullptr     ? Stager::kToHost
                   : from.region == nullptr ? Stager::kToDevice
                                            : Stager::kOnDevice),
        timeout_(engine.config.progress_timeout_ms),
        staging_(engine.staging),
        stager_(engine.staging.stager((to.region != nullptr ? to : from).region->device)),
        shared_(std::make_shared<Shared>()) {}

  Error run() {
    for (const CopySide *const side : {&to_, &from_}) {
      if (side->region == nullptr) continue;
      if (!side->region->begin_use()) return make_error(MP_REGION_RELEASED, side->region->label() + " is released");
      shared_->regions.push_back(side->region);
      if (Error error = side->region->check_memory()) return error;
    }
    const bool direct =
        direction_ == Stager::kOnDevice || is_pinned((to_.region != nullptr ? to_ : from_).region->device->driver(),
                                                     direction_ == Stager::kToDevice ? from_ : to_);
    if (direct) return copy_all();
    Error error = begin_chunks();
    // What was begun is waited for in any case: it writes memory of the caller.
    while (!chunks_.empty()) {
      if (Error ended = finish_oldest(); ended && !error) error = ended;
    }
    if (!late_) shared_->end_uses();
    return error;
  }

 private:
  // The device reaches both sides.
  Error copy_all() {
    std::vector<cuda::Piece> pieces(to_.ranges.count);
    uint64_t all = 0;
    for (size_t i = 0; i < pieces.size(); ++i) {
      pieces[i] = {pointer(to_, i, 0), pointer(from_, i, 0), to_.ranges.length(i)};
      all += pieces[i].nbytes;
    }
    const bool within =
        direction_ == Stager::kOnDevice && to_.region->device->context() == from_.region->device->context();
    const cuda::Reach reach = direction_ != Stager::kOnDevice ? cuda::Reach::kHost
                              : within                        ? cuda::Reach::kWithinDevice
                                                              : cuda::Reach::kAnywhere;
    cuda::Stream going_on = nullptr;
    const auto copier = staging_.direct((to_.region != nullptr ? to_ : from_).region->device);
    const int64_t timeout_ns = std::chrono::nanoseconds(timeout_).count();
    const Error error = copier->copy(std::move(pieces), reach, timeout_ns, &going_on);
    if (going_on != nullptr) {
      // The regions are in use until it ends. Where nobody can tell that any more, the context is gone.
      stager_->after_stream(
          reinterpret_cast<uint64_t>(going_on), [] { return false; }, [shared = shared_](const Error &) {});
      return late("a copy");
    }
    if (!error) count(all);
    return error;
  }

  void count(uint64_t nbytes) {
    cuda::StagerCounters &counters = staging_.counters;
    counters.copies.fetch_add(1, std::memory_order_relaxed);
    (direction_ == Stager::kToDevice ? counters.to_device_bytes
     : direction_ == Stager::kToHost ? counters.to_host_bytes
                                     : counters.on_device_bytes)
        .fetch_add(nbytes, std::memory_order_relaxed);
  }

  Error begin_chunks() {
    std::shared_ptr<Chunk> chunk;
    for (size_t i = 0; i < to_.ranges.count; ++i) {
      const uint64_t nbytes = to_.ranges.length(i);
      for (uint64_t done = 0; done < nbytes;) {
        if (chunk == nullptr) {
          chunk = std::make_shared<Chunk>();
          if (Error error = take_slot(&chunk->slot)) return error;
        }
        done += add(*chunk, i, done);
        if (chunk->filled == cuda::kPieceBytes) begin(std::move(chunk));
      }
    }
    if (chunk != nullptr) begin(std::move(chunk));
    return {};
  }

  // Some bytes of range i, as many as the piece has room for.
  uint64_t add(Chunk &chunk, size_t i, uint64_t done) {
    const uint64_t nbytes = std::min(to_.ranges.length(i) - done, cuda::kPieceBytes - chunk.filled);
    uint8_t *const staged = chunk.slot.data() + chunk.filled;
    const bool to_device = direction_ == Stager::kToDevice;
    const CopySide &host = to_device ? from_ : to_;
    uint8_t *const there = host.base + host.ranges.offset(i) + done;
    chunk.copies.push_back({pointer(to_device ? to_ : from_, i, done), staged, nbytes});
    chunk.filled += nbytes;
    if (to_device) {
      copy_bytes(staged, there, nbytes, false);
    } else {
      chunk.parts.push_back({there, nbytes});
    }
    return nbytes;
  }

  // Whoever waits for pinned memory has none.
  Error take_slot(Slot *out) {
    while (!(*out = stager_->try_slot(Stager::kOwn))) {
      if (chunks_.empty()) return wait_slot(out);
      if (Error error = finish_oldest()) return error;
    }
    return {};
  }

  Error wait_slot(Slot *out) {
    struct Wanted {
      Slot slot;
      Error error;
      bool told = false;
    };
    auto wanted = std::make_shared<Wanted>();
    stager_->want_slot(Stager::kOwn, [wanted, shared = shared_](Slot slot, const Error &error) {
      std::lock_guard lock(shared->mutex);
      wanted->slot = std::move(slot);
      wanted->error = error;
      wanted->told = true;
      shared->changed.notify_all();
    });
    std::unique_lock lock(shared_->mutex);
    if (!shared_->changed.wait_for(lock, timeout_, [&] { return wanted->told; })) return late("pinned memory");
    if (wanted->error) return wanted->error;
    *out = std::move(wanted->slot);
    return {};
  }

  void begin(std::shared_ptr<Chunk> chunk) {
    while (chunks_.size() >= kChunksMax) {
      if (Error error = finish_oldest(); error && !first_) first_ = error;
    }
    std::vector<Copy> copies = std::move(chunk->copies);
    chunks_.push_back(chunk);
    stager_->copy(direction_, std::move(copies), [chunk, shared = shared_](const Error &error) {
      std::lock_guard lock(shared->mutex);
      chunk->error = error;
      chunk->ended = true;
      shared->changed.notify_all();
    });
  }

  // Waits for it, and takes its bytes to where they belong.
  Error finish_oldest() {
    const std::shared_ptr<Chunk> chunk = std::move(chunks_.front());
    chunks_.pop_front();
    {
      std::unique_lock lock(shared_->mutex);
      if (!shared_->changed.wait_for(lock, timeout_, [&] { return chunk->ended; })) {
        // The others come after it. They touch no memory of the host but that of the stager.
        chunks_.clear();
        late_ = true;
        return late("a copy");
      }
    }
    if (first_) return std::exchange(first_, {});
    if (chunk->error) return chunk->error;
    uint64_t at = 0;
    for (const Part &part : chunk->parts) {
      copy_bytes(part.host, chunk->slot.data() + at, part.nbytes, false);
      at += part.nbytes;
    }
    return {};
  }

  Error late(const char *what) const {
    return make_error(MP_DEADLINE,
                      std::string("waited ") + std::to_string(timeout_.count()) + " ms for " + what +
                          " of a GPU that makes no progress",
                      "see whether the GPU hangs (nvidia-smi); a longer progress_timeout where it is only busy");
  }

  const CopySide &to_, &from_;
  const Stager::Direction direction_;
  const std::chrono::milliseconds timeout_;
  cuda::Staging &staging_;
  const std::shared_ptr<Stager> stager_;
  const std::shared_ptr<Shared> shared_;
  std::deque<std::shared_ptr<Chunk>> chunks_;
  Error first_;  // of a chunk that was finished on the way
  bool late_ = false;
};

}  // namespace

Error copy_device_ranges(Engine &engine, const CopySide &to, const CopySide &from) {
  size_t bad = 0;
  if (!to.ranges.inside(to.nbytes, &bad) || !from.ranges.inside(from.nbytes, &bad)) {
    Error error = make_error(MP_OUT_OF_RANGE,
                             "item " + std::to_string(bad) + " is not inside the " + std::to_string(from.nbytes) +
                                 " bytes of source and the " + std::to_string(to.nbytes) + " of target",
                             "offset + length up to the end of both");
    error.item = static_cast<int64_t>(bad);
    return error;
  }
  if (to.ranges.count == 0) return {};
  return RangeCopy(engine, to, from).run();
}

}  // namespace moonpool

using namespace moonpool;

namespace {

Error side_of(mp_region *handle, void *data, uint64_t nbytes, const Ranges &ranges, CopySide *out) {
  *out = {nullptr, static_cast<uint8_t *>(data), nbytes, ranges};
  if (handle == nullptr) return {};
  Region &region = *handle->region;
  if (region.device == nullptr) {
    return make_error(MP_INVALID_ARGUMENT, region.label() + " is not memory of a GPU", "NULL, and where its memory is");
  }
  *out = {handle->region, region.base, region.length, ranges};
  return {};
}

}  // namespace

extern "C" mp_status mp_region_copy_batch(mp_region *target_region, void *target, uint64_t target_bytes,
                                          const int64_t *target_offsets, size_t target_offsets_stride,
                                          mp_region *source_region, const void *source, uint64_t source_bytes,
                                          const int64_t *source_offsets, size_t source_offsets_stride,
                                          const int64_t *lengths, size_t lengths_stride, size_t count,
                                          mp_error *error) {
  mp_region *const either = target_region != nullptr ? target_region : source_region;
  return call(either, "target_region and source_region", error, [&]() -> Error {
    CopySide to, from;
    const Ranges to_ranges{target_offsets, target_offsets_stride, lengths, lengths_stride, count};
    const Ranges from_ranges{source_offsets, source_offsets_stride, lengths, lengths_stride, count};
    if (Error bad = side_of(target_region, target, target_bytes, to_ranges, &to)) return bad;
    // What is only read is not written through this.
    if (Error bad = side_of(source_region, const_cast<void *>(source), source_bytes, from_ranges, &from)) return bad;
    if (to.region != nullptr && !to.region->writable_here()) {
      return make_error(MP_REGION_READ_ONLY, to.region->label() + " is read-only", "register it with writable=True");
    }
    return copy_device_ranges(*either->engine, to, from);
  });
}
