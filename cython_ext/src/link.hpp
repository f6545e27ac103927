// SPDX-License-Identifier: Apache-2.0
// The transport interface. The engine knows transports only through it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "status.hpp"
#include "transfer.hpp"
#include "wire.hpp"
#include "work_queue.hpp"

namespace moonpool {

class Engine;
class Peer;

// One transport to one peer.
class Link : public Carrier {
 public:
  // Whether it is `other`, or passes work on to it.
  virtual bool is(const Link &other) const { return this == &other; }
  // Whether it can move every descriptor of the transfer.
  virtual bool takes(const Transfer &transfer) const { return transfer.device == nullptr; }
  // Whether it would carry a transfer now.
  virtual bool usable() const { return true; }
  // What it cannot do although it is connected, for people; "" as a rule, but not when it is not usable.
  virtual std::string shortcoming() const { return {}; }
  // Takes the transfer's descriptors. Small work may be done in the caller's thread; nothing blocks on the network.
  virtual void submit(const std::shared_ptr<Transfer> &transfer) = 0;
  // Goes on with what another path of the same peer could not finish. Nothing of it is being applied any more.
  virtual void adopt(std::vector<Work> work, const Error &cause) = 0;
  // The peer's answer to a fence that the link asked for.
  virtual void fenced(uint64_t) {}
  // What the peer has to say of itself has changed since the link was made.
  virtual void offered(std::string_view) {}
  // The peer has withdrawn a region.
  virtual void region_gone(uint64_t) {}
  // No more work; everything unfinished fails with `cause`. `settled`: the peer is known to apply nothing any more;
  // otherwise the descriptors that it might be applying are handed to Peer::orphan.
  virtual void shutdown(const Error &cause, bool settled) = 0;
  virtual size_t lanes_ready() const { return 0; }
};

struct Probe {
  bool available;
  std::string reason;  // why not, or what it can do
};

// The error of what comes to a link that was shut down.
Error connection_ended(const std::string &peer, const char *path);

using wire::Offer;

// Called once: with the link, or with the reason why there is none.
using Connected = std::function<void(std::shared_ptr<Link>, const Error &)>;

class Transport {
 public:
  virtual ~Transport() = default;
  virtual const char *name() const = 0;
  virtual Probe probe() const = 0;
  // Lower is taken first. Only the order means anything.
  virtual int cost() const = 0;
  // What peers have to know to use it towards this engine. They are told again when ports have changed.
  virtual std::string offer(const Engine &) const { return {}; }
  // "" when `engine` reaches the peer that made the offer, otherwise why not.
  virtual std::string unreachable(const Engine &engine, const Id128 &incarnation, std::string_view offer) const = 0;
  // Whether a link of it might take the transfer, as far as that is known without one.
  virtual bool suits(const Transfer &transfer) const { return transfer.device == nullptr; }
  // It moves memory of GPUs and nothing else, so that it is not what a peer is reached over.
  virtual bool for_gpus_only() const { return false; }
  // Whether that answer may become another one while the peer stays connected.
  virtual bool comes_back() const { return false; }
  // `connected` may be called before this returns, or later on an I/O thread, in any case before `deadline_ns` plus the
  // time that a busy thread needs. Nothing blocks.
  virtual void connect(const std::shared_ptr<Peer> &peer, std::string_view offer, int64_t deadline_ns,
                       Connected connected) = 0;
};

// Every transport of this build, the cheapest first.
std::vector<std::unique_ptr<Transport>> all_transports();
std::unique_ptr<Transport> make_local_transport();
std::unique_ptr<Transport> make_shm_transport();
std::unique_ptr<Transport> make_cuda_ipc_transport();
std::unique_ptr<Transport> make_rdma_transport();
std::unique_ptr<Transport> make_tcp_transport();

}  // namespace moonpool
