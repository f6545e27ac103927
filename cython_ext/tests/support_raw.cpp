// SPDX-License-Identifier: Apache-2.0
#include "support_raw.hpp"

#include <sys/socket.h>

#include "auth.hpp"

namespace moonpool::testing {

wire::Hello make_hello(wire::Kind kind, const std::string &secret) {
  wire::Hello hello;
  std::memset(&hello, 0, sizeof hello);
  std::memcpy(hello.magic, wire::kMagic, sizeof hello.magic);
  hello.version = wire::kVersion;
  hello.kind = kind;
  hello.flags = secret.empty() ? 0 : wire::kHasSecret;
  hello.incarnation = random_id();
  random_bytes(hello.nonce, sizeof hello.nonce);
  wire::set_text(hello.name, "raw");
  return hello;
}

wire::Challenge make_challenge(const std::string &secret) {
  wire::Challenge challenge;
  std::memset(&challenge, 0, sizeof challenge);
  std::memcpy(challenge.magic, wire::kMagic, sizeof challenge.magic);
  challenge.version = wire::kVersion;
  challenge.flags = secret.empty() ? 0 : wire::kHasSecret;
  challenge.incarnation = random_id();
  random_bytes(challenge.nonce, sizeof challenge.nonce);
  return challenge;
}

bool send_message(int fd, wire::Message type, std::string_view body) {
  std::string out;
  wire::append_message(&out, type, body);
  return send_all(fd, out.data(), out.size());
}

bool receive_message(int fd, ControlMessage *message) {
  wire::MessageHeader header;
  if (!receive_struct(fd, &header) || header.bytes > wire::kControlMessageMax) return false;
  message->type = header.type;
  message->body.resize(header.bytes);
  return receive_all(fd, message->body.data(), header.bytes);
}

// ---------------------------------------------------------------- client

Fd RawClient::open(wire::Kind kind, const Id128 &session, uint64_t lane_id) {
  return open_over(connect_to_loopback(port_), kind, session, lane_id);
}

Fd RawClient::open_over(Fd fd, wire::Kind kind, const Id128 &session, uint64_t lane_id) {
  wire::Hello hello = make_hello(kind, secret_);
  hello.incarnation = incarnation_;
  hello.session = session;
  hello.lane_id = lane_id;
  wire::Challenge challenge;
  wire::Welcome welcome;
  wire::Proof proof;
  status_ = MP_CONNECT;
  if (!fd || !send_struct(fd.get(), hello) || !receive_struct(fd.get(), &challenge)) return {};
  status_ = static_cast<mp_status>(challenge.status);
  message_ = wire::get_text(challenge.message);
  if (status_ != MP_OK) return {};
  prove(secret_, Role::kClient, hello, challenge, proof.mac);
  status_ = MP_CONNECT;
  if (!send_struct(fd.get(), proof) || !receive_struct(fd.get(), &welcome)) return {};
  status_ = static_cast<mp_status>(welcome.status);
  message_ = wire::get_text(welcome.message);
  if (status_ != MP_OK) return {};
  session_ = welcome.session;
  return fd;
}

bool RawClient::open_control() {
  control_ = open(wire::kControl, peer_id_, 0);
  if (!control_) return false;
  ControlMessage message;
  while (receive_message(control_.get(), &message)) {
    if (message.type == wire::kSync) return true;
    if (message.type == wire::kOffer && !wire::decode_offer(message.body, &offers_)) return false;
    if (message.type != wire::kRegions) continue;
    std::vector<wire::RegionRecord> records;
    if (!wire::decode_regions(message.body, &records)) return false;
    for (const wire::RegionRecord &record : records) keys_[record.name] = record.key;
  }
  return false;
}

bool send_request(int lane, mp_op op, uint64_t id, const std::vector<wire::WireDesc> &descs, uint8_t flags) {
  wire::RequestHeader header{wire::kRequestMagic, static_cast<uint8_t>(op), flags, 0, 0, 0, id, 0};
  header.desc_count = static_cast<uint32_t>(descs.size());
  for (const wire::WireDesc &desc : descs) header.payload_bytes += desc.length;
  return send_struct(lane, header) && send_all(lane, descs.data(), descs.size() * sizeof(wire::WireDesc));
}

std::optional<Response> receive_response(int lane) {
  Response response;
  if (!receive_struct(lane, &response.header) || *wire::check_response(response.header) != '\0') return {};
  response.failed.resize(response.header.failed_count);
  response.payload.resize(response.header.payload_bytes);
  if (!receive_all(lane, response.failed.data(), response.failed.size() * sizeof(wire::FailedDesc))) return {};
  if (!receive_all(lane, response.payload.data(), response.payload.size())) return {};
  return response;
}

// ---------------------------------------------------------------- server

std::optional<Request> receive_request(int lane) {
  Request request;
  if (!receive_struct(lane, &request.header)) return {};
  request.descs.resize(request.header.desc_count);
  if (!receive_all(lane, request.descs.data(), request.descs.size() * sizeof(wire::WireDesc))) return {};
  if (request.header.op == MP_READ) return request;
  request.payload.resize(request.header.payload_bytes);
  if (!receive_all(lane, request.payload.data(), request.payload.size())) return {};
  return request;
}

bool answer(int lane, const Request &request, uint8_t fill) {
  const bool read = request.header.op == MP_READ;
  const uint64_t bytes = read ? request.header.payload_bytes : 0;
  const wire::ResponseHeader header{wire::kResponseMagic, 0, {}, 0, 0, request.header.id, bytes};
  const Bytes payload(bytes, fill);
  return send_struct(lane, header) && send_all(lane, payload.data(), payload.size());
}

RawServer::RawServer(uint64_t region_bytes, std::vector<wire::Offer> offers)
    : region_bytes_(region_bytes), offers_(std::move(offers)), listener_(listen_on_loopback(&port_)) {
  thread_ = std::thread([this] { serve(); });
}

RawServer::~RawServer() { die(); }

void RawServer::die() {
  std::vector<Connection> controls, lanes;
  {
    std::lock_guard lock(mutex_);
    dead_ = true;
    controls.swap(controls_);
    lanes.swap(lanes_);
  }
  // The order in which the kernel closes what a process leaves behind.
  lanes.clear();
  controls.clear();
  ::shutdown(listener_.get(), SHUT_RDWR);
  if (thread_.joinable()) thread_.join();
  listener_.reset();
}

void RawServer::serve() {
  for (;;) {
    Fd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!fd) return;
    // Little is in flight unread, so that a stalled target is noticed soon.
    set_buffers(fd.get(), 1 << 16);
    greet(std::move(fd));
  }
}

