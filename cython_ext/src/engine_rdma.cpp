// SPDX-License-Identifier: Apache-2.0
// What the engine does for RDMA: opens the devices, registers regions with them, and tells links of ports that change.
#include <algorithm>
#include <utility>

#include "engine.hpp"
#include "peer.hpp"
#include "rdma_link.hpp"
#include "rdma_memory.hpp"

namespace moonpool {

namespace {

constexpr int64_t kRoomNs = 10 * kMillisecond;

pci::Distance distance_of(const RdmaDevice &device, const Region &region, const pci::Place &gpu) {
  if (region.device != nullptr) return pci::distance(device.place, gpu);
  const int here = numa_node_of(region.base), there = device.place.numa_node;
  return here < 0 || there < 0 || here == there ? pci::kSameSwitch : pci::kSameHostBridge;
}

// As Region::set_distances takes them.
uint64_t distances_of(const RdmaHost &host, const Region &region) {
  const pci::Place gpu = region.device == nullptr ? pci::Place{} : cuda::place_of(*region.device);
  uint64_t distances = 0;
  for (size_t i = 0; i < std::min<size_t>(host.devices().size(), 16); ++i) {
    distances |= uint64_t{distance_of(*host.devices()[i], region, gpu)} << (4 * i);
  }
  return distances;
}

}  // namespace

Error Engine::open_rdma() {
  const auto &names = config.transports;
  if (std::find(names.begin(), names.end(), "rdma") == names.end()) return {};
  rdma = std::make_shared<RdmaHost>();
  if (Error error = rdma->open(config.rdma)) return error;
  return rdma->watch(*io_[0], [this](const std::shared_ptr<Rail> &rail) {
    std::vector<std::weak_ptr<RdmaLink>> links;
    std::vector<std::weak_ptr<Peer>> peers;
    {
      std::lock_guard lock(mutex_);
      links = rdma_links_;
      peers = peers_;
    }
    for (const auto &weak : links) {
      if (const auto link = weak.lock()) link->rail_changed(*rail);
    }
    for (const auto &weak : peers) {
      if (const auto peer = weak.lock()) peer->reconsider_paths();
    }
    const auto &rails = rdma->rails();
    const auto index = static_cast<uint32_t>(std::find(rails.begin(), rails.end(), rail) - rails.begin());
    for (const auto &session : all_sessions()) session->rail_changed(index, rail->state().up);
  });
}

void Engine::rdma_link_made(const std::shared_ptr<RdmaLink> &link) {
  std::lock_guard lock(mutex_);
  std::erase_if(rdma_links_, [](const auto &weak) { return weak.expired(); });
  rdma_links_.push_back(link);
  if (!closing_.load()) rdma_connecting_.push_back(link);
}

void Engine::rdma_link_settled(const RdmaLink &link) {
  std::shared_ptr<RdmaLink> last;  // goes without the lock
  std::lock_guard lock(mutex_);
  const auto it = std::find_if(rdma_connecting_.begin(), rdma_connecting_.end(),
                               [&](const auto &one) { return one.get() == &link; });
  if (it == rdma_connecting_.end()) return;
  last = std::move(*it);
  rdma_connecting_.erase(it);
}

void Engine::make_room_for_queue_pairs() {
  if (making_room_.exchange(true)) return;
  io_[0]->post([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->make_room();
  });
}

// Queue pairs of links that are idle go to lanes that wait, those of links that were used longest ago first.
void Engine::make_room() {
  // With the time of each as it is now: transfers change it, and what is being sorted must not.
  std::vector<std::pair<int64_t, std::shared_ptr<RdmaLink>>> links;
  {
    std::lock_guard lock(mutex_);
    for (const auto &weak : rdma_links_) {
      if (auto link = weak.lock()) links.emplace_back(link->used_at(), std::move(link));
    }
  }
  std::sort(links.begin(), links.end(), [](const auto &a, const auto &b) { return a.first < b.first; });
  for (const auto &[used_at, link] : links) {
    if (rdma->queue_pairs_wanted()) link->rest();
  }
  making_room_.store(false);
  if (!rdma->queue_pairs_wanted() || closing_.load() || making_room_.exchange(true)) return;
  // The others are busy.
  io_[0]->call_at(now_ns() + kRoomNs, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->make_room();
  });
}

// A region that no device takes goes over other paths, unless RDMA is required, or those that a GPU's takes are off.
Error Engine::register_rdma(Region &region) {
  if (rdma == nullptr || rdma->devices().empty()) return {};
  Error error = try_register_rdma(region);
  if (!error) return {};
  stats.regions_not_registered.fetch_add(1);
  std::lock_guard lock(mutex_);
  registration_problem_ = error.message + (error.cause.empty() ? "" : ": " + error.cause);
  const bool needed = config.require == "rdma" || (region.device != nullptr && !config.cuda_staging);
  return needed ? error : Error{};
}

Error Engine::try_register_rdma(Region &region) {
  std::shared_ptr<RdmaMemory> registrations;
  if (region.device != nullptr) {
    if (region.device->managed()) {
      return make_error(MP_TRANSPORT_UNAVAILABLE, "managed memory is not registered for RDMA",
                        "cudaMalloc instead of cudaMallocManaged");
    }
    if (Error error = cuda::keep_in_order(*region.device)) return error;
  }
  const RdmaMemory::Source source{region.base, region.length, region.writable(), region.device.get()};
  if (Error error = RdmaMemory::make(*rdma, config.rdma, source, &registrations)) return error;
  if (region.device != nullptr) {
    write_flush_.add(region.device);
    (registrations->route() == RdmaMemory::Route::kDmabuf ? stats.regions_dmabuf : stats.regions_peermem).fetch_add(1);
  }
  region.set_rdma(std::move(registrations));
  region.set_distances(distances_of(*rdma, region));  // its pages are there now
  return {};
}

std::string Engine::registration_problem() const {
  std::lock_guard lock(mutex_);
  return registration_problem_;
}

// False when a device does not let go of the memory yet.
bool Engine::withdraw_rdma(Region &region) {
  const std::shared_ptr<RdmaMemory> registrations = region.rdma();
  if (registrations == nullptr) return true;
  if (!registrations->close()) return false;
  if (region.device != nullptr) write_flush_.remove(region.device);
  region.set_rdma(nullptr);
  return true;
}

// With a context that has died nobody will see what came: whoever uses the memory is told by the driver.
void Engine::flush_gpu_writes() {
  if (write_flush_.needed() && write_flush_.flush()) stats.gpu_flushes_failed.fetch_add(1);
}

void Engine::flush_gpu_writes(const Transfer &transfer) {
  if (!write_flush_.needed()) return;
  const auto &locals = transfer.locals;
  const auto of_gpu = [](const auto &region) { return region->device != nullptr; };
  if (std::any_of(locals.begin(), locals.end(), of_gpu)) flush_gpu_writes();
}

}  // namespace moonpool
