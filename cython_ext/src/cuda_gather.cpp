// SPDX-License-Identifier: Apache-2.0
#include "cuda_gather.hpp"

#include <algorithm>
#include <cstring>

namespace moonpool::cuda {

namespace {

// Launches that may be under way. Whoever wants another one waits for the oldest.
constexpr size_t kTablesMax = 8;
constexpr size_t kTablePiecesMin = 1024;
// Of a piece, for one block. Large pieces are shared by several.
constexpr uint64_t kBlockBytes = 64u << 10;
constexpr unsigned kBlocksOfPieceMax = 64;

unsigned blocks_of_piece(const Piece *pieces, size_t count) {
  uint64_t longest = 0;
  for (size_t i = 0; i < count; ++i) longest = std::max(longest, pieces[i].nbytes);
  return static_cast<unsigned>(std::clamp<uint64_t>((longest + kBlockBytes - 1) / kBlockBytes, 1, kBlocksOfPieceMax));
}

bool aligned(const Piece *pieces, size_t count) {
  uint64_t bits = 0;
  for (size_t i = 0; i < count; ++i) bits |= pieces[i].to | pieces[i].from;
  return bits % 16 == 0;
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

Error PieceCopier::enqueue(std::vector<Piece> pieces, Stream stream) {
  join_pieces(&pieces);
  for (size_t done = 0; done < pieces.size();) {
    const size_t some = std::min(kPiecesMax, pieces.size() - done);
    uint64_t nbytes = 0;
    for (size_t i = 0; i < some; ++i) nbytes += pieces[done + i].nbytes;
    const bool small = nbytes / some <= kKernelPieceBytes && aligned(pieces.data() + done, some);
    if (Error error = enqueue_some(pieces.data() + done, some, small, stream)) return error;
    done += some;
  }
  return {};
}

Error PieceCopier::enqueue_some(const Piece *pieces, size_t count, bool kernel_first, Stream stream) {
  if (count == 1) return one_by_one(pieces, count, stream);
  if (kernel_first && has_kernel()) return launch(pieces, count, stream);
  if (driver_.copy_batch != nullptr) return batch(pieces, count, stream);
  // An older driver: a kernel is slow where pieces are not aligned, and still better than a call for each.
  if (has_kernel()) return launch(pieces, count, stream);
  return one_by_one(pieces, count, stream);
}

Error PieceCopier::one_by_one(const Piece *pieces, size_t count, Stream stream) {
  for (size_t i = 0; i < count; ++i) {
    const Result result = driver_.copy(pieces[i].to, pieces[i].from, pieces[i].nbytes, stream);
    if (result != kSuccess) return call_error(driver_, result, "cannot copy " + std::to_string(count) + " pieces");
  }
  return {};
}

Error PieceCopier::batch(const Piece *pieces, size_t count, Stream stream) {
  std::vector<Pointer> to(count), from(count);
  std::vector<size_t> nbytes(count);
  for (size_t i = 0; i < count; ++i) {
    to[i] = pieces[i].to;
    from[i] = pieces[i].from;
    nbytes[i] = pieces[i].nbytes;
  }
  CopyAttributes attributes{};
  attributes.source_access_order = kSourceAccessOrderStream;
  size_t first = 0, failed = 0;
  const Result result =
      driver_.copy_batch(to.data(), from.data(), nbytes.data(), count, &attributes, &first, 1, &failed, stream);
  if (result == kSuccess) return {};
  return call_error(driver_, result, "cannot copy a batch of " + std::to_string(count) + " pieces");
}

Error PieceCopier::launch(const Piece *pieces, size_t count, Stream stream) {
  Table *table = nullptr;
  if (Error error = take_table(count, &table)) return error;
  std::memcpy(table->memory, pieces, count * sizeof(Piece));
  auto where = reinterpret_cast<Pointer>(table->memory);
  void *parameters[] = {&where};
  Result result = driver_.launch(function_, static_cast<unsigned>(count), blocks_of_piece(pieces, count), 1,
                                 kCopyThreads, 1, 1, 0, stream, parameters, nullptr);
  if (result == kSuccess) result = driver_.event_record(table->read, stream);
  {
    std::lock_guard lock(mutex_);
    table->taken = false;
  }
  returned_.notify_one();
  if (result == kSuccess) return {};
  return call_error(driver_, result, "cannot copy " + std::to_string(count) + " pieces by a kernel");
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
Error PieceCopier::take_table(size_t count, Table **out) {
  std::unique_lock lock(mutex_);
  Table *found = nullptr;
  for (const auto &table : tables_) {
    if (!table->taken && driver_.event_query(table->read) == kSuccess) {
      found = table.get();
      break;
    }
  }
  if (found == nullptr && tables_.size() < kTablesMax) {
    auto table = std::make_unique<Table>();
    if (const Result result = driver_.event_create(&table->read, kEventDisableTiming); result != kSuccess) {
      return call_error(driver_, result, "cannot make an event");
    }
    tables_.push_back(std::move(table));
    found = tables_.back().get();
  }
  if (found == nullptr) {
    // Others hold a table no longer than a launch takes.
    auto idle = tables_.end();
    returned_.wait(lock, [&] {
      idle = std::find_if(tables_.begin(), tables_.end(), [](const auto &one) { return !one->taken; });
      return idle != tables_.end();
    });
    found = idle->get();
    if (const Result result = driver_.event_synchronize(found->read); result != kSuccess) {
      return call_error(driver_, result, "cannot wait for an earlier copy");
    }
  }
  if (found->capacity < count) {
    if (Error error = make_table(count, found)) return error;
  }
  found->taken = true;
  *out = found;
  return {};
}

Error PieceCopier::make_table(size_t count, Table *table) {
  if (table->memory != nullptr) driver_.host_free(table->memory);
  table->memory = nullptr;
  table->capacity = 0;
  size_t capacity = kTablePiecesMin;
  while (capacity < count) capacity *= 2;
  const Result result = driver_.host_allocate(&table->memory, capacity * sizeof(Piece), kHostAllocPortable);
  if (result != kSuccess) return call_error(driver_, result, "cannot have pinned memory for a table of pieces");
  table->capacity = capacity;
  return {};
}

void PieceCopier::drop_table(Table *table) {
  if (table->memory != nullptr) driver_.host_free(table->memory);
  if (table->read != nullptr) driver_.event_destroy(table->read);
}

}  // namespace moonpool::cuda
