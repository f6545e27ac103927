// SPDX-License-Identifier: Apache-2.0
#include "rdma_server_lane.hpp"

#include <algorithm>
#include <iterator>

#include "engine.hpp"
#include "rdma_memory.hpp"
#include "session.hpp"
#include "stream.hpp"

namespace moonpool {

namespace {

constexpr size_t kReceiveBytes = 16 * 1024;
// A client that asks and does not take its answers is waited for in the socket.
constexpr size_t kSendBytes = 1u << 20;

}  // namespace

RdmaServerLane::RdmaServerLane(Engine &engine, IoThread &io, Fd fd, std::weak_ptr<Session> session)
    : engine_(engine), io_(io), session_(std::move(session)) {
  fd_ = std::move(fd);
  engine_.stats.server_lanes.fetch_add(1);
}

RdmaServerLane::~RdmaServerLane() { close(); }

void RdmaServerLane::start() {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  watched_ = EPOLLIN;
  if (io_.add(shared_from_this(), watched_)) close_locked();
}

bool RdmaServerLane::closed() const {
  std::lock_guard lock(mutex_);
  return closed_;
}

void RdmaServerLane::close() {
  std::lock_guard lock(mutex_);
  close_locked();
}

void RdmaServerLane::close_locked() {
  if (closed_) return;
  closed_ = true;
  engine_.stats.server_lanes.fetch_sub(1);
  end_queue_locked();
  io_.remove(*this);
  fd_.reset();
}

// When it returns the device touches no memory for the client any more.
void RdmaServerLane::end_queue_locked() {
  if (channel_ != nullptr) io_.remove(*channel_);
  channel_.reset();
  queue_.reset();
}

void RdmaServerLane::drop_region(const Region &region) {
  if (region.rdma() != nullptr) close();
}

void RdmaServerLane::on_events(uint32_t) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    flush_locked();
    if (receive_locked()) return;
    close_locked();
  }
  // Nothing more is to be waited for here.
  if (const auto session = session_.lock()) session->deliver();
}

void RdmaServerLane::rail_changed(uint32_t rail, bool up) {
  std::lock_guard lock(mutex_);
  if (closed_ || queue_ == nullptr || out_.size() >= kSendBytes) return;
  rdma::Frame news;
  news.header.type = rdma::kRail;
  news.header.status = static_cast<uint16_t>(up ? MP_OK : MP_TRANSPORT_UNAVAILABLE);
  news.header.rail = rail;
  rdma::encode(news, &out_);
  flush_locked();
}

// ---------------------------------------------------------------- marks

bool RdmaServerLane::marked(uint32_t count) const {
  std::lock_guard lock(mutex_);
  return closed_ || static_cast<int32_t>(marks_ - count) >= 0;
}

void RdmaServerLane::on_marks() {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    queue_->clear();
    // Armed before the last look, so that none is missed.
    if (queue_->arm() || !take_marks_locked()) close_locked();
  }
  if (const auto session = session_.lock()) session->deliver();
}

// False when the queue pair is of no use any more.
bool RdmaServerLane::take_marks_locked() {
  for (;;) {
    ibv_wc completions[16];
    const int n = queue_->poll(completions, static_cast<int>(std::size(completions)));
    if (n <= 0) return n == 0;
    const bool good = std::all_of(completions, completions + n, [](const ibv_wc &one) {
      return one.status == IBV_WC_SUCCESS && one.opcode == IBV_WC_RECV_RDMA_WITH_IMM;
    });
    if (!good || queue_->expect_marks(static_cast<uint32_t>(n)) != 0) return false;
    // Before the notifications that wait for them are delivered.
    engine_.flush_gpu_writes();
    marks_ += static_cast<uint32_t>(n);
  }
}

bool RdmaServerLane::receive_locked() {
  while (out_.size() < kSendBytes) {
    char buffer[kReceiveBytes];
    const Step step = receive_bytes(fd(), buffer, sizeof buffer);
    if (step.kind == Step::kBlocked) return true;
    if (step.kind != Step::kMoved) return false;
    in_.append(buffer, step.bytes);
    std::string_view rest = in_;
    for (rdma::Decoded decoded = rdma::Decoded::kFrame; decoded == rdma::Decoded::kFrame;) {
      rdma::Frame frame;
      decoded = rdma::decode(&rest, &frame);
      const bool bad = decoded == rdma::Decoded::kBad || (decoded == rdma::Decoded::kFrame && !take_locked(frame));
      if (!bad) continue;
      engine_.stats.protocol_errors.fetch_add(1);
      return false;
    }
    in_.erase(0, in_.size() - rest.size());
    flush_locked();
  }
  return true;
}

bool RdmaServerLane::take_locked(const rdma::Frame &frame) {
  if (frame.header.type == rdma::kFind && queue_ != nullptr) {
    find_locked(frame.header.key);
    return true;
  }
  if (frame.header.type != rdma::kConnect || queue_ != nullptr) return false;
  rdma::Frame answer;
  answer.header.type = rdma::kConnected;
  Error error;
  if (frame.header.rail >= engine_.rdma->rails().size()) {
    error = make_error(MP_TRANSPORT_UNAVAILABLE, "there is no such rail");
  } else {
    error = connect_locked(frame);
  }
  if (error) {
    end_queue_locked();
    answer.header.status = static_cast<uint16_t>(MP_TRANSPORT_UNAVAILABLE);
    answer.message = error.message + (error.cause.empty() ? "" : ": " + error.cause);
  } else {
    answer.queue_pair = queue_->info();
  }
  rdma::encode(answer, &out_);
  return true;
}

Error RdmaServerLane::connect_locked(const rdma::Frame &frame) {
  if (Error error = RdmaQueue::make(engine_.rdma->rail(frame.header.rail), engine_.config.rdma, true, &queue_)) {
    return error;
  }
  channel_ = std::make_shared<RdmaChannel>(queue_->descriptor(), [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->on_marks();
  });
  if (channel_->fd() < 0) return make_error(MP_LIMIT, "no descriptor is left");
  if (Error error = io_.add(channel_, EPOLLIN)) return error;
  if (Error error = queue_->arm()) return error;
  return queue_->connect(frame.queue_pair);
}

void RdmaServerLane::find_locked(uint64_t key) {
  rdma::Frame answer;
  answer.header.type = rdma::kFound;
  answer.header.key = key;
  const std::shared_ptr<Region> region = engine_.regions.find(key);
  const std::shared_ptr<RdmaMemory> memory = region == nullptr ? nullptr : region->rdma();
  if (memory != nullptr) answer.found.keys = memory->remote_keys(queue_->rail().device_index);
  if (answer.found.keys.empty()) {
    answer.header.status =
        static_cast<uint16_t>(region == nullptr ? engine_.regions.absence(key) : MP_TRANSPORT_UNAVAILABLE);
  } else {
    answer.found.length = region->length;
    answer.found.piece_bytes = memory->piece_bytes();
    answer.found.start = memory->start();
  }
  rdma::encode(answer, &out_);
}

void RdmaServerLane::flush_locked() {
  send_bytes(fd(), &out_);
  const uint32_t want = (out_.size() < kSendBytes ? uint32_t{EPOLLIN} : 0u) | (out_.empty() ? 0u : uint32_t{EPOLLOUT});
  if (want == watched_) return;
  watched_ = want;
  io_.modify(*this, want);
}

}  // namespace moonpool
