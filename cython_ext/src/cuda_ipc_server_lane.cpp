// SPDX-License-Identifier: Apache-2.0
#include "cuda_ipc_server_lane.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "cuda_ipc_memory.hpp"
#include "engine.hpp"
#include "stream.hpp"

namespace moonpool {

namespace {

constexpr size_t kReceiveBytes = 4096;
constexpr size_t kAnswersMax = 64;  // a client that does not take them is not listened to
constexpr int kPeerPidfd = 77;      // SO_PEERPIDFD, Linux 6.5

// Of the process that made the connection, also in another PID namespace where the kernel tells.
Fd pidfd_of_client(int socket) {
  int fd = -1;
  socklen_t size = sizeof fd;
  if (getsockopt(socket, SOL_SOCKET, kPeerPidfd, &fd, &size) == 0) return Fd(fd);
  ucred who{};
  size = sizeof who;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &size) != 0 || who.pid <= 0) return Fd();
  return Fd(static_cast<int>(syscall(SYS_pidfd_open, who.pid, 0)));
}

bool same_user(int socket) {
  ucred who{};
  socklen_t size = sizeof who;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &size) == 0 && who.uid == geteuid();
}

void refuse(const Error &error, cuda_ipc::Response *response) {
  response->header.status = static_cast<uint8_t>(error.code);
  response->reason = error.message + (error.cause.empty() ? "" : ": " + error.cause);
}

}  // namespace

// A client that died in the middle of a copy: what it had queued on a GPU ends with its process, not with its socket.
class CudaIpcServerLane::ExitWatch final : public Handler {
 public:
  ExitWatch(Fd pidfd, std::function<void()> exited) : exited_(std::move(exited)) { fd_ = std::move(pidfd); }
  void on_events(uint32_t) override { exited_(); }

 private:
  const std::function<void()> exited_;
};

CudaIpcServerLane::CudaIpcServerLane(Engine &engine, IoThread &io, Fd fd) : engine_(engine), io_(io) {
  fd_ = std::move(fd);
  engine_.stats.server_lanes.fetch_add(1);
}

CudaIpcServerLane::~CudaIpcServerLane() {
  std::lock_guard lock(mutex_);
  close_locked();
  end_locked();
}

void CudaIpcServerLane::start() {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  auto table_fd = std::make_shared<Fd>();
  table_ = UseTable::make(table_fd.get());
  for (uint32_t slot = UseTable::kSlots; slot > 0; --slot) free_slots_.push_back(slot - 1);
  watched_ = EPOLLIN;
  if (table_ == nullptr || !same_user(fd()) || io_.add(shared_from_this(), watched_)) {
    close_locked();
    return end_locked();
  }
  client_ = pidfd_of_client(fd());
  cuda_ipc::Response first;
  first.header.type = cuda_ipc::kTable;
  first.header.value = client_ ? 1 : 0;
  respond_locked(first, std::move(table_fd));
}

bool CudaIpcServerLane::closed() const {
  std::lock_guard lock(mutex_);
  return closed_;
}

void CudaIpcServerLane::close() {
  std::lock_guard lock(mutex_);
  close_locked();
}

void CudaIpcServerLane::close_locked() {
  if (closed_) return;
  closed_ = true;
  out_.clear();
  engine_.stats.server_lanes.fetch_sub(1);
  // The client hears of it here, stops, and closes its end.
  if (!ended_ && !gone_) ::shutdown(fd(), SHUT_WR);
}

bool CudaIpcServerLane::settle(int64_t until) {
  std::vector<uint32_t> slots;
  std::shared_ptr<UseTable> table;
  {
    std::lock_guard lock(mutex_);
    for (const auto &entry : shared_) slots.push_back(entry.second.slot);
    table = table_;
  }
  for (const uint32_t slot : slots) table->withdraw(slot);
  return std::all_of(slots.begin(), slots.end(), [&](uint32_t slot) { return table->wait_unused(slot, until); });
}

bool CudaIpcServerLane::in_use_locked() const {
  return std::any_of(shared_.begin(), shared_.end(),
                     [&](const auto &entry) { return table_->used(entry.second.slot); });
}

// The client's end is closed: it is over, unless the process died in a copy.
void CudaIpcServerLane::hung_up_locked() {
  close_locked();
  if (gone_) return;
  gone_ = true;
  io_.remove(*this);
  fd_.reset();
  for (const auto &entry : shared_) table_->withdraw(entry.second.slot);
  if (!client_ || !in_use_locked()) return end_locked();
  exit_watch_ = std::make_shared<ExitWatch>(std::move(client_), [self = shared_from_this()] {
    std::lock_guard lock(self->mutex_);
    self->end_locked();
  });
  if (io_.add(exit_watch_, EPOLLIN)) end_locked();
}

void CudaIpcServerLane::end_locked() {
  if (ended_) return;
  ended_ = true;
  if (fd_) io_.remove(*this);
  if (exit_watch_ != nullptr) io_.remove(*exit_watch_);
  exit_watch_.reset();
  fd_.reset();
  for (auto &entry : shared_) {
    if (const auto region = entry.second.region.lock()) region->unshare(*table_);
  }
  shared_.clear();
}

void CudaIpcServerLane::on_events(uint32_t) {
  std::lock_guard lock(mutex_);
  if (gone_ || ended_) return;
  flush_locked();
  if (!receive_locked()) return hung_up_locked();
  if (!closed_ && !parse_locked()) {
    engine_.stats.protocol_errors.fetch_add(1);
    close_locked();
  }
  watch_locked();
}

