// SPDX-License-Identifier: Apache-2.0
// Copies of many scattered pieces, in a number of driver calls that does not depend on how many there are: blocks of a
// paged KV cache to one contiguous chunk, and back.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda_driver.hpp"
#include "cuda_kernel.hpp"

namespace moonpool::cuda {

// Up to so many bytes of an average piece a kernel copies them; larger ones go to the copy engines, which leave the
// multiprocessors to the model. `gather` of deploy/gpu_check.py measures both.
constexpr uint64_t kKernelPieceBytes = 128u << 10;
// Pieces of one launch or batch call. More take another call for each so many.
constexpr size_t kPiecesMax = 1u << 16;

// Joins pieces that follow each other on both sides.
void join_pieces(std::vector<Piece> *pieces);

// Of one context. Thread-safe.
class PieceCopier {
 public:
  PieceCopier(const Driver &driver, Context context) : driver_(driver), context_(context) {}
  // Waits for nothing: whoever enqueued has waited for the stream. The context may be gone.
  ~PieceCopier();
  PieceCopier(const PieceCopier &) = delete;
  PieceCopier &operator=(const PieceCopier &) = delete;

  // Puts copies of all pieces on a stream, in any order among themselves. The context is current. Everything that is
  // named is memory that the device reaches: on a page that is not pinned a kernel would end the context. `pieces` may
  // go when it returns. The stream is none of the default streams.
  Error enqueue(std::vector<Piece> pieces, Stream stream);

 private:
  // Pinned memory that a kernel reads its pieces from, until the event has come.
  struct Table {
    void *memory = nullptr;
    size_t capacity = 0;
    Event read = nullptr;
    bool taken = false;
  };

  Error enqueue_some(const Piece *pieces, size_t count, bool kernel_first, Stream stream);
  Error launch(const Piece *pieces, size_t count, Stream stream);
  Error batch(const Piece *pieces, size_t count, Stream stream);
  Error one_by_one(const Piece *pieces, size_t count, Stream stream);
  bool has_kernel();
  Error take_table(size_t count, Table **out);
  Error make_table(size_t count, Table *table);
  void drop_table(Table *table);

  const Driver &driver_;
  const Context context_;

  std::mutex mutex_;
  std::condition_variable returned_;  // a table
  bool looked_ = false;               // for the kernel
  Module module_ = nullptr;
  Function function_ = nullptr;
  std::vector<std::unique_ptr<Table>> tables_;
};

}  // namespace moonpool::cuda
