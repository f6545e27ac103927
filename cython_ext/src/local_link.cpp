// SPDX-License-Identifier: Apache-2.0
// The local transport: two engines of one process, or one engine and itself.
#include "copy_link.hpp"
#include "engine.hpp"
#include "peer.hpp"

namespace moonpool {

namespace {

class LocalLink final : public CopyLink {
 public:
  LocalLink(const std::shared_ptr<Peer> &peer, std::weak_ptr<Engine> target)
      : CopyLink(peer, "local"), target_(std::move(target)) {}

 private:
  void copy(const Work &work) override {
    const std::shared_ptr<Engine> target = target_.lock();
    if (target == nullptr) {
      Error error = refusal(MP_PEER_LOST);
      error.message = "the peer's engine was closed";
      work.transfer->descs_failed(work.begin, work.end, error);
      return;
    }
    const bool write = work.transfer->op == MP_WRITE;
    RequestChecker checker(target->regions);
    copy_descs(
        work,
        [&](const Desc &desc, uint8_t **remote) {
          return checker.check({desc.key, desc.offset, desc.length}, write, remote);
        },
        [&] {
          checker.reset();
          return Error{};
        });
  }

  const std::weak_ptr<Engine> target_;
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
    connected(std::make_shared<LocalLink>(peer, Engine::in_this_process(peer->incarnation())), {});
  }
};

}  // namespace

std::unique_ptr<Transport> make_local_transport() { return std::make_unique<LocalTransport>(); }

}  // namespace moonpool
