// SPDX-License-Identifier: Apache-2.0
#include "region.hpp"

#include <algorithm>

#include "cuda_memory.hpp"

namespace moonpool {

namespace {
std::atomic<uint64_t> g_generation{1};
}  // namespace

Region::Region(uint64_t region_id, uint8_t *address, uint64_t nbytes, std::string region_name, uint32_t region_flags)
    : id(region_id),
      key(random_u64()),
      generation(g_generation.fetch_add(1)),
      base(address),
      length(nbytes),
      name(std::move(region_name)),
      flags(region_flags) {}

Region::Region(uint64_t region_id, std::unique_ptr<Memory> own, uint64_t nbytes, std::string region_name,
               uint32_t region_flags)
    : id(region_id),
      key(random_u64()),
      generation(g_generation.fetch_add(1)),
      base(own->base()),
      length(nbytes),
      name(std::move(region_name)),
      flags(region_flags | (own->fd() != nullptr ? MP_REGION_SHARED : 0)),
      memory(std::move(own)) {}

Region::Region(uint64_t region_id, uint8_t *address, uint64_t nbytes, std::string region_name, uint32_t region_flags,
               std::shared_ptr<const cuda::DeviceMemory> of_device)
    : id(region_id),
      key(random_u64()),
      generation(g_generation.fetch_add(1)),
      base(address),
      length(nbytes),
      name(std::move(region_name)),
      flags(region_flags | MP_REGION_CUDA),
      device(std::move(of_device)) {}

std::string Region::location() const {
  if (device != nullptr) return "cuda:" + std::to_string(device->device());
  const int node = numa_node_of(base);
  return node < 0 ? "cpu" : "cpu:" + std::to_string(node);
}

std::string Region::label() const {
  if (!name.empty()) return "region \"" + name + "\"";
  return "region without a name (id " + std::to_string(id) + ", " + std::to_string(length) + " bytes)";
}

std::shared_ptr<RdmaMemory> Region::rdma() const {
  std::lock_guard lock(mutex_);
  return rdma_;
}

void Region::set_rdma(std::shared_ptr<RdmaMemory> registrations) {
  std::lock_guard lock(mutex_);
  rdma_ = std::move(registrations);
}

bool Region::begin_use() {
  if ((users_.fetch_add(1) & kReleased) == 0) return true;
  users_.fetch_sub(1);
  return false;
}

bool Region::begin_serving() {
  // Counted first, checked second; a release does the opposite. One of the two always sees the other.
  serving_.fetch_add(1);
  if (!released()) return true;
  end_serving();
  return false;
}

void Region::end_serving() {
  if (serving_.fetch_sub(1) == 1 && released()) {
    std::lock_guard lock(mutex_);
    unserved_.notify_all();
  }
}

bool Region::try_release() {
  int64_t users = 0;
  return users_.compare_exchange_strong(users, kReleased) || (users & kReleased) != 0;
}

void Region::wait_unserved() {
  std::unique_lock lock(mutex_);
  unserved_.wait(lock, [this] { return serving_.load() == 0; });
}

mp_status Region::share(std::shared_ptr<UseTable> table, uint32_t slot, bool may_be_read,
                        std::shared_ptr<const Fd> *fd) {
  std::lock_guard lock(mutex_);
  if (released()) return MP_REGION_RELEASED;
  if (memory != nullptr) *fd = memory->fd();
  const bool mapped = *fd != nullptr;
  if (!mapped && !may_be_read) return MP_TRANSPORT_UNAVAILABLE;
  shares_.push_back({std::move(table), slot, mapped});
  return MP_OK;
}

mp_status Region::share_device(std::shared_ptr<UseTable> table, uint32_t slot) {
  std::lock_guard lock(mutex_);
  if (released()) return MP_REGION_RELEASED;
  shares_.push_back({std::move(table), slot, true});
  return MP_OK;
}

Error Region::check_memory() const {
  Error error = device->check_alive();
  if (error.code != MP_REGION_RELEASED) return error;
  std::lock_guard lock(mutex_);
  for (const Share &share : shares_) share.table->withdraw(share.slot);
  return error;
}

void Region::unshare(const UseTable &table) {
  std::lock_guard lock(mutex_);
  std::erase_if(shares_, [&](const Share &share) {
    if (share.table.get() != &table) return false;
    // A release that waits for it need not wait for one who is gone.
    share.table->end_uses(share.slot);
    return true;
  });
}

bool Region::stop_sharing(int64_t until) {
  std::vector<Share> shares;
  {
    std::lock_guard lock(mutex_);
    shares = shares_;
  }
  for (const Share &share : shares) share.table->withdraw(share.slot);
  bool quiet = true;
  for (const Share &share : shares) {
    // A reader harms nothing, and looks at the slot before it believes what it has read.
    if (!share.mapped) {
      share.table->abandon(share.slot);
      continue;
    }
    quiet = (share.table->wait_unused(share.slot, until) || share.table->abandon(share.slot)) && quiet;
  }
  if (!quiet && (memory == nullptr || !memory->detach())) return false;
  std::lock_guard lock(mutex_);
  if (memory != nullptr) memory->forget_fd();
  return true;
}

Error RegionTable::insert(const std::shared_ptr<Region> &region) {
  std::unique_lock lock(mutex_);
  if (by_key_.size() >= capacity_) {
    return make_error(
        MP_LIMIT,
        "cannot register \"" + region->name + "\": " + std::to_string(capacity_) + " regions are registered already",
        "release regions, register larger ones, or raise regions_max");
  }
  if (!by_name_.emplace(region->name, region->key).second) {
    return make_error(MP_INVALID_ARGUMENT, "a region named \"" + region->name + "\" is registered already",
                      "use another name, or release the first one");
  }
  by_key_.emplace(region->key, region);
  return {};
}

void RegionTable::erase(const Region &region) {
  std::unique_lock lock(mutex_);
  if (by_key_.erase(region.key) == 0) return;
  by_name_.erase(region.name);
  released_.insert(region.key);
  if (released_keys_.size() < kRemembered) {
    released_keys_.push_back(region.key);
  } else {
    uint64_t &oldest = released_keys_[released_next_++ % kRemembered];
    released_.erase(oldest);
    oldest = region.key;
  }
}

std::shared_ptr<Region> RegionTable::find(uint64_t key) const {
  std::shared_lock lock(mutex_);
  const auto it = by_key_.find(key);
  return it == by_key_.end() ? nullptr : it->second;
}

mp_status RegionTable::absence(uint64_t key) const {
  std::shared_lock lock(mutex_);
  return released_.count(key) != 0 ? MP_REGION_RELEASED : MP_REGION_UNKNOWN;
}

std::vector<std::shared_ptr<Region>> RegionTable::all() const {
  std::shared_lock lock(mutex_);
  std::vector<std::shared_ptr<Region>> regions;
  regions.reserve(by_key_.size());
  for (const auto &entry : by_key_) regions.push_back(entry.second);
  return regions;
}

size_t RegionTable::size() const {
  std::shared_lock lock(mutex_);
  return by_key_.size();
}

mp_status RequestChecker::check(const wire::WireDesc &desc, bool write, uint8_t **address) {
  if (last_ == nullptr || desc.key != last_key_) {
    std::shared_ptr<Region> region = table_.find(desc.key);
    if (region == nullptr) return table_.absence(desc.key);
    ServingPin pin(std::move(region));
    if (pin.get() == nullptr) return MP_REGION_RELEASED;
    last_ = pin.get();
    last_key_ = desc.key;
    pins_.push_back(std::move(pin));
  }
  if (desc.length == 0 || !last_->contains(desc.offset, desc.length)) return MP_OUT_OF_RANGE;
  if (write && !last_->writable()) return MP_REGION_READ_ONLY;
  *address = last_->base + desc.offset;
  return MP_OK;
}

std::vector<ServingPin> RequestChecker::pin_again() const {
  std::vector<ServingPin> pins;
  for (const ServingPin &pin : pins_) pins.push_back(pin.again());
  return pins;
}

std::vector<ServingPin> RequestChecker::take() {
  last_ = nullptr;
  return std::exchange(pins_, {});
}

void RequestChecker::reset() {
  last_ = nullptr;
  pins_.clear();
}

bool RequestChecker::pins(const Region &region) const {
  return std::any_of(pins_.begin(), pins_.end(), [&](const ServingPin &pin) { return pin.get() == &region; });
}

void RequestChecker::unpin(const Region &region) {
  if (last_ == &region) last_ = nullptr;
  std::erase_if(pins_, [&](const ServingPin &pin) { return pin.get() == &region; });
}

}  // namespace moonpool