bool RawServer::greet(Fd fd) {
  wire::Hello hello;
  wire::Proof proof;
  wire::Challenge challenge = make_challenge("");
  challenge.incarnation = incarnation_;
  wire::Welcome welcome;
  std::memset(&welcome, 0, sizeof welcome);
  welcome.session = random_id();
  wire::set_text(welcome.name, "raw target");
  if (!receive_struct(fd.get(), &hello) || !send_struct(fd.get(), challenge) || !receive_struct(fd.get(), &proof)) {
    return false;
  }
  prove("", Role::kServer, hello, challenge, welcome.mac);
  if (!send_struct(fd.get(), welcome)) return false;
  if (hello.kind == wire::kControl) {
    std::string offer, regions;
    wire::Writer offer_writer(&offer), regions_writer(&regions);
    for (const wire::Offer &one : offers_) wire::encode_offer(offer_writer, one);
    wire::encode_region(regions_writer, {kKey, region_bytes_, 1, MP_REGION_WRITABLE, "kv"});
    if (!send_message(fd.get(), wire::kOffer, offer) || !send_message(fd.get(), wire::kRegions, regions) ||
        !send_message(fd.get(), wire::kSync, {})) {
      return false;
    }
  }
  std::lock_guard lock(mutex_);
  if (dead_) return false;
  (hello.kind == wire::kControl ? controls_ : lanes_).push_back({std::move(fd), hello.lane_id});
  return true;
}

int RawServer::nth(const std::vector<Connection> &list, size_t n) {
  const bool there = eventually([&] {
    std::lock_guard lock(mutex_);
    return list.size() > n;
  });
  std::lock_guard lock(mutex_);
  return there ? list[n].fd.get() : -1;
}

uint64_t RawServer::lane_id(size_t n) {
  nth(lanes_, n);
  std::lock_guard lock(mutex_);
  return lanes_.at(n).lane_id;
}

size_t RawServer::lanes() {
  std::lock_guard lock(mutex_);
  return lanes_.size();
}

}  // namespace moonpool::testing
