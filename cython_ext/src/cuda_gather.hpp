// SPDX-License-Identifier: Apache-2.0
// Copies of many scattered pieces, in a number of driver calls that does not depend on how many there are: blocks of a
// paged KV cache to one contiguous chunk, and back.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda_driver.hpp"
#include "cuda_kernel.hpp"

namespace moonpool::cuda {

// Where the two sides of all pieces are.
enum class Reach {
  kWithinDevice,  // both in memory of the context's device
  kHost,          // one of them in pinned memory of the host
  kAnywhere,      // perhaps in memory of another device, where a kernel that is not allowed to would end the context
};
// Up to so many bytes of an average piece a kernel copies them; larger ones go to the copy engines, which leave the
// multiprocessors to the model. The way to the host is slower, so a call of the copy engines is sooner worth its time.
// `gather` of deploy/gpu_check.py measures both.
constexpr uint64_t kKernelPieceBytes = 128u << 10;
constexpr uint64_t kKernelHostPieceBytes = 32u << 10;
// Pieces of one launch or batch call. More take another call for each so many.
constexpr size_t kPiecesMax = 1u << 16;

// Joins pieces that follow each other on both sides.
void join_pieces(std::vector<Piece> *pieces);

// Of one context. Thread-safe.
class PieceCopier {
 public:
  // patience_ns: how long a copy waits for kernels before it to end. A device on which none does hangs.
  PieceCopier(const Driver &driver, Context context, int64_t patience_ns)
      : driver_(driver), context_(context), patience_ns_(patience_ns) {}
  // Waits for nothing: whoever enqueued has waited for the stream. The context may be gone.
  ~PieceCopier();
  PieceCopier(const PieceCopier &) = delete;
  PieceCopier &operator=(const PieceCopier &) = delete;

  // Puts copies of all pieces on a stream, in any order among themselves. The context is current, the stream is none of
  // the default streams, and memory of the host is pinned: on another page a kernel would end the context. *begun: some
  // of it is on the stream, whatever the result. kNotReady: kernels before it have not ended for `patience_ns`; until
  // one does, no other call waits for that.
  Result enqueue(std::vector<Piece> pieces, Reach reach, Stream stream, bool *begun);

 private:
  // Pinned memory that a kernel reads its pieces from, until the event has come.
  struct Table {
    void *memory = nullptr;
    size_t capacity = 0;
    Event read = nullptr;
    bool taken = false;
  };

  Result enqueue_some(const Piece *pieces, size_t count, Reach reach, Stream stream, bool *begun);
  Result launch(const Piece *pieces, size_t count, Stream stream, bool *begun);
  Result batch(const Piece *pieces, size_t count, Stream stream);
  Result one_by_one(const Piece *pieces, size_t count, Stream stream, bool *begun);
  bool has_kernel();
  Result take_table(size_t count, Table **out);
  Table *idle_table() const;
  Result fit_table(size_t count, Table *table);
  void drop_table(Table *table);

  const Driver &driver_;
  const Context context_;
  const int64_t patience_ns_;

  std::mutex mutex_;
  std::condition_variable returned_;  // a table
  bool looked_ = false;               // for the kernel
  Module module_ = nullptr;
  Function function_ = nullptr;
  std::vector<std::unique_ptr<Table>> tables_;
  bool late_ = false;  // all of them, for longer than anybody waits
};

}  // namespace moonpool::cuda
