// SPDX-License-Identifier: Apache-2.0
#include "shm_link.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "digest.hpp"
#include "engine.hpp"
#include "peer.hpp"

namespace moonpool {

namespace {

// About the speed of a copy by the kernel, and how long a waiter looks for its end at most.
constexpr int64_t kBytesPerNs = 8;
constexpr int64_t kCopyingMaxNs = 150'000;
// Longer than the copy of one slice.
constexpr int64_t kShortly = 100 * kMillisecond;

// Distinct keys of the remote regions. A transfer names few regions and long runs of each as a rule, but need not.
std::vector<uint64_t> keys_of(const Transfer &transfer) {
  constexpr size_t kFew = 32;
  std::vector<uint64_t> keys;
  std::unordered_set<uint64_t> many;
  for (const Desc &desc : transfer.descs) {
    if (!keys.empty() && keys.back() == desc.key) continue;
    if (keys.size() < kFew) {
      if (std::find(keys.begin(), keys.end(), desc.key) != keys.end()) continue;
    } else {
      if (many.empty()) many.insert(keys.begin(), keys.end());
      if (!many.insert(desc.key).second) continue;
    }
    keys.push_back(desc.key);
  }
  return keys;
}

Work whole(const std::shared_ptr<Transfer> &transfer) {
  return {transfer, 0, static_cast<uint32_t>(transfer->descs.size()), transfer->bytes, 0};
}

}  // namespace

ShmLink::ShmLink(const std::shared_ptr<Peer> &peer, IoThread &io, Fd fd, Connected connected)
    : CopyLink(peer, "shm"),
      peer_(peer),
      owner_(OtherProcess::behind(fd.get())),
      io_(io),
      requests_(shm::kDescsPerFrameMax),
      connected_(std::move(connected)),
      proof_(random_u64()) {
  fd_ = std::move(fd);
}

// The last copy is over. Closing the socket tells the peer so.
ShmLink::~ShmLink() { shutdown(make_error(MP_CLOSED, "the peer was closed"), true); }

void ShmLink::open(int64_t deadline_ns) {
  Error error;
  {
    std::lock_guard lock(mutex_);
    watched_ = EPOLLIN;
    error = io_.add(self(), watched_);
    if (!error) send_locked(shm::request_header(shm::kOpen, reinterpret_cast<uintptr_t>(&proof_), proof_), nullptr);
  }
  if (error) return broken(error, true);
  io_.call_at(deadline_ns, [weak = weak_from_this()] {
    const auto self = std::static_pointer_cast<ShmLink>(weak.lock());
    if (self == nullptr || self->usable_.load()) return;
    self->broken(make_error(MP_CONNECT, "no answer over the Unix socket within the connect deadline"), false);
  });
}

bool ShmLink::takes(const Transfer &transfer) const {
  if (!usable_.load() || transfer.in_pieces()) return false;
  if (peer_copies_.load()) return true;
  return copier_of(keys_of(transfer), transfer.op) != Copier::kPeer;
}

ShmLink::Copier ShmLink::copier_locked(uint64_t key, mp_op op) const {
  const auto it = reached_.find(key);
  if (it == reached_.end()) return refused_.count(key) != 0 ? Copier::kPeer : Copier::kUnknown;
  if (it->second->memory != nullptr) return Copier::kThisProcess;
  // A writer that is stopped in the middle could not be kept from writing later.
  const bool reads = op == MP_READ && it->second->readable.load() && reads_errno_.load() == 0;
  return reads ? Copier::kThisProcess : Copier::kPeer;
}

// The peer for all as soon as it is needed for one.
ShmLink::Copier ShmLink::copier_of(const std::vector<uint64_t> &keys, mp_op op) const {
  Copier copier = Copier::kThisProcess;
  std::shared_lock lock(regions_mutex_);
  for (const uint64_t key : keys) {
    const Copier one = copier_locked(key, op);
    if (one == Copier::kPeer) return one;
    if (one == Copier::kUnknown) copier = one;
  }
  return copier;
}

std::string ShmLink::shortcoming() const {
  if (!usable_.load()) return {};
  const int reads_errno = reads_errno_.load();
  if (!peer_copies_.load()) {
    return std::string(reads_errno == 0 ? "not for writes to memory that the peer's engine did not allocate"
                                        : "only for memory that the peer's engine allocated") +
           ": the peer may not reach into this process (" + errno_text(copies_errno_.load()) + ")";
  }
  if (reads_errno != 0) {
    return "memory that the peer's engine did not allocate is copied by the peer: this process may not read it there "
           "(" +
           errno_text(reads_errno) + ")";
  }
  std::shared_lock lock(regions_mutex_);
  return why_not_mapped_.empty() ? "" : "memory that could be mapped is copied by the peer: " + why_not_mapped_;
}

void ShmLink::submit(const std::shared_ptr<Transfer> &transfer) {
  const std::vector<uint64_t> keys = keys_of(*transfer);
  const Copier copier = copier_of(keys, transfer->op);
  if (copier == Copier::kThisProcess) return CopyLink::submit(transfer);
  if (copier == Copier::kPeer) return request(transfer);
  bool ended;
  Todo todo;
  {
    std::lock_guard lock(mutex_);
    ended = ended_;
    if (!ended) {
      if (waiting_.empty() && sent_.empty()) progress_at_ = now_ns();
      waiting_.push_back({transfer, keys});
      for (const uint64_t key : keys) {
        if (copier_of({key}, transfer->op) != Copier::kUnknown || !asked_.insert(key).second) continue;
        send_locked(shm::request_header(shm::kMap, key), nullptr);
      }
      begin_waiting_locked(&todo);  // an answer may have come since we looked
      watch_progress_locked();
    }
  }
  if (ended) return turned_away(transfer);
  run(std::move(todo));
}

// The peer copies: at least one of its regions cannot be reached from here.
void ShmLink::request(const std::shared_ptr<Transfer> &transfer) {
  if (!peer_copies_.load()) return go_elsewhere({whole(transfer)}, not_reached());
  if (!requests_.push(transfer, engine_.config.slice_bytes)) return turned_away(transfer);
  Todo todo;
  {
    std::lock_guard lock(mutex_);
    pump_locked(&todo);
  }
  run(std::move(todo));
}

void ShmLink::turned_away(const std::shared_ptr<Transfer> &transfer) {
  go_elsewhere({whole(transfer)}, connection_ended(label_, path()));
}

// Copied, but perhaps not to or from where it should have been. The copy is over, so it may be done again.
void ShmLink::not_moved(Work work, const Error &cause) { go_elsewhere({std::move(work)}, cause); }

void ShmLink::go_elsewhere(std::vector<Work> work, const Error &cause) {
  const std::shared_ptr<Peer> peer = peer_.lock();
  if (peer == nullptr) return fail_work(work, cause);
  peer->move_on(std::move(work), this, cause);
}

void ShmLink::adopt(std::vector<Work> work, const Error &cause) {
  // The parts that are left go the way of a transfer of which nothing was begun, because both ways take any part.
  for (Work &one : work) {
    const Copier copier = copier_of(keys_of(*one.transfer), one.transfer->op);
    std::vector<Work> alone;
    alone.push_back(std::move(one));
    if (copier == Copier::kThisProcess) {
      CopyLink::adopt(std::move(alone), cause);
    } else if (!peer_copies_.load() || !requests_.push_front(alone.front(), engine_.config.slice_bytes)) {
      go_elsewhere(std::move(alone), cause);
    }
  }
  Todo todo;
  {
    std::lock_guard lock(mutex_);
    pump_locked(&todo);
  }
  run(std::move(todo));
}

void ShmLink::cancel(Transfer &transfer) {
  CopyLink::cancel(transfer);
  std::vector<Work> never_begun = requests_.remove(transfer);
  {
    std::lock_guard lock(mutex_);
    std::erase_if(waiting_, [&](const auto &one) {
      if (one.transfer.get() != &transfer) return false;
      never_begun.push_back(whole(one.transfer));
      return true;
    });
    wake_waiter_locked();
  }
  // What the peer was asked to copy is settled by its answer.
  fail_work(never_begun, transfer.stop_cause());
}

// The calling thread takes the I/O thread's place at the socket as long as an answer that its transfer needs is coming.
void ShmLink::assist(Transfer &transfer, int64_t until) {
  CopyLink::assist(transfer, until);
  {
    std::lock_guard lock(mutex_);
    if (assisted_ || !awaits_locked(transfer)) return;
    if (!wake_) wake_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake_) return;
    assisted_ = true;
    watch_locked();
  }
  const bool bulk = transfer.bytes >= kBulkBytes;
  // The copy itself takes a while; being woken from sleep at its end takes about as long as a small one.
  const int64_t copying_ns = std::min<int64_t>(static_cast<int64_t>(transfer.bytes) / kBytesPerNs, kCopyingMaxNs);
  const int64_t look_ns = int64_t{engine_.config.spin_us} * 1000;
  int64_t spin_until = now_ns() + (look_ns == 0 ? 0 : look_ns + copying_ns);
  ActiveThreads::enter();
  for (int64_t now = now_ns(); now < until; now = now_ns()) {
    const bool look = now < spin_until && ActiveThreads::may_look(bulk);
    {
      std::lock_guard lock(mutex_);
      if (!awaits_locked(transfer)) break;
      asleep_ = !look;
    }
    if (!look) {
      ActiveThreads::leave();
      sleep(until - now);
      ActiveThreads::enter();
    } else if (!yield_core() && bulk) {
      spin_until = now;
    }
    run(drive());
  }
  ActiveThreads::leave();
  std::lock_guard lock(mutex_);
  assisted_ = asleep_ = false;
  watch_locked();
}

