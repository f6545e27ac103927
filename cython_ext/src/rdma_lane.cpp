// SPDX-License-Identifier: Apache-2.0
#include "rdma_lane.hpp"

#include <algorithm>
#include <cerrno>

#include "engine.hpp"
#include "peer.hpp"
#include "rdma_link.hpp"
#include "rdma_memory.hpp"
#include "stream.hpp"

namespace moonpool {

namespace {

// Slices in flight on one lane: enough that the device always has the next one, few enough that other rails find work.
constexpr size_t kFramesInFlight = 8;
constexpr uint64_t kBytesInFlight = 4u << 20;
// One doorbell and one signalled completion for so many requests.
constexpr uint32_t kChainMax = 32;
constexpr size_t kReceiveBytes = 16 * 1024;
// A cancelled transfer whose requests end by themselves costs nobody a queue pair.
constexpr int64_t kGrace = 10 * kMillisecond;
constexpr int64_t kArmLateNs = kMillisecond;
// How often a lane that takes nothing new looks whether it can leave.
constexpr int64_t kGoBackNs = 5 * kMillisecond;
constexpr uint64_t kMessageMax = 1u << 30;  // RC allows 2^31; what every device takes

Error no_room() {
  return make_error(MP_LIMIT, "the engine has as many queue pairs as it may have, and all are busy",
                    "raise rdma_queue_pairs_max");
}

}  // namespace

class RdmaLane::Channel : public Handler {
 public:
  Channel(std::weak_ptr<Lane> lane, Fd fd) : lane_(std::move(lane)) { fd_ = std::move(fd); }
  void on_events(uint32_t) override {
    if (const auto lane = std::static_pointer_cast<RdmaLane>(lane_.lock())) lane->on_completions();
  }

