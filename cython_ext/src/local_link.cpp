// SPDX-License-Identifier: Apache-2.0
// The local transport: two engines of one process, or one engine and itself.
#include <utility>

#include "copy_link.hpp"
#include "engine.hpp"
#include "local_server_lane.hpp"
#include "peer.hpp"

namespace moonpool {

namespace {

// One copy to or from the peer's memory.
class LocalCopy {
 public:
  explicit LocalCopy(LocalServerLane &lane) : lane_(lane.begin_copy() ? &lane : nullptr) {}
  ~LocalCopy() { end(); }
  LocalCopy(const LocalCopy &) = delete;
  LocalCopy &operator=(const LocalCopy &) = delete;

  bool allowed() const { return lane_ != nullptr; }
  void end() {
    if (LocalServerLane *lane = std::exchange(lane_, nullptr)) lane->end_copy();
  }

 private:
  LocalServerLane *lane_;
};

class LocalLink final : public CopyLink {
 public:
  LocalLink(const std::shared_ptr<Peer> &peer, std::weak_ptr<Engine> target, std::shared_ptr<LocalServerLane> lane)
      : CopyLink(peer, "local"), target_(std::move(target)), lane_(std::move(lane)) {}
  ~LocalLink() override { lane_->close(); }

  // Memory of a device is reached over tcp, whose server stages it.
  bool takes(const Transfer &transfer) const override { return !transfer.in_pieces(); }

 private:
  void copy(const Work &work) override {
    const std::shared_ptr<Engine> target = target_.lock();
    LocalCopy copying(*lane_);
    if (target == nullptr || !copying.allowed()) {
      Error error = refusal(MP_PEER_LOST);
      error.message = target == nullptr ? "the peer's engine was closed" : "the peer ended the connection";
      error.hint = "the next transfer connects again";
      work.transfer->descs_failed(work.begin, work.end, error);
      return;
    }
    const bool write = work.transfer->op == MP_WRITE;
    RequestChecker checker(target->regions);
    const Moved moved = move_descs(work, [&](uint32_t, const Desc &desc, uint8_t **remote) {
      return checker.check({desc.key, desc.offset, desc.length}, write, remote);
    });
    checker.reset();
    copying.end();
    report_moved(work, moved);
  }

  const std::weak_ptr<Engine> target_;
  const std::shared_ptr<LocalServerLane> lane_;  // of the peer's session
};

class LocalTransport final : public Transport {
 public:
  const char *name() const override { return "local"; }
  Probe probe() const override { return {true, "engines of the same process"}; }
  int cost() const override { return 1; }
  std::string unreachable(const Engine &, const Id128 &incarnation, std::string_view) const override {
    return Engine::in_this_process(incarnation) != nullptr ? "" : "the peer is another process";
  }
  void connect(const std::shared_ptr<Peer> &peer, std::string_view, int64_t, Connected connected) override {
    const std::shared_ptr<Engine> target = Engine::in_this_process(peer->incarnation());
    const auto lane = std::make_shared<LocalServerLane>();
    if (target == nullptr || !target->admit_local(*peer, lane)) {
      return connected(nullptr, make_error(MP_PEER_LOST, "the session of this path has ended"));
    }
    connected(std::make_shared<LocalLink>(peer, target, lane), {});
  }
};

}  // namespace

std::unique_ptr<Transport> make_local_transport() { return std::make_unique<LocalTransport>(); }

}  // namespace moonpool
