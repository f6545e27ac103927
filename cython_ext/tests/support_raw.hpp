// SPDX-License-Identifier: Apache-2.0
//
// Both sides of the wire protocol by hand, on blocking sockets: what an engine meets when the other side is slow,
// broken or hostile.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "support.hpp"
#include "wire.hpp"

namespace moonpool::testing {

wire::Hello make_hello(wire::Kind kind, const std::string &secret);
wire::Challenge make_challenge(const std::string &secret);

struct ControlMessage {
  uint16_t type = 0;
  std::string body;
};
bool send_message(int fd, wire::Message type, std::string_view body);
bool receive_message(int fd, ControlMessage *message);
template <class T>
std::string body_of(const T &value) {
  std::string body;
  wire::Writer(&body).put(value);
  return body;
}

// A client of an engine.
class RawClient {
 public:
  explicit RawClient(uint16_t port, std::string secret = {}) : port_(port), secret_(std::move(secret)) {}

  // Both return an empty descriptor when the server refuses; status() says why.
  Fd open(wire::Kind kind, const Id128 &session, uint64_t lane_id);
  Fd open_lane(uint64_t lane_id) { return open(wire::kLane, session_, lane_id); }
  // The same over a connection that is there already.
  Fd open_over(Fd fd, wire::Kind kind, const Id128 &session, uint64_t lane_id);
  // Opens the control connection and reads what the server announces.
  bool open_control();

  int control() const { return control_.get(); }
  void close_control() { control_.reset(); }
  mp_status status() const { return status_; }
  const std::string &message() const { return message_; }
  const Id128 &incarnation() const { return incarnation_; }
  uint64_t key(const std::string &name) const { return keys_.at(name); }
  const Id128 &session() const { return session_; }
  const std::vector<wire::Offer> &offers() const { return offers_; }

 private:
  const uint16_t port_;
  const std::string secret_;
  const Id128 incarnation_ = random_id();
  const Id128 peer_id_ = random_id();
  Fd control_;
  Id128 session_{};
  std::map<std::string, uint64_t> keys_;
  std::vector<wire::Offer> offers_;
  mp_status status_ = MP_OK;
  std::string message_;
};

// Header and descriptors of a request. The payload of a write is the caller's to send.
bool send_request(int lane, mp_op op, uint64_t id, const std::vector<wire::WireDesc> &descs, uint8_t flags = 0);
struct Response {
  wire::ResponseHeader header{};
  std::vector<wire::FailedDesc> failed;
  Bytes payload;
};
std::optional<Response> receive_response(int lane);

// The other side of the same: a request with the payload of a write, and a good answer to it. A read is answered with
// bytes of `fill`.
struct Request {
  wire::RequestHeader header{};
  std::vector<wire::WireDesc> descs;
  Bytes payload;
};
std::optional<Request> receive_request(int lane);
bool answer(int lane, const Request &request, uint8_t fill = 0);

// A target that proves itself, announces one writable region "kv" and then does nothing by itself. Connections are
// accepted by a thread of its own; the test reads and answers them, or does not.
class RawServer {
 public:
  explicit RawServer(uint64_t region_bytes, std::vector<wire::Offer> offers = {{"tcp", ""}});
  ~RawServer();

  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  const Id128 &incarnation() const { return incarnation_; }
  static constexpr uint64_t kKey = 0x6b6579;

  // Wait until there are so many; descriptors stay the server's. -1 when patience ended.
  int control(size_t n = 0) { return nth(controls_, n); }
  int lane(size_t n) { return nth(lanes_, n); }
  // The lane id of that lane's Hello.
  uint64_t lane_id(size_t n);
  size_t lanes();
  // As if its process died: every connection ends, and nobody connects any more.
  void die();

 private:
  struct Connection {
    Fd fd;
    uint64_t lane_id;
  };
  void serve();
  bool greet(Fd fd);
  int nth(const std::vector<Connection> &list, size_t n);

  const uint64_t region_bytes_;
  const std::vector<wire::Offer> offers_;
  const Id128 incarnation_ = random_id();
  uint16_t port_ = 0;
  Fd listener_;
  std::mutex mutex_;
  bool dead_ = false;
  std::vector<Connection> controls_, lanes_;
  std::thread thread_;
};

}  // namespace moonpool::testing
