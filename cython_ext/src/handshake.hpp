// SPDX-License-Identifier: Apache-2.0
// The four handshake messages, from both sides, without blocking: a Dialer connects and proves, a Greeter checks.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "address.hpp"
#include "io_thread.hpp"
#include "wire.hpp"

namespace moonpool {

struct Identity {
  std::string name;
  Id128 incarnation;
  std::string secret;
};

struct DialRequest {
  std::vector<SocketAddress> addresses;  // tried one after the other
  wire::Kind kind;
  Id128 session;
  uint64_t lane_id;
  int64_t deadline_ns;
};

struct Dialed {
  Error error;
  Fd fd;
  wire::Challenge challenge;
  wire::Welcome welcome;
};

// `done` is called once, on the I/O thread. `identity` must outlive the thread.
void dial(const Identity &identity, IoThread &io, DialRequest request, std::function<void(Dialed)> done);

struct Admission {
  Error error;
  Id128 session;                     // control: the token its lanes must present
  std::function<void(Fd)> accepted;  // called once the Welcome is sent
};

struct GreeterHooks {
  // Decides about a client that has proved the secret.
  std::function<Admission(const wire::Hello &)> admit;
  // One handshake ended, with MP_OK or why not.
  std::function<void(mp_status)> finished;
};

void greet(const Identity &identity, IoThread &io, Fd fd, int64_t deadline_ns, const GreeterHooks &hooks);

// Non-blocking, no delay, keep-alive; used by every socket of the engine.
void tune_socket(int fd);

}  // namespace moonpool
