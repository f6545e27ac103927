// SPDX-License-Identifier: Apache-2.0
#include "tcp_lane.hpp"

#include <algorithm>
#include <cerrno>

#include "engine.hpp"
#include "lane_link.hpp"
#include "peer.hpp"
#include "same_host.hpp"

namespace moonpool {

namespace {

// One turn while holding the lock. The rest is left to the next turn, so that a cancel never waits long.
constexpr uint64_t kTurnBytes = 4u << 20;
constexpr int kTurnSteps = 256;
// Enough frames in flight that the far side always has the next one, few enough that idle lanes find work in the queue.
constexpr size_t kFramesInFlight = 64;
constexpr uint64_t kReadBytesInFlight = 2u << 20;

Error broke_while_receiving(const Step &step) {
  Error error = make_error(MP_PEER_LOST, "a lane broke while receiving");
  error.cause = step.kind == Step::kEnded ? "closed by the peer" : errno_text(step.err);
  return error;
}

}  // namespace

// ---------------------------------------------------------------- driving

void TcpLane::begin_locked() {
  tune_same_host(fd_.get());
  armed_ = EPOLLRDHUP | EPOLLONESHOT;
  if (Error error = io_.add(shared_from_this(), armed_)) return cut_locked(std::move(error));
  opened_locked();
}

// Only sends.
void TcpLane::send_first_locked() {
  turn_bytes_ = 0;
  while (turn_bytes_ < kTurnBytes && send_locked()) {
  }
}

void TcpLane::on_events(uint32_t events) {
  with_lock([&] {
    armed_ = 0;  // one shot
    if (!ready_.load()) return;
    drive_locked();
    if (turn_bytes_ >= kBulkBytes) io_.note_bulk();
    // Nothing is outstanding, so a hang-up can be acted on at once; otherwise receiving reports it.
    if (ready_.load() && frames_.empty() && (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) {
      Error cause = make_error(MP_PEER_LOST, "an idle lane was closed by the peer");
      cut_locked(std::move(cause));
    }
  });
}

void TcpLane::drive_locked() {
  if (!ready_.load(std::memory_order_relaxed)) return;
  turn_bytes_ = 0;
  for (int i = 0; i < kTurnSteps && turn_bytes_ < kTurnBytes; ++i) {
    if (send_locked()) continue;
    if (!ready_.load(std::memory_order_relaxed)) return;
    if (!receive_locked()) break;
  }
  if (ready_.load(std::memory_order_relaxed)) arm_locked();
}

void TcpLane::arm_locked() {
  uint32_t want = EPOLLRDHUP;
  if (!frames_.empty()) want |= EPOLLIN;
  // Blocked, or stopped by the turn's budget with work left.
  if (sending_ || (can_start_locked() && link_.has_work())) want |= EPOLLOUT;
  // A thread that looks at the socket itself needs nobody to do it.
  if (assisted_) want &= ~(asleep_ ? assist_mask_ : uint32_t{EPOLLIN | EPOLLOUT});
  want |= EPOLLONESHOT;
  if (want == armed_) return;
  armed_ = want;
  io_.modify(*this, want);
}

bool TcpLane::can_start_locked() const {
  return frames_.size() < kFramesInFlight && reads_in_flight_ < kReadBytesInFlight;
}

bool TcpLane::start_frame_locked() {
  Work work;
  for (;;) {
    if (!can_start_locked() || !link_.pull(&work)) return false;
    if (!work.transfer->stopping()) break;
    work.transfer->descs_failed(work.begin, work.end, work.transfer->stop_cause());
  }
  const Transfer &transfer = *work.transfer;
  const uint32_t count = work.end - work.begin;
  const wire::RequestHeader header{wire::kRequestMagic,
                                   static_cast<uint8_t>(transfer.op),
                                   transfer.digest ? wire::kFlagDigest : uint8_t{0},
                                   0,
                                   count,
                                   0,
                                   next_frame_id_++,
                                   work.bytes};
  request_.resize(sizeof header + count * sizeof(wire::WireDesc));
  std::memcpy(request_.data(), &header, sizeof header);
  auto *table = request_.data() + sizeof header;
  const bool write = transfer.op == MP_WRITE;
  writer_.begin(request_.data(), request_.size(), transfer.digest && write);
  for (uint32_t i = work.begin; i < work.end; ++i, table += sizeof(wire::WireDesc)) {
    const Desc &desc = transfer.descs[i];
    const wire::WireDesc on_wire{desc.key, desc.offset, desc.length};
    std::memcpy(table, &on_wire, sizeof on_wire);
    if (write) writer_.add(desc.local, desc.length);
  }
  if (!write) reads_in_flight_ += work.bytes;
  load_.fetch_add(work.bytes, std::memory_order_relaxed);
  work.transfer->driver.store(this, std::memory_order_relaxed);
  if (frames_.empty()) progress_at_ = now_ns();
  frames_.push_back({.work = std::move(work), .id = header.id, .digests = {}});
  sending_ = true;
  watch_progress_locked();
  return true;
}

// True when something was sent.
bool TcpLane::send_locked() {
  if (!sending_ && !start_frame_locked()) return false;
  const Step step = writer_.step(fd());
  if (step.kind == Step::kMoved) {
    turn_bytes_ += step.bytes;
    progress_at_ = now_ns();
    if (writer_.done()) {
      sending_ = false;
      frames_.back().digests = writer_.take_digests();
    }
    return true;
  }
  if (step.kind != Step::kBlocked) {
    Error cause = make_error(MP_PEER_LOST, "a lane broke while sending");
    cause.cause = errno_text(step.err);
    cut_locked(std::move(cause));
  }
  return false;
}

// True when something was received.
bool TcpLane::receive_locked() {
  if (frames_.empty()) return false;
  if (sending_ && frames_.size() == 1) return check_silence_locked();
  Step step;
  if (!in_payload_) {
    if (header_got_ < sizeof header_) {
      step = receive_bytes(fd(), reinterpret_cast<uint8_t *>(&header_) + header_got_, sizeof header_ - header_got_);
      if (step.kind == Step::kMoved) header_got_ += step.bytes;
    } else if (failed_got_ < failed_.size() * sizeof(wire::FailedDesc)) {
      auto *records = reinterpret_cast<uint8_t *>(failed_.data());
      step = receive_bytes(fd(), records + failed_got_, failed_.size() * sizeof(wire::FailedDesc) - failed_got_);
      if (step.kind == Step::kMoved) failed_got_ += step.bytes;
    } else {
      step = {Step::kMoved, 0, 0};
    }
  } else {
    size_t next = 0;
    step = reader_.step(fd(), reinterpret_cast<uint8_t *>(&header_), sizeof header_, &next);
    if (step.kind == Step::kMoved) header_got_ = next;
  }
  if (step.kind == Step::kBlocked) return false;
  if (step.kind != Step::kMoved) {
    cut_locked(broke_while_receiving(step));
    return false;
  }
  turn_bytes_ += step.bytes;
  progressed_locked();
  if (in_payload_) {
    if (reader_.done()) finish_frame_locked();
    return true;
  }
  return receive_header_locked();
}

// The only request is still being sent, so all that can come is the end of the connection, or nonsense. Either must be
// read: the socket would stay ready, and whoever watches it would never rest.
bool TcpLane::check_silence_locked() {
  Step step{Step::kMoved};
  if (header_got_ == 0) step = receive_bytes(fd(), &header_, sizeof header_);
  if (step.kind == Step::kBlocked) return false;
  if (step.kind == Step::kMoved) {
    cut_locked(make_error(MP_PROTOCOL, "the peer answered a request before it had all of it"));
  } else {
    cut_locked(broke_while_receiving(step));
  }
  return false;
}

bool TcpLane::receive_header_locked() {
  if (header_got_ < sizeof header_) return true;
  const Frame &frame = frames_.front();
  const Work &work = frame.work;
  if (failed_got_ == 0 && failed_.empty()) {
    const char *wrong = wire::check_response(header_);
    if (*wrong == '\0' && (header_.id != frame.id || header_.failed_count > work.end - work.begin)) {
      wrong = "a response to another request";
    }
    if (*wrong != '\0') {
      cut_locked(make_error(MP_PROTOCOL, std::string("the peer sent ") + wrong));
      return false;
    }
    failed_.resize(header_.failed_count);
  }
  if (failed_got_ < failed_.size() * sizeof(wire::FailedDesc)) return true;
  return begin_payload_locked();
}

bool TcpLane::begin_payload_locked() {
  const Frame &frame = frames_.front();
  const Transfer &transfer = *frame.work.transfer;
  const uint32_t count = frame.work.end - frame.work.begin;
  const bool read = transfer.op == MP_READ;
  reader_.begin(transfer.digest && read);
  size_t next_failed = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const bool failed = next_failed < failed_.size() && failed_[next_failed].desc == i;
    if (failed) ++next_failed;
    if (!read) continue;
    const Desc &desc = transfer.descs[frame.work.begin + i];
    reader_.add(failed || frame.discard ? nullptr : desc.local, failed ? 0 : desc.length);
  }
  if (next_failed != failed_.size() || reader_.payload_left() != header_.payload_bytes) {
    cut_locked(make_error(MP_PROTOCOL, "the peer sent a response that does not fit its request"));
    return false;
  }
  in_payload_ = true;
  header_got_ = 0;
  if (reader_.done()) finish_frame_locked();
  return true;
}

void TcpLane::finish_frame_locked() {
  Frame frame = std::move(frames_.front());
  frames_.pop_front();
  in_payload_ = false;
  Transfer &transfer = *frame.work.transfer;
  load_.fetch_sub(frame.work.bytes, std::memory_order_relaxed);
  if (transfer.op == MP_READ) reads_in_flight_ -= frame.work.bytes;
  const bool read_digests = transfer.digest && transfer.op == MP_READ;
  std::vector<wire::FailedDesc> failed = std::move(failed_);
  failed_.clear();
  failed_got_ = 0;
  if (frame.resolved) return;
  if (read_digests) {
    const size_t pieces = reader_.digests().size();
    for (size_t i = reader_.next_mismatch(0); i < pieces; i = reader_.next_mismatch(i + 1)) {
      failed.push_back({static_cast<uint32_t>(i), MP_DIGEST});
    }
    std::sort(failed.begin(), failed.end(), [](const auto &a, const auto &b) { return a.desc < b.desc; });
  }
  const uint64_t *digests = read_digests ? reader_.digests().data() : frame.digests.data();
  report_work(frame.work, failed, transfer.digest ? digests : nullptr, [&](uint32_t desc, uint32_t status) {
    const bool known = status > MP_PENDING && status <= kLastStatus;
    refuse(transfer, desc, known ? static_cast<mp_status>(status) : MP_PROTOCOL);
  });
}

// ---------------------------------------------------------------- ending

std::vector<Work> TcpLane::take_unfinished_locked() {
  std::vector<Work> work;
  for (Frame &frame : frames_) {
    if (!frame.resolved) work.push_back(std::move(frame.work));
  }
  frames_.clear();
  reads_in_flight_ = 0;
  sending_ = false;
  in_payload_ = false;
  header_got_ = failed_got_ = 0;
  failed_.clear();
  return work;
}

void TcpLane::cancel_locked(const Transfer &transfer) {
  const Error cause = transfer.stop_cause();
  bool cut = false;
  for (size_t i = 0; i < frames_.size(); ++i) {
    Frame &frame = frames_[i];
    if (frame.resolved || frame.work.transfer.get() != &transfer) continue;
    if (transfer.op == MP_READ) {
      // The answer is still coming, but nobody's memory is its destination any more.
      if (i == 0 && in_payload_) reader_.discard_all();
      frame.discard = frame.resolved = true;
      frame.work.transfer->descs_failed(frame.work.begin, frame.work.end, cause);
    } else if (sending_ && i + 1 == frames_.size()) {
      cut = true;  // half of it is on its way and the rest may not be read any more
    }
    // A write that was sent whole is settled by its acknowledgement.
  }
  if (cut) cut_locked(cause);
}

// ---------------------------------------------------------------- waiting

bool TcpLane::carries_locked(const Transfer &transfer) const {
  return std::any_of(frames_.begin(), frames_.end(),
                     [&](const Frame &frame) { return frame.work.transfer.get() == &transfer && !frame.resolved; });
}

std::optional<pollfd> TcpLane::sleep_on_locked() {
  // Other events than these are the I/O thread's meanwhile.
  assist_mask_ = sending_ ? EPOLLIN | EPOLLOUT : EPOLLIN;
  asleep_ = true;
  arm_locked();
  return pollfd{fd(), static_cast<short>(POLLIN | (sending_ ? POLLOUT : 0)), 0};
}

}  // namespace moonpool
