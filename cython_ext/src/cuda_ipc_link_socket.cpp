// SPDX-License-Identifier: Apache-2.0
// What a CudaIpcLink does at its socket. Everything that holds mutex_ leaves what calls transfers, the peer or the
// driver to run().
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "cuda_ipc_link.hpp"
#include "engine.hpp"
#include "stream.hpp"

namespace moonpool {

namespace {

constexpr size_t kReceiveBytes = 16 * 1024;
constexpr size_t kRefusedMax = 65536;
constexpr size_t kDescriptorsMax = 64;
// Parts of one region that are asked for before the first has come: so many descriptors are under way at most.
constexpr uint32_t kPartsInFlight = 16;

}  // namespace

void CudaIpcLink::on_events(uint32_t) {
  Todo todo;
  {
    std::lock_guard lock(mutex_);
    if (ended_) return;
    flush_locked();
    while (receive_locked(&todo)) parse_locked(&todo);
  }
  run(std::move(todo));
}

// True when something came.
bool CudaIpcLink::receive_locked(Todo *todo) {
  if (todo->fault) return false;
  char buffer[kReceiveBytes];
  bool lost = false;
  const Step step = receive_with_fds(fd(), buffer, sizeof buffer, &fds_, &lost);
  if (step.kind == Step::kBlocked) return false;
  if (step.kind != Step::kMoved) {
    todo->fault = make_error(MP_PEER_LOST, "the Unix socket to the peer broke");
    todo->fault.cause = step.kind == Step::kEnded ? "closed by the peer" : errno_text(step.err);
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

void CudaIpcLink::parse_locked(Todo *todo) {
  std::string_view rest = in_;
  for (;;) {
    cuda_ipc::Response response;
    const cuda_ipc::Decoded decoded = cuda_ipc::decode(&rest, &response);
    if (decoded == cuda_ipc::Decoded::kMore) break;
    if (decoded == cuda_ipc::Decoded::kBad || !handle_locked(std::move(response), todo)) {
      todo->fault = make_error(MP_PROTOCOL, "the peer sent a malformed answer over the Unix socket");
      return;
    }
  }
  in_.erase(0, in_.size() - rest.size());
  begin_waiting_locked(todo);
}

bool CudaIpcLink::handle_locked(cuda_ipc::Response response, Todo *todo) {
  if ((response.header.type == cuda_ipc::kTable) != (table_ == nullptr)) return false;
  switch (response.header.type) {
    case cuda_ipc::kTable:
      return on_table_locked(response, todo);
    case cuda_ipc::kFound:
      return on_found_locked(response, todo);
    default:
      return on_part_locked(response, todo);
  }
}

bool CudaIpcLink::on_table_locked(const cuda_ipc::Response &response, Todo *todo) {
  if (fds_.empty()) return false;
  const Fd fd = std::move(fds_.front());
  fds_.pop_front();
  std::string why_not;
  table_ = UseTable::open(fd, &why_not);
  if (table_ == nullptr) {
    todo->fault = make_error(MP_NO_MEMORY, "the table that says which memory is in use cannot be mapped",
                             "check free memory and `ulimit -v`");
    todo->fault.cause = why_not;
    return true;
  }
  writes_.store(response.header.value != 0);
  usable_.store(true);
  todo->opened = true;
  return true;
}

bool CudaIpcLink::on_found_locked(const cuda_ipc::Response &response, Todo *todo) {
  const uint64_t key = response.header.key;
  const auto it = coming_.find(key);
  if (it == coming_.end() || it->second.found.length != 0) return false;
  if (response.header.status != MP_OK) {
    coming_.erase(it);
    engine_.stats.regions_not_imported.fetch_add(1);
    refuse_locked(key, response.reason);
    return true;
  }
  if (response.header.value >= UseTable::kSlots) return false;
  Coming &coming = it->second;
  coming.found = response.found;
  coming.slot = response.header.value;
  if (coming.found.parts > 0) {
    ask_parts_locked(key, &coming);
    return true;
  }
  importing_.insert(key);
  todo->import.emplace_back(key, std::move(coming));
  coming_.erase(it);
  return true;
}

void CudaIpcLink::ask_parts_locked(uint64_t key, Coming *coming) {
  while (coming->asked < coming->found.parts && coming->asked - coming->parts.size() < kPartsInFlight) {
    send_locked(cuda_ipc::make_request(cuda_ipc::kPart, key, coming->asked++));
  }
}

bool CudaIpcLink::on_part_locked(const cuda_ipc::Response &response, Todo *todo) {
  const uint64_t key = response.header.key;
  const bool good = response.header.status == MP_OK;
  if (good && fds_.empty()) return false;
  Fd fd;
  if (good) {
    fd = std::move(fds_.front());
    fds_.pop_front();
  }
  const auto it = coming_.find(key);
  if (it == coming_.end()) return true;  // one part of it was refused before
  Coming &coming = it->second;
  if (!good) {
    coming_.erase(it);
    engine_.stats.regions_not_imported.fetch_add(1);
    send_locked(cuda_ipc::make_request(cuda_ipc::kDrop, key));
    refuse_locked(key, response.reason);
    return true;
  }
  // They come in the order in which they were asked for.
  if (response.header.value != coming.parts.size() || response.header.bytes == 0) return false;
  coming.parts.push_back({std::move(fd), response.header.bytes});
  if (coming.parts.size() < coming.found.parts) {
    ask_parts_locked(key, &coming);
    return true;
  }
  uint64_t bytes = 0;
  for (const cuda_ipc::Part &part : coming.parts) bytes += part.nbytes;
  if (bytes < coming.found.offset + coming.found.length) return false;
  importing_.insert(key);
  todo->import.emplace_back(key, std::move(coming));
  coming_.erase(it);
  return true;
}

void CudaIpcLink::refuse_locked(uint64_t key, std::string why_not) {
  // Forgetting costs another question.
  if (refused_.size() >= kRefusedMax) refused_.clear();
  why_not_ = why_not;
  refused_[key] = std::move(why_not);
}

// Asks for a region that is not known yet.
void CudaIpcLink::look_for_locked(uint64_t key, const Transfer &transfer, Todo *todo) {
  if (reached_.count(key) != 0 || coming_.count(key) != 0 || importing_.count(key) != 0 || refused_.count(key) != 0) {
    return;
  }
  if (reached_.size() + coming_.size() + importing_.size() >= kImportedMax) make_room_locked(todo);
  if (waiting_.empty()) progress_at_ = now_ns();
  coming_.emplace(key, Coming{transfer.device, {}, 0, 0, {}});
  send_locked(cuda_ipc::make_request(cuda_ipc::kFind, key));
}

// A quarter of the regions, those that nobody uses and that were used longest ago.
void CudaIpcLink::make_room_locked(Todo *todo) {
  std::vector<std::pair<int64_t, uint64_t>> idle;
  for (const auto &[key, reached] : reached_) {
    if (reached.use_count() == 1) idle.emplace_back(reached->used_at, key);
  }
  std::sort(idle.begin(), idle.end());
  idle.resize(std::min(idle.size(), kImportedMax / 4));
  for (const auto &[used_at, key] : idle) {
    const auto it = reached_.find(key);
    todo->dropped.push_back(std::move(it->second));
    reached_.erase(it);
  }
}

// Each key is looked at until it is known and then never again, however many of them there are.
void CudaIpcLink::begin_waiting_locked(Todo *todo) {
  std::erase_if(waiting_, [&](Waiting &one) {
    if (one.work.transfer->stopping()) {
      todo->stopped.push_back(std::move(one.work));
      return true;
    }
    while (!one.keys.empty()) {
      const uint64_t key = one.keys.back();
      if (const auto refused = refused_.find(key); refused != refused_.end()) {
        Error cause = make_error(MP_TRANSPORT_UNAVAILABLE, "a region of the peer cannot be imported",
                                 "allow \"tcp\", or see the cause");
        cause.cause = refused->second;
        todo->elsewhere.emplace_back(std::move(one.work), here(std::move(cause)));
        return true;
      }
      if (coming_.count(key) != 0 || importing_.count(key) != 0) return false;
      one.keys.pop_back();
    }
    todo->begin.push_back(std::move(one.work));
    return true;
  });
}

void CudaIpcLink::send_locked(const cuda_ipc::Request &request) {
  if (ended_) return;
  cuda_ipc::encode(request, &out_);
  flush_locked();
}

void CudaIpcLink::flush_locked() {
  send_bytes(fd(), &out_);
  const uint32_t want = uint32_t{EPOLLIN} | (out_.empty() ? 0u : uint32_t{EPOLLOUT});
  if (ended_ || want == watched_) return;
  watched_ = want;
  io_.modify(*this, want);
}

void CudaIpcLink::watch_progress_locked() {
  if (progress_watched_ || ended_ || waiting_.empty()) return;
  progress_watched_ = true;
  const int64_t limit = int64_t{engine_.config.progress_timeout_ms} * kMillisecond;
  io_.call_at(std::max(progress_at_, now_ns()) + limit, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->check_progress();
  });
}

void CudaIpcLink::check_progress() {
  const int64_t limit = int64_t{engine_.config.progress_timeout_ms} * kMillisecond;
  {
    std::lock_guard lock(mutex_);
    progress_watched_ = false;
    if (ended_ || waiting_.empty()) return;
    if (now_ns() - progress_at_ < limit) return watch_progress_locked();
  }
  broken(make_error(MP_DEADLINE,
                    "the peer did not answer over the Unix socket for " + std::to_string(limit / kMillisecond) + " ms",
                    "check that the peer is not stopped, or raise progress_timeout"));
}

}  // namespace moonpool
