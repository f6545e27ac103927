// SPDX-License-Identifier: Apache-2.0
// What a ShmLink does at its socket. Everything here but the first and the last function holds mutex_, and leaves what
// calls transfers or the peer to run().
#include <sys/socket.h>

#include <cerrno>

#include "engine.hpp"
#include "shm_link.hpp"
#include "stream.hpp"

namespace moonpool {

namespace {

constexpr size_t kInFlight = 16;
constexpr size_t kReceiveBytes = 64 * 1024;
constexpr size_t kRefusedMax = 65536;
// One read brings the descriptor of one frame, and its frame comes with it or right after it.
constexpr size_t kDescriptorsMax = 16;

}  // namespace

void ShmLink::on_events(uint32_t) {
  const auto self = this->self();
  run(drive());
}

ShmLink::Todo ShmLink::drive() {
  Todo todo;
  std::lock_guard lock(mutex_);
  drive_locked(&todo);
  return todo;
}

void ShmLink::drive_locked(Todo *todo) {
  if (ended_) return;
  flush_locked();
  while (receive_locked(todo)) parse_locked(todo);
  if (!todo->fault) pump_locked(todo);
}

// True when something came.
bool ShmLink::receive_locked(Todo *todo) {
  if (todo->fault) return false;
  char buffer[kReceiveBytes];
  bool lost = false;
  const Step step = receive_with_fds(fd(), buffer, sizeof buffer, &fds_, &lost);
  if (step.kind == Step::kBlocked) return false;
  if (step.kind != Step::kMoved) {
    todo->fault = make_error(MP_PEER_LOST, "the Unix socket to the peer broke");
    todo->fault.cause = step.kind == Step::kEnded ? "closed by the peer" : errno_text(step.err);
    // Its owner lets go of it only after everything it did is over.
    todo->peer_gone = true;
    return false;
  }
  in_.append(buffer, step.bytes);
  progress_at_ = now_ns();
  if (lost) {
    todo->fault = make_error(MP_LIMIT, "this process has no descriptor left for memory of the peer",
                             "close files, or raise `ulimit -n`");
  } else if (fds_.size() > kDescriptorsMax) {
    todo->fault = make_error(MP_PROTOCOL, "the peer sent descriptors that nobody asked for");
  }
  return !todo->fault;
}

void ShmLink::parse_locked(Todo *todo) {
  std::string_view rest = in_;
  for (;;) {
    shm::CopyResponse response;
    const shm::Decoded decoded = shm::decode_response(&rest, &response);
    if (decoded == shm::Decoded::kMore) break;
    if (decoded == shm::Decoded::kBad || !handle_locked(std::move(response), todo)) {
      todo->fault = make_error(MP_PROTOCOL, "the peer sent a malformed answer over the Unix socket");
    }
    if (todo->fault) return;
  }
  in_.erase(0, in_.size() - rest.size());
}

bool ShmLink::handle_locked(shm::CopyResponse response, Todo *todo) {
  if ((response.header.type == shm::kOpened) != (table_ == nullptr)) return false;
  switch (response.header.type) {
    case shm::kOpened:
      todo->opened = true;
      return on_opened_locked(response, todo);
    case shm::kMapped:
    case shm::kReadable:
      if (!on_reached_locked(response, todo)) return false;
      begin_waiting_locked(todo);
      return true;
    default:
      return on_copied_locked(std::move(response), todo);
  }
}

bool ShmLink::on_opened_locked(const shm::CopyResponse &response, Todo *todo) {
  if (fds_.empty()) return false;
  const Fd fd = std::move(fds_.front());
  fds_.pop_front();
  std::string why_not;
  table_ = UseTable::open(fd, &why_not);
  peer_copies_.store(response.header.status == MP_OK);
  copies_errno_.store(static_cast<int>(response.header.value));
  owner_proof_ = {response.header.id, response.header.bytes};
  reads_errno_.store(owner_ ? owner_.prove(owner_proof_) : EPERM);
  usable_.store(table_ != nullptr);
  if (table_ == nullptr) {
    todo->fault = make_error(MP_NO_MEMORY, "the table that says which memory is in use cannot be mapped",
                             "check free memory and `ulimit -v`");
    todo->fault.cause = why_not;
  }
  return true;
}

bool ShmLink::on_reached_locked(const shm::CopyResponse &response, Todo *todo) {
  const shm::ResponseHeader &header = response.header;
  if (asked_.erase(header.id) == 0) return false;
  const bool lies_there = header.type == shm::kReadable;
  if (header.status == MP_OK && header.value >= UseTable::kSlots) return false;
  if (lies_there) {
    if (header.status != MP_OK || response.address > UINT64_MAX - header.bytes) return false;
    remember_locked(response, nullptr, todo);
    return true;
  }
  std::shared_ptr<Mapping> memory;
  std::string why_not = header.status == MP_LIMIT ? "the peer shares no more of it with this process" : "";
  if (header.status == MP_OK) {
    if (fds_.empty()) return false;
    const Fd fd = std::move(fds_.front());
    fds_.pop_front();
    memory = Mapping::open(fd, header.bytes, &why_not);
    if (memory == nullptr) send_locked(shm::request_header(shm::kUnmap, header.id), nullptr);
  }
  if (memory != nullptr) {
    remember_locked(response, std::move(memory), todo);
    return true;
  }
  engine_.stats.regions_not_mapped.fetch_add(1);
  std::unique_lock lock(regions_mutex_);
  // Forgetting costs another question.
  if (refused_.size() >= kRefusedMax) refused_.clear();
  refused_.insert(header.id);
  if (why_not_mapped_.empty()) why_not_mapped_ = std::move(why_not);
  return true;
}

void ShmLink::remember_locked(const shm::CopyResponse &response, std::shared_ptr<Mapping> memory, Todo *todo) {
  const uint64_t key = response.header.id;
  if (memory != nullptr) {
    engine_.stats.regions_mapped.fetch_add(1);
  } else {
    engine_.stats.regions_not_mapped.fetch_add(1);
  }
  auto *reached = new Reached{std::move(memory), response.address, response.header.bytes, response.header.value};
  const auto end = [weak = weak_from_this(), key, &stats = engine_.stats](const Reached *one) {
    if (one->memory != nullptr) stats.regions_mapped.fetch_sub(1);
    delete one;
    if (const auto link = std::static_pointer_cast<ShmLink>(weak.lock())) link->let_go(key);
  };
  todo->reached.push_back(key);
  std::unique_lock lock(regions_mutex_);
  reached_[key] = ReachedPtr(reached, end);
}

bool ShmLink::on_copied_locked(shm::CopyResponse response, Todo *todo) {
  const auto it = sent_.find(response.header.id);
  if (it == sent_.end()) return false;
  const Work &work = it->second;
  const uint32_t count = work.end - work.begin;
  if (response.digests.size() != (work.transfer->digest ? count : 0)) return false;
  if (!response.failed.empty() && response.failed.back().desc >= count) return false;
  todo->copied.emplace_back(std::move(it->second), std::move(response));
  sent_.erase(it);
  return true;
}

void ShmLink::begin_waiting_locked(Todo *todo) {
  std::shared_lock lock(regions_mutex_);
  // Each key is looked at until it is known and then never again, however many of them there are.
  std::erase_if(waiting_, [&](Waiting &one) {
    for (; !one.keys.empty(); one.keys.pop_back()) {
      const uint64_t key = one.keys.back();
      if (copier_locked(key, one.transfer->op) == Copier::kUnknown && asked_.count(key) != 0) return false;
    }
    todo->begin.push_back(std::move(one.transfer));
    return true;
  });
}

void ShmLink::send_locked(const shm::RequestHeader &header, const shm::Desc *descs) {
  shm::encode(header, descs, &out_);
  flush_locked();
}

void ShmLink::pump_locked(Todo *todo) {
  Work work;
  while (!ended_ && sent_.size() < kInFlight && requests_.pull(&work)) {
    const Transfer &transfer = *work.transfer;
    if (transfer.stopping()) {
      todo->stopped.push_back(std::move(work));
      continue;
    }
    std::vector<shm::Desc> descs;
    descs.reserve(work.end - work.begin);
    for (uint32_t i = work.begin; i < work.end; ++i) {
      const Desc &desc = transfer.descs[i];
      descs.push_back({desc.key, desc.offset, desc.length, reinterpret_cast<uintptr_t>(desc.local)});
    }
    shm::RequestHeader header = shm::request_header(shm::kCopy, next_id_++, work.bytes);
    header.op = static_cast<uint8_t>(transfer.op);
    header.flags = transfer.digest ? wire::kFlagDigest : uint8_t{0};
    header.count = static_cast<uint32_t>(descs.size());
    if (sent_.empty()) progress_at_ = now_ns();
    sent_.emplace(header.id, std::move(work));
    shm::encode(header, descs.data(), &out_);
  }
  if (out_.empty()) return;
  // All of them at once: the peer looks at what has come and shares that out among its threads.
  flush_locked();
  watch_progress_locked();
}

void ShmLink::flush_locked() {
  send_bytes(fd(), &out_);
  watch_locked();
}

void ShmLink::watch_locked() {
  if (ended_) return;
  const uint32_t want = (assisted_ ? 0u : EPOLLIN) | (out_.empty() ? 0u : EPOLLOUT);
  if (want == watched_) return;
  watched_ = want;
  io_.modify(*this, want);
}

void ShmLink::watch_progress_locked() {
  if (progress_watched_) return;
  progress_watched_ = true;
  const int64_t limit = int64_t{engine_.config.progress_timeout_ms} * kMillisecond;
  io_.call_at(std::max(progress_at_, now_ns()) + limit, [weak = weak_from_this()] {
    if (const auto self = std::static_pointer_cast<ShmLink>(weak.lock())) self->check_progress();
  });
}

void ShmLink::check_progress() {
  const int64_t limit = int64_t{engine_.config.progress_timeout_ms} * kMillisecond;
  {
    std::lock_guard lock(mutex_);
    progress_watched_ = false;
    if (ended_ || (sent_.empty() && waiting_.empty())) return;
    if (now_ns() - progress_at_ < limit) return watch_progress_locked();
  }
  broken(make_error(MP_DEADLINE,
                    "the peer did not answer over the Unix socket for " + std::to_string(limit / kMillisecond) + " ms",
                    "check that the peer is not stopped, or raise progress_timeout"),
         false);
}

}  // namespace moonpool
