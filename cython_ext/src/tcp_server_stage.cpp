// SPDX-License-Identifier: Apache-2.0
// What the serving side of tcp does with descriptors of memory of a device: their bytes pass through pinned memory.
// While a piece is copied the next request is received, and its answer waits until the bytes are in place.
#include <algorithm>

#include "engine.hpp"
#include "tcp_server_lane.hpp"

namespace moonpool {

namespace {

// Answers that wait for a copy, or for another answer. A client sends fewer requests at once.
constexpr size_t kLandingsMax = 64;

}  // namespace

void TcpServerLane::Copies::begin() {
  std::lock_guard lock(mutex_);
  ++running_;
}

void TcpServerLane::Copies::end() {
  std::lock_guard lock(mutex_);
  if (--running_ == 0) changed_.notify_all();
}

bool TcpServerLane::Copies::none() const {
  std::lock_guard lock(mutex_);
  return running_ == 0;
}

bool TcpServerLane::Copies::wait(int64_t until) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, steady_point(until), [this] { return running_ == 0; });
}

// Of a descriptor that passed its check. The memory is looked at once for each region of a request.
mp_status TcpServerLane::note_device(uint32_t desc, const Region &region) {
  mp_status status = MP_OK;
  if (!engine_.config.cuda_staging) {
    status = MP_TRANSPORT_UNAVAILABLE;
  } else if (device_ != nullptr && region.device->context() != device_->context()) {
    status = MP_INVALID_ARGUMENT;
  } else if (region.device != device_) {
    status = region.check_memory().code;
  }
  if (status != MP_OK) {
    addresses_[desc] = nullptr;
    return status;
  }
  device_ = region.device;
  on_device_[desc] = true;
  offsets_[desc] = staged_bytes_;
  staged_bytes_ += descs_[desc].length;
  return MP_OK;
}

// Nothing is received or answered while the lane waits, so that its client is held up and nobody else.
TcpServerLane::Progress TcpServerLane::wait() {
  state_ = State::kWaiting;
  if (!flush_acks()) return Progress::kBroken;
  watch(acks_.empty() ? 0u : uint32_t{EPOLLOUT});
  return Progress::kBlocked;
}

// What an answer to a read or the payload of a write needs before it can begin.
TcpServerLane::Progress TcpServerLane::admit() {
  const bool read = request_.op == MP_READ;
  // Answers go out in the order of the requests.
  if (read ? !landings_.empty() : landings_.size() >= kLandingsMax) return wait();
  if (device_ != nullptr && slot_ == nullptr) want_slot();
  if (device_ != nullptr && slot_ == nullptr) return wait();
  if (device_ != nullptr && read && fetch_ == Fetch::kNone) fetch();
  if (device_ != nullptr && read && fetch_ != Fetch::kOver) return wait();
  progress_at_ = now_ns();
  if (slot_ != nullptr) watch_stall_locked();
  return read ? begin_read_reply() : begin_payload();
}

void TcpServerLane::want_slot() {
  if (slot_wanted_) return;
  const std::shared_ptr<cuda::Stager> stager = engine_.staging.stager(device_);
  fetch_ = Fetch::kNone;
  cuda::Slot slot = stager->try_slot(cuda::Stager::kServing);
  if (slot) {
    slot_ = std::make_shared<cuda::Slot>(std::move(slot));
    return;
  }
  slot_wanted_ = true;
  const auto ready = [weak = weak_from_this(), &io = io_](cuda::Slot came, const Error &error) {
    io.post([weak, error, kept = std::make_shared<cuda::Slot>(std::move(came))] {
      const auto self = weak.lock();
      if (self == nullptr) return;
      self->resume([&] {
        self->slot_wanted_ = false;
        if (error) return self->fail_device_descs(error.code);
        self->slot_ = kept;
      });
    });
  };
  stager->want_slot(cuda::Stager::kServing, ready);
}

// Where the socket takes the bytes of a descriptor from, or puts them.
uint8_t *TcpServerLane::place_of(uint32_t desc) const {
  if (device_ == nullptr || !on_device_[desc] || addresses_[desc] == nullptr) return addresses_[desc];
  return slot_->data() + offsets_[desc];
}

// Of the descriptors that have not failed.
std::vector<cuda::Copy> TcpServerLane::device_copies(std::vector<uint32_t> *which) {
  std::vector<cuda::Copy> copies;
  auto failed = failed_.begin();
  for (uint32_t i = 0; i < descs_.size(); ++i) {
    while (failed != failed_.end() && failed->desc < i) ++failed;
    if (!on_device_[i] || addresses_[i] == nullptr || (failed != failed_.end() && failed->desc == i)) continue;
    copies.push_back({reinterpret_cast<cuda::Pointer>(addresses_[i]), place_of(i), descs_[i].length});
    which->push_back(i);
  }
  return copies;
}

