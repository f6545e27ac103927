// SPDX-License-Identifier: Apache-2.0
#include "rdma_lane.hpp"

#include <algorithm>
#include <cerrno>
#include <tuple>

#include "engine.hpp"
#include "peer.hpp"
#include "rdma_link.hpp"
#include "rdma_memory.hpp"
#include "stream.hpp"

namespace moonpool {

namespace {

constexpr size_t kReceiveBytes = 16 * 1024;
// A cancelled transfer whose requests end by themselves costs nobody a queue pair.
constexpr int64_t kGrace = 10 * kMillisecond;
constexpr int64_t kArmLateNs = kMillisecond;
// How often a lane that takes nothing new looks whether it can leave.
constexpr int64_t kGoBackNs = 5 * kMillisecond;
// How long a lane that is always busy keeps its queue pair while others wait for one: connecting takes a few of these
// milliseconds.
constexpr int64_t kTurnNs = 100 * kMillisecond;

Error no_room() {
  return make_error(MP_LIMIT, "the engine has as many queue pairs as it may have, and all are busy",
                    "raise rdma_queue_pairs_max");
}

}  // namespace

RdmaLane::RdmaLane(RdmaLink &link, IoThread &io, std::shared_ptr<Rail> rail, std::vector<uint32_t> remotes)
    : Lane(link, io, wire::kRdma), rdma_link_(link), rail_(std::move(rail)), remotes_(std::move(remotes)) {}

// Adds which rail it was.
Error RdmaLane::here(Error error) const {
  error.message = "rail " + rail_->label() + (remote_gid_.empty() ? "" : " to " + remote_gid_) + ": " + error.message;
  return error;
}

Error RdmaLane::not_ready() {
  Error error;
  with_lock([&] { error = not_ready_locked(); });
  return error;
}

Error RdmaLane::not_ready_locked() const {
  if (waits_) return no_room();
  return make_error(MP_TRANSPORT_UNAVAILABLE,
                    "rail " + rail_->label() + " to " + rdma_link_.remote_gid(remote_rail()) +
                        ": a lane was not ready within the connect deadline; packets may not pass between the two "
                        "(cable, VLAN, firewall): choose others with rdma_devices",
                    "check that the peer is not stopped, or raise connect_timeout");
}

// ---------------------------------------------------------------- connecting

// A port that went down says so, but not every device says that it is back.
Error RdmaLane::hindrance() {
  if (!rail_->state().up) engine_.rdma->look_at(rail_);
  return rail_->unusable();
}

bool RdmaLane::admitted_locked() {
  if (counted_ || waits_) return counted_;
  counted_ = engine_.rdma->take_queue_pair([weak = weak_from_this(), host = std::weak_ptr(engine_.rdma)] {
    const auto lane = weak.lock();
    if (lane == nullptr) return false;
    // On its own thread, since whoever gives one back may hold the lock of another lane.
    lane->io().post([weak, host] {
      if (const auto self = std::static_pointer_cast<RdmaLane>(weak.lock())) return self->its_turn();
      if (const auto rdma = host.lock()) rdma->give_queue_pair();
    });
    return true;
  });
  waits_ = !counted_;
  if (waits_) engine_.make_room_for_queue_pairs();
  return counted_;
}

// A queue pair is counted for it.
void RdmaLane::its_turn() {
  std::shared_ptr<LaneLink> unused;
  with_lock([&] {
    waits_ = false;
    counted_ = true;
    if (shut_) return give_up_turn_locked();
    if (!link_.established() || link_.has_work()) return;
    // Others have done what it was wanted for.
    give_up_turn_locked();
    begin_resting();
    unused = link_.weak_from_this().lock();
  });
  if (unused != nullptr) return unused->pass_on_work();
  dial_now();
}

void RdmaLane::give_up_turn_locked() {
  if (counted_) engine_.rdma->give_queue_pair();
  counted_ = false;
}

void RdmaLane::begin_locked() {
  choose_remote_locked();
  failed_ = true;
  Error error = RdmaQueue::make(rail_, engine_.config.rdma, false, &queue_);
  if (!error) {
    channel_ = std::make_shared<RdmaChannel>(queue_->descriptor(), [weak = weak_from_this()] {
      if (const auto self = std::static_pointer_cast<RdmaLane>(weak.lock())) self->on_completions();
    });
    error = channel_->fd() < 0 ? make_error(MP_LIMIT, "no descriptor is left", "raise `ulimit -n`")
                               : io_.add(channel_, EPOLLIN);
  }
  watched_ = EPOLLIN;
  channel_watched_ = true;
  if (!error) error = io_.add(shared_from_this(), watched_);
  if (error) return cut_locked(std::move(error));
  requests_.resize(kChainMax);
  pieces_.resize(size_t{kChainMax} * queue_->pieces_max());
  zero_based_.resize(pieces_.size());
  marks_ = 0;
  send_locked(rdma::kConnect, 0);
}

Error RdmaLane::connect_locked(const rdma::QueuePairInfo &remote) {
  remote_gid_ = gid_text(remote.gid);
  if (Error error = queue_->connect(remote)) return error;
  // A write of nothing is acknowledged like any other, and so shows that the path carries packets.
  ibv_send_wr probe{};
  probe.opcode = IBV_WR_RDMA_WRITE;
  probe.send_flags = IBV_SEND_SIGNALED;
  probing_ = true;
  if (Error error = queue_->arm()) return here(std::move(error));
  armed_ = true;
  if (const int err = queue_->post(&probe)) {
    return here(system_error(MP_TRANSPORT_UNAVAILABLE, err, "cannot post a work request"));
  }
  return {};
}

void RdmaLane::send_locked(rdma::Type type, uint64_t key) {
  rdma::Frame frame;
  frame.header.type = type;
  frame.header.rail = remote_rail();
  frame.header.key = key;
  if (type == rdma::kConnect) frame.queue_pair = queue_->info();
  rdma::encode(frame, &out_);
  flush_locked();
}

void RdmaLane::flush_locked() {
  send_bytes(fd(), &out_);
  const uint32_t want = EPOLLIN | (out_.empty() ? 0u : uint32_t{EPOLLOUT});
  if (want == watched_) return;
  watched_ = want;
  io_.modify(*this, want);
}

void RdmaLane::on_events(uint32_t) {
  with_lock([&] {
    if (queue_ == nullptr) return;
    flush_locked();
    if (receive_locked() && ready_.load()) drive_locked();
  });
}

// False when the lane was cut.
bool RdmaLane::receive_locked() {
  for (;;) {
    char buffer[kReceiveBytes];
    const Step step = receive_bytes(fd(), buffer, sizeof buffer);
    if (step.kind == Step::kBlocked) return true;
    if (step.kind != Step::kMoved) {
      Error error = here(make_error(MP_PEER_LOST, "the lane's socket broke"));
      error.cause = step.kind == Step::kEnded ? "closed by the peer" : errno_text(step.err);
      cut_locked(std::move(error));
      return false;
    }
    in_.append(buffer, step.bytes);
    std::string_view rest = in_;
    for (rdma::Decoded decoded = rdma::Decoded::kFrame; decoded == rdma::Decoded::kFrame;) {
      rdma::Frame frame;
      Error error;
      decoded = rdma::decode(&rest, &frame);
      if (decoded == rdma::Decoded::kBad) error = make_error(MP_PROTOCOL, "the peer sent a malformed frame");
      if (decoded == rdma::Decoded::kFrame) error = take_locked(frame);
      if (!error) continue;
      cut_locked(std::move(error));
      return false;
    }
    in_.erase(0, in_.size() - rest.size());
  }
}

Error RdmaLane::take_locked(const rdma::Frame &frame) {
  if (frame.header.type == rdma::kConnected && remote_gid_.empty()) {
    if (frame.header.status == MP_OK) return connect_locked(frame.queue_pair);
    Error error = here(make_error(MP_TRANSPORT_UNAVAILABLE, "the peer has no queue pair for it"));
    error.cause = frame.message;
    return error;
  }
  if (frame.header.type == rdma::kRail) {
    return remote_changed_locked(frame.header.rail, frame.header.status == MP_OK);
  }
  if (frame.header.type != rdma::kFound || asked_.erase(frame.header.key) == 0) {
    return here(make_error(MP_PROTOCOL, "the peer sent an answer that nobody asked for"));
  }
  rdma_link_.remember(remote_rail(), frame.header.key, frame.found);
  progressed_locked();
  return {};
}

// ---------------------------------------------------------------- driving

void RdmaLane::on_completions() {
  with_lock([&] {
    if (queue_ == nullptr) return;
    queue_->clear();
    armed_ = false;
    drive_locked();
  });
}

void RdmaLane::drive_locked() {
  if (queue_ == nullptr) return;
  bool more = true;
  while (more && queue_ != nullptr) {
    more = poll_locked();
    if (queue_ != nullptr) more = post_locked() || more;
  }
  if (queue_ != nullptr) arm_locked();
}

void RdmaLane::arm_locked() {
  const bool wanted = probing_ || !chains_.empty();
  if (!wanted || assisted_) return;
  watch_channel_locked(true);
  arm_queue_locked();
}

void RdmaLane::watch_channel_locked(bool watched) {
  if (channel_watched_ == watched) return;
  channel_watched_ = watched;
  io_.modify(*channel_, watched ? uint32_t{EPOLLIN} : 0u);
}

void RdmaLane::arm_queue_locked() {
  if (armed_) return;
  if (Error error = queue_->arm()) return cut_locked(here(std::move(error)));
  armed_ = true;
  // What came before makes nothing ready.
  while (queue_ != nullptr && poll_locked()) post_locked();
}

// A thread that waits for one transfer after the other finds the completions itself. An armed queue would wake the I/O
// thread for each of them, so it is armed only when nobody has come to wait.
void RdmaLane::arm_submitted_locked() {
  if (waited_ && !chains_.empty()) {
    arm_late_locked();
  } else {
    arm_locked();
  }
}

void RdmaLane::arm_late_locked() {
  if (arm_late_) return;
  arm_late_ = true;
  io_.call_at(now_ns() + kArmLateNs, [weak = weak_from_this()] {
    const auto self = std::static_pointer_cast<RdmaLane>(weak.lock());
    if (self == nullptr) return;
    self->with_lock([&] {
      self->arm_late_ = false;
      // A thread that waits arms it when it leaves.
      if (self->queue_ != nullptr && !self->assisted_) self->drive_locked();
    });
  });
}

// True when something was completed.
bool RdmaLane::poll_locked() {
  ibv_wc completions[16];
  const int n = queue_->poll(completions, static_cast<int>(std::size(completions)));
  if (n < 0) {
    cut_locked(here(make_error(MP_TRANSPORT_UNAVAILABLE, "the completion queue broke")));
    return false;
  }
  for (int i = 0; i < n; ++i) {
    if (completions[i].status != IBV_WC_SUCCESS) {
      rail_->errors.fetch_add(1, std::memory_order_relaxed);
      // Keys that do not fit any more are asked for again.
      if (completions[i].status == IBV_WC_REM_ACCESS_ERR && !chains_.empty()) {
        const Frame &frame = frames_[chains_.front().frame - frames_.front().id];
        for (uint32_t d = frame.work.begin; d < frame.work.end; ++d) {
          rdma_link_.region_gone(frame.work.transfer->descs[d].key);
        }
      }
      cut_locked(explain(completions[i]));
      return false;
    }
    if (probing_) {
      probing_ = false;
      failed_ = false;
      tried_ = 0;
      worked_ |= 1u << remote_;
      hopeless_ &= ~(1u << remote_);
      // Nobody may have been there to hear that it is back.
      rdma_link_.remote_changed(remote_rail(), true);
      turn_ends_ = now_ns() + kTurnNs;
      opened_locked();
    } else {
      completed_locked();
    }
    if (queue_ == nullptr) return false;
  }
  if (n > 0) waited_ = assisted_;
  if (n > 0) progressed_locked();
  return n > 0;
}

// ---------------------------------------------------------------- the peer's rail

bool RdmaLane::reachable() const {
  return rail_->state().up &&
         std::any_of(remotes_.begin(), remotes_.end(), [this](uint32_t j) { return rdma_link_.remote_up(j); });
}

// Each is tried once before one is tried again: those that are up first, as far as is known, and of these last the ones
// that never worked. Of equals the one that it is meant for.
void RdmaLane::choose_remote_locked() {
  if (failed_) {
    tried_ |= 1u << remote_;
    hopeless_ |= (1u << remote_) & ~worked_;
  }
  if (tried_ == (1u << remotes_.size()) - 1) tried_ = 0;
  const auto rank = [&](size_t place) {
    const uint32_t bit = 1u << place;
    return std::tuple((tried_ & bit) != 0, !rdma_link_.remote_up(remotes_[place]), (hopeless_ & bit) != 0, place);
  };
  remote_ = 0;
  for (size_t place = 1; place < remotes_.size(); ++place) {
    if (rank(place) < rank(remote_)) remote_ = place;
  }
}

// Told over the control connection, which is there also when no lane is.
void RdmaLane::remote_changed(uint32_t rail, bool up) {
  const auto found = std::find(remotes_.begin(), remotes_.end(), rail);
  if (found == remotes_.end()) return;
  const auto place = static_cast<size_t>(found - remotes_.begin());
  bool dial = false;
  with_lock([&] {
    if (ready_.load() || (queue_ != nullptr && !up)) {
      if (Error error = remote_changed_locked(rail, up)) cut_locked(std::move(error));
      return;
    }
    if (!up) return;
    forget_failures_locked(rail);
    if (resting() || shut_) return;
    // Otherwise it is being connected over another one, which may take until somebody gives up.
    if (queue_ != nullptr) {
      const bool better = place < remote_ || (worked_ & (1u << remote_)) == 0;
      if (place == remote_ || !better || assisted_) return;
      failed_ = false;
      leave_locked(false);
    }
    dial = true;
  });
  if (dial) dial_now();
}

Error RdmaLane::remote_changed_locked(uint32_t rail, bool up) {
  rdma_link_.remote_changed(rail, up);
  if (!up && rail == remote_rail()) {
    return here(make_error(MP_TRANSPORT_UNAVAILABLE, "the peer's port went down"));
  }
  if (up) forget_failures_locked(rail);
  // The rail that this lane is meant for is back.
  if (up && remote_ != 0 && rail == remotes_[0]) {
    going_back_ = true;
    io_.post([weak = weak_from_this(), id = lane_id_] { go_back(weak, id); });
  }
  return {};
}

// What went wrong before a port came back says nothing about it any more.
void RdmaLane::forget_failures_locked(uint32_t rail) {
  const auto found = std::find(remotes_.begin(), remotes_.end(), rail);
  if (found == remotes_.end()) return;
  const uint32_t bit = 1u << (found - remotes_.begin());
  tried_ &= ~bit;
  hopeless_ &= ~bit;
}

// Once what is under way has ended.
void RdmaLane::go_back(const std::weak_ptr<Lane> &weak, uint64_t lane_id) {
  const auto self = std::static_pointer_cast<RdmaLane>(weak.lock());
  if (self == nullptr) return;
  self->with_lock([&] {
    if (self->queue_ == nullptr || self->lane_id_ != lane_id) return;
    if (self->can_leave_locked()) return self->leave_locked(true);
    self->io_.call_at(now_ns() + kGoBackNs, [weak, lane_id] { go_back(weak, lane_id); });
  });
}

Error RdmaLane::explain(const ibv_wc &completion) const {
  const Verbs &verbs = rail_->device->verbs;
  // Before it was ready this says that no packets pass, not that the peer is gone.
  Error error = here(make_error(probing_ ? MP_TRANSPORT_UNAVAILABLE : MP_PEER_LOST,
                                std::string("a work request failed: ") + verbs.wc_status_str(completion.status) +
                                    " (vendor code " + std::to_string(completion.vendor_err) + ")"));
  if (completion.status == IBV_WC_RETRY_EXC_ERR) {
    error.hint =
        "no acknowledgement came: check the peer, the cable, the switch, and that both ends route to each other";
  } else if (completion.status == IBV_WC_LOC_PROT_ERR) {
    error.hint = "registered memory must stay mapped until it is released";
  }
  return error;
}

void RdmaLane::completed_locked() {
  const Chain chain = chains_.front();
  chains_.pop_front();
  used_ -= chain.requests;
  --frames_[chain.frame - frames_.front().id].chains;
  while (!frames_.empty() && frames_.front().chains == 0 && frames_.front().next == frames_.front().work.end) {
    Frame done = std::move(frames_.front());
    frames_.pop_front();
    finish_locked(std::move(done));
  }
}

void RdmaLane::finish_locked(Frame frame) {
  Transfer &transfer = *frame.work.transfer;
  load_.fetch_sub(frame.work.bytes, std::memory_order_relaxed);
  uint64_t bytes = frame.work.bytes;
  for (const wire::FailedDesc &one : frame.failed) bytes -= transfer.descs[frame.work.begin + one.desc].length;
  if (transfer.op == MP_READ) engine_.flush_gpu_writes(transfer);
  // Before whoever waits is woken, and looks.
  auto &moved = transfer.op == MP_WRITE ? rail_->written_bytes : rail_->read_bytes;
  moved.fetch_add(bytes, std::memory_order_relaxed);
  report_work(frame.work, frame.failed, nullptr, [&](uint32_t desc, uint32_t status) {
    if (transfer.stopping()) {
      transfer.descs_failed(desc, desc + 1, transfer.stop_cause());
    } else if (status == MP_TRANSPORT_UNAVAILABLE) {
      rdma_link_.elsewhere({frame.work.transfer, desc, desc + 1, transfer.descs[desc].length, frame.work.attempts});
    } else {
      refuse(transfer, desc, static_cast<mp_status>(status));
    }
  });
}

// ---------------------------------------------------------------- waiting and ending

bool RdmaLane::carries_locked(const Transfer &transfer) const {
  return std::any_of(frames_.begin(), frames_.end(),
                     [&](const Frame &frame) { return frame.work.transfer.get() == &transfer; });
}

std::optional<pollfd> RdmaLane::sleep_on_locked() {
  asleep_ = true;
  // Waits for keys, which the I/O thread receives.
  if (chains_.empty()) return pollfd{-1, 0, 0};
  const size_t before = chains_.size();
  // Nobody else has to look meanwhile.
  watch_channel_locked(false);
  arm_queue_locked();
  if (queue_ == nullptr) left_.reset();  // nobody sleeps on it yet
  if (queue_ == nullptr || chains_.size() != before) return {};
  return pollfd{channel_->fd(), POLLIN, 0};
}

void RdmaLane::sleep_ended_locked() {
  left_.reset();
  if (queue_ == nullptr) return;
  queue_->clear();
  armed_ = false;
}

void RdmaLane::cancel_locked(const Transfer &transfer) {
  if (!carries_locked(transfer)) return;
  // What is posted cannot be taken back but with the whole queue pair.
  io_.call_at(now_ns() + kGrace, [weak = weak_from_this(), id = lane_id_, wanted = transfer.weak_from_this()] {
    const auto self = std::static_pointer_cast<RdmaLane>(weak.lock());
    const auto stopped = wanted.lock();
    if (self == nullptr || stopped == nullptr) return;
    self->with_lock([&] {
      if (self->queue_ == nullptr || self->lane_id_ != id) return;
      self->drive_locked();
      if (self->queue_ != nullptr && self->carries_locked(*stopped)) self->cut_locked(stopped->stop_cause());
    });
  });
}

void RdmaLane::rail_changed() {
  const RailState state = rail_->state();
  bool dial = false;
  with_lock([&] {
    dial = state.up;
    if (queue_ == nullptr || state.up) return;
    cut_locked(here(make_error(MP_TRANSPORT_UNAVAILABLE, "the port went down: " + state.reason)));
  });
  if (dial) dial_now();
}

std::vector<Work> RdmaLane::take_unfinished_locked() {
  if (channel_ != nullptr) io_.remove(*channel_);
  // A waiter that sleeps on its descriptor leaves first.
  if (asleep_) left_ = std::move(channel_);
  channel_.reset();
  queue_.reset();
  give_up_turn_locked();
  armed_ = probing_ = going_back_ = false;
  std::vector<Work> work;
  for (Frame &frame : frames_) work.push_back(std::move(frame.work));
  frames_.clear();
  chains_.clear();
  used_ = 0;
  in_.clear();
  out_.clear();
  remote_gid_.clear();
  asked_.clear();
  return work;
}

}  // namespace moonpool
