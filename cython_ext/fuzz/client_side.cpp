// SPDX-License-Identifier: Apache-2.0
#include "client_side.hpp"

#include <algorithm>
#include <cstring>

#include "auth.hpp"
#include "digest.hpp"
#include "engine.hpp"
#include "handles.hpp"
#include "peer.hpp"

namespace moonpool::fuzz {

namespace {

const std::string kSecret = "the secret of the fuzzers";
constexpr uint32_t kDeadlineMs = 2000;
constexpr uint64_t kBytesMax = 400u << 10;
constexpr uint64_t kFirstKey = 0x100;

struct Announced {
  uint64_t length;
  uint32_t flags;
};
constexpr Announced kAnnounced[] = {
    {4096, MP_REGION_WRITABLE}, {1u << 20, MP_REGION_WRITABLE}, {uint64_t{1} << 62, 0}, {64, MP_REGION_WRITABLE}};

template <class T>
std::string_view bytes_of(const T &value) {
  return {reinterpret_cast<const char *>(&value), sizeof value};
}

int32_t at_once(void *) { return 1; }

}  // namespace

ClientSide::ClientSide(Start start)
    : incarnation_((World::get().reset(), random_id())), token_(random_id()), auto_(start != Start::kNothing) {
  refill();
  mp_config config;
  mp_config_init(&config);
  config.transports = "tcp";
  config.secret = reinterpret_cast<const uint8_t *>(kSecret.data());
  config.secret_bytes = kSecret.size();
  config.lanes = 2;
  config.io_threads = 2;
  config.slice_bytes = 64u << 10;
  config.spin_us = 0;
  config.connect_timeout_ms = 1000;
  config.progress_timeout_ms = 1000;
  config.deadline_ms = kDeadlineMs;
  FUZZ_CHECK(mp_engine_open(&config, &engine_, nullptr) == MP_OK);
  for (const Piece &piece : pieces()) {
    mp_region *handle = nullptr;
    FUZZ_CHECK(mp_region_register(engine_, piece.base, piece.bytes, nullptr, piece.writable ? MP_REGION_WRITABLE : 0,
                                  &handle, nullptr) == MP_OK);
    regions_.push_back(handle);
  }
  std::vector<SocketAddress> addresses, more;
  FUZZ_CHECK(!resolve_address("192.0.2.1:7700", false, 0, {}, &addresses));
  FUZZ_CHECK(!resolve_address("[2001:db8::1]:7700", false, 0, {}, &more));
  addresses.push_back(more.front());
  peer_ = new mp_peer{Peer::make(engine_->engine, "192.0.2.1:7700", std::move(addresses))};
  FUZZ_CHECK(engine_->engine->add_peer(peer_->peer));
  mp_peer_ensure(peer_, 0, at_once, nullptr, nullptr);
  pump();
  if (start == Start::kNothing) return;
  FUZZ_CHECK(connections_.size() == 3);
  // The script of a control connection begins before anything was announced.
  if (start == Start::kControl) auto_ = false;
}

ClientSide::~ClientSide() {
  pump();
  check_transfers();
  for (const Running &running : running_) {
    FUZZ_CHECK(mp_transfer_get_state(running.handle) != MP_RUNNING);
  }
  FUZZ_CHECK(mp_peer_close(peer_, nullptr) == MP_OK);
  World::get().run();
  for (const Running &running : running_) {
    const mp_transfer_state state = mp_transfer_get_state(running.handle);
    FUZZ_CHECK(state != MP_RUNNING && state != MP_UNSETTLED);
    std::vector<uint8_t> statuses(mp_transfer_count(running.handle));
    mp_transfer_item_status(running.handle, statuses.data(), statuses.size());
    for (const uint8_t status : statuses) FUZZ_CHECK(status != MP_PENDING);
    mp_error error;
    mp_transfer_get_error(running.handle, &error);
    FUZZ_CHECK((error.code == MP_OK) == (state == MP_COMPLETED) && error.code != MP_PENDING);
    mp_transfer_free(running.handle);
  }
  FUZZ_CHECK(engine_->engine->running.size() == 0);
  for (mp_region *region : regions_) {
    FUZZ_CHECK(mp_region_release(region, nullptr) == MP_OK);
    mp_region_free(region);
  }
  mp_peer_free(peer_);
  FUZZ_CHECK(mp_engine_close(engine_, nullptr) == MP_OK);
  mp_engine_free(engine_);
  FUZZ_CHECK(World::get().open_sockets() == 0);
}

// ---------------------------------------------------------------- the peer

void ClientSide::pump() {
  do {
    World::get().run();
  } while (serve());
}

bool ClientSide::serve() {
  bool more = false;
  for (int fd = World::get().accept_from_core(); fd >= 0; fd = World::get().accept_from_core()) {
    connections_.emplace_back();
    connections_.back().fd = fd;
    more = true;
  }
  for (Connection &connection : connections_) {
    if (!World::get().alive(connection.fd)) continue;
    more = read(connection) || more;
    if (!auto_) continue;
    using Stage = Connection::Stage;
    if (connection.stage == Stage::kHello || connection.stage == Stage::kProved) {
      Source nothing(std::string_view{});
      answer(connection, nothing);
      if (connection.stage == Stage::kOpen && connection.hello.kind == wire::kControl) announce(connection);
      more = true;
    }
    for (const std::string &message : connection.answers) {
      World::get().feed(connection.fd, message);
      more = true;
    }
    connection.answers.clear();
  }
  return more;
}

bool ClientSide::read(Connection &connection) {
  using Stage = Connection::Stage;
  const std::string got = World::get().take(connection.fd);
  std::string &in = connection.received;
  in += got;
  if (connection.stage == Stage::kFresh && in.size() >= sizeof connection.hello) {
    std::memcpy(&connection.hello, in.data(), sizeof connection.hello);
    in.erase(0, sizeof connection.hello);
    connection.stage = Stage::kHello;
    FUZZ_CHECK(std::memcmp(connection.hello.magic, wire::kMagic, sizeof wire::kMagic) == 0);
    FUZZ_CHECK(connection.hello.kind == wire::kControl || connection.hello.kind == wire::kLane);
  }
  if (connection.stage == Stage::kChallenged && in.size() >= sizeof(wire::Proof)) {
    uint8_t mac[32];
    prove(kSecret, Role::kClient, connection.hello, connection.challenge, mac);
    FUZZ_CHECK(std::memcmp(mac, in.data(), sizeof mac) == 0);
    in.erase(0, sizeof(wire::Proof));
    connection.stage = Stage::kProved;
  }
  if (connection.stage != Stage::kOpen) return !got.empty();
  const bool more = connection.hello.kind == wire::kLane ? read_requests(connection) : read_messages(connection);
  return more || !got.empty();
}

// What the engine asks for is always well-formed, and within what was announced.
bool ClientSide::read_requests(Connection &connection) {
  std::string &in = connection.received;
  size_t used = 0;
  while (in.size() - used >= sizeof(wire::RequestHead)) {
    wire::RequestHead head;
    std::memcpy(&head, in.data() + used, sizeof head);
    FUZZ_CHECK(*wire::check_request(head) == '\0');
    Request request{head.header, std::vector<wire::WireDesc>(head.header.desc_count)};
    const size_t table = request.descs.size() * sizeof(wire::WireDesc);
    const bool write = head.header.op == MP_WRITE;
    const size_t digests = write && (head.header.flags & wire::kFlagDigest) != 0 ? request.descs.size() * 8 : 0;
    const size_t payload = write ? head.header.payload_bytes : 0;
    const size_t whole = sizeof head.header + table + payload + digests;
    if (in.size() - used < whole) break;
    std::memcpy(request.descs.data(), in.data() + used + sizeof head.header, table);
    check_request(request, std::string_view(in).substr(used + sizeof head.header + table, payload + digests));
    connection.requests.push_back(std::move(request));
    used += whole;
  }
  in.erase(0, used);
  return used > 0;
}

void ClientSide::check_request(const Request &request, std::string_view payload) const {
  uint64_t sum = 0;
  const bool write = request.header.op == MP_WRITE, digest = (request.header.flags & wire::kFlagDigest) != 0;
  for (size_t i = 0; i < request.descs.size(); ++i) {
    const wire::WireDesc &desc = request.descs[i];
    FUZZ_CHECK(desc.length > 0);
    if (faultless_) {
      FUZZ_CHECK(desc.key >= kFirstKey && desc.key - kFirstKey < std::size(kAnnounced));
      const Announced &region = kAnnounced[desc.key - kFirstKey];
      FUZZ_CHECK(desc.length <= region.length && desc.offset <= region.length - desc.length);
      FUZZ_CHECK(!write || region.flags == MP_REGION_WRITABLE);
    }
    if (write && digest && !reads_) {
      uint64_t value = 0;
      std::memcpy(&value, payload.data() + request.header.payload_bytes + i * sizeof value, sizeof value);
      FUZZ_CHECK(value == leaf_digest(payload.data() + sum, desc.length));
    }
    sum += desc.length;
  }
  FUZZ_CHECK(sum == request.header.payload_bytes);
}

bool ClientSide::read_messages(Connection &connection) {
  std::string &in = connection.received;
  size_t used = 0;
  while (in.size() - used >= sizeof(wire::MessageHeader)) {
    wire::MessageHeader header;
    std::memcpy(&header, in.data() + used, sizeof header);
    FUZZ_CHECK(header.bytes <= wire::kControlMessageMax);
    if (in.size() - used < sizeof header + header.bytes) break;
    const std::string_view body = std::string_view(in).substr(used + sizeof header, header.bytes);
    wire::Reader reader(body);
    uint64_t id = 0;
    std::string reply, message;
    FUZZ_CHECK(reader.get(&id));
    wire::Writer writer(&reply);
    writer.put(id);
    if (header.type == wire::kNotify) {
      wire::Notify notify;
      FUZZ_CHECK(wire::decode_notify(body, &notify));
      FUZZ_CHECK(notify.marks.empty());  // nothing here goes over rdma
      writer.put(uint32_t{MP_OK});
    } else {
      FUZZ_CHECK(header.type == wire::kFence && reader.done());
    }
    wire::append_message(&message, header.type == wire::kNotify ? wire::kNotifyAck : wire::kFenced, reply);
    connection.answers.push_back(std::move(message));
    used += sizeof header + header.bytes;
  }
  in.erase(0, used);
  return used > 0;
}

void ClientSide::answer(Connection &connection, Source &spoiling) {
  using Stage = Connection::Stage;
  if (connection.stage == Stage::kHello) {
    wire::Challenge &challenge = connection.challenge;
    std::memset(&challenge, 0, sizeof challenge);
    std::memcpy(challenge.magic, wire::kMagic, sizeof challenge.magic);
    challenge.version = wire::kVersion;
    challenge.flags = wire::kHasSecret;
    challenge.incarnation = incarnation_;
    random_bytes(challenge.nonce, sizeof challenge.nonce);
    spoil(&challenge, spoiling);
    World::get().feed(connection.fd, bytes_of(challenge));
    connection.stage = Stage::kChallenged;
  } else if (connection.stage == Stage::kProved) {
    wire::Welcome welcome{};
    prove(kSecret, Role::kServer, connection.hello, connection.challenge, welcome.mac);
    welcome.session = token_;
    wire::set_text(welcome.name, "played");
    const wire::Welcome right = welcome;
    spoil(&welcome, spoiling);
    if (std::memcmp(right.mac, welcome.mac, sizeof right.mac) == 0) ++welcomes_;
    World::get().feed(connection.fd, bytes_of(welcome));
    connection.stage = Stage::kOpen;
  }
}

void ClientSide::announce(Connection &connection) {
  std::string out, offer, body;
  wire::Writer offers(&offer), writer(&body);
  wire::encode_offer(offers, {"tcp", ""});
  wire::append_message(&out, wire::kOffer, offer);
  for (size_t i = 0; i < std::size(kAnnounced); ++i) {
    const Announced &one = kAnnounced[i];
    wire::encode_region(writer, {kFirstKey + i, one.length, i + 1, one.flags, "r" + std::to_string(i)});
  }
  wire::append_message(&out, wire::kRegions, body);
  wire::append_message(&out, wire::kSync, {});
  World::get().feed(connection.fd, out);
}

void ClientSide::respond(Connection &connection, Source &source) {
  if (connection.requests.empty()) return;
  const Request request = std::move(connection.requests.front());
  connection.requests.pop_front();
  wire::ResponseHeader header{wire::kResponseMagic, request.header.flags, {}, 0, 0, request.header.id, 0};
  Source header_fault(source.take(2));
  const auto payload_at = source.get<uint8_t>(), payload_change = source.get<uint8_t>();
  std::vector<wire::FailedDesc> failed;
  while (!source.empty() && failed.size() < 64) {
    const uint32_t at = source.get<uint8_t>();
    failed.push_back({at, source.get<uint8_t>()});
    if (at >= request.descs.size() || (failed.size() > 1 && at <= failed[failed.size() - 2].desc)) faultless_ = false;
  }
  header.failed_count = static_cast<uint32_t>(failed.size());
  std::string payload;
  std::vector<uint64_t> digests;
  const bool read = request.header.op == MP_READ;
  for (uint32_t i = 0; read && i < request.descs.size(); ++i) {
    const wire::WireDesc &desc = request.descs[i];
    const bool refused = std::any_of(failed.begin(), failed.end(), [i](const auto &one) { return one.desc == i; });
    const size_t before = payload.size();
    if (!refused) {
      payload.resize(before + desc.length);
      fill_pattern(reinterpret_cast<uint8_t *>(payload.data()) + before, desc.key, desc.offset, desc.length);
    }
    digests.push_back(refused ? 0 : leaf_digest(payload.data() + before, payload.size() - before));
  }
  header.payload_bytes = payload.size();
  // With digests a changed payload must be noticed, so that is no fault of ours.
  const bool digest = (request.header.flags & wire::kFlagDigest) != 0;
  if (payload_change != 0 && !payload.empty()) {
    payload[payload_at * 37 % payload.size()] ^= static_cast<char>(payload_change);
    if (!digest) faultless_ = false;
  }
  if (spoil(&header, header_fault)) faultless_ = false;
  std::string out(bytes_of(header));
  out.append(reinterpret_cast<const char *>(failed.data()), failed.size() * sizeof(wire::FailedDesc));
  out += payload;
  if (digest && read) out.append(reinterpret_cast<const char *>(digests.data()), digests.size() * sizeof(uint64_t));
  World::get().feed(connection.fd, out);
}

// ---------------------------------------------------------------- transfers

void ClientSide::submit(Source &source) {
  const auto flags = source.get<uint8_t>();
  mp_options options{};
  options.deadline_ns = int64_t{source.get<uint8_t>()} * 20 * kMillisecond;
  options.digest = (flags & kDigest) != 0 ? 1 : 0;
  if ((flags & kNotify) != 0) {
    options.notify = "done";
    options.notify_bytes = 4;
  }
  Running running{};
  running.op = (flags & kWrite) != 0 ? MP_WRITE : MP_READ;
  running.regions = peer_->peer->regions();
  if ((flags & kRemembered) != 0 || running.regions.empty()) {
    running.regions = remembered_;
  } else {
    remembered_ = running.regions;
  }
  const size_t n = source.get<uint8_t>() % 32;
  if (running.regions.empty() || n == 0 || running_.size() >= 16) return;
  for (size_t i = 0; i < n; ++i) {
    running.locals.push_back(source.get<uint8_t>() % kPieces);
    running.remotes.push_back(static_cast<uint32_t>(source.below(running.regions.size())));
    running.local_offsets.push_back(source.get<int32_t>());
    running.remote_offsets.push_back(source.get<int32_t>());
    running.lengths.push_back(source.get<int32_t>());
    bytes_ += static_cast<uint64_t>(std::clamp<int64_t>(running.lengths.back(), 0, 1 << 19));
  }
  if (bytes_ > kBytesMax) return;
  std::vector<const mp_remote_region *> remotes;
  for (const mp_remote_region &region : running.regions) remotes.push_back(&region);
  const mp_batch batch{n,
                       running.local_offsets.data(),
                       1,
                       running.remote_offsets.data(),
                       1,
                       running.lengths.data(),
                       1,
                       regions_.data(),
                       regions_.size(),
                       running.locals.data(),
                       remotes.data(),
                       remotes.size(),
                       running.remotes.data()};
  mp_error error{};
  if ((flags & kPlan) != 0) {
    mp_plan *plan = nullptr;
    if (mp_plan_create(peer_, &batch, &plan, &error) != MP_OK) return;
    const mp_status status = mp_plan_post(plan, running.op, nullptr, 0, &options, &running.handle, &error);
    mp_plan_free(plan);
    if (status != MP_OK) return;
  } else if (mp_submit(peer_, running.op, &batch, &options, &running.handle, &error) != MP_OK) {
    return;
  }
  if (running.op == MP_READ) reads_ = true;
  running_.push_back(std::move(running));
}

// Bytes of items that are reported as read are those that the peer sent for them.
void ClientSide::check_read(const Running &running) const {
  std::vector<uint8_t> statuses(running.lengths.size());
  mp_transfer_item_status(running.handle, statuses.data(), statuses.size());
  for (size_t i = 0; i < statuses.size(); ++i) {
    if (statuses[i] != MP_OK) continue;
    const uint8_t *local = pieces()[running.locals[i]].base + running.local_offsets[i];
    const uint64_t key = running.regions[running.remotes[i]].key;
    FUZZ_CHECK(has_pattern(local, key, static_cast<uint64_t>(running.remote_offsets[i]),
                           static_cast<size_t>(running.lengths[i])));
  }
}

void ClientSide::check_transfers() {
  // Every transfer leaves the running state by its deadline.
  auto_ = false;
  World::get().advance(int64_t{kDeadlineMs + 4000} * kMillisecond);
  mp_peer_info info;
  mp_peer_get_info(peer_, &info);
  FUZZ_CHECK(info.state != MP_PEER_READY || welcomes_ > 0);
  // Items of one transfer may overlap too, so only a single item is known for sure.
  if (faultless_ && running_.size() == 1 && running_[0].op == MP_READ && running_[0].lengths.size() == 1) {
    check_read(running_[0]);
  }
}

// ---------------------------------------------------------------- the script

ClientSide::Connection *ClientSide::pick(Source &source) {
  const size_t at = source.get<uint8_t>();
  return connections_.empty() ? nullptr : &connections_[at % connections_.size()];
}

void ClientSide::run(const std::vector<ScriptStep> &script) {
  for (const ScriptStep &one : script) {
    step(one.what, Source(one.bytes));
    // Steps that come together reach the engine together.
    if ((one.what & 0x80) == 0) pump();
  }
}

void ClientSide::step(uint8_t what, Source source) {
  World &world = World::get();
  switch (static_cast<Step>((what & 0x7f) % kSteps)) {
    case kConnect:
      mp_peer_ensure(peer_, 0, at_once, nullptr, nullptr);
      return;
    case kAuto:
      auto_ = (source.get<uint8_t>() & 1) != 0;
      return;
    case kRefuse:
      world.refuse_from_core();
      return;
    case kAdvance:
      return world.advance(int64_t{source.get<uint16_t>() % 500} * 10 * kMillisecond);
    case kSubmit:
      return submit(source);
    case kCancel:
      if (!running_.empty()) mp_transfer_cancel(running_[source.below(running_.size())].handle, 0);
      return;
    case kRelease:
      // Refused while a transfer uses it.
      mp_region_release(regions_[source.below(regions_.size())], nullptr);
      return;
    default:
      break;
  }
  Connection *connection = pick(source);
  if (connection == nullptr) return;
  switch (static_cast<Step>((what & 0x7f) % kSteps)) {
    case kAnswer:
      return answer(*connection, source);
    case kRaw:
      faultless_ = false;
      return world.feed(connection->fd, source.rest());
    case kMessage: {
      std::string out;
      const auto type = static_cast<wire::Message>(source.get<uint8_t>());
      wire::append_message(&out, type, source.rest());
      faultless_ = false;
      return world.feed(connection->fd, out);
    }
    case kAnnounce:
      if (connection->stage != Connection::Stage::kOpen || connection->hello.kind != wire::kControl) faultless_ = false;
      return announce(*connection);
    case kResponse:
      return respond(*connection, source);
    case kCut:
      return world.shut(connection->fd, (source.get<uint8_t>() & 1) != 0);
    case kCuts:
      return world.set_cuts(connection->fd, source.get<uint32_t>());
    case kRoom:
      return world.set_room(connection->fd, source.get<uint32_t>() % (1u << 20));
    default:
      FUZZ_CHECK(!"a step that somebody handles");
  }
}

int run_client_script(ClientSide::Start start, const uint8_t *data, size_t size) {
  ClientSide(start).run(parse_script(data, size));
  // Gives back what the run left here: libFuzzer takes an allocation more than it was for a leak and runs it again.
  World::get().reset();
  return 0;
}

}  // namespace moonpool::fuzz