// True while an answer of the peer has to come before the transfer can go on.
bool ShmLink::awaits_locked(const Transfer &transfer) const {
  if (ended_ || transfer.finished() || transfer.stopping()) return false;
  const auto sent = [&](const auto &entry) { return entry.second.transfer.get() == &transfer; };
  const auto waits = [&](const Waiting &one) { return one.transfer.get() == &transfer; };
  return std::any_of(sent_.begin(), sent_.end(), sent) || std::any_of(waiting_.begin(), waiting_.end(), waits);
}

void ShmLink::sleep(int64_t nanoseconds) {
  pollfd fds[2] = {{fd(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
  const int64_t left = std::min(nanoseconds, int64_t{3600} * 1'000'000'000);
  const timespec timeout{left / 1'000'000'000, left % 1'000'000'000};
  ppoll(fds, 2, &timeout, nullptr);
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t n = read(wake_.get(), &count, sizeof count);
}

// A waiter that sleeps at the socket looks again at its transfer.
void ShmLink::wake_waiter_locked() {
  if (!asleep_) return;
  const uint64_t one = 1;
  // It can only fail when the counter is full, and then the waiter is woken anyway.
  [[maybe_unused]] const ssize_t n = write(wake_.get(), &one, sizeof one);
}

void ShmLink::region_gone(uint64_t key) {
  ReachedPtr gone;
  std::unique_lock lock(regions_mutex_);
  refused_.erase(key);
  const auto it = reached_.find(key);
  if (it == reached_.end()) return;
  gone = std::move(it->second);
  reached_.erase(it);
  lock.unlock();
}

// The last user of a region is gone. May be called by any thread, under no lock of this link.
void ShmLink::let_go(uint64_t key) {
  {
    // There is room again for regions that were refused.
    std::unique_lock regions(regions_mutex_);
    refused_.clear();
    why_not_mapped_.clear();
  }
  std::lock_guard lock(mutex_);
  if (!ended_) send_locked(shm::request_header(shm::kUnmap, key), nullptr);
}

void ShmLink::run(Todo todo) {
  for (const auto &[work, response] : todo.copied) report(work, response);
  for (const Work &work : todo.stopped) fail_work({work}, {});
  if (todo.opened && usable_.load()) {
    Connected connected;
    {
      std::lock_guard lock(mutex_);
      connected = std::move(connected_);
      connected_ = nullptr;
    }
    if (connected != nullptr) connected(self(), {});
  }
  // The answer and the news that the region is gone come over different sockets, in any order.
  if (const std::shared_ptr<Peer> peer = todo.reached.empty() ? nullptr : peer_.lock()) {
    for (const uint64_t key : todo.reached) {
      if (!peer->knows(key)) region_gone(key);
    }
  }
  for (const auto &transfer : todo.begin) submit(transfer);
  if (todo.fault) broken(todo.fault, todo.peer_gone);
}

void ShmLink::report(const Work &work, const shm::CopyResponse &response) {
  Transfer &transfer = *work.transfer;
  std::vector<Work> elsewhere;
  uint32_t next_failed = 0;
  uint32_t done_from = work.begin;
  const auto done_until = [&](uint32_t end) {
    const uint64_t *digests = transfer.digest ? response.digests.data() + (done_from - work.begin) : nullptr;
    if (done_from < end) transfer.descs_done(done_from, end, digests);
    done_from = end + 1;
  };
  for (uint32_t i = work.begin; i < work.end; ++i) {
    auto status = MP_OK;
    const bool failed = next_failed < response.failed.size() && response.failed[next_failed].desc == i - work.begin;
    if (failed) status = static_cast<mp_status>(response.failed[next_failed++].status);
    const Desc &desc = transfer.descs[i];
    if (!failed && transfer.digest && leaf_digest(desc.local, desc.length) != response.digests[i - work.begin]) {
      status = MP_DIGEST;
    }
    if (status == MP_OK) continue;
    done_until(i);
    if (status == MP_TRANSPORT_UNAVAILABLE) {
      elsewhere.push_back({work.transfer, i, i + 1, desc.length, work.attempts});
      continue;
    }
    Error error = refusal(status);
    if (status == MP_DIGEST) error.message = "bytes arrived that are not the bytes sent";
    if (status == MP_SYSTEM) {
      error.message = "memory of the region, or of the local buffer, cannot be accessed";
      error.hint = "registered memory must stay mapped until it is released";
    }
    transfer.descs_failed(i, i + 1, error);
  }
  done_until(work.end);
  if (elsewhere.empty()) return;
  // The peer may not reach this process any more.
  peer_copies_.store(false);
  go_elsewhere(std::move(elsewhere), not_reached());
}

Error ShmLink::not_reached() const {
  Error error = refusal(MP_TRANSPORT_UNAVAILABLE);
  error.message = "memory that cannot be reached from here is copied by the peer, who may not reach into this process";
  error.hint =
      "let the engine allocate the memory, allow \"tcp\", or run both as a user who may trace the other "
      "(kernel.yama.ptrace_scope)";
  return error;
}

// True when the peer copies nothing of this process any more, because it has seen that it must not. One that died in
// the middle of a copy leaves this false.
bool ShmLink::settle(int64_t until) {
  if (table_ == nullptr) return true;
  table_->revoke();
  return table_->wait_idle(until);
}

// Takes nothing more. False when it had ended before.
bool ShmLink::end(Ended *out) {
  {
    std::lock_guard lock(mutex_);
    if (ended_) return false;
    ended_ = true;
    usable_.store(false);
    io_.remove(*this);
    wake_waiter_locked();
    out->connected = std::move(connected_);
    connected_ = nullptr;
    for (auto &entry : sent_) out->sent.push_back(std::move(entry.second));
    sent_.clear();
    for (const Waiting &one : waiting_) out->never_begun.push_back(whole(one.transfer));
    waiting_.clear();
  }
  for (Work &work : close_queue()) out->never_begun.push_back(std::move(work));
  for (Work &work : requests_.close()) out->never_begun.push_back(std::move(work));
  return true;
}

void ShmLink::broken(const Error &cause, bool peer_gone) {
  Ended left;
  if (!end(&left)) return;
  // An owner lets go of the socket only when it has stopped copying; the table says so too, unless the owner died.
  const bool settled = left.sent.empty() || settle(now_ns() + kShortly) || peer_gone;
  if (left.connected != nullptr) left.connected(nullptr, cause);
  const std::shared_ptr<Peer> peer = peer_.lock();
  if (peer == nullptr) {
    fail_work(left.never_begun, cause);
    return fail_work(left.sent, cause);
  }
  const Error error = peer->describe(cause, path());
  peer->path_failed(*this, error);
  peer->move_on(std::move(left.never_begun), this, error);
  if (settled) {
    peer->move_on(std::move(left.sent), this, error);
  } else {
    peer->orphan(std::move(left.sent), error);
  }
}

void ShmLink::shutdown(const Error &cause, bool settled) {
  Ended left;
  if (!end(&left)) return;
  fail_work(left.never_begun, cause);
  if (left.sent.empty()) return;
  // Closing from this side means that this process may do what it likes with its memory when it is over.
  const int64_t until = now_ns() + (settled ? int64_t{engine_.config.progress_timeout_ms} * kMillisecond : 0);
  bool idle = settle(std::min(until, now_ns() + kShortly));
  while (!idle && now_ns() < until && !hung_up()) idle = settle(std::min(until, now_ns() + kShortly));
  const std::shared_ptr<Peer> peer = peer_.lock();
  if (idle || settled || peer == nullptr) {
    fail_work(left.sent, cause);
  } else {
    peer->orphan(std::move(left.sent), cause);
  }
}

}  // namespace moonpool
