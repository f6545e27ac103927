// SPDX-License-Identifier: Apache-2.0
// The rdma transport, requesting side: lanes on every rail that reaches the peer.
#pragma once

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
  RdmaLink(const std::shared_ptr<Peer> &peer, std::shared_ptr<RdmaHost> host, Connected connected);
  ~RdmaLink() override { shutdown(make_error(MP_CLOSED, "the peer was closed"), true); }

  // Lanes for these pairs.
  void open(const std::vector<rdma::RailPair> &pairs);
  bool takes(const Transfer &transfer) const override;
  std::string shortcoming() const override;
  void region_gone(uint64_t key) override;
  void rail_changed(const Rail &rail);

  // ---- for the lanes
  void lane_opened() override;
  void lane_refused(const Error &cause) override;
  // nullptr: not known yet.
  std::shared_ptr<const rdma::Found> remote_keys(uint32_t rail, uint64_t key) const;
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
  // Peers may be sent over it.
  void usable();

  const std::shared_ptr<RdmaHost> host_;
  mutable std::mutex state_mutex_;
  Connected connected_;
  size_t opened_lanes_ = 0, refused_lanes_ = 0;  // while it connects
  Error first_cause_;

  mutable std::shared_mutex keys_mutex_;
  std::unordered_map<Key, std::shared_ptr<const rdma::Found>, HashKey> keys_;
  std::unordered_set<uint64_t> refused_;
};

}  // namespace moonpool
