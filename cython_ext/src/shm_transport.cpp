// SPDX-License-Identifier: Apache-2.0
// The shm transport: two processes of one host, one user and one container.
#include <sys/socket.h>
#include <unistd.h>

#include <fstream>

#include "engine.hpp"
#include "peer.hpp"
#include "shm_link.hpp"

namespace moonpool {

namespace {

class ShmTransport final : public Transport {
 public:
  const char *name() const override { return "shm"; }

  Probe probe() const override {
    const std::string why_not = why_no_shared_memory();
    if (!why_not.empty()) return {false, why_not};
    int scope = 0;
    std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> scope;
    if (scope > 0 && geteuid() != 0) {
      return {true,
              "processes of one host, for memory that an engine allocated; memory that was only registered goes over "
              "another transport, because kernel.yama.ptrace_scope is " +
                  std::to_string(scope)};
    }
    return {true, "processes of one host, user and container"};
  }

  int cost() const override { return 10; }

  std::string offer(const Engine &engine) const override { return shm::encode_identity(engine.host()); }

  std::string unreachable(const Engine &, const Id128 &, std::string_view offer) const override {
    shm::HostIdentity theirs;
    if (!shm::decode_identity(offer, &theirs)) return "the peer made an offer that cannot be read";
    return shm::why_apart(shm::HostIdentity::of_this_process(), theirs);
  }

  void connect(const std::shared_ptr<Peer> &peer, std::string_view offer, int64_t deadline_ns,
               Connected connected) override {
    shm::HostIdentity theirs;
    if (!shm::decode_identity(offer, &theirs)) {
      return connected(nullptr, make_error(MP_PROTOCOL, "the peer made an offer that cannot be read"));
    }
    Engine &engine = peer->engine();
    IoThread &io = engine.next_io();
    DialRequest request{
        {SocketAddress::abstract(theirs.socket)}, wire::kShm, peer->session(), peer->next_lane_id(), deadline_ns};
    dial(engine.identity, io, std::move(request),
         [weak = std::weak_ptr<Peer>(peer), &io, deadline_ns, connected = std::move(connected)](Dialed dialed) {
           const std::shared_ptr<Peer> self = weak.lock();
           if (dialed.error || self == nullptr) return connected(nullptr, dialed.error);
           // The name is in the same namespace, but only a socket of our own user is trusted with our memory.
           ucred who{};
           socklen_t size = sizeof who;
           if (getsockopt(dialed.fd.get(), SOL_SOCKET, SO_PEERCRED, &who, &size) != 0 || who.uid != geteuid()) {
             return connected(nullptr, make_error(MP_TRANSPORT_UNAVAILABLE, "the peer runs as another user"));
           }
           std::make_shared<ShmLink>(self, io, std::move(dialed.fd), connected)->open(deadline_ns);
         });
  }
};

}  // namespace

std::unique_ptr<Transport> make_shm_transport() { return std::make_unique<ShmTransport>(); }

}  // namespace moonpool
