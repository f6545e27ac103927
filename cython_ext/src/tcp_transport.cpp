// SPDX-License-Identifier: Apache-2.0
// The tcp transport: what every peer can be reached with.
#include "engine.hpp"
#include "lane_link.hpp"
#include "peer.hpp"
#include "tcp_lane.hpp"

namespace moonpool {

namespace {

// Head and digest trailer leave room for this many pieces in one system call (IOV_MAX is 1024).
constexpr uint32_t kDescsPerFrame = 1000;

class TcpTransport final : public Transport {
 public:
  const char *name() const override { return "tcp"; }
  Probe probe() const override { return {true, "sockets; always there"}; }
  int cost() const override { return 100; }
  std::string unreachable(const Engine &, const Id128 &, std::string_view) const override { return {}; }
  void connect(const std::shared_ptr<Peer> &peer, std::string_view, int64_t, Connected connected) override {
    Engine &engine = peer->engine();
    auto link = std::make_shared<LaneLink>(peer, name(), kDescsPerFrame);
    std::vector<std::shared_ptr<Lane>> lanes;
    for (uint32_t i = 0; i < engine.config.lanes; ++i) {
      lanes.push_back(std::make_shared<TcpLane>(*link, engine.next_io()));
    }
    const size_t all = lanes.size();
    link->start(std::move(lanes), all);
    connected(std::move(link), {});
  }
};

}  // namespace

std::unique_ptr<Transport> make_tcp_transport() { return std::make_unique<TcpTransport>(); }

}  // namespace moonpool
