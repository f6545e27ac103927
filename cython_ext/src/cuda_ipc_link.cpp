// SPDX-License-Identifier: Apache-2.0
#include "cuda_ipc_link.hpp"

#include <poll.h>

#include <algorithm>

#include "engine.hpp"
#include "peer.hpp"

namespace moonpool {

namespace {

Work whole(const std::shared_ptr<Transfer> &transfer) {
  return {transfer, 0, static_cast<uint32_t>(transfer->descs.size()), transfer->bytes, 0};
}

std::vector<uint64_t> keys_of(const Work &work) {
  std::unordered_set<uint64_t> seen;
  std::vector<uint64_t> keys;
  for (uint32_t i = work.begin; i < work.end; ++i) {
    const uint64_t key = work.transfer->descs[i].key;
    if ((keys.empty() || keys.back() != key) && seen.insert(key).second) keys.push_back(key);
  }
  return keys;
}

}  // namespace

CudaIpcLink::CudaIpcLink(const std::shared_ptr<Peer> &peer, IoThread &io, Fd fd, Connected connected)
    : peer_(peer), engine_(peer->engine()), label_(peer->label()), io_(io), connected_(std::move(connected)) {
  fd_ = std::move(fd);
}

// The last copy is over. Closing the socket tells the peer so.
CudaIpcLink::~CudaIpcLink() { shutdown(make_error(MP_CLOSED, "the peer was closed"), true); }

void CudaIpcLink::open(int64_t deadline_ns) {
  Error error;
  {
    std::lock_guard lock(mutex_);
    watched_ = EPOLLIN;
    error = io_.add(self(), watched_);
  }
  if (error) return broken(error);
  io_.call_at(deadline_ns, [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (self == nullptr || self->usable_.load()) return;
    self->broken(make_error(MP_CONNECT, "no answer over the Unix socket within the connect deadline"));
  });
}

// The bytes pass no processor that could look at them. Whether the peer's regions are memory of a GPU it says itself.
bool CudaIpcLink::takes(const Transfer &transfer) const {
  if (!usable_.load() || transfer.digest || transfer.device == nullptr || !transfer.remote_on_device) return false;
  if (transfer.device->managed() || (transfer.op == MP_WRITE && !writes_.load())) return false;
  const bool all_here = std::all_of(transfer.locals.begin(), transfer.locals.end(),
                                    [](const auto &region) { return region->device != nullptr; });
  if (!all_here) return false;
  std::lock_guard lock(mutex_);
  return refused_.empty() || std::none_of(transfer.descs.begin(), transfer.descs.end(),
                                          [&](const Desc &desc) { return refused_.count(desc.key) != 0; });
}

std::string CudaIpcLink::shortcoming() const {
  if (!usable_.load()) return {};
  std::lock_guard lock(mutex_);
  if (!why_not_.empty()) return why_not_;
  return writes_.load() ? "" : "only for reads: the peer's kernel cannot tell it when this process has ended";
}

void CudaIpcLink::submit(const std::shared_ptr<Transfer> &transfer) { take({whole(transfer)}); }

void CudaIpcLink::adopt(std::vector<Work> work, const Error &) { take(std::move(work)); }

void CudaIpcLink::take(std::vector<Work> work) {
  Todo todo;
  {
    std::lock_guard lock(mutex_);
    for (Work &one : work) {
      if (ended_) {
        todo.elsewhere.emplace_back(std::move(one), connection_ended(label_, path()));
        continue;
      }
      std::vector<uint64_t> keys = keys_of(one);
      if (keys.size() > kImportedMax / 2) {
        Error cause = make_error(MP_TRANSPORT_UNAVAILABLE, "a transfer with more regions than are imported at a time",
                                 "several transfers, or larger regions");
        todo.elsewhere.emplace_back(std::move(one), here(std::move(cause)));
        continue;
      }
      for (const uint64_t key : keys) look_for_locked(key, *one.transfer, &todo);
      waiting_.push_back({std::move(one), std::move(keys)});
    }
    begin_waiting_locked(&todo);
    watch_progress_locked();
  }
  run(std::move(todo));
}

void CudaIpcLink::cancel(Transfer &transfer) {
  std::vector<Work> never_begun;
  {
    std::lock_guard lock(mutex_);
    std::erase_if(waiting_, [&](Waiting &one) {
      if (one.work.transfer.get() != &transfer) return false;
      never_begun.push_back(std::move(one.work));
      return true;
    });
  }
  fail_work(never_begun, transfer.stop_cause());
}

void CudaIpcLink::region_gone(uint64_t key) {
  ReachedPtr gone;  // goes without the lock
  std::lock_guard lock(mutex_);
  refused_.erase(key);
  const auto it = reached_.find(key);
  if (it == reached_.end()) return;
  gone = std::move(it->second);
  reached_.erase(it);
}

// The last user of a region is gone. Under no lock of this link.
void CudaIpcLink::let_go(uint64_t key) {
  std::lock_guard lock(mutex_);
  // It may have been asked for again and refused, because the peer did not know yet.
  refused_.erase(key);
  send_locked(cuda_ipc::make_request(cuda_ipc::kDrop, key));
}

void CudaIpcLink::run(Todo todo) {
  for (const Work &work : todo.stopped) fail_work({work}, work.transfer->stop_cause());
  if (todo.opened) {
    Connected connected;
    {
      std::lock_guard lock(mutex_);
      std::swap(connected, connected_);
    }
    if (connected != nullptr) connected(self(), {});
  }
  todo.dropped.clear();
  for (auto &[key, coming] : todo.import) import(key, std::move(coming));
  for (const Work &work : todo.begin) begin(work);
  for (const auto &[work, cause] : todo.elsewhere) go_elsewhere(work, cause);
  if (todo.fault) broken(todo.fault);
}

// Everything that the driver has to do for a region of the peer, under no lock.
void CudaIpcLink::import(uint64_t key, Coming coming) {
  Error error;
  const int64_t patience_ns = int64_t{engine_.config.progress_timeout_ms} * kMillisecond;
  auto memory = cuda_ipc::Imported::open(*coming.here, coming.found, std::move(coming.parts), patience_ns, &error);
  const bool there = memory != nullptr;
  (there ? engine_.stats.regions_imported.fetch_add(1) : 0,
   there ? 0 : engine_.stats.regions_not_imported.fetch_add(1));
  ReachedPtr reached;
  if (there) {
    const auto end = [weak = weak_from_this(), key, &stats = engine_.stats](const Reached *one) {
      stats.regions_imported.fetch_sub(1);
      delete one;
      if (const auto link = weak.lock()) link->let_go(key);
    };
    reached = ReachedPtr(
        new Reached{std::move(memory), coming.found.offset, coming.found.length, coming.slot,
                    coming.found.writable != 0,
                    cuda_ipc::is_device_of(*coming.here, coming.found.device) ? coming.here->device() : -1, now_ns()},
        end);
  }
  Todo todo;
  bool known = true;
  if (const auto peer = peer_.lock()) known = peer->knows(key);
  {
    std::lock_guard lock(mutex_);
    importing_.erase(key);
    if (there && !ended_ && known) {
      reached_[key] = reached;
    } else if (!there) {
      send_locked(cuda_ipc::make_request(cuda_ipc::kDrop, key));
      refuse_locked(key, error.message + (error.cause.empty() ? "" : ": " + error.cause));
    } else {
      refuse_locked(key, "the region was released");
    }
    begin_waiting_locked(&todo);
  }
  reached.reset();
  run(std::move(todo));
}

// ---------------------------------------------------------------- copies

// MP_TRANSPORT_UNAVAILABLE: it is not imported any more.
mp_status CudaIpcLink::use_locked(uint64_t key, Flight *flight) {
  if (flight->last != nullptr && flight->last_key == key) return MP_OK;
  auto use = flight->uses.find(key);
  if (use == flight->uses.end()) {
    const auto it = reached_.find(key);
    if (it == reached_.end()) return MP_TRANSPORT_UNAVAILABLE;
    if (!table_->begin_use(it->second->slot)) return MP_REGION_RELEASED;
    use = flight->uses.emplace(key, it->second).first;
    use->second->used_at = now_ns();
    flight->within = flight->within && use->second->device == flight->work.transfer->device->device();
  }
  flight->last = use->second.get();
  flight->last_key = key;
  return MP_OK;
}

mp_status CudaIpcLink::resolve_locked(const Desc &desc, bool write, Flight *flight, cuda::Pointer *remote) {
  if (const mp_status status = use_locked(desc.key, flight); status != MP_OK) return status;
  const Reached &region = *flight->last;
  if (desc.length == 0 || desc.length > region.length || desc.offset > region.length - desc.length) {
    return MP_OUT_OF_RANGE;
  }
  if (write && !region.writable) return MP_REGION_READ_ONLY;
  *remote = region.memory->base() + region.offset + desc.offset;
  return MP_OK;
}

void CudaIpcLink::begin(const Work &work) {
  const auto flight = std::make_shared<Flight>(work);
  const Transfer &transfer = *work.transfer;
  const bool write = transfer.op == MP_WRITE;
  {
    std::lock_guard lock(mutex_);
    for (uint32_t i = work.begin; i < work.end; ++i) {
      const Desc &desc = transfer.descs[i];
      cuda::Pointer remote = 0;
      const mp_status status = resolve_locked(desc, write, flight.get(), &remote);
      if (status == MP_TRANSPORT_UNAVAILABLE) {
        // It has made room for others, or the peer has just withdrawn it: who owns it knows.
        flight->error = here(make_error(status, "a region of the peer is not imported any more"));
        break;
      }
      if (status != MP_OK) {
        flight->failed.push_back({i - work.begin, static_cast<uint32_t>(status)});
      } else if (write) {
        flight->copies.push_back({remote, desc.local, desc.length});
      } else {
        flight->copies.push_back(
            {reinterpret_cast<cuda::Pointer>(desc.local), reinterpret_cast<uint8_t *>(remote), desc.length});
      }
    }
  }
  for (const auto &[key, reached] : flight->uses) {
    if (!flight->error) flight->error = reached->memory->let(*transfer.device);
  }
  if (flight->error || flight->copies.empty()) return landed(*flight, flight->error);
  engine_.staging.stager(transfer.device)
      ->copy(
          cuda::Stager::kOnDevice, std::move(flight->copies),
          [self = self(), flight](const Error &error) { self->landed(*flight, error); }, flight->within);
}

// By the stager's thread.
void CudaIpcLink::landed(Flight &flight, const Error &error) {
  Transfer &transfer = *flight.work.transfer;
  std::unordered_set<uint64_t> released;
  for (const auto &[key, reached] : flight.uses) {
    if (!table_->end_use(reached->slot)) released.insert(key);
  }
  flight.last = nullptr;
  flight.uses.clear();
  Error cause = error;
  if (!cause && hung_up()) {
    // The memory may have gone with its owner, so the copy alone proves nothing.
    cause =
        make_error(MP_PEER_LOST, "the peer ended while its memory was being used", "the next transfer connects again");
    usable_.store(false);
  }
  if (cause) return go_elsewhere(flight.work, here(cause));
  for (uint32_t i = 0; !released.empty() && i < flight.work.end - flight.work.begin; ++i) {
    if (released.count(transfer.descs[flight.work.begin + i].key) != 0)
      flight.failed.push_back({i, MP_REGION_RELEASED});
  }
  std::sort(flight.failed.begin(), flight.failed.end(), [](const auto &a, const auto &b) { return a.desc < b.desc; });
  const auto same = [](const auto &a, const auto &b) { return a.desc == b.desc; };
  flight.failed.erase(std::unique(flight.failed.begin(), flight.failed.end(), same), flight.failed.end());
  report_work(flight.work, flight.failed, nullptr, [&](uint32_t desc, uint32_t status) {
    transfer.descs_failed(desc, desc + 1, here(refused_by_peer(static_cast<mp_status>(status))));
  });
}

Error CudaIpcLink::here(Error error) const {
  error.peer = label_;
  error.path = path();
  return error;
}

// Nothing of it was moved, or it may be moved again: the copy is over.
void CudaIpcLink::go_elsewhere(const Work &work, const Error &cause) {
  const std::shared_ptr<Peer> peer = peer_.lock();
  if (peer == nullptr) return fail_work({work}, cause);
  peer->move_on({work}, this, cause);
}

bool CudaIpcLink::hung_up() const {
  pollfd one{fd(), POLLRDHUP, 0};
  return poll(&one, 1, 0) > 0;
}

// ---------------------------------------------------------------- the end

// Takes nothing more. False when it had ended before.
bool CudaIpcLink::end(Connected *connected, std::vector<Work> *never_begun) {
  std::unordered_map<uint64_t, ReachedPtr> reached;  // goes without the lock
  std::lock_guard lock(mutex_);
  if (ended_) return false;
  ended_ = true;
  usable_.store(false);
  io_.remove(*this);
  std::swap(*connected, connected_);
  for (Waiting &one : waiting_) never_begun->push_back(std::move(one.work));
  waiting_.clear();
  coming_.clear();
  reached.swap(reached_);
  return true;
}

void CudaIpcLink::broken(const Error &cause) {
  Connected connected;
  std::vector<Work> never_begun;
  if (!end(&connected, &never_begun)) return;
  if (connected != nullptr) connected(nullptr, cause);
  const std::shared_ptr<Peer> peer = peer_.lock();
  if (peer == nullptr) return fail_work(never_begun, cause);
  const Error error = peer->describe(cause, path());
  peer->path_failed(*this, error);
  peer->move_on(std::move(never_begun), this, error);
}

// Copies that are under way end by themselves, and hold what they need.
void CudaIpcLink::shutdown(const Error &cause, bool) {
  Connected connected;
  std::vector<Work> never_begun;
  if (end(&connected, &never_begun)) fail_work(never_begun, cause);
}

}  // namespace moonpool
