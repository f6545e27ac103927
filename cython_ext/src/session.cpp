// SPDX-License-Identifier: Apache-2.0
#include "session.hpp"

#include <algorithm>
#include <utility>

#include "engine.hpp"

namespace moonpool {

namespace {

// Numbers of lanes only grow, and a lane that is this far behind has long missed the deadline of its handshake.
constexpr size_t kFencedMax = 1024;
// Twice what a client may use, because it can hear of a broken lane long before this side does.
constexpr size_t kLanesMax = 128;
// Notifications that came before their bytes.
constexpr size_t kPendingMax = 1024;

}  // namespace

Session::Session(Engine &engine, IoThread &io, const wire::Hello &hello)
    : token(random_id()),
      peer_id(hello.session),
      client(hello.incarnation),
      client_name(wire::get_text(hello.name)),
      engine_(engine),
      io_(io) {}

void Session::start(Fd fd) {
  std::weak_ptr<Session> weak = weak_from_this();
  ControlHooks hooks;
  hooks.message = [weak](wire::Message type, std::string_view body) {
    const auto self = weak.lock();
    return self == nullptr ? Error{} : self->on_message(type, body);
  };
  hooks.malformed = [weak] {
    if (const auto self = weak.lock()) self->engine_.stats.protocol_errors.fetch_add(1);
  };
  hooks.lost = [weak](const Error &, bool) {
    if (const auto self = weak.lock()) self->engine_.drop_session(self);
  };
  std::shared_ptr<ControlConnection> control;
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    control = control_ = std::make_shared<ControlConnection>(io_, std::move(fd), std::move(hooks));
  }
  control->start();
  {
    std::lock_guard lock(mutex_);
    send_offer_locked();
  }
  std::string body;
  wire::Writer regions(&body);
  for (const auto &region : engine_.regions.all()) {
    wire::encode_region(regions, {region->key, region->length, region->generation, region->flags, region->name});
    if (body.size() > 64 * 1024) {
      control->send(wire::kRegions, body);
      body.clear();
    }
  }
  if (!body.empty()) control->send(wire::kRegions, body);
  control->send(wire::kSync, {});
}

// Made and sent under the lock, so that the latest one is that of the latest state.
void Session::send_offer_locked() {
  if (control_ == nullptr) return;
  std::string offer;
  wire::Writer writer(&offer);
  for (const auto &transport : engine_.transports) {
    const auto &names = engine_.config.transports;
    if (std::find(names.begin(), names.end(), transport->name()) == names.end()) continue;
    wire::encode_offer(writer, {transport->name(), transport->offer(engine_)});
  }
  control_->send(wire::kOffer, offer);
}

bool Session::add_lane(uint64_t lane_id, std::shared_ptr<ServerLane> lane) {
  std::shared_ptr<ServerLane> replaced, oldest;
  {
    std::lock_guard lock(mutex_);
    if (closed_ || fenced_.count(lane_id) != 0) return false;
    // Lanes that ended by themselves make room here, so the map follows the sockets.
    std::erase_if(lanes_, [](const auto &entry) { return entry.second->closed(); });
    replaced = std::exchange(lanes_[lane_id], lane);
    if (lanes_.size() > kLanesMax) {
      oldest = std::move(lanes_.begin()->second);
      lanes_.erase(lanes_.begin());
    }
  }
  // A lane outside the map would escape fences and releases.
  if (replaced != nullptr) replaced->close();
  if (oldest != nullptr) oldest->close();
  lane->start();
  return true;
}

void Session::announce(const Region &region) {
  std::string body;
  wire::Writer writer(&body);
  wire::encode_region(writer, {region.key, region.length, region.generation, region.flags, region.name});
  std::lock_guard lock(mutex_);
  if (control_ != nullptr) control_->send(wire::kRegions, body);
}

void Session::withdraw(const Region &region) {
  std::string body;
  wire::Writer(&body).put(region.key);
  std::lock_guard lock(mutex_);
  if (control_ != nullptr) control_->send(wire::kRegionGone, body);
}

