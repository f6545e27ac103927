// SPDX-License-Identifier: Apache-2.0
// A link made of lanes: a few persistent connections to one peer that pull slices from one queue. What a lane's
// connection is made of is the transport's.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "lane.hpp"
#include "link.hpp"
#include "work_queue.hpp"

namespace moonpool {

class LaneLink : public Link, public std::enable_shared_from_this<LaneLink> {
 public:
  LaneLink(const std::shared_ptr<Peer> &peer, const char *path, uint32_t descs_per_frame);
  ~LaneLink() override { shutdown(make_error(MP_CLOSED, "the peer was closed"), true); }

  // Once, before anything else. Connects the first `first` of them; the others when there is work for them.
  void start(std::vector<std::shared_ptr<Lane>> lanes, size_t first);
  const char *path() const override { return path_; }
  void submit(const std::shared_ptr<Transfer> &transfer) override;
  void adopt(std::vector<Work> work, const Error &cause) override { retry(std::move(work), cause); }
  void cancel(Transfer &transfer) override;
  void assist(Transfer &transfer, int64_t until) override;
  void fenced(uint64_t lane_id) override;
  void shutdown(const Error &cause, bool settled) override;
  size_t lanes_ready() const override;
  // A lane takes work, or may in a moment.
  bool promising() const;
  // Its peer counts on it.
  virtual bool established() const { return true; }
  // How long a lane may take from its socket's handshake until it is ready.
  virtual int64_t opening_ns() const;

  // ---- for the lanes
  bool pull(Work *work) { return queue_.pull(work); }
  bool has_work() const { return !queue_.empty(); }
  // A lane can be used, or could not be connected.
  virtual void lane_opened() {}
  virtual void lane_refused(const Error &) {}
  // Another lane takes what is queued: one rests from now on, or could not be connected.
  void pass_on_work();
  // A lane ended with these unfinished. Reads can be asked for again at once; writes only when the peer has said that
  // nothing of the old lane is being applied any more.
  void lane_cut(uint64_t lane_id, std::vector<Work> work, const Error &cause);
  std::shared_ptr<Peer> peer() const { return peer_.lock(); }
  Engine &engine() const { return engine_; }
  const Id128 session;
  const std::vector<SocketAddress> addresses;

 protected:
  const std::vector<std::shared_ptr<Lane>> &lanes() const { return lanes_; }
  // Of the slices that a transfer of so many bytes is cut into.
  virtual uint64_t slice_bytes(uint64_t transfer_bytes) const;
  // No lane is left to take what is queued. The lanes of some transports come back soon enough to wait for them.
  virtual void stranded(const Error &) {}
  std::vector<Work> take_queue() { return queue_.take(); }

 private:
  struct Fencing {
    std::vector<Work> work;
    Error cause;
  };
  Lane &lane_for_small(const Transfer &transfer);
  void wake_lanes(size_t n);
  // Connects up to `n` lanes that rest.
  void rouse(size_t n);
  void retry(std::vector<Work> work, const Error &cause);

  Engine &engine_;
  const std::weak_ptr<Peer> peer_;
  const char *const path_;
  const uint32_t descs_per_frame_;
  WorkQueue queue_;
  std::vector<std::shared_ptr<Lane>> lanes_;
  std::atomic<uint32_t> round_robin_{0};
  mutable std::mutex mutex_;
  bool closed_ = false;
  bool settled_ = false;  // when closed: the peer applies nothing any more
  std::unordered_map<uint64_t, Fencing> fencing_;
};

}  // namespace moonpool
