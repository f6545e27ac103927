// SPDX-License-Identifier: Apache-2.0
// The tcp transport, requesting side: a few persistent lanes to one peer that pull slices from one queue.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "link.hpp"
#include "tcp_lane.hpp"
#include "work_queue.hpp"

namespace moonpool {

class TcpLink final : public Link, public std::enable_shared_from_this<TcpLink> {
 public:
  explicit TcpLink(const std::shared_ptr<Peer> &peer);
  ~TcpLink() override { shutdown(make_error(MP_CLOSED, "the peer was closed"), true); }

  void start();
  const char *path() const override { return "tcp"; }
  void submit(const std::shared_ptr<Transfer> &transfer) override;
  void adopt(std::vector<Work> work, const Error &cause) override { retry(std::move(work), cause); }
  void cancel(Transfer &transfer) override;
  void assist(Transfer &transfer, int64_t until) override;
  void fenced(uint64_t lane_id) override;
  void shutdown(const Error &cause, bool settled) override;
  size_t lanes_ready() const override;

  // ---- for the lanes
  bool pull(Work *work) { return queue_.pull(work); }
  bool has_work() const { return !queue_.empty(); }
  // A lane ended with these unfinished. Reads can be asked for again at once; writes only when the peer has said that
  // nothing of the old lane is being applied any more.
  void lane_cut(uint64_t lane_id, std::vector<Work> work, const Error &cause);
  std::shared_ptr<Peer> peer() const { return peer_.lock(); }
  Engine &engine() const { return engine_; }
  const Id128 session;
  const std::vector<SocketAddress> addresses;

 private:
  struct Fencing {
    std::vector<Work> work;
    Error cause;
  };
  TcpLane &lane_for_small();
  void wake_lanes(size_t n);
  void retry(std::vector<Work> work, const Error &cause);

  Engine &engine_;
  const std::weak_ptr<Peer> peer_;
  WorkQueue queue_;
  std::vector<std::shared_ptr<TcpLane>> lanes_;
  std::atomic<uint32_t> round_robin_{0};
  mutable std::mutex mutex_;
  bool closed_ = false;
  bool settled_ = false;  // when closed: the peer applies nothing any more
  std::unordered_map<uint64_t, Fencing> fencing_;
};

}  // namespace moonpool
