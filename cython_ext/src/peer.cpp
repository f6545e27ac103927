// SPDX-License-Identifier: Apache-2.0
#include "peer.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "engine.hpp"

namespace moonpool {

namespace {

constexpr int64_t kBackoffFirst = 50 * kMillisecond;
constexpr int64_t kBackoffMax = 5000 * kMillisecond;

std::chrono::steady_clock::time_point time_point(int64_t ns) {
  return std::chrono::steady_clock::time_point{std::chrono::nanoseconds(ns)};
}

void fail_all(const std::vector<std::shared_ptr<Transfer>> &transfers, const Error &error) {
  for (const auto &transfer : transfers) {
    transfer->descs_failed(0, static_cast<uint32_t>(transfer->descs.size()), error);
  }
}

}  // namespace

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
      if (std::strcmp(link_->path(), "tcp") != 0) return "the peer is connected";
      const size_t ready = link_->lanes_ready();
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

Error Peer::ensure(int64_t deadline_ns) {
  std::unique_lock lock(mutex_);
  if (state_ != State::kConnecting) {
    // The back-off holds for everyone, so that a fault never becomes a storm.
    while (state_ != State::kReady && state_ != State::kClosed && now_ns() < std::min(retry_at_, deadline_ns)) {
      changed_.wait_until(lock, time_point(std::min(retry_at_, deadline_ns)));
    }
    if (state_ == State::kIdle || state_ == State::kLost) start_dial_locked(deadline_ns);
  }
  const bool ended = changed_.wait_until(lock, time_point(deadline_ns + 1000 * kMillisecond),
                                         [this] { return state_ != State::kConnecting; });
  if (state_ == State::kReady) return {};
  if (!ended) return make_error(MP_CONNECT, "no answer from " + address_ + " within the connect deadline");
  return last_error_;
}

void Peer::start_dial_locked(int64_t deadline_ns) {
  state_ = State::kConnecting;
  const uint64_t connection = ++connection_;
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
      std::lock_guard lock(mutex_);
      return wire::decode_offer(body, &offers_) ? Error{} : malformed;
    }
    case wire::kRegions: {
      std::vector<wire::RegionRecord> records;
      if (!wire::decode_regions(body, &records)) return malformed;
      std::lock_guard lock(mutex_);
      learn_regions_locked(std::move(records));
      changed_.notify_all();
      return {};
    }
    case wire::kRegionGone: {
      uint64_t key = 0;
      if (!reader.get(&key) || !reader.done()) return malformed;
      std::lock_guard lock(mutex_);
      const auto it = name_of_key_.find(key);
      if (it == name_of_key_.end()) return {};
      const auto record = by_name_.find(it->second);
      if (record != by_name_.end() && record->second.key == key) by_name_.erase(record);
      name_of_key_.erase(it);
      return {};
    }
    case wire::kSync:
      return on_sync();
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
                                    "let the peer call notifications() more often, or raise notifications_max there"),
                         "tcp");
      }
      transfer->notify_done(error);
      return {};
    }
    case wire::kFenced: {
      uint64_t lane_id = 0;
      if (!reader.get(&lane_id) || !reader.done()) return malformed;
      std::shared_ptr<Link> link;
      {
        std::lock_guard lock(mutex_);
        link = link_;
      }
      if (link != nullptr) link->fenced(lane_id);
      return {};
    }
    default:
      return malformed;
  }
}

void Peer::learn_regions_locked(std::vector<wire::RegionRecord> records) {
  for (wire::RegionRecord &record : records) {
    name_of_key_[record.key] = record.name;
    std::string name = record.name;
    by_name_[std::move(name)] = std::move(record);
  }
}

Error Peer::on_sync() {
  Reach reach;
  Id128 incarnation;
  {
    std::lock_guard lock(mutex_);
    if (state_ != State::kConnecting) return {};
    reach.offers = offers_;
    incarnation = incarnation_;
  }
  reach.same_process = Engine::in_this_process(incarnation) != nullptr;
  const std::string &require = engine_->config.require;
  std::vector<std::string> allowed = engine_->config.transports;
  if (!require.empty()) allowed = {require};
  Transport *transport = choose_path(engine_->transports, allowed, reach);
  if (transport == nullptr) {
    const auto join = [](const std::vector<std::string> &names) {
      std::string text;
      for (const std::string &name : names) text += (text.empty() ? "" : ", ") + name;
      return text.empty() ? "none" : text;
    };
    fail_connect(describe(
        make_error(MP_TRANSPORT_UNAVAILABLE,
                   require.empty() ? "no transport that both sides allow reaches the peer"
                                   : "the required transport \"" + require + "\" does not reach the peer",
                   "this engine may use " + join(engine_->config.transports) + ", the peer offers " +
                       join(reach.offers) +
                       "; \"local\" reaches only engines of the same process; change `transports` or `require`"),
        ""));
    return {};
  }
  const std::shared_ptr<Link> link = transport->connect(shared_from_this());
  std::vector<std::shared_ptr<Transfer>> waiting;
  std::vector<Orphan> orphans;
  {
    std::lock_guard lock(mutex_);
    if (state_ != State::kConnecting) return {};
    state_ = State::kReady;
    backoff_ns_ = 0;
    retry_at_ = 0;
    link_ = link;
    waiting.swap(waiting_);
    orphans.swap(orphans_);
    changed_.notify_all();
  }
  // The peer tore down our earlier session before it answered (or it is a new process): nothing of it writes any more.
  settle(std::move(orphans));
  for (const auto &transfer : waiting) {
    if (transfer->target_incarnation != incarnation) {
      transfer->descs_failed(0, static_cast<uint32_t>(transfer->descs.size()),
                             describe(make_error(MP_REGION_STALE, "the peer was restarted; its regions are new ones",
                                                 "look the region up again: peer.regions[name]"),
                                      "tcp"));
    } else {
      submit(transfer);
    }
  }
  return {};
}

