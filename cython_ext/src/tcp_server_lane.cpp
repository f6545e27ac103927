// SPDX-License-Identifier: Apache-2.0
#include "tcp_server_lane.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "digest.hpp"
#include "engine.hpp"
#include "same_host.hpp"

namespace moonpool {

namespace {

// One turn of a lane: enough to keep the socket busy, little enough that the thread's other lanes are not kept waiting.
constexpr int kStepsPerTurn = 16;
// Acknowledgements wait for each other while more requests are at hand, but not longer than this.
constexpr unsigned kAcksTogether = 4;
// A client that sends requests and does not read the answers is cut off here.
constexpr size_t kAckBytesMax = 1u << 20;

}  // namespace

TcpServerLane::TcpServerLane(Engine &engine, IoThread &io, Fd fd) : engine_(engine), io_(io), checker_(engine.regions) {
  fd_ = std::move(fd);
  tune_same_host(fd_.get());
  engine_.stats.server_lanes.fetch_add(1);
}

TcpServerLane::~TcpServerLane() { close(); }

void TcpServerLane::start() {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  watched_ = EPOLLIN;
  if (io_.add(shared_from_this(), watched_)) close_locked();
}

// One that ended by itself counts as open until its copies are over: a fence has to find it.
bool TcpServerLane::closed() const {
  std::lock_guard lock(mutex_);
  return closed_ && copies_->none();
}

void TcpServerLane::close() {
  {
    std::lock_guard lock(mutex_);
    close_locked();
  }
  // An engine that closes waits for the copies of all lanes at once.
  if (!engine_.closed()) copies_->wait(now_ns() + int64_t{engine_.config.progress_timeout_ms} * kMillisecond);
}

bool TcpServerLane::settle(int64_t until) { return copies_->wait(until); }

void TcpServerLane::close_locked() {
  if (closed_) return;
  closed_ = true;
  checker_.reset();
  slot_.reset();
  io_.remove(*this);
  fd_.reset();
  engine_.stats.server_lanes.fetch_sub(1);
}

void TcpServerLane::watch(uint32_t events) {
  if (events == watched_) return;
  watched_ = events;
  io_.modify(*this, events);
}

void TcpServerLane::on_events(uint32_t events) {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  // Nobody reads that the connection has ended while it waits, and it would be told again and again.
  if (state_ == State::kWaiting && (events & (EPOLLHUP | EPOLLERR)) != 0) return close_locked();
  run_turn_locked();
}

void TcpServerLane::run_turn_locked() {
  turn_bytes_ = 0;
  Progress progress = Progress::kMore;
  for (int i = 0; i < kStepsPerTurn && progress == Progress::kMore; ++i) progress = step_locked();
  if (turn_bytes_ >= kBulkBytes) io_.note_bulk();
  if (progress == Progress::kBroken) close_locked();
  if (progress != Progress::kMore) return;
  // The rest of the turn comes at once: the socket is still ready.
  if (!flush_acks()) close_locked();
}

TcpServerLane::Progress TcpServerLane::step_locked() {
  switch (state_) {
    case State::kHead:
      return read_head();
    case State::kTable:
      return read_table();
    case State::kWaiting:
      return wait();
    case State::kPayload:
      return read_payload();
    case State::kReply:
      return write_reply();
  }
  return Progress::kBroken;
}

// What a receiving step means for the lane. Before it sleeps the acknowledgements go out.
TcpServerLane::Progress TcpServerLane::moved(const Step &step) {
  if (step.kind == Step::kMoved) return Progress::kMore;
  if (step.kind != Step::kBlocked) return Progress::kBroken;
  if (!flush_acks()) return Progress::kBroken;
  watch(acks_.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT);
  return Progress::kBlocked;
}

TcpServerLane::Progress TcpServerLane::protocol_error() {
  engine_.stats.protocol_errors.fetch_add(1);
  return Progress::kBroken;
}

TcpServerLane::Progress TcpServerLane::read_head() {
  if (head_got_ < sizeof head_) {
    const Step step = receive_bytes(fd(), reinterpret_cast<uint8_t *>(&head_) + head_got_, sizeof head_ - head_got_);
    if (step.kind != Step::kMoved) return moved(step);
    head_got_ += step.bytes;
    if (head_got_ < sizeof head_) return Progress::kMore;
  }
  head_got_ = 0;
  if (*wire::check_request(head_) != '\0') return protocol_error();
  request_ = head_.header;
  descs_.resize(request_.desc_count);
  descs_[0] = head_.first;
  if (request_.desc_count == 1) return begin_request();
  table_got_ = 0;
  state_ = State::kTable;
  return Progress::kMore;
}

TcpServerLane::Progress TcpServerLane::read_table() {
  auto *table = reinterpret_cast<uint8_t *>(descs_.data() + 1);
  const size_t bytes = (descs_.size() - 1) * sizeof(wire::WireDesc);
  const Step step = receive_bytes(fd(), table + table_got_, bytes - table_got_);
  if (step.kind != Step::kMoved) return moved(step);
  table_got_ += step.bytes;
  return table_got_ < bytes ? Progress::kMore : begin_request();
}

void TcpServerLane::check_descs() {
  failed_.clear();
  addresses_.assign(descs_.size(), nullptr);
  on_device_.assign(descs_.size(), false);
  offsets_.resize(descs_.size());
  device_.reset();
  staged_bytes_ = 0;
  const bool write = request_.op == MP_WRITE;
  for (uint32_t i = 0; i < descs_.size(); ++i) {
    mp_status status = checker_.check(descs_[i], write, &addresses_[i]);
    if (status == MP_OK && checker_.region().device != nullptr) status = note_device(i, checker_.region());
    if (status != MP_OK) failed_.push_back({i, static_cast<uint32_t>(status)});
  }
  if (!failed_.empty()) engine_.stats.requests_refused.fetch_add(failed_.size());
}

TcpServerLane::Progress TcpServerLane::begin_request() {
  uint64_t sum = 0;
  const bool digest = (request_.flags & wire::kFlagDigest) != 0;
  for (const wire::WireDesc &desc : descs_) {
    const bool leaf = desc.length > 0 && desc.length <= kDigestLeafBytes;
    if (desc.length > wire::kPayloadPerFrameMax || (digest && !leaf)) return protocol_error();
    sum += desc.length;
  }
  if (sum != request_.payload_bytes) return protocol_error();
  check_descs();
  if (device_ != nullptr && sum > cuda::kPieceBytes) return protocol_error();
  return admit();
}

TcpServerLane::Progress TcpServerLane::begin_payload() {
  reader_.begin((request_.flags & wire::kFlagDigest) != 0);
  for (uint32_t i = 0; i < descs_.size(); ++i) {
    if (descs_[i].length > 0) reader_.add(place_of(i), descs_[i].length);
  }
  state_ = State::kPayload;
  return Progress::kMore;
}

TcpServerLane::Progress TcpServerLane::read_payload() {
  if (!reader_.done()) {
    size_t next = 0;
    const Step step = reader_.step(fd(), reinterpret_cast<uint8_t *>(&head_), sizeof head_, &next);
    if (step.kind != Step::kMoved) return moved(step);
    turn_bytes_ += step.bytes;
    if (slot_ != nullptr) progress_at_ = now_ns();
    head_got_ = next;
    if (!reader_.done()) return Progress::kMore;
  }
  finish_write();
  state_ = State::kHead;
  // Nothing of a next request came along, so the sender probably waits for this answer.
  if (head_got_ > 0 && acks_waiting_ < kAcksTogether) return Progress::kMore;
  if (!flush_acks()) return Progress::kBroken;
  return head_got_ > 0 || !acks_.empty() ? Progress::kMore : Progress::kBlocked;
}

void TcpServerLane::finish_write() {
  if ((request_.flags & wire::kFlagDigest) != 0) {
    const size_t pieces = reader_.digests().size();
    for (size_t i = reader_.next_mismatch(0); i < pieces; i = reader_.next_mismatch(i + 1)) {
      failed_.push_back({static_cast<uint32_t>(i), MP_DIGEST});
    }
    // A region may have been released after a piece had arrived: then the piece has failed already.
    std::stable_sort(failed_.begin(), failed_.end(), [](const auto &a, const auto &b) { return a.desc < b.desc; });
    const auto same = [](const auto &a, const auto &b) { return a.desc == b.desc; };
    failed_.erase(std::unique(failed_.begin(), failed_.end(), same), failed_.end());
  }
  if (device_ != nullptr || !landings_.empty()) return land();
  checker_.reset();
  engine_.stats.served_write_bytes.fetch_add(good_bytes(), std::memory_order_relaxed);
  append_response(request_, failed_, 0);
}

// Payload of the descriptors that did not fail.
uint64_t TcpServerLane::good_bytes() const {
  uint64_t bytes = request_.payload_bytes;
  for (const wire::FailedDesc &failed : failed_) bytes -= descs_[failed.desc].length;
  return bytes;
}

void TcpServerLane::append_response(const wire::RequestHeader &request, const std::vector<wire::FailedDesc> &failed,
                                    uint64_t payload_bytes) {
  const wire::ResponseHeader header{wire::kResponseMagic, request.flags, {}, static_cast<uint32_t>(failed.size()), 0,
                                    request.id,           payload_bytes};
  acks_.append(reinterpret_cast<const char *>(&header), sizeof header);
  acks_.append(reinterpret_cast<const char *>(failed.data()), failed.size() * sizeof(wire::FailedDesc));
  ++acks_waiting_;
}

bool TcpServerLane::flush_acks() {
  while (!acks_.empty()) {
    const ssize_t n = send(fd(), acks_.data(), acks_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0) return (errno == EAGAIN || errno == EINTR) && acks_.size() <= kAckBytesMax;
    acks_.erase(0, static_cast<size_t>(n));
  }
  acks_waiting_ = 0;
  return true;
}

TcpServerLane::Progress TcpServerLane::begin_read_reply() {
  append_response(request_, failed_, good_bytes());
  reply_head_.swap(acks_);
  acks_.clear();
  acks_waiting_ = 0;
  const bool digest = (request_.flags & wire::kFlagDigest) != 0;
  writer_.begin(reply_head_.data(), reply_head_.size(), digest);
  for (uint32_t i = 0; i < descs_.size(); ++i) {
    if (addresses_[i] != nullptr) {
      writer_.add(place_of(i), descs_[i].length);
    } else {
      writer_.add_absent();
    }
  }
  state_ = State::kReply;
  return write_reply();
}

TcpServerLane::Progress TcpServerLane::write_reply() {
  while (!writer_.done()) {
    const Step step = writer_.step(fd());
    if (step.kind == Step::kBlocked) {
      // Requests wait until the client has taken this answer.
      watch(EPOLLOUT);
      return Progress::kBlocked;
    }
    if (step.kind != Step::kMoved) return Progress::kBroken;
    turn_bytes_ += step.bytes;
    if (slot_ != nullptr) progress_at_ = now_ns();
  }
  slot_.reset();
  checker_.reset();
  engine_.stats.served_read_bytes.fetch_add(good_bytes(), std::memory_order_relaxed);
  state_ = State::kHead;
  watch(EPOLLIN);
  // A client mostly sends the next request when it has this answer: asking the socket now would be a wasted call.
  return Progress::kBlocked;
}

void TcpServerLane::drop_region(const Region &region) {
  std::lock_guard lock(mutex_);
  if (closed_ || !checker_.pins(region)) return;
  const uint8_t *low = region.base, *high = region.base + region.length;
  const bool fetched = device_ != nullptr && region.device != nullptr;
  if (request_.op == MP_READ && fetched) return close_locked();  // what was copied before must not be read any more
  if (state_ == State::kReply) {
    if (writer_.touches(low, high)) return close_locked();
    return checker_.unpin(region);  // its bytes were sent; those of other regions may take as long as the client likes
  }
  reader_.discard(low, high);
  for (uint32_t i = 0; i < addresses_.size(); ++i) {
    if (addresses_[i] == nullptr || addresses_[i] < low || addresses_[i] >= high) continue;
    addresses_[i] = nullptr;
    failed_.push_back({i, MP_REGION_RELEASED});
  }
  std::sort(failed_.begin(), failed_.end(), [](const auto &a, const auto &b) { return a.desc < b.desc; });
  // Other regions of the request are still being written, but their pins go with this lane's lock held: a release of
  // theirs comes through here as well.
  checker_.unpin(region);
}

}  // namespace moonpool
