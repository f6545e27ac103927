// SPDX-License-Identifier: Apache-2.0
#include "cuda_stager.hpp"

#include <algorithm>
#include <utility>

#include "io_thread.hpp"
#include "system.hpp"

namespace moonpool::cuda {

namespace {

// Copies of a piece take some 20 us on PCIe 5, so the first looks come soon and the later ones seldom.
constexpr int64_t kFirstPauseNs = 20'000;
constexpr int64_t kLongestPauseNs = 1'000'000;

Error closed_error() { return make_error(MP_CLOSED, "the engine was closed"); }

const char *what_of(Stager::Direction direction) {
  return direction == Stager::kOnDevice ? "cannot copy between devices" : "cannot copy between a device and the host";
}

}  // namespace

void Slot::reset() {
  if (const std::shared_ptr<Stager> owner = std::exchange(owner_, nullptr)) owner->give_back(use_, data_);
}

Stager::Stager(std::shared_ptr<const DeviceMemory> memory, uint64_t ring_bytes, uint32_t spin_us, int64_t patience_ns,
               StagerCounters &counters)
    : memory_(std::move(memory)),
      driver_(memory_->driver()),
      ring_bytes_(ring_bytes),
      spin_ns_(int64_t{spin_us} * 1000),
      patience_ns_(patience_ns),
      counters_(counters) {}

Stager::~Stager() { join(); }

// ---------------------------------------------------------------- for everybody

Slot Stager::try_slot(Use use) {
  std::lock_guard lock(mutex_);
  if (closing_ || !waiters_[use].empty() || free_[use].empty()) return {};
  uint8_t *const data = free_[use].back();
  free_[use].pop_back();
  return Slot(shared_from_this(), use, data);
}

void Stager::want_slot(Use use, Ready ready) {
  {
    std::lock_guard lock(mutex_);
    if (!closing_) {
      counters_.waits.fetch_add(1, std::memory_order_relaxed);
      waiters_[use].push_back({use, std::move(ready)});
      start_locked();
      return changed_.notify_one();
    }
  }
  ready({}, closed_error());
}

void Stager::copy(Direction direction, std::vector<Copy> copies, Done done, bool within) {
  Job job{direction, std::move(copies), std::move(done), 0, nullptr, false, {}, within};
  for (const Copy &one : job.copies) job.nbytes += one.nbytes;
  {
    std::lock_guard lock(mutex_);
    if (!closing_) {
      queue_.push_back(std::move(job));
      start_locked();
      return changed_.notify_one();
    }
  }
  job.done(closed_error());
}

// The event is recorded by the calling thread, so that what it queues on the stream afterwards is not waited for. The
// stager looks at it, instead of letting its own streams wait: behind them every other transfer would wait too.
Error Stager::after_stream(uint64_t stream, std::function<bool()> given_up, Done done) {
  const ContextScope scope(driver_, memory_->context());
  Event event = nullptr;
  Result result = scope.result();
  if (result == kSuccess) result = driver_.event_create(&event, kEventDisableTiming);
  if (result == kSuccess) result = driver_.event_record(event, reinterpret_cast<Stream>(stream));
  if (result != kSuccess) {
    if (event != nullptr) driver_.event_destroy(event);
    Error error = failed(result, "cannot wait for the CUDA stream that was given");
    error.hint = "a stream of the context that the local region is in";
    return error;
  }
  std::unique_lock lock(mutex_);
  if (closing_) {
    lock.unlock();
    driver_.event_destroy(event);
    return closed_error();
  }
  new_gates_.push_back({event, std::move(given_up), std::move(done)});
  start_locked();
  changed_.notify_one();
  return {};
}

void Stager::give_back(int use, uint8_t *data) {
  std::lock_guard lock(mutex_);
  free_[use].push_back(data);
  if (!waiters_[use].empty()) changed_.notify_one();
}

void Stager::start_locked() {
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
}

void Stager::begin_close(int64_t until) {
  std::lock_guard lock(mutex_);
  if (!closing_) until_ = until;  // who joins later shortens nobody's time
  closing_ = true;
  changed_.notify_one();
}

void Stager::join() {
  begin_close(now_ns());
  if (thread_.joinable()) thread_.join();
}

// ---------------------------------------------------------------- the thread

bool Stager::idle_locked() const {
  const auto served = [this](const std::deque<Waiter> &waiting) {
    return waiting.empty() || !(closing_ || ring_ == nullptr || !free_[waiting.front().use].empty());
  };
  return queue_.empty() && new_gates_.empty() && served(waiters_[kOwn]) && served(waiters_[kServing]);
}

void Stager::run() {
  int64_t look_until = 0;
  int64_t pause = kFirstPauseNs;
  for (;;) {
    const bool moved = turn();
    const int64_t now = now_ns();
    if (moved) {
      look_until = now + spin_ns_;
      pause = kFirstPauseNs;
      continue;
    }
    const bool waits = !gates_.empty() || std::any_of(std::begin(under_way_), std::end(under_way_),
                                                      [](const auto &jobs) { return !jobs.empty(); });
    if (waits && now < look_until && ActiveThreads::may_look(true) && yield_core()) continue;
    std::unique_lock lock(mutex_);
    if (!idle_locked()) continue;
    if (closing_ && (!waits || now >= until_)) break;
    if (!waits) {
      changed_.wait(lock, [this] { return closing_ || !idle_locked(); });
    } else {
      changed_.wait_for(lock, std::chrono::nanoseconds(pause), [this] { return !idle_locked(); });
      pause = std::min(2 * pause, kLongestPauseNs);
    }
  }
  give_up();
  dispose();
}

// True when anything moved.
bool Stager::turn() {
  const ContextScope scope(driver_, memory_->context());
  entered_ = scope.result();
  bool moved = end_jobs();
  moved = open_gates() || moved;
  moved = hand_out() || moved;
  return begin_jobs() || moved;
}

Error Stager::prepare(Direction direction) {
  if (entered_ != kSuccess) return failed(entered_, "cannot use the CUDA context of the memory");
  if (copier_ == nullptr) copier_ = std::make_unique<PieceCopier>(driver_, memory_->context(), patience_ns_);
  Stream &stream = streams_[direction];
  if (stream != nullptr) return {};
  const Result result = driver_.stream_create(&stream, kStreamNonBlocking, 0);
  return result == kSuccess ? Error{} : failed(result, "cannot make a stream for copies");
}

Error Stager::allocate_ring() {
  if (ring_ != nullptr) return {};
  if (entered_ != kSuccess) return failed(entered_, "cannot use the CUDA context of the memory");
  std::unique_ptr<Memory> memory;
  if (Error error = Memory::allocate({ring_bytes_, false, false, MP_HUGE_PAGES_AUTO, MP_NUMA_ANY}, &memory))
    return error;
  const Result result = driver_.host_register(memory->base(), ring_bytes_, kHostRegisterPortable);
  if (result != kSuccess) {
    Error error = failed(result, "cannot pin memory for staging");
    error.hint = "lower cuda_staging_bytes, or raise the limit of locked memory (ulimit -l)";
    return error;
  }
  ring_ = std::move(memory);
  std::lock_guard lock(mutex_);
  const uint64_t pieces = ring_bytes_ / kPieceBytes;
  for (uint64_t i = pieces; i > 0; --i) {
    free_[i % 2].push_back(ring_->base() + (i - 1) * kPieceBytes);
  }
  return {};
}

bool Stager::hand_out() {
  bool closing;
  {
    std::lock_guard lock(mutex_);
    if (waiters_[kOwn].empty() && waiters_[kServing].empty()) return false;
    closing = closing_;
  }
  const Error error = closing ? closed_error() : allocate_ring();
  std::vector<std::pair<Waiter, Slot>> served;
  {
    std::lock_guard lock(mutex_);
    for (auto &waiting : waiters_) {
      while (!waiting.empty() && (error || !free_[waiting.front().use].empty())) {
        const Use use = waiting.front().use;
        Slot slot;
        if (!error) {
          slot = Slot(shared_from_this(), use, free_[use].back());
          free_[use].pop_back();
        }
        served.emplace_back(std::move(waiting.front()), std::move(slot));
        waiting.pop_front();
      }
    }
  }
  for (auto &[waiter, slot] : served) waiter.ready(std::move(slot), error);
  return !served.empty();
}

bool Stager::begin_jobs() {
  std::deque<Job> jobs;
  bool closing;
  {
    std::lock_guard lock(mutex_);
    jobs.swap(queue_);
    closing = closing_;
  }
  for (Job &job : jobs) {
    Error error = closing ? closed_error() : prepare(job.direction);
    if (!error) {
      Result result = take_event(&job.event);
      bool begun = false;
      if (result == kSuccess) result = issue(job, &begun);
      if (result != kSuccess) error = failed(result, what_of(job.direction));
      if (begun) {
        // Part of a copy that could not be begun whole is waited for, too.
        if (result == kSuccess) result = driver_.event_record(job.event, streams_[job.direction]);
        job.recorded = result == kSuccess;
        job.error = result == kSuccess ? Error{} : failed(result, what_of(job.direction));
        under_way_[job.direction].push_back(std::move(job));
        continue;
      }
    }
    end(job, error);
  }
  return !jobs.empty();
}

Result Stager::issue(Job &job, bool *begun) {
  std::vector<Piece> pieces(job.copies.size());
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Copy &one = job.copies[i];
    const auto host = reinterpret_cast<Pointer>(one.host);
    const bool to_host = job.direction == kToHost;
    pieces[i] = {to_host ? host : one.device, to_host ? one.device : host, one.nbytes};
  }
  const Reach reach = job.direction != kOnDevice ? Reach::kHost : job.within ? Reach::kWithinDevice : Reach::kAnywhere;
  return copier_->enqueue(std::move(pieces), reach, streams_[job.direction], begun);
}

