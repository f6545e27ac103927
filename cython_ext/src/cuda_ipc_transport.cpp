// SPDX-License-Identifier: Apache-2.0
// The cuda_ipc transport: memory of GPUs in two processes of one host and one user.
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>

#include "cuda_ipc_link.hpp"
#include "engine.hpp"
#include "peer.hpp"

namespace moonpool {

namespace {

constexpr char kUnreadable[] = "the peer made an offer that cannot be read";

// Without opening the driver, which only who has memory of a GPU does.
std::string why_no_driver() {
  if (std::getenv("MOONPOOL_CUDA_LIBRARY") != nullptr || cuda::Driver::present() != nullptr) return {};
  for (const char *device : {"/dev/nvidiactl", "/dev/dxg"}) {
    if (access(device, F_OK) == 0) return {};
  }
  return "this host shows no NVIDIA GPU (/dev/nvidiactl)";
}

// Other than for shm, the processes need not see each other's numbers: memory comes by handle or descriptor.
std::string why_not_reached(const shm::HostIdentity &ours, const shm::HostIdentity &theirs) {
  if (ours.boot_id.empty() || theirs.boot_id.empty()) return "a side cannot tell which host it is on";
  if (ours.boot_id != theirs.boot_id) return "the peer is on another host";
  if (ours.net_namespace != theirs.net_namespace) return "the peer is in another container (network namespace)";
  if (ours.user_namespace != theirs.user_namespace) return "the peer is in another container (user namespace)";
  if (ours.uid != theirs.uid) {
    return "the peer runs as another user (" + std::to_string(theirs.uid) + ", this process as " +
           std::to_string(ours.uid) + ")";
  }
  return theirs.socket.empty() ? "the peer could not open a Unix socket" : "";
}

class CudaIpcTransport final : public Transport {
 public:
  const char *name() const override { return "cuda_ipc"; }

  Probe probe() const override {
    const std::string why_not = why_no_driver();
    if (!why_not.empty()) return {false, why_not};
    return {true, "from GPU to GPU, processes of one host and user"};
  }

  int cost() const override { return 20; }
  bool for_gpus_only() const override { return true; }
  bool suits(const Transfer &transfer) const override {
    return transfer.device != nullptr && transfer.remote_on_device && !transfer.digest && !transfer.device->managed();
  }

  std::string offer(const Engine &engine) const override { return shm::encode_identity(engine.host()); }

  std::string unreachable(const Engine &, const Id128 &incarnation, std::string_view offer) const override {
    if (Engine::in_this_process(incarnation) != nullptr) return "the peer is in this process";
    shm::HostIdentity theirs;
    if (!shm::decode_identity(offer, &theirs)) return kUnreadable;
    return why_not_reached(shm::HostIdentity::of_this_process(), theirs);
  }

  void connect(const std::shared_ptr<Peer> &peer, std::string_view offer, int64_t deadline_ns,
               Connected connected) override {
    shm::HostIdentity theirs;
    if (!shm::decode_identity(offer, &theirs)) return connected(nullptr, make_error(MP_PROTOCOL, kUnreadable));
    Engine &engine = peer->engine();
    IoThread &io = engine.next_io();
    DialRequest request{
        {SocketAddress::abstract(theirs.socket)}, wire::kCudaIpc, peer->session(), peer->next_lane_id(), deadline_ns};
    dial(engine.identity, io, std::move(request),
         [weak = std::weak_ptr<Peer>(peer), &io, deadline_ns, connected = std::move(connected)](Dialed dialed) {
           const std::shared_ptr<Peer> self = weak.lock();
           if (dialed.error || self == nullptr) return connected(nullptr, dialed.error);
           // Memory is only given to, and taken from, processes of our own user.
           ucred who{};
           socklen_t size = sizeof who;
           if (getsockopt(dialed.fd.get(), SOL_SOCKET, SO_PEERCRED, &who, &size) != 0 || who.uid != geteuid()) {
             return connected(nullptr, make_error(MP_TRANSPORT_UNAVAILABLE, "the peer runs as another user"));
           }
           std::make_shared<CudaIpcLink>(self, io, std::move(dialed.fd), connected)->open(deadline_ns);
         });
  }
};

}  // namespace

std::unique_ptr<Transport> make_cuda_ipc_transport() { return std::make_unique<CudaIpcTransport>(); }

}  // namespace moonpool
