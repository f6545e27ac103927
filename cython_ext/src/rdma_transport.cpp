// SPDX-License-Identifier: Apache-2.0
// The rdma transport: RC queue pairs over every port that reaches the peer.
#include <algorithm>

#include "engine.hpp"
#include "peer.hpp"
#include "rdma_link.hpp"

namespace moonpool {

namespace {

constexpr const char *kUnreadable = "the peer made an offer that cannot be read";

std::vector<rdma::RailOffer> offers_of(const RdmaHost &host) {
  std::vector<rdma::RailOffer> offers;
  for (const auto &rail : host.rails()) {
    const RailState state = rail->state();
    offers.push_back({state.gid, state.lid, state.ethernet, state.up, state.mtu, {}});
  }
  return offers;
}

class RdmaTransport final : public Transport {
 public:
  const char *name() const override { return "rdma"; }

  Probe probe() const override {
    std::vector<std::string> names;
    const std::string why_not = find_rdma_devices(&names);
    if (!why_not.empty()) return {false, why_not};
    std::string text = names.size() == 1 ? "device" : "devices";
    for (const std::string &one : names) text += (&one == &names.front() ? " " : ", ") + one;
    return {true, text};
  }

  int cost() const override { return 50; }

  std::string offer(const Engine &engine) const override { return rdma::encode_offer(offers_of(*engine.rdma)); }

  std::string unreachable(const Engine &engine, const Id128 &, std::string_view offer) const override {
    std::vector<rdma::RailOffer> theirs;
    if (!rdma::decode_offer(offer, &theirs)) return kUnreadable;
    engine.rdma->look_at_those_down();
    if (!engine.rdma->any_up()) return "no port can be used: " + engine.rdma->why_not();
    if (!rdma::pair_rails(offers_of(*engine.rdma), theirs).empty()) return {};
    return "the peer has no active port of the same link layer";
  }

  bool suits(const Transfer &transfer) const override {
    return !transfer.staged && !transfer.digest &&
           std::none_of(transfer.locals.begin(), transfer.locals.end(),
                        [](const auto &region) { return region->rdma() == nullptr; });
  }

  bool comes_back() const override { return true; }

  void connect(const std::shared_ptr<Peer> &peer, std::string_view offer, int64_t deadline_ns,
               Connected connected) override {
    Engine &engine = peer->engine();
    std::vector<rdma::RailOffer> theirs;
    const std::vector<rdma::RailOffer> ours = offers_of(*engine.rdma);
    if (!rdma::decode_offer(offer, &theirs) || rdma::pair_rails(ours, theirs).empty()) {
      return connected(nullptr, make_error(MP_TRANSPORT_UNAVAILABLE, "no port reaches the peer",
                                           "see `mooncake-bench doctor` on both hosts"));
    }
    auto link = std::make_shared<RdmaLink>(peer, std::move(connected));
    engine.rdma_link_made(link);
    link->open(rdma::choose_rails(ours, theirs), theirs, deadline_ns);
  }
};

}  // namespace

std::unique_ptr<Transport> make_rdma_transport() { return std::make_unique<RdmaTransport>(); }

}  // namespace moonpool
