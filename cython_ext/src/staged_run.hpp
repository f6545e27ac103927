// SPDX-License-Identifier: Apache-2.0
// A transfer whose local memory is a device's, over paths that only move memory of the host: it is carried in pieces,
// each of which is a transfer of its own between pinned memory and the peer. While one is on the network others are
// copied, and the paths know nothing of devices.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cuda_stager.hpp"
#include "transfer.hpp"
#include "work_queue.hpp"

namespace moonpool {

class StagedPiece;

class StagedRun final : public Carrier, public std::enable_shared_from_this<StagedRun> {
 public:
  static void begin(const std::shared_ptr<Transfer> &transfer);
  // Goes on with what a path could not move that reaches the device by itself.
  static void adopt(const Work &work);
  StagedRun(std::shared_ptr<Transfer> transfer, std::shared_ptr<cuda::Stager> stager);

  // Of its latest piece.
  const char *path() const override { return path_.load(); }
  void cancel(Transfer &transfer) override;
  // The stager and the I/O threads do the work.
  void assist(Transfer &, int64_t) override {}

 private:
  friend class StagedPiece;

  void add(uint32_t begin, uint32_t end);
  // Begins pieces as long as there is pinned memory for them.
  void go_on();
  void begin_piece(cuda::Slot slot);
  bool take_next(uint32_t *begin, uint32_t *end);
  void send_later(const std::shared_ptr<StagedPiece> &piece);
  void send(const std::shared_ptr<StagedPiece> &piece);
  void ended(const std::shared_ptr<StagedPiece> &piece);
  void fail_rest(const Error &error);

  const std::shared_ptr<Transfer> real_;
  const std::shared_ptr<cuda::Stager> stager_;
  std::atomic<const char *> path_{"tcp"};
  std::mutex mutex_;
  std::deque<std::pair<uint32_t, uint32_t>> rest_;  // descriptors that no piece has yet: from, and to before
  bool waiting_ = false;                            // for pinned memory
  std::unordered_set<std::shared_ptr<StagedPiece>> pieces_;
};

}  // namespace moonpool
