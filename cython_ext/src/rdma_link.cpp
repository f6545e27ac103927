// SPDX-License-Identifier: Apache-2.0
#include "rdma_link.hpp"

#include <algorithm>

#include "engine.hpp"
#include "peer.hpp"
#include "rdma_lane.hpp"
#include "rdma_memory.hpp"

namespace moonpool {

namespace {

constexpr uint32_t kDescsPerFrame = 1024;
constexpr uint64_t kSliceBytesMin = 256u << 10;
// With the lanes of other transports fewer than a server keeps for one session.
constexpr size_t kLanesMax = 48;
// Regions whose keys are remembered, and those that go another way. Forgetting costs a question.
constexpr size_t kKeysMax = 1u << 20;
constexpr size_t kRefusedMax = 65536;
// After the first lane the others have so long to become ready too, so that the first transfer finds every rail.
constexpr int64_t kOthersNs = 500 * kMillisecond;

}  // namespace

RdmaLink::RdmaLink(const std::shared_ptr<Peer> &peer, Connected connected)
    : LaneLink(peer, "rdma", kDescsPerFrame), connected_(std::move(connected)) {}

void RdmaLink::open(const std::vector<rdma::RailChoices> &choices, const std::vector<rdma::RailOffer> &remote,
                    int64_t deadline_ns) {
  const RdmaHost &host = *engine().rdma;
  std::vector<std::shared_ptr<Lane>> lanes;
  const auto add = [&](const rdma::RailChoices &one) {
    if (lanes.size() == kLanesMax) return;
    lanes.push_back(std::make_shared<RdmaLane>(*this, engine().next_io(), host.rail(one.local), one.remotes));
  };
  remote_ = remote;
  for (size_t i = 0; i < remote.size(); ++i) {
    remote_up_[i].store(remote[i].up != 0);
    offered_up_[i].store(remote[i].up != 0);
  }
  // Those that can be connected first. One on each rail, then the next ones, so that a few busy lanes are on different
  // rails.
  std::vector<rdma::RailChoices> up = choices;
  const auto down =
      std::stable_partition(up.begin(), up.end(), [&](const auto &one) { return host.rail(one.local)->state().up; });
  for (auto one = up.begin(); one != down; ++one) add(*one);
  first_lanes_ = std::max<size_t>(lanes.size(), 1);
  // Each of them may try a second rail of the peer.
  const auto theirs_up = std::count_if(remote.begin(), remote.end(), [](const auto &rail) { return rail.up != 0; });
  const int attempts = theirs_up > 1 ? 2 : 1;
  refusals_max_ = first_lanes_ * static_cast<size_t>(attempts);
  opening_ns_ = (deadline_ns - now_ns()) / attempts;
  rails_ = choices.size();
  for (auto one = down; one != up.end(); ++one) add(*one);
  for (uint32_t i = 1; i < engine().config.rdma.queue_pairs; ++i) {
    for (const rdma::RailChoices &one : up) add(one);
  }
  used_at_.store(now_ns());
  start(std::move(lanes), first_lanes_);
  engine().next_io().call_at(deadline_ns, [weak = weak_from_this()] {
    if (const auto self = std::static_pointer_cast<RdmaLink>(weak.lock())) self->out_of_time();
  });
}

void RdmaLink::submit(const std::shared_ptr<Transfer> &transfer) {
  used_at_.store(now_ns(), std::memory_order_relaxed);
  LaneLink::submit(transfer);
}

void RdmaLink::rest() {
  for (const auto &lane : lanes()) lane->rest();
}

// The largest that still give every rail a few, so that all of them end at the same time.
uint64_t RdmaLink::slice_bytes(uint64_t transfer_bytes) const {
  const uint64_t largest = engine().config.slice_bytes;
  return rails_ == 1 ? largest : std::clamp(transfer_bytes / (rails_ * 4), std::min(kSliceBytesMin, largest), largest);
}

bool RdmaLink::takes(const Transfer &transfer) const {
  // The bytes pass no processor that could look at them.
  if (transfer.digest || transfer.staged || !promising()) return false;
  if (std::any_of(transfer.locals.begin(), transfer.locals.end(),
                  [](const auto &region) { return region->rdma() == nullptr; })) {
    return false;
  }
  std::shared_lock lock(keys_mutex_);
  return refused_.empty() || std::none_of(transfer.descs.begin(), transfer.descs.end(),
                                          [&](const Desc &desc) { return refused_.count(desc.key) != 0; });
}

// A lane that rests is tried when a transfer comes, but while its ports are down the bytes go another way.
bool RdmaLink::usable() const {
  return std::any_of(lanes().begin(), lanes().end(), [](const auto &lane) {
    return lane->ready() || (lane->promising() && static_cast<const RdmaLane &>(*lane).reachable());
  });
}

std::string RdmaLink::shortcoming() const {
  if (usable()) return {};
  std::lock_guard lock(state_mutex_);
  if (!first_cause_) {
    const RdmaHost &host = *engine().rdma;
    return host.any_up() ? "no port of the peer is up" : "no port can be used: " + host.why_not();
  }
  // What the peer met is only in the cause.
  return first_cause_.message + (first_cause_.cause.empty() ? "" : ": " + first_cause_.cause);
}

bool RdmaLink::established() const {
  std::lock_guard lock(state_mutex_);
  return connected_ == nullptr;
}

int64_t RdmaLink::opening_ns() const { return established() ? LaneLink::opening_ns() : opening_ns_; }

void RdmaLink::lane_opened() {
  bool first;
  size_t tried;
  {
    std::lock_guard lock(state_mutex_);
    first_cause_ = {};
    first = opened_lanes_++ == 0;
    tried = opened_lanes_ + refusals_;
  }
  if (tried >= first_lanes_) return settled();
  if (!first) return;
  engine().next_io().call_at(now_ns() + kOthersNs, [weak = weak_from_this()] {
    if (const auto self = std::static_pointer_cast<RdmaLink>(weak.lock())) self->settled();
  });
}

void RdmaLink::settled() {
  Connected connected;
  {
    std::lock_guard lock(state_mutex_);
    std::swap(connected, connected_);
  }
  if (connected == nullptr) return;
  connected(std::static_pointer_cast<RdmaLink>(shared_from_this()), {});
  engine().rdma_link_settled(*this);
}

// Some lane is not ready, and whoever connects has no more time for this path.
void RdmaLink::out_of_time() {
  Error cause = lanes().empty() ? Error{} : static_cast<RdmaLane &>(*lanes().front()).not_ready();
  Connected connected;
  {
    std::lock_guard lock(state_mutex_);
    if (opened_lanes_ == 0) std::swap(connected, connected_);
    if (first_cause_) cause = first_cause_;
  }
  if (connected == nullptr) return settled();
  give_up(connected, cause);
}

void RdmaLink::give_up(const Connected &connected, const Error &cause) {
  connected(nullptr, cause);
  shutdown(cause, true);
  engine().rdma_link_settled(*this);
}

void RdmaLink::lane_refused(const Error &cause) {
  Connected connected;
  Error first;
  {
    std::lock_guard lock(state_mutex_);
    if (!first_cause_) first_cause_ = cause;
    if (connected_ != nullptr && ++refusals_ >= refusals_max_ && opened_lanes_ == 0) {
      std::swap(connected, connected_);
      first = first_cause_;
    }
  }
  if (connected == nullptr) {
    // Work may have waited for this lane. One that rests has not been tried yet.
    if (promising()) {
      pass_on_work();
    } else {
      stranded(cause);
    }
    return;
  }
  give_up(connected, first);
}

// Rails come back by themselves; until then the bytes go another way.
void RdmaLink::stranded(const Error &cause) {
  {
    std::lock_guard lock(state_mutex_);
    if (!first_cause_) first_cause_ = cause;
  }
  std::vector<Work> left = take_queue();
  if (left.empty()) return;
  if (const std::shared_ptr<Peer> here = peer()) {
    here->move_on(std::move(left), this, here->describe(cause, path()));
  } else {
    fail_work(left, cause);
  }
}

void RdmaLink::elsewhere(Work work) {
  const Error cause = make_error(MP_TRANSPORT_UNAVAILABLE, "memory of the transfer is not registered for RDMA",
                                 "allow \"tcp\", or see the error of its registration");
  // Under a lane's lock, which paths must not be looked for under.
  engine().next_io().post([weak = weak_from_this(), work = std::move(work), cause]() mutable {
    const auto self = weak.lock();
    const std::shared_ptr<Peer> here = self == nullptr ? nullptr : self->peer();
    if (here == nullptr) return fail_work({work}, cause);
    here->move_on({std::move(work)}, self.get(), here->describe(cause, "rdma"));
  });
}

void RdmaLink::remote_changed(uint32_t rail, bool up) {
  if (rail < remote_up_.size()) remote_up_[rail].store(up, std::memory_order_relaxed);
}

void RdmaLink::offered(std::string_view offer) {
  std::vector<rdma::RailOffer> remote;
  if (!rdma::decode_offer(offer, &remote)) return;
  for (uint32_t i = 0; i < std::min(remote.size(), remote_.size()); ++i) {
    const bool up = remote[i].up != 0;
    remote_up_[i].store(up);
    if (offered_up_[i].exchange(up) == up) continue;
    for (const auto &lane : lanes()) static_cast<RdmaLane &>(*lane).remote_changed(i, up);
  }
}

void RdmaLink::rail_changed(const Rail &rail) {
  for (const auto &lane : lanes()) {
    auto &one = static_cast<RdmaLane &>(*lane);
    if (&one.rail() == &rail) one.rail_changed();
  }
}

// ---------------------------------------------------------------- keys

std::shared_ptr<const rdma::Found> RdmaLink::remote_keys(uint32_t rail, uint64_t key) const {
  std::shared_lock lock(keys_mutex_);
  const auto it = keys_.find({rail, key});
  return it == keys_.end() ? nullptr : it->second;
}

void RdmaLink::remember(uint32_t rail, uint64_t key, rdma::Found found) {
  const bool refused = found.status == MP_TRANSPORT_UNAVAILABLE;
  std::unique_lock lock(keys_mutex_);
  if (keys_.size() >= kKeysMax) keys_.clear();
  if (refused_.size() >= kRefusedMax) refused_.clear();
  if (refused) refused_.insert(key);
  keys_[{rail, key}] = std::make_shared<const rdma::Found>(std::move(found));
}

void RdmaLink::region_gone(uint64_t key) {
  std::unique_lock lock(keys_mutex_);
  refused_.erase(key);
  for (uint32_t rail = 0; rail < rdma::kRailsMax; ++rail) keys_.erase({rail, key});
}

}  // namespace moonpool
