// SPDX-License-Identifier: Apache-2.0
//
// Stands between two engines and cuts their lanes. Control connections pass untouched.
#pragma once

#include <atomic>
#include <list>
#include <mutex>
#include <string>

#include "support.hpp"

namespace moonpool::testing {

class Proxy {
 public:
  explicit Proxy(uint16_t target_port);
  ~Proxy();

  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  // From here on each of the next `cuts` lanes that carry so many bytes is reset on both sides.
  void cut_lanes(int cuts, uint64_t bytes_min, uint64_t bytes_max, uint32_t seed);
  // Lanes that connect from here on are reset at once.
  void refuse_lanes(bool refuse) { refuse_lanes_.store(refuse); }
  int cuts_made() const { return cuts_made_.load(); }
  size_t lanes() const { return lanes_open_.load(); }
  // Resets the n-th lane that is open.
  void cut_lane(size_t n);

 private:
  // One direction: what was read and not written yet.
  struct Pipe {
    std::string waiting;
    bool ended = false;
  };
  struct Connection {
    Fd client, target;
    Pipe up, down;
    uint64_t bytes = 0;
    bool known = false;  // whether it is a lane
    bool lane = false;
  };

  void run();
  // False when the connection is over.
  bool forward(Connection &connection, int from, int to, Pipe &pipe);
  bool may_go_on(Connection &connection, const Pipe &pipe);
  uint64_t next_limit();
  static void reset(Connection &connection);

  const uint16_t target_port_;
  uint16_t port_ = 0;
  Fd listener_;
  std::atomic<bool> stopping_{false}, refuse_lanes_{false};
  std::atomic<int> cuts_made_{0};
  std::atomic<size_t> lanes_open_{0};
  std::mutex mutex_;
  int cuts_left_ = 0;
  uint64_t bytes_min_ = 0, bytes_max_ = 0, limit_ = 0;
  std::mt19937 random_;
  std::list<Connection> connections_;
  std::thread thread_;
};

}  // namespace moonpool::testing
