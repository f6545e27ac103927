// SPDX-License-Identifier: Apache-2.0
//
// The stand-in's objects. Each begins with what verbs.h shows of it.
//
// Locks are in this order: the world's gate, a queue pair, a completion queue, a channel or context. No two of one
// kind. The thread sanitizer takes every lock for an order between threads, and an order that real devices do not make
// would hide races of the engine. So nothing on the way of a request is shared by queue pairs, but for the gate, whose
// readers are not ordered.
#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>

#include "standin.hpp"

#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

namespace moonpool::standin {

// Readers: the device at work. A writer: an object is made, changed or goes; it has waited for the work under way.
class Gate {
 public:
  Gate() {
    pthread_rwlockattr_t attributes;
    pthread_rwlockattr_init(&attributes);
    pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&lock_, &attributes);
    pthread_rwlockattr_destroy(&attributes);
  }
  void lock() { pthread_rwlock_wrlock(&lock_); }
  void unlock() { pthread_rwlock_unlock(&lock_); }
  void lock_shared() { pthread_rwlock_rdlock(&lock_); }
  void unlock_shared() { pthread_rwlock_unlock(&lock_); }

 private:
  pthread_rwlock_t lock_;
};

struct Device : ibv_device {
  int index = 0;
  Limits limits;
  bool up = true;
  std::vector<GidRow> gids;
};

struct Qp;
struct Cq;

struct Event {
  ibv_async_event event;
  std::shared_ptr<Qp> qp;  // that it is about
};

struct Context : ibv_context {
  std::mutex events_mutex;
  std::deque<Event> unread;
  std::deque<Event> unacknowledged;
  std::atomic<int> objects{0};
};

struct Pd : ibv_pd {
  std::atomic<int> objects{0};
};

struct Mr : ibv_mr {
  uint64_t start = 0;  // the address of its first byte for devices
  unsigned access = 0;
  // Of a dma-buf: its pages, as the device has them.
  void *mapped = nullptr;
  size_t mapped_bytes = 0;
};

struct Channel : ibv_comp_channel {
  std::mutex events_mutex;
  std::deque<Cq *> unread;
  std::atomic<int> users{0};
};

struct Completion {
  ibv_wc wc;
  std::shared_ptr<Qp> qp;
  uint32_t retires;  // requests that have no place in the send queue any more
  Side side;
};

struct Cq : ibv_cq {
  std::mutex entries_mutex;
  std::deque<Completion> entries, held;
  bool armed = false;
  bool broken = false;
  std::atomic<int> users{0};
  std::atomic<uint32_t> events_got{0}, events_acknowledged{0};
};

struct Request {
  ibv_send_wr wr{};
  std::vector<ibv_sge> pieces;
  std::vector<uint8_t> inlined;
  uint64_t bytes = 0;
};

struct Qp : ibv_qp {
  // Set while it is connected, read by requests afterwards; under the gate.
  ibv_qp_cap cap{};
  ibv_qp_attr attributes{};
  bool gone = false;

  std::atomic<ibv_qp_state> now{IBV_QPS_RESET};
  std::atomic<uint32_t> used{0};  // of the send queue
  uint32_t unretired = 0;         // executed without a completion; the executor's

  std::mutex work_mutex;
  std::condition_variable work_changed;
  std::deque<Request> requests;
  std::deque<uint64_t> receives;  // wr_id
  bool busy = false;              // somebody executes
  bool waits = false;             // the first request needs something that is not there
  uint64_t wake_ups = 0;
  bool stop = false;
  std::thread worker;
};

struct World {
  World();

  Gate gate;
  std::array<Device, kDevices> devices;
  std::unordered_map<uint32_t, std::shared_ptr<Qp>> queue_pairs;
  std::unordered_map<uint32_t, Mr *> by_lkey, by_rkey;
  std::set<Cq *> completion_queues;
  std::set<Context *> contexts;
  uint32_t next_number = 0x11, next_key = 0x1000;

  std::atomic<bool> deferred{false}, requests_held{false}, retries_over{false};
  std::array<std::atomic<bool>, 2> completions_held{};

  std::atomic<int64_t> domains{0}, registrations{0}, channels{0}, workers{0};
  std::array<std::array<std::atomic<uint64_t>, kDevices>, static_cast<size_t>(Call::kCount)> calls{};
  struct {
    std::atomic<uint64_t> posts, requests, signalled, inlined, immediate, pieces, written_bytes, read_bytes, failed,
        waited, arms, events;
  } counted{};

  // Errno of the fault that this call meets, or 0.
  int met(Call call, const ibv_context *context);
  bool met(const Qp &qp, const Request &request, RequestFault *fault);
  void misused(const std::string &what);

  std::atomic<int> faults{0};  // without any nobody takes the lock
  std::mutex faults_mutex;
  std::vector<CallFault> call_faults;
  std::vector<RequestFault> request_faults;
  std::vector<std::string> misuses;
};

World &world();
// No order between threads comes from counting.
inline void count(std::atomic<uint64_t> &counter, uint64_t n = 1) { counter.fetch_add(n, std::memory_order_relaxed); }
int index_of(const ibv_context *context);

void fill_table(ibv_context_ops *table);
// Executes what can be. Takes the gate.
void drain(const std::shared_ptr<Qp> &qp);
// The same in the way that is set.
void kick(const std::shared_ptr<Qp> &qp);
// What the first request waits for may be there.
void wake(const std::shared_ptr<Qp> &qp);
void wake_all();
// Into the error state; kick() it afterwards, without the gate.
void break_qp(const std::shared_ptr<Qp> &qp);
void complete(Cq &cq, Completion completion);
// Held ones that need not be any more.
void let_go(Cq &cq);
void raise(Context &context, ibv_event_type type, const std::shared_ptr<Qp> &qp = nullptr);
void raise_port_event(int device, ibv_event_type type);

}  // namespace moonpool::standin