Result Stager::take_event(Event *event) {
  if (events_.empty()) return driver_.event_create(event, kEventDisableTiming);
  *event = events_.back();
  events_.pop_back();
  return kSuccess;
}

bool Stager::end_jobs() {
  bool moved = false;
  for (auto &jobs : under_way_) {
    while (!jobs.empty()) {
      Job &first = jobs.front();
      Result result = first.recorded ? driver_.event_query(first.event) : kSuccess;
      if (result == kNotReady) break;
      if (result != kSuccess && !first.error) {
        first.error = failed(result, "a copy of memory of a device failed");
      }
      // Without an event to go by it has ended when its stream has nothing left, or can do nothing any more.
      first.recorded = first.recorded && result == kSuccess;
      if (!first.recorded && driver_.stream_query(streams_[first.direction]) == kNotReady) break;
      Job job = std::move(first);
      jobs.pop_front();
      moved = true;
      end(job, job.error);
    }
  }
  return moved;
}

void Stager::end(Job &job, const Error &error) {
  if (job.event != nullptr) events_.push_back(std::exchange(job.event, nullptr));
  if (!error) {
    counters_.copies.fetch_add(1, std::memory_order_relaxed);
    (job.direction == kToDevice ? counters_.to_device_bytes
     : job.direction == kToHost ? counters_.to_host_bytes
                                : counters_.on_device_bytes)
        .fetch_add(job.nbytes, std::memory_order_relaxed);
  }
  job.done(error);
}

