// SPDX-License-Identifier: Apache-2.0
// The server's view of a client: its control connection and the lanes that serve its requests.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "control.hpp"
#include "region.hpp"
#include "server_lane.hpp"

namespace moonpool {

class Engine;

class Session : public std::enable_shared_from_this<Session> {
 public:
  Session(Engine &engine, IoThread &io, const wire::Hello &hello);

  // The connection is usable from here on: announces offers and regions.
  void start(Fd fd);
  // False when the session has ended, or the lane was fenced before it came.
  bool add_lane(uint64_t lane_id, std::shared_ptr<ServerLane> lane);
  void announce(const Region &region);
  void withdraw(const Region &region);
  // Nothing of `region` is read or written by this session's lanes when it returns.
  void drop_region(const Region &region);
  // Ends the control connection and every lane; when it returns nothing of this session touches memory.
  void close();
  // close(), and then also the copies that a client on this host makes by itself are over. False: one is not at
  // `until`.
  bool end(int64_t until);
  void rail_changed(uint32_t rail, bool up);
  // A lane got further: delivers the notifications that were waiting for it.
  void deliver();
  size_t lanes() const;

  const Id128 token;  // lanes present it
  const Id128 peer_id;
  const Id128 client;  // incarnation
  const std::string client_name;

 private:
  void send_offer_locked();
  Error on_message(wire::Message type, std::string_view body);
  Error on_notify(std::string_view body);
  bool arrived_locked(const wire::Mark &mark) const;
  void fence(uint64_t lane_id);
  // To call without the lock.
  std::map<uint64_t, std::shared_ptr<ServerLane>> all_lanes() const;
  std::map<uint64_t, std::shared_ptr<ServerLane>> close_lanes();

  Engine &engine_;
  IoThread &io_;
  mutable std::mutex mutex_;
  bool closed_ = false;
  std::shared_ptr<ControlConnection> control_;
  std::map<uint64_t, std::shared_ptr<ServerLane>> lanes_;
  struct Pending {
    uint64_t id;
    std::vector<wire::Mark> marks;
    std::string payload;
  };
  std::deque<Pending> pending_;  // notifications, in the order in which they are delivered
  std::set<uint64_t> fenced_;    // lanes that were not here when they were fenced, and must not come later
};

}  // namespace moonpool
