// SPDX-License-Identifier: Apache-2.0
// Registered memory and the table that peers' requests are checked against.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "memory.hpp"
#include "shm_table.hpp"
#include "status.hpp"
#include "wire.hpp"

namespace moonpool {

class RdmaMemory;

namespace cuda {
class DeviceMemory;
}

// Two kinds of use keep the bytes owned: transfers of this engine (`users`) make a release fail, work on behalf of
// peers (`serving`) is stopped by it.
class Region {
 public:
  Region(uint64_t id, uint8_t *base, uint64_t length, std::string name, uint32_t flags);
  // Of memory that the engine allocated.
  Region(uint64_t id, std::unique_ptr<Memory> memory, uint64_t length, std::string name, uint32_t flags);
  // Of memory of a device: no processor may touch `base`.
  Region(uint64_t id, uint8_t *base, uint64_t length, std::string name, uint32_t flags,
         std::shared_ptr<const cuda::DeviceMemory> device);
  Region(const Region &) = delete;
  Region &operator=(const Region &) = delete;

  const uint64_t id;
  const uint64_t key;
  const uint64_t generation;
  uint8_t *const base;
  const uint64_t length;
  const std::string name;
  const uint32_t flags;
  const std::unique_ptr<Memory> memory;                    // nullptr: somebody else's, and only registered
  const std::shared_ptr<const cuda::DeviceMemory> device;  // nullptr: memory of the host

  // For messages.
  std::string label() const;

  // "cuda:0", "cpu:1" or "cpu".
  std::string location() const;

  // By peers.
  bool writable() const { return (flags & MP_REGION_WRITABLE) != 0; }
  bool released() const { return (users_.load() & kReleased) != 0; }
  // By transfers of this engine.
  bool writable_here() const { return memory != nullptr || writable(); }
  // Overflow-safe.
  bool contains(uint64_t offset, uint64_t nbytes) const { return nbytes <= length && offset <= length - nbytes; }

  // False once the region is released.
  bool begin_use();
  void end_use() { users_.fetch_sub(1); }
  bool begin_serving();
  void end_serving();
  bool served() const { return serving_.load() > 0; }

  // False when transfers of this engine still use it.
  bool try_release();
  // Releases it whoever uses it. Only for an engine that goes down: its transfers have been ended.
  void release_for_good() { users_.fetch_or(kReleased); }
  // After try_release: returns when nothing serves peers from it any more.
  void wait_unserved();

  // A peer on the same host maps the memory, or reads it where it lies; the table's slot says when it uses it. MP_OK,
  // with the descriptor when it can be mapped, or why there is no way.
  mp_status share(std::shared_ptr<UseTable> table, uint32_t slot, bool may_be_read, std::shared_ptr<const Fd> *fd);
  // The same for memory of a GPU, which is imported by handle or descriptor.
  mp_status share_device(std::shared_ptr<UseTable> table, uint32_t slot);
  void unshare(const UseTable &table);
  // Whether its memory, a GPU's, is still what it was. Peers that have imported what was freed use it no more.
  Error check_memory() const;
  // Its registrations for RDMA, or nullptr.
  std::shared_ptr<RdmaMemory> rdma() const;
  void set_rdma(std::shared_ptr<RdmaMemory> registrations);
  // How far each RDMA device is from its first byte, as far as is known: a pci::Distance in four bits for each.
  uint64_t distance(size_t device) const {
    return device < 16 ? distances_.load(std::memory_order_relaxed) >> (4 * device) & 15 : 0;
  }
  void set_distances(uint64_t distances) { distances_.store(distances, std::memory_order_relaxed); }
  // After try_release: returns when no peer copies to or from the memory any more, or what it reads is void. Those that
  // do not stop until `until` keep old pages that are not this region's any more. False when there is no memory for new
  // ones, or it is a GPU's, which cannot be moved out of their way.
  bool stop_sharing(int64_t until);

 private:
  struct Share {
    std::shared_ptr<UseTable> table;
    uint32_t slot;
    bool mapped;
  };

  // Part of the counter, so that checking it for 0 and releasing is one step.
  static constexpr int64_t kReleased = int64_t{1} << 62;

  std::atomic<int64_t> users_{0};
  std::atomic<int64_t> serving_{0};
  mutable std::mutex mutex_;
  std::condition_variable unserved_;
  std::vector<Share> shares_;
  std::shared_ptr<RdmaMemory> rdma_;
  std::atomic<uint64_t> distances_{0};
};

// Holds the `serving` count of one region.
class ServingPin {
 public:
  ServingPin() = default;
  // Empty when the region is released.
  explicit ServingPin(std::shared_ptr<Region> region)
      : region_(region != nullptr && region->begin_serving() ? std::move(region) : nullptr) {}
  ServingPin(ServingPin &&) = default;
  ServingPin &operator=(ServingPin &&other) noexcept {
    reset();
    region_ = std::move(other.region_);
    return *this;
  }
  ~ServingPin() { reset(); }
  void reset() {
    if (region_ != nullptr) region_->end_serving();
    region_.reset();
  }
  Region *get() const { return region_.get(); }
  // One more of the same region.
  ServingPin again() const { return ServingPin(region_); }

 private:
  std::shared_ptr<Region> region_;
};

// What a peer may name. Regions without a name are private to their engine and never enter it.
class RegionTable {
 public:
  explicit RegionTable(size_t capacity) : capacity_(capacity) {}

  Error insert(const std::shared_ptr<Region> &region);
  void erase(const Region &region);
  std::shared_ptr<Region> find(uint64_t key) const;
  // MP_REGION_RELEASED for a key that was here recently, otherwise MP_REGION_UNKNOWN.
  mp_status absence(uint64_t key) const;
  std::vector<std::shared_ptr<Region>> all() const;
  size_t size() const;

 private:
  static constexpr size_t kRemembered = 4096;

  const size_t capacity_;
  mutable std::shared_mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Region>> by_key_;
  std::unordered_map<std::string, uint64_t> by_name_;
  // So that a late peer hears "released" and not "unknown": a set to look in, and a ring of the same keys by age.
  std::unordered_set<uint64_t> released_;
  std::vector<uint64_t> released_keys_;
  size_t released_next_ = 0;
};

// Resolves and checks descriptors of a peer's request, one after the other. Runs of the same key cost one look-up.
class RequestChecker {
 public:
  explicit RequestChecker(const RegionTable &table) : table_(table) {}

  // MP_OK and the address, or why the peer may not touch these bytes. The region stays pinned until reset().
  mp_status check(const wire::WireDesc &desc, bool write, uint8_t **address);
  // After MP_OK.
  const Region &region() const { return *last_; }
  // What is pinned now, for work that goes on without the checker. Empty pins: of regions that were released meanwhile.
  std::vector<ServingPin> pin_again() const;
  // The pins themselves; the checker has none then.
  std::vector<ServingPin> take();
  void reset();
  bool pins(const Region &region) const;
  void unpin(const Region &region);

 private:
  const RegionTable &table_;
  std::vector<ServingPin> pins_;
  uint64_t last_key_ = 0;
  Region *last_ = nullptr;
};

}  // namespace moonpool
