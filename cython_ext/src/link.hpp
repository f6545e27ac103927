// SPDX-License-Identifier: Apache-2.0
// The transport interface. The engine knows transports only through it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "status.hpp"
#include "transfer.hpp"
#include "work_queue.hpp"

namespace moonpool {

class Engine;
class Peer;

// One transport to one peer.
class Link {
 public:
  virtual ~Link() = default;
  virtual const char *path() const = 0;
  // Takes the transfer's descriptors. Small work may be done in the caller's thread; nothing blocks on the network.
  virtual void submit(const std::shared_ptr<Transfer> &transfer) = 0;
  // When it returns no byte is written to local memory for `transfer` any more; what a peer may still be applying is
  // reported when it is known to have ended.
  virtual void cancel(Transfer &transfer) = 0;
  // A waiting thread offers to do the work itself until `until`. May return at once.
  virtual void assist(Transfer &transfer, int64_t until) = 0;
  // The peer's answer to a fence that the link asked for.
  virtual void fenced(uint64_t lane_id) = 0;
  // No more work; everything unfinished fails with `cause`. `settled`: the peer is known to apply nothing any more;
  // otherwise the descriptors that it might be applying are handed to Peer::orphan.
  virtual void shutdown(const Error &cause, bool settled) = 0;
  virtual size_t lanes_ready() const = 0;
};

struct Probe {
  bool available;
  std::string reason;  // why not, or what it can do
};

// What the two ends of a pair know about each other when a path is chosen.
struct Reach {
  bool same_process;
  std::vector<std::string> offers;  // transports the peer offers
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual const char *name() const = 0;
  virtual Probe probe() const = 0;
  virtual bool reaches(const Reach &reach) const = 0;
  // Lower is taken first. Only the order means anything.
  virtual int cost() const = 0;
  virtual std::shared_ptr<Link> connect(const std::shared_ptr<Peer> &peer) = 0;
};

// Every transport of this build.
std::vector<std::unique_ptr<Transport>> all_transports();
std::unique_ptr<Transport> make_local_transport();
std::unique_ptr<Transport> make_tcp_transport();
// The cheapest of `allowed` that reaches the peer, or nullptr.
Transport *choose_path(const std::vector<std::unique_ptr<Transport>> &transports,
                       const std::vector<std::string> &allowed, const Reach &reach);

}  // namespace moonpool
