// SPDX-License-Identifier: Apache-2.0
// The server's view of a client: its control connection and the lanes that serve its requests.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

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
  void add_lane(uint64_t lane_id, std::shared_ptr<ServerLane> lane);
  void announce(const Region &region);
  void withdraw(const Region &region);
  // Nothing of `region` is read or written by this session's lanes when it returns.
  void drop_region(const Region &region);
  // Ends the control connection and every lane; when it returns nothing of this session touches memory.
  void close();
  size_t lanes() const;

  const Id128 token;  // lanes present it
  const Id128 peer_id;
  const Id128 client;  // incarnation
  const std::string client_name;

 private:
  Error on_message(wire::Message type, std::string_view body);
  Error on_notify(std::string_view body);
  void fence(uint64_t lane_id);

  Engine &engine_;
  IoThread &io_;
  mutable std::mutex mutex_;
  bool closed_ = false;
  std::shared_ptr<ControlConnection> control_;
  std::map<uint64_t, std::shared_ptr<ServerLane>> lanes_;
  std::set<uint64_t> fenced_;  // lanes that were not here when they were fenced, and must not come later
};

}  // namespace moonpool
