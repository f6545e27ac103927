// SPDX-License-Identifier: Apache-2.0
// Copies between memory of a device and pinned memory of the host, for bytes that no network adapter and no peer
// fetches from the device by itself. docs/decisions/0015-gpu-memory.md says why it is a thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda_direct.hpp"
#include "cuda_gather.hpp"
#include "cuda_memory.hpp"
#include "memory.hpp"

namespace moonpool::cuda {

// Transfers move through the host in pieces of at most so many bytes and descriptors.
constexpr uint64_t kPieceBytes = 1u << 20;
constexpr uint32_t kPieceDescs = 1000;

struct Copy {
  Pointer device;
  uint8_t *host;  // pinned; between devices the source, which no processor touches
  uint64_t nbytes;
};

class Stager;

// A piece of the pinned memory. It goes back when this does.
class Slot {
 public:
  Slot() = default;
  Slot(std::shared_ptr<Stager> owner, int use, uint8_t *data) : owner_(std::move(owner)), use_(use), data_(data) {}
  Slot(Slot &&other) noexcept : owner_(std::move(other.owner_)), use_(other.use_), data_(other.data_) {}
  Slot &operator=(Slot &&other) noexcept {
    reset();
    owner_ = std::move(other.owner_);
    use_ = other.use_;
    data_ = other.data_;
    return *this;
  }
  ~Slot() { reset(); }
  void reset();
  explicit operator bool() const { return owner_ != nullptr; }
  uint8_t *data() const { return data_; }

 private:
  std::shared_ptr<Stager> owner_;
  int use_ = 0;
  uint8_t *data_ = nullptr;
};

// What happened, for people.
struct StagerCounters {
  std::atomic<uint64_t> to_device_bytes{0}, to_host_bytes{0}, on_device_bytes{0}, copies{0}, waits{0};
};

// The pinned memory of one context, and the thread that makes every driver call for it: one stream for each direction,
// and an event behind each copy that says when it has ended.
class Stager : public std::enable_shared_from_this<Stager> {
 public:
  // Own transfers and those of peers have a half each: engines that wait for each other's memory would never go on.
  enum Use { kOwn = 0, kServing = 1 };
  enum Direction { kToDevice = 0, kToHost = 1, kOnDevice = 2 };
  using Done = std::function<void(const Error &)>;
  using Ready = std::function<void(Slot, const Error &)>;

  // patience_ns: how long its thread waits for kernels to end before it begins another one.
  Stager(std::shared_ptr<const DeviceMemory> memory, uint64_t ring_bytes, uint32_t spin_us, int64_t patience_ns,
         StagerCounters &counters);
  ~Stager();

  // A piece if one is free; nothing otherwise.
  Slot try_slot(Use use);
  // `ready` is called once, on the stager's thread, in the order of the calls. It must not block.
  void want_slot(Use use, Ready ready);
  // The same with `done`, after the last byte has been copied or none is going to be any more.
  // within: between memories of this device, and not of another one.
  void copy(Direction direction, std::vector<Copy> copies, Done done, bool within = false);
  // `done` is called when everything that was queued on the stream so far has ended.
  Error after_stream(uint64_t stream, std::function<bool()> given_up, Done done);

  // Nothing more is begun. What is under way has until `until`.
  void begin_close(int64_t until);
  void join();

 private:
  friend class Slot;

  struct Job {
    Direction direction;
    std::vector<Copy> copies;
    Done done;
    uint64_t nbytes = 0;
    Event event = nullptr;
    bool recorded = false;  // the event says when it has ended
    Error error;            // although part of it is under way
    bool within = false;
  };
  struct Gate {
    Event event;
    std::function<bool()> given_up;
    Done done;
  };
  struct Waiter {
    Use use;
    Ready ready;
  };

  void run();
  void start_locked();
  bool turn();
  bool begin_jobs();
  bool end_jobs();
  bool open_gates();
  bool hand_out();
  bool idle_locked() const;
  void give_back(int use, uint8_t *data);
  // With the context current.
  Error prepare(Direction direction);
  Error allocate_ring();
  Result issue(Job &job, bool *begun);
  Result take_event(Event *event);
  void end(Job &job, const Error &error);
  void give_up();
  void dispose();
  Error failed(Result result, const char *what) const { return call_error(driver_, result, what); }

  const std::shared_ptr<const DeviceMemory> memory_;  // of the first region: keeps its context
  const Driver &driver_;
  const uint64_t ring_bytes_;
  const int64_t spin_ns_;
  const int64_t patience_ns_;
  StagerCounters &counters_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread thread_;
  bool closing_ = false;
  int64_t until_ = 0;
  std::deque<Job> queue_;
  std::deque<Gate> new_gates_;
  std::deque<Waiter> waiters_[2];
  std::vector<uint8_t *> free_[2];

  // Of the thread alone.
  Result entered_ = kSuccess;  // the context, for this turn
  Stream streams_[3] = {};
  std::vector<Event> events_;
  std::deque<Job> under_way_[3];
  std::deque<Gate> gates_;
  std::unique_ptr<Memory> ring_;
  std::unique_ptr<PieceCopier> copier_;
  bool abandoned_ = false;  // something is under way that nobody waits for any more
};

// The stagers of an engine, one for each context that its regions are in.
class Staging {
 public:
  Staging(uint64_t ring_bytes, uint32_t spin_us, int64_t patience_ns)
      : ring_bytes_(ring_bytes), spin_us_(spin_us), patience_ns_(patience_ns) {}

  std::shared_ptr<Stager> stager(const std::shared_ptr<const DeviceMemory> &memory);
  std::shared_ptr<DirectCopier> direct(const std::shared_ptr<const DeviceMemory> &memory);
  void begin_close(int64_t until);
  void join();
  StagerCounters counters;

 private:
  const uint64_t ring_bytes_;
  const uint32_t spin_us_;
  const int64_t patience_ns_;
  std::mutex mutex_;
  bool closed_ = false;
  std::map<Context, std::shared_ptr<Stager>> stagers_;
  std::map<Context, std::shared_ptr<DirectCopier>> direct_;
};

}  // namespace moonpool::cuda
