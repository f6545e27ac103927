// SPDX-License-Identifier: Apache-2.0
// The rdma transport, requesting side: lanes on every rail that reaches the peer.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "lane_link.hpp"
#include "rdma_device.hpp"
#include "rdma_frames.hpp"

namespace moonpool {

class RdmaLink final : public LaneLink {
 public:
  RdmaLink(const std::shared_ptr<Peer> &peer, Connected connected);
  ~RdmaLink() override { shutdown(make_error(MP_CLOSED, "the peer was closed"), true); }

  // Lanes for these rails; one of each is connected now, the others when there is work for them. At the deadline it
  // counts as connected if any lane is.
  void open(const std::vector<rdma::RailChoices> &choices, const std::vector<rdma::RailOffer> &remote,
            int64_t deadline_ns);
  void submit(const std::shared_ptr<Transfer> &transfer) override;
  // Its idle lanes give up their queue pairs until there is work for them.
  void rest();
  // When there was work last.
  int64_t used_at() const { return used_at_.load(std::memory_order_relaxed); }
  bool takes(const Transfer &transfer) const override;
  bool usable() const override;
  std::string shortcoming() const override;
  bool established() const override;
  int64_t opening_ns() const override;
  void offered(std::string_view offer) override;
  void region_gone(uint64_t key) override;
  void rail_changed(const Rail &rail);

  // ---- for the lanes
  void lane_opened() override;
  void lane_refused(const Error &cause) override;
  // nullptr: not known yet.
  std::shared_ptr<const rdma::Found> remote_keys(uint32_t rail, uint64_t key) const;
  // Whether a rail of the peer is up, as far as is known.
  bool remote_up(uint32_t rail) const { return remote_up_[rail].load(std::memory_order_relaxed); }
  void remote_changed(uint32_t rail, bool up);
  // Of a rail of the peer, for errors.
  std::string remote_gid(uint32_t rail) const { return gid_text(remote_[rail].gid); }
  void remember(uint32_t rail, uint64_t key, rdma::Found found);
  // Descriptors that only another path can move.
  void elsewhere(Work work);

 private:
  struct Key {
    uint32_t rail;
    uint64_t key;
    bool operator==(const Key &) const = default;
  };
  struct HashKey {
    size_t operator()(const Key &key) const { return std::hash<uint64_t>{}(key.key + key.rail); }
  };
  void stranded(const Error &cause) override;
  uint64_t slice_bytes(uint64_t transfer_bytes) const override;
  // As connected as it will be before it is used.
  void settled();
  void out_of_time();
  void give_up(const Connected &connected, const Error &cause);

  size_t rails_ = 1;                     // that it has lanes on
  size_t first_lanes_ = 1;               // that are connected before it counts as connected
  int64_t opening_ns_ = 0;               // what each attempt of a lane may take until then
  std::vector<rdma::RailOffer> remote_;  // when it was opened
  std::array<std::atomic<bool>, rdma::kRailsMax> remote_up_{};
  std::array<std::atomic<bool>, rdma::kRailsMax> offered_up_{};  // in the latest offer
  std::atomic<int64_t> used_at_{0};
  mutable std::mutex state_mutex_;
  Connected connected_;
  size_t opened_lanes_ = 0, refusals_ = 0;  // while it connects
  size_t refusals_max_ = 0;                 // then it does not connect
  Error first_cause_;

  mutable std::shared_mutex keys_mutex_;
  std::unordered_map<Key, std::shared_ptr<const rdma::Found>, HashKey> keys_;
  std::unordered_set<uint64_t> refused_;
};

}  // namespace moonpool
