// SPDX-License-Identifier: Apache-2.0
// One RC queue pair with a completion queue of its own, from its making to its end. Not thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "rdma_device.hpp"
#include "rdma_frames.hpp"
#include "system.hpp"

namespace moonpool {

class RdmaQueue {
 public:
  // In state INIT. `serves`: it only answers; it takes marks, and has no room for requests of its own.
  static Error make(const std::shared_ptr<Rail> &rail, const RdmaConfig &config, bool serves,
                    std::unique_ptr<RdmaQueue> *out);
  // When it returns the device touches no memory for this queue pair any more.
  ~RdmaQueue();
  RdmaQueue(const RdmaQueue &) = delete;
  RdmaQueue &operator=(const RdmaQueue &) = delete;

  const rdma::QueuePairInfo &info() const { return info_; }
  // To RTR and RTS, with what both sides can.
  Error connect(const rdma::QueuePairInfo &remote);
  // A chain. 0, or an errno; the queue pair is of no use then, because a part of it may have been posted.
  int post(ibv_send_wr *chain);
  // Room for so many more marks. 0, or an errno.
  int expect_marks(uint32_t n);
  // Up to `n`; negative when the completion queue is broken.
  int poll(ibv_wc *out, int n) { return ibv_poll_cq(cq_, n, out); }
  // The next completion makes the descriptor ready, unless it is there already. On an error nothing ever will.
  Error arm();
  // Takes the readiness away again.
  void clear();
  // A new descriptor, to watch.
  Fd descriptor() const;

  uint32_t depth() const { return depth_; }
  uint32_t pieces_max() const { return pieces_max_; }
  uint32_t inline_max() const { return inline_max_; }
  Rail &rail() const { return *rail_; }

 private:
  RdmaQueue(std::shared_ptr<Rail> rail, const RdmaConfig &config);
  Error failed(const char *what, int err) const;

  const std::shared_ptr<Rail> rail_;
  const Verbs &verbs_;
  const RdmaConfig &config_;
  RailState state_;
  ibv_comp_channel *channel_ = nullptr;
  ibv_cq *cq_ = nullptr;
  ibv_qp *qp_ = nullptr;
  uint32_t depth_ = 0, pieces_max_ = 1, inline_max_ = 0;
  rdma::QueuePairInfo info_{};
  std::string remote_;  // for errors
};

// What an I/O thread watches a queue pair by: its descriptor is ready when something may have completed.
class RdmaChannel final : public Handler {
 public:
  RdmaChannel(Fd fd, std::function<void()> ready) : ready_(std::move(ready)) { fd_ = std::move(fd); }
  void on_events(uint32_t) override { ready_(); }

 private:
  const std::function<void()> ready_;
};

}  // namespace moonpool