bool Stager::open_gates() {
  {
    std::lock_guard lock(mutex_);
    std::move(new_gates_.begin(), new_gates_.end(), std::back_inserter(gates_));
    new_gates_.clear();
  }
  bool moved = false;
  for (auto gate = gates_.begin(); gate != gates_.end();) {
    const Result result = driver_.event_query(gate->event);
    if (result == kNotReady && !gate->given_up()) {
      ++gate;
      continue;
    }
    driver_.event_destroy(gate->event);
    Gate opened = std::move(*gate);
    gate = gates_.erase(gate);
    moved = true;
    opened.done(result == kSuccess || result == kNotReady
                    ? Error{}
                    : failed(result, "the work on the CUDA stream before the transfer failed"));
  }
  return moved;
}

// ---------------------------------------------------------------- the end

// What did not end in time. A device that hangs does nothing more of it as long as it hangs.
void Stager::give_up() {
  for (auto &jobs : under_way_) {
    for (Job &job : jobs) job.done(make_error(MP_CUDA, "a copy did not end before the engine was closed"));
    abandoned_ = abandoned_ || !jobs.empty();
    jobs.clear();
  }
  for (Gate &gate : gates_) gate.done(closed_error());
  abandoned_ = abandoned_ || !gates_.empty();
  gates_.clear();
}

void Stager::dispose() {
  // A copy that is still under way may write the memory, and the driver would wait for it: then it stays, pinned, to
  // the end of the process.
  if (abandoned_) {
    static_cast<void>(ring_.release());
    static_cast<void>(copier_.release());  // its kernels may still read their tables
    return;
  }
  copier_.reset();
  const ContextScope scope(driver_, memory_->context());
  for (const Event event : events_) driver_.event_destroy(event);
  events_.clear();
  for (Stream &stream : streams_) {
    if (stream != nullptr) driver_.stream_destroy(stream);
    stream = nullptr;
  }
  std::lock_guard lock(mutex_);
  for (auto &slots : free_) slots.clear();
  // Memory that a dead context keeps pinned cannot be pinned again by who gets its addresses next.
  if (ring_ != nullptr && driver_.host_unregister(ring_->base()) != kSuccess) static_cast<void>(ring_.release());
  ring_.reset();
}

std::shared_ptr<Stager> Staging::stager(const std::shared_ptr<const DeviceMemory> &memory) {
  std::lock_guard lock(mutex_);
  std::shared_ptr<Stager> &stager = stagers_[memory->context()];
  if (stager == nullptr) {
    stager = std::make_shared<Stager>(memory, ring_bytes_, spin_us_, patience_ns_, counters);
    if (closed_) stager->begin_close(0);
  }
  return stager;
}

std::shared_ptr<DirectCopier> Staging::direct(const std::shared_ptr<const DeviceMemory> &memory) {
  std::lock_guard lock(mutex_);
  // Whoever has come this late keeps it for itself.
  if (closed_) return std::make_shared<DirectCopier>(memory, spin_us_, patience_ns_);
  std::shared_ptr<DirectCopier> &direct = direct_[memory->context()];
  if (direct == nullptr) direct = std::make_shared<DirectCopier>(memory, spin_us_, patience_ns_);
  return direct;
}

void Staging::begin_close(int64_t until) {
  std::lock_guard lock(mutex_);
  closed_ = true;
  for (const auto &entry : stagers_) entry.second->begin_close(until);
}

void Staging::join() {
  std::map<Context, std::shared_ptr<Stager>> stagers;
  std::map<Context, std::shared_ptr<DirectCopier>> direct;
  {
    std::lock_guard lock(mutex_);
    stagers.swap(stagers_);
    direct.swap(direct_);
  }
  for (const auto &entry : stagers) entry.second->join();
}

}  // namespace moonpool::cuda
