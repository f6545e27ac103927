// SPDX-License-Identifier: Apache-2.0
// The framed control connection of a peer (client side) or a session (server side).
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "io_thread.hpp"
#include "wire.hpp"

namespace moonpool {

struct ControlHooks {
  // An error ends the connection as a protocol error.
  std::function<Error(wire::Message, std::string_view)> message;
  // It has ended as a protocol error, which the other side does not see yet. May be empty.
  std::function<void()> malformed;
  // Called once. `peer_closed`: the other side's kernel said so, its process writes nothing any more.
  std::function<void(const Error &, bool peer_closed)> lost;
};

class ControlConnection : public Handler, public std::enable_shared_from_this<ControlConnection> {
 public:
  ControlConnection(IoThread &io, Fd fd, ControlHooks hooks);

  void start();
  // From any thread. A peer that does not read is given up when `kBacklogMax` bytes wait for it.
  void send(wire::Message type, std::string_view body);
  // From any thread; the hooks are not called any more afterwards, except for a call that is under way.
  void close();

 private:
  static constexpr size_t kBacklogMax = 256u << 20;

  void on_events(uint32_t events) override;
  void flush_locked();
  void parse();
  void lose(const Error &cause, bool peer_closed);

  IoThread &io_;
  ControlHooks hooks_;
  std::mutex mutex_;  // everything below, and the descriptor
  bool closed_ = false;
  bool write_failed_ = false;
  std::string given_up_;  // why this side ended the connection, if it did
  bool watching_out_ = false;
  std::string out_;
  size_t out_at_ = 0;
  std::string in_;  // the I/O thread's
};

}  // namespace moonpool
