// SPDX-License-Identifier: Apache-2.0
// The client's view of another engine: its control connection, its regions, the link that moves the bytes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "address.hpp"
#include "backoff.hpp"
#include "control.hpp"
#include "handshake.hpp"
#include "link.hpp"
#include "wire.hpp"

namespace moonpool {

class Engine;

class Peer : public std::enable_shared_from_this<Peer> {
 public:
  static std::shared_ptr<Peer> make(std::shared_ptr<Engine> engine, std::string address,
                                    std::vector<SocketAddress> resolved);
  ~Peer();

  Engine &engine() const { return *engine_; }
  const std::string &address() const { return address_; }
  // "name (address)", for error texts.
  std::string label() const;
  // What is known about the connection, for errors that cannot name a cause of their own.
  std::string standing() const;

  // Connects if it is not connected, and waits for it until `deadline_ns`.
  Error ensure(int64_t deadline_ns, const Interrupt &interrupt);
  void close(const Error &cause);
  void info(mp_peer_info *out) const;
  Error find_region(const std::string &name, int64_t deadline_ns, mp_remote_region *out);
  std::vector<mp_remote_region> regions() const;
  // MP_REGION_STALE when the handle names an earlier incarnation than the present connection's.
  Error check_handle(const mp_remote_region &region) const;

  // Hands the transfer to the link, or keeps it until the peer is connected again.
  void submit(const std::shared_ptr<Transfer> &transfer);
  void send_notify(const std::shared_ptr<Transfer> &transfer);
  // The transfer is being stopped: what waits here for it ends.
  void forget(Transfer &transfer);

  // ---- for the links
  void send_fence(uint64_t lane_id);
  uint64_t next_lane_id() { return next_lane_id_.fetch_add(1); }
  // The link is broken: others are taken from now on, and its transport is tried again later.
  void path_failed(const Link &link, const Error &cause);
  // Goes on over another path with what the link `from` could not finish, or fails it with `cause`.
  void move_on(std::vector<Work> work, const Link *from, const Error &cause);
  // The peer may still be applying these; they are settled by the next handshake, the peer's death, or close().
  void orphan(std::vector<Work> work, const Error &cause);
  Id128 session() const;
  Id128 incarnation() const;
  // A port of this engine went up or down: asks again for the paths that were not possible.
  void reconsider_paths();
  // Why cheaper paths are not used.
  std::string fallback() const;
  // Whether a region is announced.
  bool knows(uint64_t key) const;
  std::vector<SocketAddress> resolved() const { return resolved_; }
  // Adds who and how to an error.
  Error describe(Error error, const char *path) const;

 private:
  Peer(std::shared_ptr<Engine> engine, std::string address, std::vector<SocketAddress> resolved);
  enum class State { kIdle, kConnecting, kReady, kLost, kClosed };
  struct Orphan {
    std::vector<Work> work;
    Error cause;
  };
  struct Path {
    Transport *transport = nullptr;
    bool offered = false;
    std::string offer;
    bool possible = false;  // as far as the offer says
    std::string why_not;    // why it is not used; "" when it is, or was not tried yet
    bool lost = false;      // ... which is that the peer went away
    std::shared_ptr<Link> link;
    bool connecting = false;
    Backoff backoff;
    int64_t retry_at = 0;
  };

  bool reaches_device(const Transfer &transfer) const;
  void keep(const std::shared_ptr<Transfer> &transfer);
  bool park(const Work &work, const Error &cause);
  void start_dial_locked(int64_t deadline_ns);
  void on_dialed(Dialed dialed);
  Error on_message(wire::Message type, std::string_view body);
  void on_offers(std::vector<Offer> offers);
  void on_sync();
  void become_ready();
  std::vector<Path> possible_paths(const std::vector<Offer> &offers, const Id128 &incarnation) const;
  void advance();
  void connect_path(Transport &transport);
  bool on_path(uint64_t connection, const std::string &name, const std::string &offer,
               const std::shared_ptr<Link> &link, const Error &error);
  void ask_again_locked(Path &path) const;
  static void out_of_use_locked(Path &path, const Error &cause);
  // Of a path that was there until the peer went away; none when that is not why there is no path.
  Error lost_locked() const;
  std::vector<Path>::iterator find_path_locked(const std::string &name);
  std::shared_ptr<Link> route(const Transfer &transfer, const Link *except, Error *error);
  // What would carry the next transfer; nullptr: nothing.
  const Path *current_path_locked() const;
  std::string fallback_locked() const;
  std::vector<std::shared_ptr<Link>> links_locked() const;
  void on_lost(const Error &cause, bool peer_closed);
  void fail_connect(Error error);
  void settle_later_locked();
  void settle(std::vector<Orphan> orphans);
  size_t regions_max() const;
  bool learn_regions_locked(std::vector<wire::RegionRecord> records);
  static void fill(const wire::RegionRecord &record, const Id128 &incarnation, mp_remote_region *out);

  const std::shared_ptr<Engine> engine_;
  const std::string address_;
  const std::vector<SocketAddress> resolved_;
  const Id128 peer_id_;
  IoThread &io_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kIdle;
  Error last_error_;
  int64_t retry_at_ = 0;
  int64_t connect_deadline_ = 0;  // of the present attempt
  Backoff backoff_;
  uint64_t connection_ = 0;  // counts handshakes, so that a late reply of an earlier one is dropped
  std::string name_;
  Id128 incarnation_{};
  Id128 session_{};
  std::vector<Offer> offers_;
  std::shared_ptr<ControlConnection> control_;
  std::vector<Path> paths_;  // of the present connection, the cheapest first
  std::atomic<uint64_t> next_lane_id_{1};
  std::map<std::string, wire::RegionRecord> by_name_;
  std::unordered_map<uint64_t, std::string> name_of_key_;
  std::vector<std::shared_ptr<Transfer>> waiting_;
  std::vector<Orphan> parked_;  // parts of transfers, until the path is connected that is to go on with them
  std::unordered_map<uint64_t, std::shared_ptr<Transfer>> notifying_;
  uint64_t next_notify_ = 1;
  std::vector<Orphan> orphans_;
};

}  // namespace moonpool
