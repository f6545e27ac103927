// SPDX-License-Identifier: Apache-2.0
// One batch to one peer: its descriptors, what became of each, and how waiters learn of it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "region.hpp"
#include "status.hpp"
#include "wire.hpp"

namespace moonpool {

class Peer;

// A piece of work a link moves in one go: adjacent items merged, large items split at the slice size.
struct Desc {
  uint8_t *local;
  uint64_t key;     // remote region
  uint64_t offset;  // in it
  uint64_t length;
  uint32_t item;           // first item it belongs to
  uint32_t items;          // how many it covers
  bool on_device = false;  // `local` is memory of a device
};

class Transfer;

// What moves the descriptors of a transfer.
class Carrier {
 public:
  virtual ~Carrier() = default;
  virtual const char *path() const = 0;
  // When it returns no byte is written to local memory for `transfer` any more, or the transfer stays unfinished until
  // that is so; what a peer may still be applying is reported when it is known to have ended.
  virtual void cancel(Transfer &transfer) = 0;
  // A waiting thread offers to do the work itself until `until`. May return at once.
  virtual void assist(Transfer &transfer, int64_t until) = 0;
};

class Transfer : public std::enable_shared_from_this<Transfer> {
 public:
  Transfer(std::shared_ptr<Peer> peer, mp_op op, bool digest, int64_t deadline_ns);
  virtual ~Transfer();

  // ---- set before it is submitted, constant afterwards
  const std::shared_ptr<Peer> peer;
  const mp_op op;
  const bool digest;
  const int64_t deadline_ns;
  size_t count = 0;
  uint64_t bytes = 0;
  std::vector<Desc> descs;
  std::vector<uint8_t> rejected;                     // per item, empty when every item was good
  Error rejection;                                   // why the first rejected item was
  std::vector<std::shared_ptr<Region>> locals;       // each with a use counted
  std::shared_ptr<const cuda::DeviceMemory> device;  // of a local region, nullptr: all are memory of the host
  bool remote_on_device = false;                     // of some remote region
  bool staged = false;                               // its local memory is no region's
  bool after_stream = false;                         // begun when the work on this CUDA stream has ended
  uint64_t cuda_stream = 0;
  std::string notify;
  bool has_notify = false;
  // What the notification has to wait for at the peer: these lanes have received so many marks.
  virtual void note_mark(uint64_t lane_id, uint32_t mark);
  std::vector<wire::Mark> marks() const;
  // The lane that took the latest slice, for a waiter that wants to drive it. Only compared, never followed.
  std::atomic<const void *> driver{nullptr};
  Id128 target_incarnation{};  // the incarnation that its remote handles name
  Id128 session{};             // in which it was begun, and ends: after a fence nothing of it comes over another one

  // Once, after everything above is set.
  void arm();

  // ---- called by links and the peer
  void set_carrier(std::shared_ptr<Carrier> carrier);
  std::shared_ptr<Carrier> carrier() const;
  // The path that it was handed to last; nullptr: none yet.
  const char *carried_by() const;
  // Every descriptor is reported once, through one of these two. `digests`: one per descriptor or nullptr.
  virtual void descs_done(uint32_t begin, uint32_t end, const uint64_t *digests);
  virtual void descs_failed(uint32_t begin, uint32_t end, const Error &error);
  // For a transfer of which nothing was begun.
  void fail(const Error &error) { descs_failed(0, static_cast<uint32_t>(descs.size()), error); }
  // Without descriptors to move (all resolved before): goes on to the notification and the end.
  void notify_done(const Error &error);
  // Memory of a device passes through the host in pieces, and so do they.
  bool in_pieces() const { return device != nullptr || remote_on_device; }
  bool stopping() const { return stopping_.load(std::memory_order_acquire); }
  Error stop_cause() const;

  // ---- called by anyone
  // Ends it early. Returns at once; the state is UNSETTLED while something may still write its buffers.
  virtual void stop(const Error &cause);
  bool finished() const { return state_.load(std::memory_order_acquire) != MP_RUNNING; }
  mp_transfer_state state() const { return static_cast<mp_transfer_state>(state_.load(std::memory_order_acquire)); }
  mp_status wait(int64_t timeout_ns, bool settled);
  Error error() const;
  void item_status(uint8_t *out, size_t n) const;
  void digests(uint64_t *out, size_t n) const;
  void set_eventfd(int fd);

 private:
  friend class TransferList;

  void resolved(uint32_t n);
  int64_t own_bound(bool settled) const;
  void finish();
  void set_state_locked(mp_transfer_state state);
  mp_transfer_state outcome_locked() const;
  static bool settled_state(int state) { return state != MP_RUNNING && state != MP_UNSETTLED; }

  std::atomic<uint32_t> pending_;  // descriptors not reported yet
  std::atomic<bool> failed_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<int> state_{MP_RUNNING};
  std::vector<uint8_t> desc_status_;
  std::vector<uint64_t> desc_digests_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<Carrier> carrier_;
  Error first_error_, stop_cause_;
  bool notified_ = false;
  std::vector<wire::Mark> marks_;  // one for each lane that made any
  int event_fd_ = -1;
  std::vector<uint8_t> item_status_;  // filled when it ends with a failure

  // Its place in the engine's list of running transfers; the list's lock guards these.
  Transfer *previous_ = nullptr, *next_ = nullptr;
  std::shared_ptr<Transfer> keep_;  // a running transfer lives without a handle
};

// The running transfers of an engine: what keeps them alive, and where deadlines are looked up.
class TransferList {
 public:
  void add(const std::shared_ptr<Transfer> &transfer);
  // nullptr when it is not in the list (any more).
  std::shared_ptr<Transfer> remove(Transfer &transfer);
  std::vector<std::shared_ptr<Transfer>> all() const;
  // Those whose deadline has passed and that were not stopped for it yet; `*next` is the earliest deadline of the
  // others.
  std::vector<std::shared_ptr<Transfer>> expired(int64_t now, int64_t *next) const;
  size_t size() const;

 private:
  mutable std::mutex mutex_;
  Transfer *first_ = nullptr;
  size_t size_ = 0;
};

}  // namespace moonpool
