// SPDX-License-Identifier: Apache-2.0
// What a peer has announced, and the handles made of it.
#include <algorithm>
#include <cstring>

#include "engine.hpp"
#include "peer.hpp"

namespace moonpool {

namespace {

// What any peer may announce; more than that only to an engine that may have as many itself.
constexpr size_t kRegionsKnownMin = 1u << 20;

}  // namespace

Error Peer::find_region(const std::string &name, int64_t deadline_ns, mp_remote_region *out) {
  bool connected;
  {
    std::lock_guard lock(mutex_);
    connected = state_ == State::kReady;
  }
  // What is remembered of a lost peer may be of an incarnation that is gone.
  if (!connected) {
    const Error error = ensure(now_ns() + int64_t{engine_->config.connect_timeout_ms} * kMillisecond, {});
    if (error) return error;
  }
  std::unique_lock lock(mutex_);
  const bool ended = changed_.wait_until(lock, steady_point(deadline_ns), [&] {
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
                             "look it up again among the regions of the peer"),
                  "tcp");
}

size_t Peer::regions_max() const { return std::max<size_t>(kRegionsKnownMin, engine_->config.regions_max); }

bool Peer::knows(uint64_t key) const {
  std::lock_guard lock(mutex_);
  return name_of_key_.count(key) != 0;
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

// False when the peer announces more than is remembered.
bool Peer::learn_regions_locked(std::vector<wire::RegionRecord> records) {
  if (name_of_key_.size() + records.size() > regions_max()) return false;
  for (wire::RegionRecord &record : records) {
    name_of_key_[record.key] = record.name;
    std::string name = record.name;
    by_name_[std::move(name)] = std::move(record);
  }
  return true;
}

}  // namespace moonpool
