// SPDX-License-Identifier: Apache-2.0
// Copies that the calling thread begins and waits for. To hand them to the stager's thread and back would take longer
// than 64 MiB take within a device.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda_gather.hpp"
#include "cuda_memory.hpp"

namespace moonpool::cuda {

// Of one context. Thread-safe; threads do not wait for each other's copies unless there are very many of them.
class DirectCopier {
 public:
  // patience_ns: how long a copy waits for those before it to make room.
  DirectCopier(std::shared_ptr<const DeviceMemory> memory, uint32_t spin_us, int64_t patience_ns);
  ~DirectCopier();
  DirectCopier(const DirectCopier &) = delete;
  DirectCopier &operator=(const DirectCopier &) = delete;

  // Returns when nothing of it is under way any more. Only when that takes longer than the time-out it is before that:
  // MP_DEADLINE, and *late is the stream that goes on.
  Error copy(std::vector<Piece> pieces, Reach reach, int64_t timeout_ns, Stream *late);

 private:
  struct Lane {
    Stream stream = nullptr;
    Event event = nullptr;
  };

  Result take(Lane **out);
  void give_back(Lane *lane);
  Result wait(const Lane &lane, bool recorded, int64_t until) const;

  const std::shared_ptr<const DeviceMemory> memory_;  // keeps its context
  const Driver &driver_;
  const int64_t spin_ns_;
  const int64_t patience_ns_;
  std::unique_ptr<PieceCopier> copier_;
  std::mutex mutex_;
  std::condition_variable returned_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<Lane *> idle_;
};

}  // namespace moonpool::cuda