void Peer::fail_connect(Error error) {
  error = describe(std::move(error), "tcp");
  std::vector<std::shared_ptr<Transfer>> waiting;
  std::shared_ptr<ControlConnection> control;
  {
    std::lock_guard lock(mutex_);
    if (state_ == State::kClosed) return;
    state_ = State::kLost;
    ++connection_;
    last_error_ = error;
    backoff_ns_ = std::min(std::max(backoff_ns_ * 2, kBackoffFirst), kBackoffMax);
    retry_at_ = now_ns() + backoff_ns_;
    waiting.swap(waiting_);
    control = std::move(control_);
    settle_later_locked();
    changed_.notify_all();
  }
  if (control != nullptr) control->close();
  fail_all(waiting, error);
}

void Peer::on_lost(const Error &cause, bool peer_closed) {
  const Error error = describe(cause, "tcp");
  std::shared_ptr<Link> link;
  std::unordered_map<uint64_t, std::shared_ptr<Transfer>> notifying;
  {
    std::lock_guard lock(mutex_);
    if (state_ == State::kClosed) return;
    if (state_ == State::kReady) {
      state_ = State::kLost;
      last_error_ = error;
      ++connection_;
      control_.reset();
      link = std::move(link_);
      notifying.swap(notifying_);
      changed_.notify_all();
    }
  }
  if (link == nullptr) return fail_connect(error);  // it ended before it was usable
  link->shutdown(error, peer_closed);
  for (const auto &entry : notifying) entry.second->notify_done(error);
}

void Peer::orphan(std::vector<Work> work, const Error &cause) {
  // Whoever waits learns of it now; the buffers stay owned until it is settled.
  for (const Work &one : work) one.transfer->stop(cause);
  std::vector<Orphan> orphans;
  orphans.push_back({std::move(work), cause});
  std::unique_lock lock(mutex_);
  if (state_ == State::kClosed) {
    lock.unlock();
    return settle(std::move(orphans));
  }
  orphans_.push_back(std::move(orphans.front()));
  settle_later_locked();
}

void Peer::settle_later_locked() {
  if (orphans_.empty()) return;
  // Connecting again is what settles them.
  const int64_t when = std::max(retry_at_, now_ns() + kBackoffFirst);
  io_.call_at(when, [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (self == nullptr) return;
    std::lock_guard inner(self->mutex_);
    if (self->state_ == State::kLost && !self->orphans_.empty()) {
      self->start_dial_locked(now_ns() + int64_t{self->engine_->config.connect_timeout_ms} * kMillisecond);
    }
  });
}

void Peer::settle(std::vector<Orphan> orphans) {
  for (Orphan &orphan : orphans) {
    for (Work &work : orphan.work) work.transfer->descs_failed(work.begin, work.end, orphan.cause);
  }
}

void Peer::close(const Error &cause) {
  std::shared_ptr<ControlConnection> control;
  std::shared_ptr<Link> link;
  std::vector<std::shared_ptr<Transfer>> waiting;
  std::unordered_map<uint64_t, std::shared_ptr<Transfer>> notifying;
  std::vector<Orphan> orphans;
  {
    std::lock_guard lock(mutex_);
    if (state_ == State::kClosed) return;
    state_ = State::kClosed;
    last_error_ = cause;
    ++connection_;
    control = std::move(control_);
    link = std::move(link_);
    waiting.swap(waiting_);
    notifying.swap(notifying_);
    changed_.notify_all();
  }
  const Error error = describe(cause, "tcp");
  if (link != nullptr) link->shutdown(error, true);
  if (control != nullptr) control->close();
  {
    std::lock_guard lock(mutex_);
    orphans.swap(orphans_);
  }
  fail_all(waiting, error);
  for (const auto &entry : notifying) entry.second->notify_done(error);
  settle(std::move(orphans));
}