// False at the end of the stream.
bool CudaIpcServerLane::receive_locked() {
  char buffer[kReceiveBytes];
  const Step step = receive_bytes(fd(), buffer, sizeof buffer);
  // What a client sends after this side has ended the lane means nothing any more.
  if (!closed_ && step.kind == Step::kMoved) in_.append(buffer, step.bytes);
  return step.kind == Step::kMoved || step.kind == Step::kBlocked;
}

bool CudaIpcServerLane::parse_locked() {
  std::string_view rest = in_;
  for (;;) {
    cuda_ipc::Request request;
    const cuda_ipc::Decoded decoded = cuda_ipc::decode(&rest, &request);
    if (decoded == cuda_ipc::Decoded::kBad) return false;
    if (decoded == cuda_ipc::Decoded::kMore) break;
    handle_locked(request);
  }
  in_.erase(0, in_.size() - rest.size());
  return true;
}

void CudaIpcServerLane::handle_locked(const cuda_ipc::Request &request) {
  if (request.type == cuda_ipc::kDrop) return drop_locked(request.key);
  cuda_ipc::Response response;
  response.header.key = request.key;
  std::shared_ptr<const Fd> fd;
  if (request.type == cuda_ipc::kFind) {
    find_locked(request.key, &response);
  } else {
    fd = part_locked(request, &response);
  }
  respond_locked(response, std::move(fd));
}

void CudaIpcServerLane::find_locked(uint64_t key, cuda_ipc::Response *response) {
  response->header.type = cuda_ipc::kFound;
  const std::shared_ptr<Region> region = engine_.regions.find(key);
  if (region == nullptr) {
    return refuse(make_error(engine_.regions.absence(key), "the region is not there"), response);
  }
  if (region->device == nullptr) {
    return refuse(make_error(MP_TRANSPORT_UNAVAILABLE, "the region is memory of the host"), response);
  }
  if (shared_.count(key) != 0) {
    return refuse(make_error(MP_TRANSPORT_UNAVAILABLE, "the region is in use already"), response);
  }
  if (free_slots_.empty()) {
    return refuse(make_error(MP_LIMIT, "more regions than one client uses at a time"), response);
  }
  Error error = region->check_memory();
  if (!error) error = cuda_ipc::describe(*region->device, &response->found);
  if (error) return refuse(error, response);
  const uint32_t slot = free_slots_.back();
  table_->reset(slot);
  if (const mp_status status = region->share_device(table_, slot); status != MP_OK) {
    return refuse(make_error(status, "the region is being released"), response);
  }
  free_slots_.pop_back();
  shared_.emplace(key, Shared{region, slot});
  response->header.value = slot;
  response->found.generation = region->generation;
  response->found.writable = region->writable() ? 1 : 0;
}

std::shared_ptr<const Fd> CudaIpcServerLane::part_locked(const cuda_ipc::Request &request,
                                                         cuda_ipc::Response *response) {
  response->header.type = cuda_ipc::kPartIs;
  response->header.value = request.part;
  const auto it = shared_.find(request.key);
  const std::shared_ptr<Region> region = it == shared_.end() ? nullptr : it->second.region.lock();
  if (region == nullptr || region->released()) {
    refuse(make_error(MP_REGION_RELEASED, "the region is not there any more"), response);
    return nullptr;
  }
  auto fd = std::make_shared<Fd>();
  // Other memory may have been mapped there since it was found.
  if (Error error = region->check_memory()) {
    refuse(error, response);
    return nullptr;
  }
  if (Error error = cuda_ipc::export_part(*region->device, request.part, fd.get(), &response->header.bytes)) {
    refuse(error, response);
    return nullptr;
  }
  return fd;
}

void CudaIpcServerLane::drop_locked(uint64_t key) {
  const auto it = shared_.find(key);
  if (it == shared_.end()) return;
  if (const auto region = it->second.region.lock()) region->unshare(*table_);
  free_slots_.push_back(it->second.slot);
  shared_.erase(it);
}

void CudaIpcServerLane::respond_locked(const cuda_ipc::Response &response, std::shared_ptr<const Fd> fd) {
  // A descriptor travels with the first byte of its frame, so each frame is a message of its own.
  out_.emplace_back();
  cuda_ipc::encode(response, &out_.back().bytes);
  out_.back().fd = std::move(fd);
  flush_locked();
}

void CudaIpcServerLane::flush_locked() {
  while (!out_.empty() && send_locked(&out_.front())) {
    if (out_.front().bytes.empty()) out_.pop_front();
  }
  watch_locked();
}

// False when nothing more goes now.
bool CudaIpcServerLane::send_locked(Outgoing *next) {
  const ssize_t sent = send_with_fd(fd(), next->bytes, next->fd.get());
  if (sent >= 0) {
    next->fd.reset();
    next->bytes.erase(0, static_cast<size_t>(sent));
    return true;
  }
  // Nobody can be answered any more; the end of the stream follows.
  if (errno != EAGAIN && errno != EINTR) close_locked();
  return false;
}

void CudaIpcServerLane::watch_locked() {
  if (ended_ || gone_) return;
  uint32_t want = out_.empty() ? 0u : EPOLLOUT;
  if (closed_ || out_.size() < kAnswersMax) want |= EPOLLIN;
  if (want == watched_) return;
  watched_ = want;
  io_.modify(*this, want);
}

}  // namespace moonpool