// The bytes of a read. The pins and the pinned memory belong to the copy, which goes on when the lane ends.
void TcpServerLane::fetch() {
  std::vector<uint32_t> which;
  std::vector<cuda::Copy> copies = device_copies(&which);
  auto pins = std::make_shared<std::vector<ServingPin>>(checker_.pin_again());
  const bool held = std::all_of(pins->begin(), pins->end(), [](const ServingPin &pin) { return pin.get() != nullptr; });
  if (!held || copies.empty()) return fail_device_descs(MP_REGION_RELEASED);
  fetch_ = Fetch::kRunning;
  copies_->begin();
  engine_.staging.stager(device_)->copy(
      cuda::Stager::kToHost, std::move(copies),
      [weak = weak_from_this(), &io = io_, pins, slot = slot_, running = copies_](const Error &error) {
        pins->clear();
        running->end();
        io.post([weak, error] {
          const auto self = weak.lock();
          if (self == nullptr) return;
          self->resume([&] {
            self->fetch_ = Fetch::kOver;
            if (error) self->fail_device_descs(error.code);
          });
        });
      });
}

// They are left out, and the request goes on as one that only concerns the host.
void TcpServerLane::fail_device_descs(mp_status status) {
  for (uint32_t desc = 0; desc < descs_.size(); ++desc) {
    if (!on_device_[desc] || addresses_[desc] == nullptr) continue;
    addresses_[desc] = nullptr;
    failed_.push_back({desc, static_cast<uint32_t>(status)});
  }
  std::sort(failed_.begin(), failed_.end(), [](const auto &a, const auto &b) { return a.desc < b.desc; });
  device_.reset();
  slot_.reset();
}

// A write has come whole. It is answered when its bytes are in place.
void TcpServerLane::land() {
  auto landing = std::make_shared<Landing>(Landing{request_, failed_, {}, 0, good_bytes(), false});
  landings_.push_back(landing);
  std::vector<cuda::Copy> copies;
  std::vector<uint32_t> which;
  if (device_ != nullptr) copies = device_copies(&which);
  auto slot = std::exchange(slot_, nullptr);
  auto pins = std::make_shared<std::vector<ServingPin>>(checker_.take());
  const std::shared_ptr<const cuda::DeviceMemory> device = std::exchange(device_, nullptr);
  if (copies.empty()) {
    landing->over = true;
    return answer_landed();
  }
  for (const uint32_t desc : which) {
    landing->on_device.push_back(desc);
    landing->device_bytes += descs_[desc].length;
  }
  copies_->begin();
  engine_.staging.stager(device)->copy(
      cuda::Stager::kToDevice, std::move(copies),
      [weak = weak_from_this(), &io = io_, pins, slot, running = copies_, landing](const Error &error) {
        slot->reset();
        pins->clear();
        running->end();
        io.post([weak, error, landing] {
          const auto self = weak.lock();
          if (self != nullptr) self->resume([&] { self->landed(*landing, error); });
        });
      });
}

void TcpServerLane::landed(Landing &landing, const Error &error) {
  landing.over = true;
  if (error) {
    for (const uint32_t desc : landing.on_device) {
      landing.failed.push_back({desc, static_cast<uint32_t>(error.code)});
    }
    std::sort(landing.failed.begin(), landing.failed.end(),
              [](const auto &a, const auto &b) { return a.desc < b.desc; });
    landing.good_bytes -= landing.device_bytes;
  }
  answer_landed();
}

void TcpServerLane::answer_landed() {
  for (; !landings_.empty() && landings_.front()->over; landings_.pop_front()) {
    const Landing &first = *landings_.front();
    engine_.stats.served_write_bytes.fetch_add(first.good_bytes, std::memory_order_relaxed);
    append_response(first.request, first.failed, 0);
  }
}

// On the I/O thread, when something came that the lane may be waiting for.
void TcpServerLane::resume(const std::function<void()> &change) {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  change();
  if (state_ != State::kWaiting) {
    if (!flush_acks()) return close_locked();
    if (!acks_.empty() && state_ != State::kReply) watch(EPOLLIN | EPOLLOUT);
    return;
  }
  const Progress progress = admit();
  if (progress == Progress::kBroken) return close_locked();
  if (state_ == State::kWaiting || state_ == State::kReply) return;
  watch(EPOLLIN);
  if (progress == Progress::kMore) run_turn_locked();
}

// A client that stops in the middle of a piece would keep its pinned memory from the others.
void TcpServerLane::watch_stall_locked() {
  if (stall_watched_) return;
  stall_watched_ = true;
  const int64_t limit = int64_t{engine_.config.progress_timeout_ms} * kMillisecond;
  io_.call_at(std::max(progress_at_ + limit, now_ns() + kMillisecond), [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->check_stall();
  });
}

void TcpServerLane::check_stall() {
  std::lock_guard lock(mutex_);
  stall_watched_ = false;
  if (closed_ || slot_ == nullptr) return;
  const int64_t limit = int64_t{engine_.config.progress_timeout_ms} * kMillisecond;
  const bool moves = state_ == State::kWaiting || now_ns() - progress_at_ < limit;
  if (!moves) return close_locked();
  watch_stall_locked();
}

}  // namespace moonpool