void Peer::submit(const std::shared_ptr<Transfer> &transfer) {
  std::shared_ptr<Link> link;
  Error error;
  {
    std::lock_guard lock(mutex_);
    switch (state_) {
      case State::kReady:
        link = link_;
        break;
      case State::kClosed:
        error = last_error_;
        break;
      case State::kConnecting:
        waiting_.push_back(transfer);
        return;
      case State::kIdle:
      case State::kLost:
        if (now_ns() < retry_at_) {
          error = last_error_;
        } else {
          waiting_.push_back(transfer);
          start_dial_locked(now_ns() + int64_t{engine_->config.connect_timeout_ms} * kMillisecond);
          return;
        }
    }
  }
  if (link == nullptr) return transfer->descs_failed(0, static_cast<uint32_t>(transfer->descs.size()), error);
  transfer->set_link(link);
  link->submit(transfer);
}

void Peer::send_notify(const std::shared_ptr<Transfer> &transfer) {
  std::string body;
  wire::Writer writer(&body);
  std::unique_lock lock(mutex_);
  if (state_ != State::kReady) {
    const Error error = last_error_;
    lock.unlock();
    transfer->notify_done(error);
    return;
  }
  const uint64_t id = next_notify_++;
  writer.put(id);
  writer.put_bytes(transfer->notify);
  notifying_.emplace(id, transfer);
  control_->send(wire::kNotify, body);
}

void Peer::forget(Transfer &transfer) {
  std::shared_ptr<Transfer> waiting, notifying;
  {
    std::lock_guard lock(mutex_);
    const auto it = std::find_if(waiting_.begin(), waiting_.end(), [&](const auto &t) { return t.get() == &transfer; });
    if (it != waiting_.end()) {
      waiting = std::move(*it);
      waiting_.erase(it);
    }
    for (auto n = notifying_.begin(); n != notifying_.end(); ++n) {
      if (n->second.get() != &transfer) continue;
      notifying = std::move(n->second);
      notifying_.erase(n);
      break;
    }
  }
  const Error cause = transfer.stop_cause();
  if (waiting != nullptr) waiting->descs_failed(0, static_cast<uint32_t>(waiting->descs.size()), cause);
  if (notifying != nullptr) notifying->notify_done(cause);
}

void Peer::send_fence(uint64_t lane_id) {
  std::string body;
  wire::Writer(&body).put(lane_id);
  std::lock_guard lock(mutex_);
  if (control_ != nullptr) control_->send(wire::kFence, body);
}

Id128 Peer::session() const {
  std::lock_guard lock(mutex_);
  return session_;
}

void Peer::fill(const wire::RegionRecord &record, const Id128 &incarnation, mp_remote_region *out) {
  std::memset(out, 0, sizeof *out);
  out->key = record.key;
  out->length = record.length;
  out->generation = record.generation;
  out->flags = record.flags;
  std::copy(incarnation.begin(), incarnation.end(), out->incarnation);
  wire::set_text(out->name, record.name);
}

Error Peer::find_region(const std::string &name, int64_t deadline_ns, mp_remote_region *out) {
  bool connected;
  {
    std::lock_guard lock(mutex_);
    connected = state_ == State::kReady;
  }
  // What is remembered of a lost peer may be of an incarnation that is gone.
  if (!connected) {
    const Error error = ensure(now_ns() + int64_t{engine_->config.connect_timeout_ms} * kMillisecond);
    if (error) return error;
  }
  std::unique_lock lock(mutex_);
  const bool ended = changed_.wait_until(lock, time_point(deadline_ns), [&] {
    return state_ == State::kClosed || state_ == State::kLost || by_name_.count(name) != 0;
  });
  const auto it = by_name_.find(name);
  if (it != by_name_.end()) {
    fill(it->second, incarnation_, out);
    return {};
  }
  if (ended) return last_error_;
  Error error = make_error(MP_REGION_UNKNOWN, "the peer has announced no region named \"" + name + "\"");
  std::string names;
  size_t listed = 0;
  for (const auto &entry : by_name_) {
    if (++listed > 8) break;
    names += (listed == 1 ? "\"" : ", \"") + entry.first + "\"";
  }
  error.hint = names.empty() ? "it has announced none; register one there with a name"
                             : "it has " + std::to_string(by_name_.size()) + ", among them " + names;
  lock.unlock();
  return describe(std::move(error), "tcp");
}

std::vector<mp_remote_region> Peer::regions() const {
  std::lock_guard lock(mutex_);
  std::vector<mp_remote_region> out(by_name_.size());
  size_t i = 0;
  for (const auto &entry : by_name_) fill(entry.second, incarnation_, &out[i++]);
  return out;
}

Error Peer::check_handle(const mp_remote_region &region) const {
  {
    std::lock_guard lock(mutex_);
    if (std::equal(incarnation_.begin(), incarnation_.end(), region.incarnation)) return {};
  }
  return describe(make_error(MP_REGION_STALE,
                             std::string("region \"") + region.name +
                                 "\" belongs to an earlier incarnation of the peer, "
                                 "or to another peer",
                             "look it up again: peer.regions[name]"),
                  "tcp");
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
  wire::set_text(out->path, link_ == nullptr ? "" : link_->path());
  out->regions = by_name_.size();
}

}  // namespace moonpool
