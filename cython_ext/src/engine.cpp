// SPDX-License-Identifier: Apache-2.0
#include "engine.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "cuda_ipc_server_lane.hpp"
#include "peer.hpp"
#include "rdma_link.hpp"
#include "rdma_server_lane.hpp"
#include "shm_server_lane.hpp"
#include "tcp_server_lane.hpp"

namespace moonpool {

namespace {

constexpr int kBacklog = 4096;
// Connections that have not proved the secret yet. More than this are turned away at once.
constexpr int64_t kHandshakesMax = 1024;

std::mutex g_engines_mutex;

std::unordered_map<std::string, std::weak_ptr<Engine>> &engines_in_process() {
  // Never destroyed: engines may still close while the process exits.
  static auto *engines = new std::unordered_map<std::string, std::weak_ptr<Engine>>();
  return *engines;
}

std::string registry_key(const Id128 &id) { return std::string(id.begin(), id.end()); }

}  // namespace

class Engine::Acceptor final : public Handler, public std::enable_shared_from_this<Acceptor> {
 public:
  Acceptor(Engine &engine, IoThread &io, Fd fd) : engine_(engine), io_(io) { fd_ = std::move(fd); }
  Error start() { return io_.add(shared_from_this(), EPOLLIN); }
  void stop() {
    std::lock_guard lock(mutex_);
    stopped_ = true;
    io_.remove(*this);
    fd_.reset();
  }

 private:
  void on_events(uint32_t) override {
    std::lock_guard lock(mutex_);
    for (int i = 0; i < 64 && !stopped_; ++i) {
      const int client = accept4(fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (client >= 0) {
        engine_.greet_client(Fd(client));
      } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        return pause();
      } else if (errno != ECONNABORTED && errno != EINTR) {
        return;
      }
    }
  }

  // Out of descriptors: the connection stays in the backlog. Asking again at once would only burn a core.
  void pause() {
    io_.modify(*this, 0);
    io_.call_at(now_ns() + 100 * kMillisecond, [weak = weak_from_this()] {
      auto self = weak.lock();
      if (self == nullptr) return;
      std::lock_guard lock(self->mutex_);
      if (!self->stopped_) self->io_.modify(*self, EPOLLIN);
    });
  }

