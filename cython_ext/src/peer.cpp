// SPDX-License-Identifier: Apache-2.0
#include "peer.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "engine.hpp"

namespace moonpool {

Peer::Peer(std::shared_ptr<Engine> engine, std::string address, std::vector<SocketAddress> resolved)
    : engine_(std::move(engine)),
      address_(std::move(address)),
      resolved_(std::move(resolved)),
      peer_id_(random_id()),
      io_(engine_->next_io()) {}

std::shared_ptr<Peer> Peer::make(std::shared_ptr<Engine> engine, std::string address,
                                 std::vector<SocketAddress> resolved) {
  auto *peer = new Peer(std::move(engine), std::move(address), std::move(resolved));
  return {peer, [](Peer *gone) {
            // The last reference often goes with a transfer that ends under the lock of a lane, which closing takes
            // too.
            bool closed;
            {
              std::lock_guard lock(gone->mutex_);
              closed = gone->state_ == State::kClosed;
            }
            if (closed) {
              delete gone;
            } else {
              gone->io_.post([gone] { delete gone; });
            }
          }};
}

// The last handle, plan and transfer are gone: nobody can use the connection any more.
Peer::~Peer() { close(make_error(MP_CLOSED, "the peer was closed")); }

std::string Peer::label() const {
  std::lock_guard lock(mutex_);
  return name_.empty() ? address_ : name_ + " (" + address_ + ")";
}

std::string Peer::standing() const {
  std::lock_guard lock(mutex_);
  switch (state_) {
    case State::kIdle:
    case State::kConnecting:
      return "the peer is being connected";
    case State::kReady: {
      const auto tcp = std::find_if(paths_.begin(), paths_.end(), [](const Path &path) {
        return path.link != nullptr && std::strcmp(path.link->path(), "tcp") == 0;
      });
      if (tcp == paths_.end()) return "the peer is connected";
      const size_t ready = tcp->link->lanes_ready();
      return ready == 0 ? "the peer is connected, but none of its lanes is"
                        : "the peer is connected with " + std::to_string(ready) + " lanes, the bytes did not come";
    }
    case State::kLost:
    case State::kClosed:
      return last_error_.message + (last_error_.cause.empty() ? "" : ": " + last_error_.cause);
  }
  return {};
}

Error Peer::describe(Error error, const char *path) const {
  if (error.peer.empty()) error.peer = label();
  if (error.path.empty()) error.path = path;
  return error;
}

Error Peer::ensure(int64_t deadline_ns, const Interrupt &interrupt) {
  std::unique_lock lock(mutex_);
  // True when `done` or the time came, false when interrupted. The application is asked without the lock.
  const auto wait = [&](int64_t until, const auto &done) {
    while (!done() && now_ns() < until) {
      changed_.wait_until(lock, steady_point(std::min(until, now_ns() + kInterruptEveryNs)), done);
      lock.unlock();
      const bool stop = interrupt();
      lock.lock();
      if (stop) return false;
    }
    return true;
  };
  if (state_ != State::kConnecting) {
    // The back-off holds for everyone, so that a fault never becomes a storm.
    const auto usable = [this] { return state_ == State::kReady || state_ == State::kClosed; };
    if (!wait(std::min(retry_at_, deadline_ns), usable)) return interrupted_error();
    if (state_ == State::kIdle || state_ == State::kLost) start_dial_locked(deadline_ns);
  }
  const auto ended = [this] { return state_ != State::kConnecting; };
  if (!wait(deadline_ns + 1000 * kMillisecond, ended)) return interrupted_error();
  if (state_ == State::kReady) return {};
  if (!ended()) return make_error(MP_CONNECT, "no answer from " + address_ + " within the connect deadline");
  return last_error_;
}

void Peer::start_dial_locked(int64_t deadline_ns) {
  state_ = State::kConnecting;
  const uint64_t connection = ++connection_;
  connect_deadline_ = deadline_ns;
  DialRequest request{resolved_, wire::kControl, peer_id_, 0, deadline_ns};
  std::weak_ptr<Peer> weak = weak_from_this();
  const auto current = [weak, connection]() -> std::shared_ptr<Peer> {
    auto self = weak.lock();
    if (self == nullptr) return nullptr;
    std::lock_guard lock(self->mutex_);
    return self->connection_ == connection && self->state_ == State::kConnecting ? self : nullptr;
  };
  dial(engine_->identity, io_, std::move(request), [current](Dialed dialed) {
    if (auto self = current()) self->on_dialed(std::move(dialed));
  });
  io_.call_at(deadline_ns, [current] {
    auto self = current();
    if (self == nullptr) return;
    self->fail_connect(make_error(MP_CONNECT, "no answer from " + self->address_ + " within the connect deadline",
                                  "check that the peer is not stopped, or raise connect_timeout"));
  });
}

void Peer::on_dialed(Dialed dialed) {
  if (dialed.error) return fail_connect(std::move(dialed.error));
  std::shared_ptr<ControlConnection> control;
  {
    std::lock_guard lock(mutex_);
    if (state_ != State::kConnecting) return;
    const uint64_t connection = connection_;
    std::weak_ptr<Peer> weak = weak_from_this();
    const auto current = [weak, connection]() -> std::shared_ptr<Peer> {
      auto self = weak.lock();
      if (self == nullptr) return nullptr;
      std::lock_guard inner(self->mutex_);
      return self->connection_ == connection ? self : nullptr;
    };
    ControlHooks hooks;
    hooks.message = [current](wire::Message type, std::string_view body) {
      auto self = current();
      return self == nullptr ? Error{} : self->on_message(type, body);
    };
    hooks.lost = [current](const Error &cause, bool peer_closed) {
      if (auto self = current()) self->on_lost(cause, peer_closed);
    };
    // A peer with a new incarnation replaces what was known of the old one, all in this step.
    name_ = wire::get_text(dialed.welcome.name);
    incarnation_ = dialed.challenge.incarnation;
    session_ = dialed.welcome.session;
    by_name_.clear();
    name_of_key_.clear();
    offers_.clear();
    paths_.clear();
    control = control_ = std::make_shared<ControlConnection>(io_, std::move(dialed.fd), std::move(hooks));
  }
  control->start();
}

Error Peer::on_message(wire::Message type, std::string_view body) {
  wire::Reader reader(body);
  const Error malformed = make_error(MP_PROTOCOL, "a malformed control message of type " + std::to_string(type),
                                     "run the same Moonpool release on both sides");
  switch (type) {
    case wire::kOffer: {
      std::vector<Offer> offers;
      if (!wire::decode_offer(body, &offers)) return malformed;
      on_offers(std::move(offers));
      return {};
    }
    case wire::kRegions: {
      std::vector<wire::RegionRecord> records;
      if (!wire::decode_regions(body, &records)) return malformed;
      std::lock_guard lock(mutex_);
      if (!learn_regions_locked(std::move(records))) {
        return make_error(MP_LIMIT, "the peer announces more than " + std::to_string(regions_max()) + " regions",
                          "raise regions_max here");
      }
      changed_.notify_all();
      return {};
    }
    case wire::kRegionGone: {
      uint64_t key = 0;
      if (!reader.get(&key) || !reader.done()) return malformed;
      std::vector<std::shared_ptr<Link>> links;
      {
        std::lock_guard lock(mutex_);
        const auto it = name_of_key_.find(key);
        if (it == name_of_key_.end()) return {};
        const auto record = by_name_.find(it->second);
        if (record != by_name_.end() && record->second.key == key) by_name_.erase(record);
        name_of_key_.erase(it);
        links = links_locked();
      }
      for (const auto &link : links) link->region_gone(key);
      return {};
    }
    case wire::kSync:
      on_sync();
      return {};
    case wire::kNotifyAck: {
      uint64_t id = 0;
      uint32_t status = 0;
      if (!reader.get(&id) || !reader.get(&status) || !reader.done()) return malformed;
      std::shared_ptr<Transfer> transfer;
      {
        std::lock_guard lock(mutex_);
        const auto it = notifying_.find(id);
        if (it == notifying_.end()) return {};
        transfer = std::move(it->second);
        notifying_.erase(it);
      }
      Error error;
      if (status != MP_OK) {
        error = describe(make_error(MP_NOTIFY_FULL, "the bytes arrived, but the peer did not take the notification",
                                    "let the peer take its notifications more often, or raise notifications_max there"),
                         "tcp");
      }
      transfer->notify_done(error);
      return {};
    }
    case wire::kFenced: {
      uint64_t lane_id = 0;
      if (!reader.get(&lane_id) || !reader.done()) return malformed;
      std::vector<std::shared_ptr<Link>> links;
      {
        std::lock_guard lock(mutex_);
        links = links_locked();
      }
      for (const auto &link : links) link->fenced(lane_id);
      return {};
    }
    default:
      return malformed;
  }
}

void Peer::become_ready() {
  std::vector<std::shared_ptr<Transfer>> waiting;
  std::vector<Orphan> orphans;
  {
    std::lock_guard lock(mutex_);
    if (state_ != State::kConnecting) return;
    state_ = State::kReady;
    backoff_.reset();
    retry_at_ = 0;
    waiting.swap(waiting_);
    orphans.swap(orphans_);
    changed_.notify_all();
  }
  // The peer tore down our earlier session before it answered (or it is a new process): nothing of it writes any more.
  settle(std::move(orphans));
  for (const auto &transfer : waiting) submit(transfer);
}

void Peer::fail_connect(Error error) {
  error = describe(std::move(error), "tcp");
  std::vector<std::shared_ptr<Transfer>> waiting;
  std::vector<std::shared_ptr<Link>> links;
  std::shared_ptr<ControlConnection> control;
  {
    std::lock_guard lock(mutex_);
    if (state_ == State::kClosed) return;
    state_ = State::kLost;
    ++connection_;
    last_error_ = error;
    backoff_.grow();
    retry_at_ = now_ns() + backoff_.wait_ns();
    waiting.swap(waiting_);
    control = std::move(control_);
    links = links_locked();
    paths_.clear();
    settle_later_locked();
    changed_.notify_all();
  }
  for (const auto &link : links) link->shutdown(error, false);
  if (control != nullptr) control->close();
  for (const auto &transfer : waiting) transfer->fail(error);
}

void Peer::on_lost(const Error &cause, bool peer_closed) {
  const Error error = describe(cause, "tcp");
  std::vector<std::shared_ptr<Link>> links;
  std::vector<std::shared_ptr<Transfer>> waiting;
  std::vector<Orphan> parked;
  std::unordered_map<uint64_t, std::shared_ptr<Transfer>> notifying;
  bool usable;
  {
    std::lock_guard lock(mutex_);
    if (state_ == State::kClosed) return;
    usable = state_ == State::kReady;
    if (usable) {
      state_ = State::kLost;
      last_error_ = error;
      ++connection_;
      control_.reset();
      links = links_locked();
      paths_.clear();
      waiting.swap(waiting_);
      parked.swap(parked_);
      notifying.swap(notifying_);
      changed_.notify_all();
    }
  }
  if (!usable) return fail_connect(error);
  for (const auto &link : links) link->shutdown(error, peer_closed);
  for (const auto &transfer : waiting) transfer->fail(error);
  settle(std::move(parked));
  for (const auto &entry : notifying) entry.second->notify_done(error);
}

void Peer::close(const Error &cause) {
  std::shared_ptr<ControlConnection> control;
  std::vector<std::shared_ptr<Link>> links;
  std::vector<std::shared_ptr<Transfer>> waiting;
  std::unordered_map<uint64_t, std::shared_ptr<Transfer>> notifying;
  std::vector<Orphan> orphans, parked;
  {
    std::lock_guard lock(mutex_);
    if (state_ == State::kClosed) return;
    state_ = State::kClosed;
    last_error_ = cause;
    ++connection_;
    control = std::move(control_);
    links = links_locked();
    paths_.clear();
    waiting.swap(waiting_);
    parked.swap(parked_);
    notifying.swap(notifying_);
    changed_.notify_all();
  }
  const Error error = describe(cause, "tcp");
  for (const auto &link : links) link->shutdown(error, true);
  if (control != nullptr) control->close();
  {
    std::lock_guard lock(mutex_);
    orphans.swap(orphans_);
  }
  for (const auto &transfer : waiting) transfer->fail(error);
  for (const auto &entry : notifying) entry.second->notify_done(error);
  settle(std::move(orphans));
  settle(std::move(parked));
}

Id128 Peer::session() const {
  std::lock_guard lock(mutex_);
  return session_;
}

Id128 Peer::incarnation() const {
  std::lock_guard lock(mutex_);
  return incarnation_;
}

void Peer::info(mp_peer_info *out) const {
  std::lock_guard lock(mutex_);
  std::memset(out, 0, sizeof *out);
  switch (state_) {
    case State::kIdle:
    case State::kConnecting:
      out->state = MP_PEER_CONNECTING;
      break;
    case State::kReady:
      out->state = MP_PEER_READY;
      break;
    case State::kLost:
      out->state = MP_PEER_LOST_STATE;
      break;
    case State::kClosed:
      out->state = MP_PEER_CLOSED;
      break;
  }
  std::copy(incarnation_.begin(), incarnation_.end(), out->incarnation);
  wire::set_text(out->name, name_);
  wire::set_text(out->address, address_);
  const Path *const path = current_path_locked();
  wire::set_text(out->path, path == nullptr ? "" : path->transport->name());
  wire::set_text(out->fallback, fallback_locked());
  out->regions = by_name_.size();
}

}  // namespace moonpool
