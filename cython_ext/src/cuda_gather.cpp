// SPDX-License-Identifier: Apache-2.0
#include "cuda_gather.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "system.hpp"

namespace moonpool::cuda {

namespace {

// Launches that may be under way. Whoever wants another one waits for the oldest.
constexpr size_t kTablesMax = 8;
constexpr size_t kTablePiecesMin = 1024;
// Between two looks at whether one of them has ended.
constexpr int64_t kFirstPauseNs = 20'000;
constexpr int64_t kLongestPauseNs = 1'000'000;
// Of a piece, for one block. Large pieces are shared by several.
constexpr uint64_t kBlockBytes = 64u << 10;
constexpr unsigned kBlocksOfPieceMax = 64;

unsigned blocks_of_piece(const Piece *pieces, size_t count) {
  uint64_t longest = 0;
  for (size_t i = 0; i < count; ++i) longest = std::max(longest, pieces[i].nbytes);
  return static_cast<unsigned>(std::clamp<uint64_t>((longest + kBlockBytes - 1) / kBlockBytes, 1, kBlocksOfPieceMax));
}

// So that a kernel is the best way.
bool is_small(const Piece *pieces, size_t count, Reach reach) {
  uint64_t nbytes = 0, bits = 0;
  for (size_t i = 0; i < count; ++i) {
    nbytes += pieces[i].nbytes;
    bits |= pieces[i].to | pieces[i].from;
  }
  const uint64_t most = reach == Reach::kHost ? kKernelHostPieceBytes : kKernelPieceBytes;
  return bits % 16 == 0 && nbytes / count <= most;
}

}  // namespace

void join_pieces(std::vector<Piece> *pieces) {
  size_t kept = 0;
  for (const Piece &piece : *pieces) {
    if (piece.nbytes == 0) continue;
    Piece *const last = kept > 0 ? &(*pieces)[kept - 1] : nullptr;
    if (last != nullptr && last->to + last->nbytes == piece.to && last->from + last->nbytes == piece.from) {
      last->nbytes += piece.nbytes;
    } else {
      (*pieces)[kept++] = piece;
    }
  }
  pieces->resize(kept);
}

PieceCopier::~PieceCopier() {
  const ContextScope current(driver_, context_);
  if (current.result() != kSuccess) return;  // it has taken everything with it
  for (const auto &table : tables_) drop_table(table.get());
  if (module_ != nullptr) driver_.module_unload(module_);
}

Result PieceCopier::enqueue(std::vector<Piece> pieces, Reach reach, Stream stream, bool *begun) {
  *begun = false;
  join_pieces(&pieces);
  for (size_t done = 0; done < pieces.size();) {
    const size_t some = std::min(kPiecesMax, pieces.size() - done);
    const Result result = enqueue_some(pieces.data() + done, some, reach, stream, begun);
    if (result != kSuccess) return result;
    *begun = true;
    done += some;
  }
  return kSuccess;
}

Result PieceCopier::enqueue_some(const Piece *pieces, size_t count, Reach reach, Stream stream, bool *begun) {
  if (count == 1) return one_by_one(pieces, count, stream, begun);
  const bool reaches = reach != Reach::kAnywhere;
  if (reaches && is_small(pieces, count, reach) && has_kernel()) return launch(pieces, count, stream, begun);
  if (driver_.copy_batch != nullptr) {
    const Result result = batch(pieces, count, stream);
    // A driver that has the call may still not have it for this device.
    if (result != kNotSupported) return result;
  }
  // A kernel is slow where pieces are not aligned, and still better than a call for each.
  if (reaches && has_kernel()) return launch(pieces, count, stream, begun);
  return one_by_one(pieces, count, stream, begun);
}

Result PieceCopier::one_by_one(const Piece *pieces, size_t count, Stream stream, bool *begun) {
  for (size_t i = 0; i < count; ++i) {
    const Result result = driver_.copy(pieces[i].to, pieces[i].from, pieces[i].nbytes, stream);
    if (result != kSuccess) return result;
    *begun = true;
  }
  return kSuccess;
}

Result PieceCopier::batch(const Piece *pieces, size_t count, Stream stream) {
  std::vector<Pointer> to(count), from(count);
  std::vector<size_t> nbytes(count);
  for (size_t i = 0; i < count; ++i) {
    to[i] = pieces[i].to;
    from[i] = pieces[i].from;
    nbytes[i] = pieces[i].nbytes;
  }
  CopyAttributes attributes{kSourceAccessOrderStream, {}, {}, 0};
  size_t first = 0, failed = 0;
  return driver_.copy_batch(to.data(), from.data(), nbytes.data(), count, &attributes, &first, 1, &failed, stream);
}

Result PieceCopier::launch(const Piece *pieces, size_t count, Stream stream, bool *begun) {
  Table *table = nullptr;
  if (const Result result = take_table(count, &table); result != kSuccess) return result;
  std::memcpy(table->memory, pieces, count * sizeof(Piece));
  auto where = reinterpret_cast<Pointer>(table->memory);
  void *parameters[] = {&where};
  Result result = driver_.launch(function_, static_cast<unsigned>(count), blocks_of_piece(pieces, count), 1,
                                 kCopyThreads, 1, 1, 0, stream, parameters, nullptr);
  const bool launched = result == kSuccess;
  if (launched) {
    *begun = true;
    result = driver_.event_record(table->read, stream);
  }
  {
    std::lock_guard lock(mutex_);
    // A kernel of which nobody can tell when it has read its table keeps it.
    table->taken = launched && result != kSuccess;
  }
  returned_.notify_one();
  return result;
}

// Loaded when it is first needed. Where it cannot be, such as where compiling PTX is forbidden, copies go other ways.
bool PieceCopier::has_kernel() {
  std::lock_guard lock(mutex_);
  if (!looked_) {
    looked_ = true;
    if (driver_.module_load(&module_, kCopyModule) != kSuccess) {
      module_ = nullptr;
    } else if (driver_.module_function(&function_, module_, kCopyKernel) != kSuccess) {
      function_ = nullptr;
    }
  }
  return function_ != nullptr;
}

// One that no kernel reads any more. Where all are read, one is waited for: kernels end.
Result PieceCopier::take_table(size_t count, Table **out) {
  std::unique_lock lock(mutex_);
  const int64_t until = now_ns() + (late_ ? 0 : patience_ns_);
  Table *found = idle_table();
  for (int64_t pause = kFirstPauseNs; found == nullptr; found = idle_table()) {
    if (tables_.size() < kTablesMax) {
      auto table = std::make_unique<Table>();
      const Result result = driver_.event_create(&table->read, kEventDisableTiming);
      if (result != kSuccess) return result;
      tables_.push_back(std::move(table));
    } else if (now_ns() >= until) {
      late_ = true;
      return kNotReady;
    } else {
      returned_.wait_for(lock, std::chrono::nanoseconds(pause));
      pause = std::min(2 * pause, kLongestPauseNs);
    }
  }
  late_ = false;
  if (const Result result = fit_table(count, found); result != kSuccess) return result;
  found->taken = true;
  *out = found;
  return kSuccess;
}

PieceCopier::Table *PieceCopier::idle_table() const {
  for (const auto &table : tables_) {
    if (!table->taken && driver_.event_query(table->read) == kSuccess) return table.get();
  }
  return nullptr;
}

Result PieceCopier::fit_table(size_t count, Table *table) {
  if (table->capacity >= count) return kSuccess;
  if (table->memory != nullptr) driver_.host_free(table->memory);
  table->memory = nullptr;
  table->capacity = 0;
  size_t capacity = kTablePiecesMin;
  while (capacity < count) capacity *= 2;
  const Result result = driver_.host_allocate(&table->memory, capacity * sizeof(Piece), kHostAllocPortable);
  if (result == kSuccess) table->capacity = capacity;
  return result;
}

void PieceCopier::drop_table(Table *table) {
  if (table->memory != nullptr) driver_.host_free(table->memory);
  driver_.event_destroy(table->read);
}

}  // namespace moonpool::cuda
