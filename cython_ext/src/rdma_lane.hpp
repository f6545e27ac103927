// SPDX-License-Identifier: Apache-2.0
// The lane of the rdma transport: a queue pair on one rail, which lives as long as the lane's socket. The socket
// carries what the queue pairs have to know of each other and the keys of regions; the bytes go from memory to memory.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "lane.hpp"
#include "rdma_frames.hpp"
#include "rdma_queue.hpp"

namespace moonpool {

class RdmaLink;

class RdmaLane final : public Lane {
 public:
  // `remotes`: rails of the peer in its offer, the one that it is meant for first.
  RdmaLane(RdmaLink &link, IoThread &io, std::shared_ptr<Rail> rail, std::vector<uint32_t> remotes);

  const Rail &rail() const { return *rail_; }
  uint64_t distance(const Transfer &transfer) const override;
  // Its port is up, and one of the peer's, as far as is known.
  bool reachable() const;
  // The port went up or down.
  void rail_changed();
  // A port of the peer did.
  void remote_changed(uint32_t rail, bool up);
  // The error of a lane that is not ready, with its two rails.
  Error not_ready();

 private:
  // One doorbell and one signalled completion for so many requests.
  static constexpr uint32_t kChainMax = 32;
  // Part of a transfer whose work requests are being posted, or have been.
  struct Frame {
    Work work;
    uint64_t id;
    uint32_t next;         // the descriptor that is posted next
    uint64_t next_at = 0;  // ... from this byte on
    uint32_t chains = 0;   // posted and not completed
    bool begun = false;    // something of it was posted
    std::vector<wire::FailedDesc> failed;
  };
  struct Chain {
    uint32_t requests;
    uint64_t frame;
  };
  // The registration of a local region.
  struct Local {
    const uint8_t *base = nullptr;
    const uint8_t *end = nullptr;
    uint64_t piece_bytes = 0;
    uint64_t start = 0;
    bool of_gpu = false;
    std::vector<uint32_t> keys;
  };

  Error hindrance() override;
  bool admitted_locked() override;
  void give_up_turn_locked() override;
  void its_turn();
  void begin_locked() override;
  void on_events(uint32_t events) override;
  void on_completions();
  void drive_locked() override;
  void send_first_locked() override { post_locked(); }
  void arm_locked() override;
  void arm_submitted_locked() override;
  bool copies() const override { return false; }
  void arm_late_locked();
  void arm_queue_locked();
  void watch_channel_locked(bool watched);
  bool busy_locked() const override { return !frames_.empty(); }
  bool carries_locked(const Transfer &transfer) const override;
  void cancel_locked(const Transfer &transfer) override;
  std::vector<Work> take_unfinished_locked() override;
  bool returns_soon_locked() const override { return rail_->state().up; }
  std::optional<pollfd> sleep_on_locked() override;
  void sleep_ended_locked() override;

  bool receive_locked();
  Error take_locked(const rdma::Frame &frame);
  void send_locked(rdma::Type type, uint64_t key);
  void flush_locked();
  Error connect_locked(const rdma::QueuePairInfo &remote);
  bool start_frame_locked();
  bool keys_known_locked(const Frame &frame);
  bool post_locked();
  uint32_t build_locked(Frame *frame, uint32_t room);
  uint32_t mark_locked(Frame *frame, uint32_t n);
  const Local *find_local_locked(const Frame &frame, const Desc &desc);
  bool poll_locked();
  void completed_locked();
  void finish_locked(Frame frame);
  Error explain(const ibv_wc &completion) const;
  Error here(Error error) const;
  Error not_ready_locked() const override;
  uint32_t remote_rail() const { return remotes_[remote_]; }
  void choose_remote_locked();
  Error remote_changed_locked(uint32_t rail, bool up);
  void forget_failures_locked(uint32_t rail);
  static void go_back(const std::weak_ptr<Lane> &weak, uint64_t lane_id);

  RdmaLink &rdma_link_;
  const std::shared_ptr<Rail> rail_;
  const std::vector<uint32_t> remotes_;
  size_t remote_ = 0;    // the place in it of the one in use
  bool failed_ = false;  // nothing came through it
  // Bits of places in remotes_: tried in vain since something was ready; never ready, and tried in vain; ready once.
  uint32_t tried_ = 0, hopeless_ = 0, worked_ = 0;
  bool going_back_ = false;  // takes nothing new, to connect to the rail that it is meant for
  bool counted_ = false;     // among the engine's queue pairs
  bool waits_ = false;       // ... or for its turn to be
  int64_t turn_ends_ = 0;    // others may wait for its queue pair
  std::unique_ptr<RdmaQueue> queue_;
  std::shared_ptr<RdmaChannel> channel_, left_;  // ready when something completed; left_: a waiter still sleeps on it
  bool armed_ = false;
  bool channel_watched_ = false;  // by the I/O thread
  bool waited_ = false;           // the latest completion was found by a thread that waited for it
  bool arm_late_ = false;         // a timer looks whether nobody waits
  bool probing_ = false;
  uint32_t watched_ = 0;
  std::string in_, out_;
  std::string remote_gid_;  // for errors
  std::unordered_set<uint64_t> asked_;

  std::deque<Frame> frames_;  // oldest first; only the newest may not be posted whole
  std::deque<Chain> chains_;
  uint64_t next_frame_ = 1;
  uint32_t marks_ = 0;  // made with this queue pair
  uint32_t used_ = 0;   // requests in the queue
  Local local_;         // the latest
  std::vector<ibv_send_wr> requests_;
  std::vector<ibv_sge> pieces_;
  std::array<bool, kChainMax> of_gpu_{};  // of each request: it names memory that no processor may touch
  std::vector<uint64_t> zero_based_;      // the piece's address for the device; pieces_ has it for the processor
};

}  // namespace moonpool
