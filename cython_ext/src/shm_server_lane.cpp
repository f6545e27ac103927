// SPDX-License-Identifier: Apache-2.0
#include "shm_server_lane.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

#include "digest.hpp"
#include "engine.hpp"
#include "stream.hpp"

namespace moonpool {

namespace {

// More requests than this wait in the socket: a client that sends them without end fills its own buffer.
constexpr size_t kPendingMax = 64;
constexpr size_t kReceiveBytes = 64 * 1024;
constexpr size_t kSendBytes = 64 * 1024;
constexpr int kRequestsPerTurn = 8;
constexpr unsigned kHeldMax = 4;
// Being mapped gains more than being read.
constexpr size_t kKeptForMappings = UseTable::kSlots / 2;

// The descriptors of one request that passed their check, as both sides of a process_vm call.
struct Pieces {
  std::vector<iovec> ours, theirs;
  std::vector<uint32_t> desc;
};

}  // namespace

ShmServerLane::ShmServerLane(Engine &engine, IoThread &io, Fd fd) : engine_(engine), io_(io) {
  fd_ = std::move(fd);
  engine_.stats.server_lanes.fetch_add(1);
}

ShmServerLane::~ShmServerLane() {
  close();
  std::lock_guard lock(mutex_);
  end_locked();
}

void ShmServerLane::start() {
  std::unique_lock lock(mutex_);
  if (closed_) return;
  client_ = OtherProcess::behind(fd());
  for (uint32_t slot = UseTable::kSlots; slot > 0; --slot) free_slots_.push_back(slot - 1);
  watched_ = EPOLLIN;
  if (!client_ || io_.add(shared_from_this(), watched_)) {
    close_locked(lock);
    end_locked();
  }
}

bool ShmServerLane::closed() const {
  std::lock_guard lock(mutex_);
  return closed_;
}

void ShmServerLane::close() {
  std::unique_lock lock(mutex_);
  close_locked(lock);
}

bool ShmServerLane::settle(int64_t until) {
  std::vector<Shared> shared;
  std::shared_ptr<UseTable> table;
  {
    std::lock_guard lock(mutex_);
    for (const auto &entry : shared_) shared.push_back(entry.second);
    table = table_;
  }
  for (const Shared &one : shared) table->withdraw(one.slot);
  bool quiet = true;
  for (const Shared &one : shared) {
    // What the client only reads is not waited for, because it will believe none of it.
    if (!one.mapped) table->abandon(one.slot);
    quiet = (!one.mapped || table->wait_unused(one.slot, until)) && quiet;
  }
  return quiet;
}

void ShmServerLane::close_locked(std::unique_lock<std::mutex> &lock) {
  if (!closed_) {
    closed_ = true;
    pending_.clear();
    out_.clear();
    engine_.stats.server_lanes.fetch_sub(1);
  }
  quiet_.wait(lock, [this] { return working_ == 0; });
  // The client hears of it here, stops, and closes its end.
  if (!ended_) ::shutdown(fd(), SHUT_WR);
}

void ShmServerLane::end_locked() {
  if (ended_) return;
  ended_ = true;
  io_.remove(*this);
  fd_.reset();
  for (auto &entry : shared_) {
    if (const auto region = entry.second.region.lock()) region->unshare(*table_);
  }
  shared_.clear();
}

void ShmServerLane::on_events(uint32_t) {
  bool work_here = false;
  {
    std::unique_lock lock(mutex_);
    if (ended_) return;
    flush_locked();
    if (!receive_locked()) {
      // The end of the stream: the client's process is gone, or it touches nothing any more.
      close_locked(lock);
      return end_locked();
    }
    if (!closed_ && !parse_locked()) return close_locked(lock);
    work_here = !pending_.empty();
    // One thread does one request; others help when there are more.
    const size_t helpers = std::min(pending_.size(), engine_.io_count());
    for (size_t i = 1; i < helpers; ++i) {
      engine_.next_io_but(io_).post([weak = weak_from_this()] {
        if (auto self = weak.lock()) self->work();
      });
    }
    watch_locked();
  }
  if (work_here) work();
}

// False at the end of the stream.
bool ShmServerLane::receive_locked() {
  char buffer[kReceiveBytes];
  const Step step = receive_bytes(fd(), buffer, sizeof buffer);
  // What a client sends after this side has ended the lane means nothing any more.
  if (!closed_ && step.kind == Step::kMoved) in_.append(buffer, step.bytes);
  return step.kind == Step::kMoved || step.kind == Step::kBlocked;
}

bool ShmServerLane::parse_locked() {
  std::string_view rest = in_;
  for (;;) {
    shm::CopyRequest request;
    const shm::Decoded decoded = shm::decode_request(&rest, &request);
    if (decoded == shm::Decoded::kBad || (decoded == shm::Decoded::kFrame && !handle_locked(std::move(request)))) {
      engine_.stats.protocol_errors.fetch_add(1);
      return false;
    }
    if (decoded == shm::Decoded::kMore) break;
  }
  in_.erase(0, in_.size() - rest.size());
  return true;
}

bool ShmServerLane::handle_locked(shm::CopyRequest request) {
  const bool opens = request.header.type == shm::kOpen;
  if (opens != (table_ == nullptr)) return false;
  switch (request.header.type) {
    case shm::kOpen:
      open_client_locked(request.header);
      return table_ != nullptr;
    case shm::kMap:
      map_locked(request.header.id);
      return true;
    case shm::kUnmap:
      unmap_locked(request.header.id);
      return true;
    default:
      pending_.push_back(std::move(request));
      return true;
  }
}

void ShmServerLane::open_client_locked(const shm::RequestHeader &request) {
  auto table_fd = std::make_shared<Fd>();
  table_ = UseTable::make(table_fd.get());
  if (table_ == nullptr) return;
  // The bytes that the client named prove that this is the process on the other side, and that it lets us.
  const int err = client_.prove({request.id, request.bytes});
  shm::CopyResponse response{};
  response.header.type = shm::kOpened;
  response.header.status = err == 0 ? MP_OK : MP_TRANSPORT_UNAVAILABLE;
  response.header.value = static_cast<uint32_t>(err);
  // And the same the other way round.
  response.header.id = table_->proof().address;
  response.header.bytes = table_->proof().content;
  respond_locked(response, std::move(table_fd));
}

void ShmServerLane::map_locked(uint64_t key) {
  shm::CopyResponse response{};
  response.header.type = shm::kMapped;
  response.header.id = key;
  const std::shared_ptr<Region> region = engine_.regions.find(key);
  std::shared_ptr<const Fd> fd;
  auto status = MP_OK;
  if (region == nullptr) {
    status = engine_.regions.absence(key);
  } else if (shared_.count(key) != 0) {
    status = MP_TRANSPORT_UNAVAILABLE;  // an earlier mapping of it is still being given up
  } else if (free_slots_.empty()) {
    status = MP_LIMIT;
  } else {
    const uint32_t slot = free_slots_.back();
    table_->reset(slot);
    status = region->share(table_, slot, free_slots_.size() > kKeptForMappings, &fd);
    if (status == MP_OK) {
      free_slots_.pop_back();
      shared_.emplace(key, Shared{region, slot, fd != nullptr});
      response.header.value = slot;
      response.header.bytes = region->length;
      if (fd == nullptr) {
        response.header.type = shm::kReadable;
        response.address = reinterpret_cast<uintptr_t>(region->base);
      }
    }
  }
  response.header.status = static_cast<uint8_t>(status);
  respond_locked(response, std::move(fd));
}

void ShmServerLane::unmap_locked(uint64_t key) {
  const auto it = shared_.find(key);
  if (it == shared_.end()) return;
  if (const auto region = it->second.region.lock()) region->unshare(*table_);
  free_slots_.push_back(it->second.slot);
  shared_.erase(it);
}

void ShmServerLane::respond_locked(const shm::CopyResponse &response, std::shared_ptr<const Fd> fd) {
  queue_locked(response, std::move(fd));
  flush_locked();
}

void ShmServerLane::queue_locked(const shm::CopyResponse &response, std::shared_ptr<const Fd> fd) {
  shm::CopyResponse framed = response;
  framed.header.magic = shm::kResponseMagic;
  framed.header.count = static_cast<uint32_t>(framed.failed.size());
  if (framed.header.type == shm::kCopied) framed.header.value = static_cast<uint32_t>(framed.digests.size());
  // A descriptor travels with the first byte of its frame, so such a frame is a message of its own.
  // So is one that follows many bytes, because it is messages that are counted while a client takes none.
  if (out_.empty() || fd != nullptr || out_.back().fd != nullptr || out_.back().bytes.size() >= kSendBytes) {
    out_.emplace_back();
  }
  shm::encode(framed, &out_.back().bytes);
  out_.back().fd = std::move(fd);
}

void ShmServerLane::flush_locked() {
  while (!out_.empty()) {
    Outgoing &next = out_.front();
    const ssize_t sent = send_with_fd(fd(), next.bytes, next.fd.get());
    if (sent < 0) {
      if (errno == EAGAIN || errno == EINTR) break;
      if (refuse_locked(&next)) continue;
      // Nobody can be answered any more. close() waits for copies, so whoever calls this does not wait for it.
      out_.clear();
      io_.post([weak = weak_from_this()] {
        if (auto self = weak.lock()) self->close();
      });
      break;
    }
    next.fd.reset();
    next.bytes.erase(0, static_cast<size_t>(sent));
    if (next.bytes.empty()) out_.pop_front();
  }
  watch_locked();
}

// The kernel may not let a descriptor go, because too many are under way to other processes: the region is then one
// that cannot be mapped. False when the answer cannot do without.
bool ShmServerLane::refuse_locked(Outgoing *next) {
  shm::CopyResponse response;
  std::string_view frame = next->bytes;
  if (next->fd == nullptr || shm::decode_response(&frame, &response) != shm::Decoded::kFrame ||
      response.header.type != shm::kMapped) {
    return false;
  }
  unmap_locked(response.header.id);
  response.header.status = MP_LIMIT;
  response.header.value = 0;
  response.header.bytes = 0;
  next->fd.reset();
  next->bytes.clear();
  shm::encode(response, &next->bytes);
  return true;
}

void ShmServerLane::watch_locked() {
  if (ended_) return;
  uint32_t want = out_.empty() || held_ > 0 ? 0u : EPOLLOUT;
  // Requests wait while there are enough, and while the client does not take its answers.
  if (closed_ || (pending_.size() < kPendingMax && out_.size() < kPendingMax)) want |= EPOLLIN;
  if (want == watched_) return;
  watched_ = want;
  io_.modify(*this, want);
}

void ShmServerLane::work() {
  for (int i = 0; i < kRequestsPerTurn; ++i) {
    shm::CopyRequest request;
    {
      std::lock_guard lock(mutex_);
      if (closed_ || pending_.empty()) return;
      request = std::move(pending_.front());
      pending_.pop_front();
      ++working_;
    }
    shm::CopyResponse response{};
    const bool served = copy(request, &response);
    std::lock_guard lock(mutex_);
    if (--working_ == 0) quiet_.notify_all();
    if (closed_) return;
    if (served) {
      // Waking the client costs as much as a small copy, so answers to large ones wait for each other.
      const bool hold = request.header.bytes >= kBulkBytes && (working_ > 0 || !pending_.empty()) && held_ < kHeldMax;
      held_ = hold ? held_ + 1 : 0;
      queue_locked(response, nullptr);
      if (!hold) flush_locked();
    }
    watch_locked();
  }
  io_.post([weak = weak_from_this()] {
    if (auto self = weak.lock()) self->work();
  });
}

// False when there is nobody any more to answer to.
bool ShmServerLane::copy(const shm::CopyRequest &request, shm::CopyResponse *answer) {
  shm::CopyResponse &response = *answer;
  const bool write = request.header.op == MP_WRITE;
  const bool digest = (request.header.flags & wire::kFlagDigest) != 0;
  response.header.type = shm::kCopied;
  response.header.id = request.header.id;
  RequestChecker checker(engine_.regions);
  Pieces pieces;
  for (uint32_t i = 0; i < request.descs.size(); ++i) {
    const shm::Desc &desc = request.descs[i];
    uint8_t *address = nullptr;
    const mp_status status = checker.check({desc.key, desc.offset, desc.length}, write, &address);
    if (status != MP_OK) {
      response.failed.push_back({i, static_cast<uint32_t>(status)});
      continue;
    }
    pieces.ours.push_back({address, desc.length});
    pieces.theirs.push_back({reinterpret_cast<void *>(desc.address), desc.length});
    pieces.desc.push_back(i);
  }
  if (!response.failed.empty()) engine_.stats.requests_refused.fetch_add(response.failed.size());
  if (!table_->begin_service()) return false;
  uint64_t moved_bytes = 0;
  if (digest) response.digests.assign(request.descs.size(), 0);
  for (size_t at = 0; at < pieces.desc.size();) {
    // With digests no more at a time than stays in the cache until it is hashed.
    size_t n = 0;
    for (uint64_t bytes = 0; at + n < pieces.desc.size() && (!digest || bytes < kDigestLeafBytes); ++n) {
      bytes += pieces.ours[at + n].iov_len;
    }
    const ssize_t got = write ? process_vm_readv(client_.pid(), &pieces.ours[at], n, &pieces.theirs[at], n, 0)
                              : process_vm_writev(client_.pid(), &pieces.ours[at], n, &pieces.theirs[at], n, 0);
    const int err = got < 0 ? errno : 0;
    auto left = static_cast<uint64_t>(got < 0 ? 0 : got);
    for (; n > 0 && left >= pieces.ours[at].iov_len; --n, ++at) {
      const iovec &piece = pieces.ours[at];
      left -= piece.iov_len;
      moved_bytes += piece.iov_len;
      if (digest) response.digests[pieces.desc[at]] = leaf_digest(piece.iov_base, piece.iov_len);
    }
    if (n == 0) continue;
    if (err == EPERM || err == ESRCH) {
      for (; at < pieces.desc.size(); ++at) response.failed.push_back({pieces.desc[at], MP_TRANSPORT_UNAVAILABLE});
      break;
    }
    // This piece cannot be reached at one of the two sides.
    response.failed.push_back({pieces.desc[at++], MP_SYSTEM});
  }
  table_->end_service();
  // The number could have been given to another process meanwhile; then the bytes were not the client's.
  if (client_.exited()) return false;
  checker.reset();
  std::sort(response.failed.begin(), response.failed.end(),
            [](const auto &a, const auto &b) { return a.desc < b.desc; });
  auto &served = write ? engine_.stats.served_write_bytes : engine_.stats.served_read_bytes;
  served.fetch_add(moved_bytes, std::memory_order_relaxed);
  return true;
}

}  // namespace moonpool
