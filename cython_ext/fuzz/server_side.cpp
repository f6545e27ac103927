// SPDX-License-Identifier: Apache-2.0
#include "server_side.hpp"

#include <algorithm>
#include <cstring>

#include "auth.hpp"
#include "digest.hpp"
#include "engine.hpp"
#include "handles.hpp"

namespace moonpool::fuzz {

namespace {

const std::string kSecret = "the secret of the fuzzers";
constexpr size_t kConnectionsMax = 24;
constexpr uint64_t kPayloadMax = 400u << 10;  // of all requests
constexpr uint16_t kPort = 7700;
constexpr uint32_t kConnectTimeoutMs = 1000;

template <class T>
std::string_view bytes_of(const T &value) {
  return {reinterpret_cast<const char *>(&value), sizeof value};
}

// Numbers up to the size of the pieces as they are, others so that they often lie within one.
uint64_t mostly_small(uint32_t number) { return number < (1u << 19) ? number : number % 5003; }

}  // namespace

ServerSide::ServerSide(Start start)
    : incarnation_((World::get().reset(), random_id())), peer_id_(random_id()), payload_left_(kPayloadMax) {
  refill();
  mp_config config;
  mp_config_init(&config);
  config.listen = "127.0.0.1:7700";
  config.transports = "tcp";
  config.secret = reinterpret_cast<const uint8_t *>(kSecret.data());
  config.secret_bytes = kSecret.size();
  config.io_threads = 2;
  config.spin_us = 0;
  config.connect_timeout_ms = kConnectTimeoutMs;
  config.peers_max = 4;
  config.notifications_max = 3;
  FUZZ_CHECK(mp_engine_open(&config, &engine_, nullptr) == MP_OK);
  for (size_t i = 0; i < kPieces; ++i) register_piece(i);
  if (start == Start::kNothing) return;
  open(wire::kControl, peer_id_, 0);
  if (start == Start::kLane) open(wire::kLane, session_, 1);
}

ServerSide::~ServerSide() {
  check_service();
  FUZZ_CHECK(mp_engine_close(engine_, nullptr) == MP_OK);
  FUZZ_CHECK(engine_->engine->stats.server_lanes.load() == 0);
  for (const Known &region : regions_) mp_region_free(region.handle);
  mp_engine_free(engine_);
  FUZZ_CHECK(World::get().open_sockets() == 0);
}

void ServerSide::register_piece(size_t at) {
  const Piece &piece = pieces()[at];
  const std::string name = "piece " + std::to_string(at) + " no. " + std::to_string(regions_.size());
  mp_region *handle = nullptr;
  FUZZ_CHECK(mp_region_register(engine_, piece.base, piece.bytes, name.c_str(), piece.writable ? MP_REGION_WRITABLE : 0,
                                &handle, nullptr) == MP_OK);
  regions_.push_back({at, handle->region->key, handle, false});
}

// ---------------------------------------------------------------- handshakes

size_t ServerSide::connect() {
  connections_.emplace_back();
  connections_.back().fd = World::get().connect_to(kPort);
  FUZZ_CHECK(connections_.back().fd >= 0);
  World::get().run();
  return connections_.size() - 1;
}

void ServerSide::send_hello(Connection &connection, wire::Kind kind, const Id128 &session, uint64_t lane,
                            Source &spoiling) {
  wire::Hello hello{};
  std::memcpy(hello.magic, wire::kMagic, sizeof hello.magic);
  hello.version = wire::kVersion;
  hello.kind = kind;
  hello.flags = wire::kHasSecret;
  hello.incarnation = incarnation_;
  random_bytes(hello.nonce, sizeof hello.nonce);
  hello.session = session;
  hello.lane_id = lane;
  wire::set_text(hello.name, "fuzz");
  spoil(&hello, spoiling);
  World::get().feed(connection.fd, bytes_of(hello));
  // A second one is nothing that the engine takes for a Hello.
  if (!connection.greeted) connection.hello = hello;
  connection.greeted = true;
}

void ServerSide::send_proof(Connection &connection, Source &spoiling) {
  wire::Proof proof;
  prove(kSecret, Role::kClient, connection.hello, connection.challenge, proof.mac);
  const bool right = !spoil(&proof, spoiling);
  if (right && connection.stage == Connection::Stage::kGreeted) ++proofs_;
  World::get().feed(connection.fd, bytes_of(proof));
}

size_t ServerSide::open(wire::Kind kind, const Id128 &session, uint64_t lane) {
  const size_t at = connect();
  Source nothing(std::string_view{});
  send_hello(connections_[at], kind, session, lane, nothing);
  World::get().run();
  receive(connections_[at], SIZE_MAX);
  send_proof(connections_[at], nothing);
  World::get().run();
  receive(connections_[at], SIZE_MAX);
  return at;
}

// Reads what the engine has sent, and checks what can be known of it.
void ServerSide::receive(Connection &connection, size_t limit) {
  using Stage = Connection::Stage;
  connection.received += World::get().take(connection.fd, limit);
  std::string &in = connection.received;
  if (connection.stage == Stage::kFresh && in.size() >= sizeof connection.challenge) {
    std::memcpy(&connection.challenge, in.data(), sizeof connection.challenge);
    in.erase(0, sizeof connection.challenge);
    connection.stage = Stage::kGreeted;
    FUZZ_CHECK(std::memcmp(connection.challenge.magic, wire::kMagic, sizeof wire::kMagic) == 0);
  }
  if (connection.stage == Stage::kGreeted && in.size() >= sizeof connection.welcome) {
    wire::Welcome &welcome = connection.welcome;
    std::memcpy(&welcome, in.data(), sizeof welcome);
    in.erase(0, sizeof welcome);
    connection.stage = Stage::kProved;
    if (welcome.status == MP_OK) {
      connection.stage = Stage::kOpen;
      if (connection.hello.kind == wire::kControl) {
        session_ = welcome.session;
      } else {
        ++lanes_;
      }
    }
  }
  if (connection.stage != Stage::kOpen) return;
  if (connection.hello.kind == wire::kControl) {
    check_messages(connection);
  } else if (connection.faultless && connection.hello.kind == wire::kLane) {
    check_responses(connection);
  } else {  // a spoilt Hello may ask for a lane of another kind
    in.clear();
  }
}

// What the engine sends on a control connection is always well-formed.
void ServerSide::check_messages(Connection &connection) {
  std::string &in = connection.received;
  wire::MessageHeader header;
  while (in.size() >= sizeof header) {
    std::memcpy(&header, in.data(), sizeof header);
    FUZZ_CHECK(header.bytes <= wire::kControlMessageMax);
    if (in.size() < sizeof header + header.bytes) return;
    const std::string_view body = std::string_view(in).substr(sizeof header, header.bytes);
    std::vector<wire::RegionRecord> records;
    std::vector<wire::Offer> offers;
    switch (header.type) {
      case wire::kOffer:
        FUZZ_CHECK(wire::decode_offer(body, &offers) && offers.size() == 1 && offers[0].transport == "tcp");
        break;
      case wire::kRegions:
        FUZZ_CHECK(wire::decode_regions(body, &records));
        break;
      case wire::kRegionGone:
      case wire::kFenced:
        FUZZ_CHECK(body.size() == 8);
        break;
      case wire::kSync:
        FUZZ_CHECK(body.empty());
        break;
      case wire::kNotifyAck:
        FUZZ_CHECK(body.size() == 12);
        break;
      default:
        FUZZ_CHECK(!"a message that a server sends");
    }
    in.erase(0, sizeof header + header.bytes);
  }
}

// ---------------------------------------------------------------- lanes

mp_status ServerSide::expected_status(const wire::WireDesc &desc, bool write) const {
  const auto it = std::find_if(regions_.begin(), regions_.end(), [&](const Known &k) { return k.key == desc.key; });
  if (it == regions_.end()) return MP_REGION_UNKNOWN;
  if (it->released) return MP_REGION_RELEASED;
  const Piece &piece = pieces()[it->piece];
  if (desc.length == 0 || desc.length > piece.bytes || desc.offset > piece.bytes - desc.length) return MP_OUT_OF_RANGE;
  return write && !piece.writable ? MP_REGION_READ_ONLY : MP_OK;
}

bool ServerSide::overlap(const std::vector<wire::WireDesc> &descs) const {
  std::vector<std::pair<const uint8_t *, const uint8_t *>> places;
  for (const wire::WireDesc &desc : descs) {
    const auto it = std::find_if(regions_.begin(), regions_.end(), [&](const Known &k) { return k.key == desc.key; });
    if (it == regions_.end()) continue;
    const uint8_t *first = pieces()[it->piece].base + desc.offset;
    places.emplace_back(first, first + desc.length);
  }
  std::sort(places.begin(), places.end());
  for (size_t i = 1; i < places.size(); ++i) {
    if (places[i].first < places[i - 1].second) return true;
  }
  return false;
}

void ServerSide::send_request(Connection &connection, Source &source) {
  const auto kind = source.get<uint8_t>();
  Expected request{};
  wire::RequestHeader &header = request.header;
  header = {wire::kRequestMagic,
            static_cast<uint8_t>((kind & 1) != 0 ? MP_WRITE : MP_READ),
            static_cast<uint8_t>((kind & 2) != 0 ? wire::kFlagDigest : 0),
            0,
            0,
            0,
            next_request_++,
            0};
  Source header_fault(source.take(2));
  header.desc_count = source.get<uint8_t>();
  for (uint32_t i = 0; i < header.desc_count; ++i) {
    const size_t at = source.below(regions_.size() + 1);
    const uint64_t key = at < regions_.size() ? regions_[at].key : source.get<uint32_t>();
    const uint64_t offset = mostly_small(source.get<uint32_t>());
    request.descs.push_back({key, offset, mostly_small(source.get<uint32_t>())});
    header.payload_bytes += request.descs.back().length;
    request.statuses.push_back(expected_status(request.descs.back(), (kind & 1) != 0));
  }
  const bool digest = (header.flags & wire::kFlagDigest) != 0, write = header.op == MP_WRITE;
  // What ends the lane instead of being answered.
  bool answered = header.desc_count > 0;
  if (header.op == MP_READ) {
    if (header.payload_bytes > payload_left_) return;
    payload_left_ -= header.payload_bytes;
  }
  for (const wire::WireDesc &desc : request.descs) {
    if (digest && (desc.length == 0 || desc.length > kDigestLeafBytes)) answered = false;
  }
  wire::RequestHeader on_wire = header;
  if (spoil(&on_wire, header_fault)) answered = false;
  std::string out(bytes_of(on_wire));
  out.append(reinterpret_cast<const char *>(request.descs.data()), request.descs.size() * sizeof(wire::WireDesc));
  if (write) {
    const size_t wrong_digest = source.get<uint8_t>();
    const bool whole = header.payload_bytes <= payload_left_;
    std::string payload(source.rest());
    payload.resize(std::min<uint64_t>(header.payload_bytes, payload_left_), 'p');
    payload_left_ -= payload.size();
    out += payload;
    request.spoilt.assign(request.descs.size(), false);
    uint64_t at = 0;
    for (size_t i = 0; digest && whole && answered && i < request.descs.size(); ++i) {
      uint64_t value = leaf_digest(payload.data() + at, request.descs[i].length);
      request.spoilt[i] = wrong_digest == i + 1;
      if (request.spoilt[i]) ++value;
      out += bytes_of(value);
      at += request.descs[i].length;
    }
    if (!whole) answered = false;
  }
  request.overlapping = overlap(request.descs);
  World::get().feed(connection.fd, out);
  if (!answered) connection.faultless = false;
  if (connection.faultless) connection.expected.push_back(std::move(request));
}

void ServerSide::check_responses(Connection &connection) {
  std::string &in = connection.received;
  size_t used = 0;
  while (in.size() - used >= sizeof(wire::ResponseHeader)) {
    wire::ResponseHeader header;
    std::memcpy(&header, in.data() + used, sizeof header);
    FUZZ_CHECK(!connection.expected.empty() && *wire::check_response(header) == '\0');
    const Expected &request = connection.expected.front();
    const bool digest = (header.flags & wire::kFlagDigest) != 0, read = request.header.op == MP_READ;
    FUZZ_CHECK(header.id == request.header.id && header.flags == request.header.flags);
    FUZZ_CHECK(header.failed_count <= request.descs.size());
    const size_t failed_bytes = header.failed_count * sizeof(wire::FailedDesc);
    const size_t trailer = digest && read ? request.descs.size() * sizeof(uint64_t) : 0;
    const size_t whole = sizeof header + failed_bytes + header.payload_bytes + trailer;
    if (in.size() - used < whole) break;
    const std::vector<wire::FailedDesc> failed = [&] {
      std::vector<wire::FailedDesc> copy(header.failed_count);
      if (failed_bytes > 0) std::memcpy(copy.data(), in.data() + used + sizeof header, failed_bytes);
      return copy;
    }();
    const auto *payload = reinterpret_cast<const uint8_t *>(in.data() + used + sizeof header + failed_bytes);
    check_response(request, header, failed.data(), payload);
    connection.expected.pop_front();
    used += whole;
  }
  in.erase(0, used);
}

void ServerSide::check_response(const Expected &request, const wire::ResponseHeader &header,
                                const wire::FailedDesc *failed, const uint8_t *payload) const {
  const bool write = request.header.op == MP_WRITE;
  // Whoever else writes the same bytes may come between a digest and its bytes.
  const bool alone = lanes_ == 1 && !request.overlapping;
  uint64_t sum = 0;
  size_t next = 0;
  std::vector<uint64_t> digests;
  for (uint32_t i = 0; i < request.descs.size(); ++i) {
    const wire::WireDesc &desc = request.descs[i];
    const bool refused = next < header.failed_count && failed[next].desc == i;
    const mp_status now = expected_status(desc, write);
    if (refused) {
      const auto status = static_cast<mp_status>(failed[next++].status);
      const bool wrong_digest = status == MP_DIGEST && write && (request.spoilt[i] || !alone);
      FUZZ_CHECK(status == now || status == request.statuses[i] || wrong_digest);
      digests.push_back(0);
      continue;
    }
    FUZZ_CHECK(request.statuses[i] == MP_OK);
    FUZZ_CHECK(!write || !request.spoilt[i] || !alone);
    if (write) continue;
    const auto known =
        std::find_if(regions_.begin(), regions_.end(), [&](const Known &k) { return k.key == desc.key; });
    if (known->piece == kReadOnly) {
      FUZZ_CHECK(has_pattern(payload + sum, kReadOnly, desc.offset, desc.length));
    }
    digests.push_back((header.flags & wire::kFlagDigest) != 0 ? leaf_digest(payload + sum, desc.length) : 0);
    sum += desc.length;
  }
  FUZZ_CHECK(next == header.failed_count);
  FUZZ_CHECK(header.payload_bytes == (write ? 0 : sum));
  if (write || (header.flags & wire::kFlagDigest) == 0 || !alone) return;
  FUZZ_CHECK(std::memcmp(payload + sum, digests.data(), digests.size() * sizeof(uint64_t)) == 0);
}

// ---------------------------------------------------------------- the script

ServerSide::Connection *ServerSide::pick(Source &source) {
  const size_t at = source.get<uint8_t>();
  return connections_.empty() ? nullptr : &connections_[at % connections_.size()];
}

void ServerSide::run(const std::vector<ScriptStep> &script) {
  for (const ScriptStep &one : script) {
    step(one.what, Source(one.bytes));
    // Steps that come together reach the engine together.
    if ((one.what & 0x80) == 0) World::get().run();
  }
}

void ServerSide::step(uint8_t what, Source source) {
  World &world = World::get();
  const auto kind = static_cast<Step>((what & 0x7f) % kSteps);
  if (kind == kConnect) {
    if (connections_.size() < kConnectionsMax) connect();
    return;
  }
  if (kind == kAdvance) return world.advance(int64_t{source.get<uint16_t>() % 1000} * 10 * kMillisecond);
  if (kind == kRegister) {
    if (regions_.size() < 16) register_piece(source.below(kPieces));
    return;
  }
  if (kind == kRelease) {
    Known &region = regions_[source.below(regions_.size())];
    region.released = true;
    FUZZ_CHECK(mp_region_release(region.handle, nullptr) == MP_OK);
    return;
  }
  if (kind == kNotices) {
    mp_notification notice;
    while (mp_notification_take(engine_, 0, &notice) == MP_OK) mp_notification_clear(&notice);
    return;
  }
  Connection *connection = pick(source);
  if (connection == nullptr) return;
  switch (kind) {
    case kRaw:
      connection->faultless = false;
      return world.feed(connection->fd, source.rest());
    case kHello: {
      const auto lane_or_control = static_cast<wire::Kind>(1 + source.below(2));
      const Id128 &session = source.get<uint8_t>() % 4 == 3 ? peer_id_ : session_;
      const uint64_t lane = source.get<uint8_t>();
      if (connection->greeted) connection->faultless = false;
      return send_hello(*connection, lane_or_control, lane_or_control == wire::kControl ? peer_id_ : session, lane,
                        source);
    }
    case kProof:
      receive(*connection, SIZE_MAX);
      if (connection->stage != Connection::Stage::kGreeted) connection->faultless = false;
      return send_proof(*connection, source);
    case kMessage: {
      std::string out;
      const auto type = static_cast<wire::Message>(source.get<uint8_t>());
      wire::append_message(&out, type, source.rest());
      connection->faultless = false;
      return world.feed(connection->fd, out);
    }
    case kRequest:
      if (connection->stage != Connection::Stage::kOpen) connection->faultless = false;
      return send_request(*connection, source);
    case kCut:
      return world.shut(connection->fd, (source.get<uint8_t>() & 1) != 0);
    case kCuts:
      return world.set_cuts(connection->fd, source.get<uint32_t>());
    case kRoom:
      return world.set_room(connection->fd, source.get<uint32_t>() % (1u << 20));
    case kTake:
      return receive(*connection, source.get<uint32_t>());
    default:
      FUZZ_CHECK(!"a step that somebody handles");
  }
}

// Whatever happened, the next client is served.
void ServerSide::check_service() {
  World &world = World::get();
  world.run();
  for (Connection &connection : connections_) {
    if (world.alive(connection.fd)) receive(connection, SIZE_MAX);
  }
  for (Connection &connection : connections_) world.shut(connection.fd, false);
  world.run();
  Engine &engine = *engine_->engine;
  FUZZ_CHECK(engine.stats.handshakes_ok.load() <= proofs_);
  FUZZ_CHECK(engine.session_count() == 0);
  FUZZ_CHECK(engine.stats.handshakes_pending.load() == 0);
  payload_left_ = kPayloadMax;
  register_piece(kReadOnly);
  open(wire::kControl, peer_id_, 0);
  Connection &lane = connections_[open(wire::kLane, session_, 1)];
  FUZZ_CHECK(lane.stage == Connection::Stage::kOpen);
  const uint8_t at = static_cast<uint8_t>(regions_.size() - 1);
  ScriptWriter read;
  read.step(0, uint8_t{0}, uint16_t{0}, uint8_t{1}, at, uint32_t{100}, uint32_t{200});
  Source source(std::string_view(read.text()).substr(3));
  send_request(lane, source);
  world.run();
  receive(lane, SIZE_MAX);
  FUZZ_CHECK(lane.expected.empty());
}

int run_server_script(ServerSide::Start start, const uint8_t *data, size_t size) {
  ServerSide(start).run(parse_script(data, size));
  // Gives back what the run left here: libFuzzer takes an allocation more than it was for a leak and runs it again.
  World::get().reset();
  return 0;
}

}  // namespace moonpool::fuzz