std::map<uint64_t, std::shared_ptr<ServerLane>> Session::all_lanes() const {
  std::lock_guard lock(mutex_);
  return lanes_;
}

void Session::drop_region(const Region &region) {
  for (const auto &entry : all_lanes()) entry.second->drop_region(region);
}

void Session::close() { close_lanes(); }

bool Session::end(int64_t until) {
  const auto lanes = close_lanes();
  return std::all_of(lanes.begin(), lanes.end(), [&](const auto &entry) { return entry.second->settle(until); });
}

std::map<uint64_t, std::shared_ptr<ServerLane>> Session::close_lanes() {
  std::shared_ptr<ControlConnection> control;
  std::map<uint64_t, std::shared_ptr<ServerLane>> lanes;
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    control = std::move(control_);
    lanes.swap(lanes_);
  }
  for (const auto &entry : lanes) entry.second->close();
  if (control != nullptr) control->close();
  return lanes;
}

size_t Session::lanes() const {
  std::lock_guard lock(mutex_);
  size_t open = 0;
  for (const auto &entry : lanes_) open += entry.second->closed() ? 0 : 1;
  return open;
}

Error Session::on_message(wire::Message type, std::string_view body) {
  switch (type) {
    case wire::kNotify:
      return on_notify(body);
    case wire::kFence: {
      uint64_t lane_id = 0;
      wire::Reader reader(body);
      if (!reader.get(&lane_id) || !reader.done()) return make_error(MP_PROTOCOL, "a malformed fence");
      fence(lane_id);
      return {};
    }
    default:
      return make_error(MP_PROTOCOL, "an unknown control message");
  }
}

Error Session::on_notify(std::string_view body) {
  wire::Notify notify;
  if (!wire::decode_notify(body, &notify)) return make_error(MP_PROTOCOL, "a malformed notification");
  {
    std::lock_guard lock(mutex_);
    if (pending_.size() >= kPendingMax)
      return make_error(MP_PROTOCOL, "too many notifications whose bytes do not come");
    pending_.push_back({notify.id, std::move(notify.marks), std::string(notify.payload)});
  }
  deliver();
  return {};
}

bool Session::arrived_locked(const wire::Mark &mark) const {
  const auto it = lanes_.find(mark.lane);
  // What a lane that has ended was given is in place.
  return it == lanes_.end() || it->second->marked(mark.mark);
}

void Session::rail_changed(uint32_t rail, bool up) {
  for (const auto &entry : all_lanes()) entry.second->rail_changed(rail, up);
  // A client without a lane hears of it too.
  std::lock_guard lock(mutex_);
  send_offer_locked();
}

void Session::deliver() {
  std::lock_guard lock(mutex_);
  while (!pending_.empty()) {
    Pending &first = pending_.front();
    const bool arrived =
        std::all_of(first.marks.begin(), first.marks.end(), [this](const auto &mark) { return arrived_locked(mark); });
    if (!arrived) return;
    const bool taken = engine_.notifications.push({client_name, client, std::move(first.payload)});
    if (!taken) engine_.stats.notifications_refused.fetch_add(1);
    std::string reply;
    wire::Writer writer(&reply);
    writer.put(first.id);
    writer.put(static_cast<uint32_t>(taken ? MP_OK : MP_NOTIFY_FULL));
    pending_.pop_front();
    if (control_ != nullptr) control_->send(wire::kNotifyAck, reply);
  }
}

void Session::fence(uint64_t lane_id) {
  std::shared_ptr<ServerLane> lane;
  {
    std::lock_guard lock(mutex_);
    const auto it = lanes_.find(lane_id);
    if (it != lanes_.end()) {
      lane = std::move(it->second);
      lanes_.erase(it);
    } else {
      // Its handshake may be under way on another I/O thread.
      fenced_.insert(lane_id);
      if (fenced_.size() > kFencedMax) fenced_.erase(fenced_.begin());
    }
  }
  if (lane != nullptr) lane->close();
  deliver();
  std::string reply;
  wire::Writer(&reply).put(lane_id);
  std::lock_guard lock(mutex_);
  if (control_ != nullptr) control_->send(wire::kFenced, reply);
}

}  // namespace moonpool