 private:
  const std::weak_ptr<Lane> lane_;
};

RdmaLane::RdmaLane(RdmaLink &link, IoThread &io, std::shared_ptr<RdmaHost> host, std::shared_ptr<Rail> rail,
                   std::vector<uint32_t> remotes)
    : Lane(link, io, wire::kRdma),
      rdma_link_(link),
      rail_(std::move(rail)),
      host_(std::move(host)),
      remotes_(std::move(remotes)) {}

// Adds which rail it was.
Error RdmaLane::here(Error error) const {
  error.message = "rail " + rail_->label() + (remote_gid_.empty() ? "" : " to " + remote_gid_) + ": " + error.message;
  return error;
}

// ---------------------------------------------------------------- connecting

// A port that went down says so, but not every device says that it is back.
Error RdmaLane::hindrance() {
  if (!rail_->state().up) rail_->refresh();
  const RailState state = rail_->state();
  if (!state.up) {
    return make_error(MP_TRANSPORT_UNAVAILABLE, "rail " + rail_->label() + " cannot be used: " + state.reason,
                      "see `mooncake-bench doctor`");
  }
  make_room();
  return host_->queue_pairs_left() ? Error{} : no_room();
}

void RdmaLane::make_room() { engine_.make_room_for_queue_pair(rdma_link_); }

void RdmaLane::begin_locked() {
  choose_remote_locked();
  counted_ = host_->take_queue_pair();
  if (!counted_ && rdma_link_.established()) return leave_locked(true);
  failed_ = true;
  Error error = counted_ ? Error{} : no_room();
  if (!error) error = RdmaQueue::make(rail_, engine_.config.rdma, false, &queue_);
  if (!error) {
    channel_ = std::make_shared<Channel>(weak_from_this(), queue_->descriptor());
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
  armed_ = queue_->arm();
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
  armed_ = queue_->arm();
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

// The first one of those that are up, but not again the one that was just tried in vain.
void RdmaLane::choose_remote_locked() {
  const size_t first = failed_ ? (remote_ + 1) % remotes_.size() : 0;
  remote_ = first;
  for (size_t i = 0; i < remotes_.size(); ++i) {
    const size_t at = (first + i) % remotes_.size();
    if (!rdma_link_.remote_up(remotes_[at])) continue;
    remote_ = at;
    return;
  }
}

Error RdmaLane::remote_changed_locked(uint32_t rail, bool up) {
  rdma_link_.remote_changed(rail, up);
  if (!up && rail == remote_rail()) {
    return here(make_error(MP_TRANSPORT_UNAVAILABLE, "the peer's port went down"));
  }
  // The rail that this lane is meant for is back.
  if (up && remote_ != 0 && rail == remotes_[0]) {
    going_back_ = true;
    io_.post([weak = weak_from_this(), id = lane_id_] { go_back(weak, id); });
  }
  return {};
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
  Error error =
      here(make_error(MP_PEER_LOST, std::string("a work request failed: ") + verbs.wc_status_str(completion.status) +
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

// ---------------------------------------------------------------- posting

bool RdmaLane::start_frame_locked() {
  const bool full = going_back_ || frames_.size() >= kFramesInFlight || used_ >= queue_->depth() ||
                    load_.load(std::memory_order_relaxed) >= kBytesInFlight;
  if (full || !ready_.load(std::memory_order_relaxed)) return false;
  Work work;
  do {
    if (!link_.pull(&work)) return false;
    if (work.transfer->stopping()) fail_work({work}, {});
  } while (work.transfer->stopping());
  load_.fetch_add(work.bytes, std::memory_order_relaxed);
  work.transfer->driver.store(this, std::memory_order_relaxed);
  if (frames_.empty()) progress_at_ = now_ns();
  const uint32_t begin = work.begin;
  frames_.push_back({.work = std::move(work), .id = next_frame_++, .next = begin, .failed = {}});
  local_ = {};
  watch_progress_locked();
  return true;
}

// False while the peer has been asked for keys that the frame needs.
bool RdmaLane::keys_known_locked(const Frame &frame) {
  if (!asked_.empty()) return false;
  uint64_t last = 0;
  bool first = true;
  for (uint32_t i = frame.next; i < frame.work.end; ++i) {
    const uint64_t key = frame.work.transfer->descs[i].key;
    if (!first && key == last) continue;
    first = false;
    last = key;
    if (rdma_link_.remote_keys(remote_rail(), key) == nullptr && asked_.insert(key).second) {
      send_locked(rdma::kFind, key);
    }
  }
  return asked_.empty();
}

// True when something was posted.
bool RdmaLane::post_locked() {
  bool posted = false;
  for (;;) {
    if (frames_.empty() || frames_.back().next == frames_.back().work.end) {
      if (!start_frame_locked()) return posted;
    }
    Frame &frame = frames_.back();
    if (frame.next == frame.work.begin && frame.next_at == 0 && !keys_known_locked(frame)) return posted;
    const uint32_t room = std::min(kChainMax, queue_->depth() - used_);
    if (room == 0) return posted;
    const uint32_t n = build_locked(&frame, room);
    if (n > 0) {
      if (const int err = queue_->post(requests_.data())) {
        cut_locked(here(system_error(MP_TRANSPORT_UNAVAILABLE, err, "cannot post work requests")));
        return false;
      }
      used_ += n;
      ++frame.chains;
      frame.begun = true;
      chains_.push_back({n, frame.id});
      posted = true;
    } else if (frame.chains == 0 && frames_.size() == 1) {
      // Nothing of it could be posted at all.
      Frame done = std::move(frames_.front());
      frames_.pop_front();
      finish_locked(std::move(done));
    }
  }
}

const RdmaLane::Local *RdmaLane::find_local_locked(const Frame &frame, const Desc &desc) {
  const uint8_t *begin = desc.local, *end = desc.local + desc.length;
  if (begin >= local_.base && end <= local_.end) return &local_;
  for (const auto &region : frame.work.transfer->locals) {
    if (begin < region->base || end > region->base + region->length) continue;
    const std::shared_ptr<RdmaMemory> memory = region->rdma();
    if (memory == nullptr) continue;
    local_ = {region->base, region->base + region->length, memory->piece_bytes(), memory->start(),
              memory->local_keys(rail_->device_index)};
    if (!local_.keys.empty()) return &local_;
  }
  local_ = {};
  return nullptr;
}

// Work requests for the next descriptors, linked, the last one signalled. Returns how many.
uint32_t RdmaLane::build_locked(Frame *frame, uint32_t room) {
  const Transfer &transfer = *frame->work.transfer;
  const bool write = transfer.op == MP_WRITE;
  const uint32_t pieces_max = queue_->pieces_max();
  std::shared_ptr<const rdma::Found> remote;
  uint64_t remote_key = 0;
  uint32_t n = 0;
  uint64_t bytes = 0;  // of the latest request
  const auto refuse = [&](mp_status status) {
    frame->failed.push_back({frame->next - frame->work.begin, static_cast<uint32_t>(status)});
    ++frame->next;
    frame->next_at = 0;
  };
  while (frame->next < frame->work.end) {
    const Desc &desc = transfer.descs[frame->next];
    if (transfer.stopping()) {
      refuse(MP_CANCELLED);
      continue;
    }
    if (remote == nullptr || desc.key != remote_key) {
      remote = rdma_link_.remote_keys(remote_rail(), desc.key);
      remote_key = desc.key;
    }
    // Withdrawn since it was asked for.
    if (remote == nullptr) {
      refuse(MP_REGION_RELEASED);
      continue;
    }
    const Local *local = find_local_locked(*frame, desc);
    if (remote->status != MP_OK || local == nullptr) {
      refuse(remote->status != MP_OK ? remote->status : MP_TRANSPORT_UNAVAILABLE);
      continue;
    }
    if (desc.length > remote->length || desc.offset > remote->length - desc.length) {
      refuse(MP_OUT_OF_RANGE);
      continue;
    }
    const uint64_t remote_at = desc.offset + frame->next_at;
    const auto local_at = static_cast<uint64_t>(desc.local - local->base) + frame->next_at;
    const uint64_t remote_in = remote_at % remote->piece_bytes, local_in = local_at % local->piece_bytes;
    const uint64_t length = std::min(
        {desc.length - frame->next_at, remote->piece_bytes - remote_in, local->piece_bytes - local_in, kMessageMax});
    const uint32_t rkey = remote->keys[remote_at / remote->piece_bytes];
    ibv_send_wr *request = n == 0 ? nullptr : &requests_[n - 1];
    const bool joins = request != nullptr && request->wr.rdma.rkey == rkey &&
                       request->wr.rdma.remote_addr + bytes == remote->start + remote_in &&
                       static_cast<uint32_t>(request->num_sge) < pieces_max && bytes + length <= kMessageMax;
    if (!joins) {
      if (n == room) break;
      request = &requests_[n];
      *request = {};
      request->sg_list = &pieces_[size_t{n} * pieces_max];
      request->opcode = write ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
      request->wr.rdma.remote_addr = remote->start + remote_in;
      request->wr.rdma.rkey = rkey;
      if (n > 0) requests_[n - 1].next = request;
      bytes = 0;
      ++n;
    }
    ibv_sge &piece = request->sg_list[request->num_sge++];
    piece = {reinterpret_cast<uintptr_t>(desc.local) + frame->next_at, static_cast<uint32_t>(length),
             local->keys[local_at / local->piece_bytes]};
    zero_based_[static_cast<size_t>(&piece - pieces_.data())] = local->start + local_in;
    bytes += length;
    frame->next_at += length;
    if (frame->next_at == desc.length) {
      ++frame->next;
      frame->next_at = 0;
    }
  }
  for (uint32_t i = 0; i < n; ++i) {
    ibv_send_wr &request = requests_[i];
    uint64_t total = 0;
    for (int k = 0; k < request.num_sge; ++k) total += request.sg_list[k].length;
    if (write && total <= queue_->inline_max()) {
      // The bytes travel in the request itself, copied by the processor.
      request.send_flags |= IBV_SEND_INLINE;
      continue;
    }
    for (int k = 0; k < request.num_sge; ++k) {
      ibv_sge &piece = request.sg_list[k];
      piece.addr = zero_based_[static_cast<size_t>(&piece - pieces_.data())];
    }
  }
  if (frame->next == frame->work.end) n = mark_locked(frame, n);
  if (n > 0) requests_[n - 1].send_flags |= IBV_SEND_SIGNALED;
  return n;
}

// A notification comes after these bytes: the last request of the frame completes something at the peer too, which is
// what verbs promise to happen after the bytes of all requests before it are in place.
uint32_t RdmaLane::mark_locked(Frame *frame, uint32_t n) {
  Transfer &transfer = *frame->work.transfer;
  if (!transfer.has_notify || transfer.op != MP_WRITE || frame->marked || (n == 0 && !frame->begun)) return n;
  if (n == 0) {
    // What was to be the last could not be posted.
    requests_[n++] = {};
    requests_[0].opcode = IBV_WR_RDMA_WRITE;
  }
  requests_[n - 1].opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  frame->marked = true;
  transfer.note_mark(lane_id_, ++marks_);
  return n;
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
  if (counted_) host_->give_queue_pair();
  armed_ = probing_ = going_back_ = counted_ = false;
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