  Engine &engine_;
  IoThread &io_;
  std::mutex mutex_;
  bool stopped_ = false;
};

Engine::Engine(Config resolved, std::vector<std::unique_ptr<Transport>> all)
    : config(std::move(resolved)),
      transports(std::move(all)),
      identity{config.name, random_id(), config.secret},
      regions(config.regions_max),
      notifications(config.notifications_max),
      staging(config.cuda_staging_bytes, config.spin_us, int64_t{config.progress_timeout_ms} * kMillisecond) {}

Engine::~Engine() { close(); }

std::shared_ptr<Engine> Engine::in_this_process(const Id128 &incarnation) {
  std::lock_guard lock(g_engines_mutex);
  const auto it = engines_in_process().find(registry_key(incarnation));
  return it == engines_in_process().end() ? nullptr : it->second.lock();
}

Error Engine::open() {
  for (uint32_t i = 0; i < config.io_threads; ++i) {
    io_.push_back(std::make_unique<IoThread>(i, config.spin_us));
    if (Error error = io_.back()->start()) return error;
  }
  host_ = shm::HostIdentity::of_this_process();
  if (Error error = open_rdma()) return error;
  if (!config.listen.empty()) {
    if (Error error = listen()) return error;
  }
  std::lock_guard lock(g_engines_mutex);
  engines_in_process()[registry_key(identity.incarnation)] = weak_from_this();
  return {};
}

Error Engine::listen() {
  std::vector<SocketAddress> addresses;
  const int64_t deadline = now_ns() + int64_t{config.connect_timeout_ms} * kMillisecond;
  if (Error error = resolve_address(config.listen, true, deadline, {}, &addresses)) return error;
  const SocketAddress &address = addresses.front();
  if (!address.loopback() && config.secret.empty() && !config.insecure) {
    return make_error(MP_CONFIG, "refusing to listen on " + address.text() + " without a cluster secret",
                      "give `secret`, listen on 127.0.0.1, or set `insecure` on a network you trust");
  }
  Fd fd(socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const int on = 1;
  if (fd) setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (!fd || bind(fd.get(), address.get(), address.length) != 0 || ::listen(fd.get(), kBacklog) != 0) {
    const int err = errno;
    const char *hint = err == EADDRINUSE      ? "another process listens there; port 0 picks a free one"
                       : err == EADDRNOTAVAIL ? "this host has no such address; see `ip address`"
                                              : "check the address and the limits of this process";
    return system_error(MP_LISTEN, err, "cannot listen on " + address.text(), hint);
  }
  address_ = local_address(fd.get()).text();
  acceptors_.push_back(std::make_shared<Acceptor>(*this, *io_[0], std::move(fd)));
  if (Error error = acceptors_.back()->start()) return error;
  const auto &names = config.transports;
  const auto on_host = [](const std::string &name) { return name == "shm" || name == "cuda_ipc"; };
  if (std::any_of(names.begin(), names.end(), on_host)) listen_on_host();
  return {};
}

// Without it peers take another path and say why.
void Engine::listen_on_host() {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string name = "moonpool-";
  for (const uint8_t byte : random_id()) {
    name += kDigits[byte >> 4];
    name += kDigits[byte & 15];
  }
  const SocketAddress address = SocketAddress::abstract(name);
  Fd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd || bind(fd.get(), address.get(), address.length) != 0 || ::listen(fd.get(), kBacklog) != 0) return;
  acceptors_.push_back(std::make_shared<Acceptor>(*this, *io_[0], std::move(fd)));
  if (!acceptors_.back()->start()) host_.socket = name;
}

void Engine::greet_client(Fd fd) {
  if (stats.handshakes_pending.load() >= kHandshakesMax) {
    stats.handshakes_refused.fetch_add(1);
    return;
  }
  stats.handshakes_pending.fetch_add(1);
  tune_socket(fd.get());
  IoThread &io = next_io();
  std::weak_ptr<Engine> weak = weak_from_this();
  GreeterHooks hooks;
  hooks.admit = [weak, &io](const wire::Hello &hello) {
    const auto self = weak.lock();
    return self == nullptr ? Admission{make_error(MP_CLOSED, "the engine is closing"), {}, {}} : self->admit(hello, io);
  };
  hooks.finished = [weak](mp_status status) {
    const auto self = weak.lock();
    if (self == nullptr) return;
    self->stats.handshakes_pending.fetch_sub(1);
    const bool broken = status == MP_PEER_LOST || status == MP_DEADLINE;
    (status == MP_OK ? self->stats.handshakes_ok
     : broken        ? self->stats.handshakes_broken
                     : self->stats.handshakes_refused)
        .fetch_add(1);
  };
  greet(identity, io, std::move(fd), now_ns() + int64_t{config.connect_timeout_ms} * kMillisecond, hooks);
}

Admission Engine::admit(const wire::Hello &hello, IoThread &io) {
  if (closing_.load()) return {make_error(MP_CLOSED, "the engine is closing"), {}, {}};
  return hello.kind == wire::kControl ? admit_control(hello, io) : admit_lane(hello, io);
}

Admission Engine::admit_control(const wire::Hello &hello, IoThread &io) {
  auto session = std::make_shared<Session>(*this, io, hello);
  std::shared_ptr<Session> replaced;
  {
    std::lock_guard lock(mutex_);
    const auto same = std::find_if(sessions_.begin(), sessions_.end(), [&](const auto &other) {
      return other->peer_id == session->peer_id && other->client == session->client;
    });
    if (same != sessions_.end()) {
      replaced = *same;
      sessions_.erase(same);
    }
    if (sessions_.size() >= config.peers_max) {
      return {
          make_error(MP_LIMIT, std::to_string(config.peers_max) + " peers are connected already (peers_max)"), {}, {}};
    }
  }
  // The client lost its earlier session. What that may still have been applying ends before the new one begins.
  if (replaced != nullptr) replaced->close();
  std::weak_ptr<Engine> weak = weak_from_this();
  return {{}, session->token, [weak, session](Fd fd) {
            const auto self = weak.lock();
            if (self == nullptr) return;
            std::lock_guard announce(self->announce_mutex_);
            {
              std::lock_guard lock(self->mutex_);
              if (self->closing_.load()) return;
              self->sessions_.push_back(session);
            }
            session->start(std::move(fd));
          }};
}

Admission Engine::admit_lane(const wire::Hello &hello, IoThread &io) {
  if (hello.kind == wire::kRdma && rdma == nullptr) {
    return {make_error(MP_TRANSPORT_UNAVAILABLE, "this engine does not use rdma"), {}, {}};
  }
  const std::shared_ptr<Session> session = find_session(hello.session, hello.incarnation);
  if (session == nullptr) return {make_error(MP_PEER_LOST, "the session of this lane has ended"), {}, {}};
  return {{}, session->token, [this, session, lane_id = hello.lane_id, kind = hello.kind, &io](Fd fd) {
            std::shared_ptr<ServerLane> lane;
            if (kind == wire::kShm) {
              lane = std::make_shared<ShmServerLane>(*this, io, std::move(fd));
            } else if (kind == wire::kCudaIpc) {
              lane = std::make_shared<CudaIpcServerLane>(*this, io, std::move(fd));
            } else if (kind == wire::kRdma) {
              lane = std::make_shared<RdmaServerLane>(*this, io, std::move(fd), session);
            } else {
              lane = std::make_shared<TcpServerLane>(*this, io, std::move(fd));
            }
            session->add_lane(lane_id, std::move(lane));
          }};
}

bool Engine::admit_local(Peer &client, const std::shared_ptr<ServerLane> &lane) {
  const std::shared_ptr<Session> session = find_session(client.session(), client.engine().identity.incarnation);
  return session != nullptr && session->add_lane(client.next_lane_id(), lane);
}

std::vector<std::shared_ptr<Session>> Engine::all_sessions() const {
  std::lock_guard lock(mutex_);
  return sessions_;
}

std::shared_ptr<Session> Engine::find_session(const Id128 &token, const Id128 &client) const {
  std::lock_guard lock(mutex_);
  const auto it = std::find_if(sessions_.begin(), sessions_.end(), [&](const auto &session) {
    return session->token == token && session->client == client;
  });
  return it == sessions_.end() ? nullptr : *it;
}

void Engine::drop_session(const std::shared_ptr<Session> &session) {
  {
    std::lock_guard lock(mutex_);
    std::erase(sessions_, session);
  }
  session->close();
}

Error Engine::fence(const Id128 &incarnation, uint32_t *sessions) {
  std::vector<std::shared_ptr<Session>> fenced;
  {
    // Like an announcement that is under way: a session that is being admitted is fenced too, or not there yet.
    std::lock_guard announce(announce_mutex_);
    std::lock_guard lock(mutex_);
    const auto first = std::stable_partition(sessions_.begin(), sessions_.end(),
                                             [&](const auto &session) { return session->client != incarnation; });
    fenced.assign(std::make_move_iterator(first), std::make_move_iterator(sessions_.end()));
    sessions_.erase(first, sessions_.end());
  }
  *sessions = static_cast<uint32_t>(fenced.size());
  const int64_t until = now_ns() + int64_t{config.progress_timeout_ms} * kMillisecond;
  bool over = true;
  for (const auto &session : fenced) over = session->end(until) && over;
  if (over) return {};
  return make_error(MP_REGION_BUSY, "the peer is cut off, but was stopped in the middle of a copy on this host",
                    "continue or kill that process: what it is copying may still reach memory of this engine");
}

Error Engine::add_region(const std::shared_ptr<Region> &region) {
  if (Error error = register_rdma(*region)) return error;
  if (region->device != nullptr) has_gpu_memory_.store(true);
  if (region->name.empty()) return {};
  std::lock_guard announce(announce_mutex_);
  if (closing_.load()) return make_error(MP_CLOSED, "the engine is closed");
  if (Error error = regions.insert(region)) return error;
  for (const auto &session : all_sessions()) session->announce(*region);
  return {};
}

Error Engine::release_region(Region &region) {
  if (!region.try_release()) {
    return make_error(MP_REGION_BUSY, "cannot release " + region.label() + ": a running transfer uses it",
                      "wait for the transfer, or cancel it first");
  }
  std::vector<std::shared_ptr<Session>> sessions;
  {
    std::lock_guard announce(announce_mutex_);
    regions.erase(region);
    sessions = all_sessions();
    if (!region.name.empty()) {
      for (const auto &session : sessions) session->withdraw(region);
    }
  }
  if (!withdraw_rdma(region) || region.served()) {
    for (const auto &session : sessions) session->drop_region(region);
    withdraw_rdma(region);
  }
  region.wait_unserved();
  if (region.stop_sharing(now_ns() + int64_t{config.progress_timeout_ms} * kMillisecond)) return {};
  if (region.device != nullptr) {
    return make_error(MP_REGION_BUSY,
                      region.label() + " is withdrawn, but a copy that a peer on this host began has not ended",
                      "continue or kill that process and release the region again: memory of a GPU cannot be moved "
                      "out of its way");
  }
  return make_error(
      MP_REGION_BUSY, region.label() + " is withdrawn, but a peer on this host was stopped in the middle of a copy",
      "continue or kill that process and release the region again: there is no memory to move its bytes to");
}

bool Engine::add_peer(const std::shared_ptr<Peer> &peer) {
  std::lock_guard lock(mutex_);
  if (closing_.load()) return false;
  std::erase_if(peers_, [](const auto &weak) { return weak.expired(); });
  peers_.push_back(peer);
  return true;
}

size_t Engine::peer_count() const {
  std::lock_guard lock(mutex_);
  return static_cast<size_t>(std::count_if(peers_.begin(), peers_.end(), [](const auto &w) { return !w.expired(); }));
}

size_t Engine::session_count() const {
  std::lock_guard lock(mutex_);
  return sessions_.size();
}

void Engine::run(const std::shared_ptr<Transfer> &transfer) {
  transfer->arm();
  running.add(transfer);
  if (closing_.load()) {
    // close() may have looked at the list before this one was in it.
    transfer->fail(make_error(MP_CLOSED, "the engine is closed"));
    return;
  }
  if (transfer->deadline_ns <= now_ns()) {
    transfer->stop(deadline_cause(*transfer));
    transfer->fail(transfer->stop_cause());
    return;
  }
  arm_deadline(transfer->deadline_ns);
  if (transfer->after_stream) return run_after_stream(transfer);
  transfer->peer->submit(transfer);
}

// Whatever path it takes, none of it is begun before.
void Engine::run_after_stream(const std::shared_ptr<Transfer> &transfer) {
  const auto go_on = [transfer](const Error &error) {
    if (error) return transfer->fail(error);
    if (transfer->stopping()) return transfer->fail(transfer->stop_cause());
    transfer->peer->submit(transfer);
  };
  const Error error =
      staging.stager(transfer->device)
          ->after_stream(
              transfer->cuda_stream, [transfer] { return transfer->stopping(); },
              [this, go_on](const Error &failed) { next_io().post([go_on, failed] { go_on(failed); }); });
  if (error) transfer->fail(error);
}

Error Engine::deadline_cause(const Transfer &transfer) {
  Error cause = transfer.peer->describe(
      make_error(MP_DEADLINE, "the deadline of a transfer of " + std::to_string(transfer.bytes) + " bytes passed",
                 "check that the peer is alive, or give it a longer deadline"),
      "");
  cause.cause = transfer.peer->standing();
  return cause;
}

void Engine::arm_deadline(int64_t deadline_ns) {
  // The timer is left armed when a transfer ends: later deadlines find it there, and an idle engine wakes once more.
  int64_t armed = deadline_armed_.load(std::memory_order_relaxed);
  while (deadline_ns < armed) {
    if (!deadline_armed_.compare_exchange_weak(armed, deadline_ns)) continue;
    io_[0]->call_at(deadline_ns, [weak = weak_from_this()] {
      if (auto self = weak.lock()) self->check_deadlines();
    });
    return;
  }
}

void Engine::check_deadlines() {
  deadline_armed_.store(kNever);
  int64_t next = kNever;
  for (const auto &transfer : running.expired(now_ns(), &next)) {
    transfer->stop(deadline_cause(*transfer));
  }
  if (next != kNever) arm_deadline(next);
}

void Engine::close() {
  if (forked()) return;
  if (closing_.exchange(true)) {
    std::unique_lock lock(mutex_);
    closed_changed_.wait(lock, [this] { return closed_; });
    return;
  }
  {
    std::lock_guard lock(g_engines_mutex);
    engines_in_process().erase(registry_key(identity.incarnation));
  }
  const Error cause = make_error(MP_CLOSED, "the engine was closed");
  for (const auto &transfer : running.all()) transfer->stop(cause);
  std::vector<std::weak_ptr<Peer>> peers;
  std::vector<std::shared_ptr<Session>> sessions;
  std::vector<std::shared_ptr<RdmaLink>> connecting;
  {
    // An announcement that is under way ends first, so that no session is added behind our back.
    std::lock_guard announce(announce_mutex_);
    std::lock_guard lock(mutex_);
    peers.swap(peers_);
    sessions.swap(sessions_);
    connecting.swap(rdma_connecting_);
  }
  connecting.clear();
  for (const auto &weak : peers) {
    if (auto peer = weak.lock()) peer->close(cause);
  }
  // Threads of the application may be copying. They find nothing more to do, because every link has been shut down.
  for (uint32_t n = copying_.load(); n != 0; n = copying_.load()) copying_.wait(n);
  for (const auto &acceptor : acceptors_) acceptor->stop();
  for (const auto &session : sessions) session->close();
  // One patience for all of them: a client that was stopped may have been at work in many.
  const int64_t until = now_ns() + int64_t{config.progress_timeout_ms} * kMillisecond;
  staging.begin_close(until);
  for (const auto &region : regions.all()) {
    region->release_for_good();
    withdraw_rdma(*region);
    region->wait_unserved();
    region->stop_sharing(until);
  }
  staging.join();
  if (rdma != nullptr) rdma->unwatch();
  for (const auto &io : io_) io->stop();
  // What the threads had not got to, such as the last words of broken lanes.
  bool more = true;
  while (more) {
    more = false;
    for (const auto &io : io_) more = io->drain() || more;
  }
  for (const auto &io : io_) io->dispose();
  notifications.close();
  std::lock_guard lock(mutex_);
  closed_ = true;
  closed_changed_.notify_all();
}

}  // namespace moonpool
