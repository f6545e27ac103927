// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstring>
#include <shared_mutex>

#include "standin_world.hpp"

namespace moonpool::standin {

namespace {

// As Linux makes them for a RoCE port with one IPv4 address.
std::vector<GidRow> usual_gids(int device) {
  const auto link_local = static_cast<uint8_t>(device + 1);
  const std::array<uint8_t, 16> local{0xfe, 0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0xff, 0xfe, 0, 0, link_local};
  const std::array<uint8_t, 16> ipv4{
      0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, static_cast<uint8_t>(device % 2), link_local};
  return {{0, IBV_GID_TYPE_ROCE_V1, local},
          {1, IBV_GID_TYPE_ROCE_V2, local},
          {2, IBV_GID_TYPE_ROCE_V1, ipv4},
          {3, IBV_GID_TYPE_ROCE_V2, ipv4}};
}

void start_over(Device &device, int index) {
  device.index = index;
  device.limits = {};
  device.up = true;
  device.gids = usual_gids(index);
}

}  // namespace

World &world() {
  static auto *one = new World();  // engines may still close while the process exits
  return *one;
}

World::World() {
  for (int i = 0; i < kDevices; ++i) {
    Device &device = devices[static_cast<size_t>(i)];
    device.node_type = IBV_NODE_CA;
    device.transport_type = IBV_TRANSPORT_IB;
    std::snprintf(device.name, sizeof device.name, "%s", device_name(i).c_str());
    start_over(device, i);
  }
}

int index_of(const ibv_context *context) { return static_cast<const Device *>(context->device)->index; }

std::string device_name(int device) { return "standin" + std::to_string(device); }

std::string gid_of(int device) { return "10.0." + std::to_string(device % 2) + "." + std::to_string(device + 1); }

void reset() {
  World &w = world();
  const Alive left = alive();
  if (left != Alive{}) w.misused("reset while these are alive: " + text_of(left));
  hold_requests(false);
  hold_completions(Side::kSend, false);
  hold_completions(Side::kReceive, false);
  w.deferred = w.retries_over = false;
  {
    std::lock_guard gate(w.gate);
    for (int i = 0; i < kDevices; ++i) start_over(w.devices[static_cast<size_t>(i)], i);
  }
  clear_faults();
  for (auto &of_call : w.calls) {
    for (auto &count : of_call) count = 0;
  }
  auto &c = w.counted;
  for (auto *count : {&c.posts, &c.requests, &c.signalled, &c.inlined, &c.immediate, &c.pieces, &c.written_bytes,
                      &c.read_bytes, &c.failed, &c.waited, &c.arms, &c.events}) {
    *count = 0;
  }
  std::lock_guard lock(w.faults_mutex);
  w.misuses.clear();
}

void set_limits(int device, const Limits &limits) {
  std::lock_guard gate(world().gate);
  world().devices[static_cast<size_t>(device)].limits = limits;
}

void set_port(int device, bool up) {
  {
    std::lock_guard gate(world().gate);
    world().devices[static_cast<size_t>(device)].up = up;
  }
  raise_port_event(device, up ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR);
  if (up) wake_all();
}

void set_gids(int device, const std::vector<GidRow> &table) {
  {
    std::lock_guard gate(world().gate);
    world().devices[static_cast<size_t>(device)].gids = table;
  }
  raise_port_event(device, IBV_EVENT_GID_CHANGE);
  wake_all();
}

void set_deferred(bool deferred) { world().deferred = deferred; }

void hold_requests(bool hold) {
  world().requests_held = hold;
  if (!hold) wake_all();
}

void hold_completions(Side side, bool hold) {
  world().completions_held[static_cast<size_t>(side)] = hold;
  if (hold) return;
  std::shared_lock gate(world().gate);
  for (Cq *cq : world().completion_queues) let_go(*cq);
}

void set_retries_over(bool over) {
  world().retries_over = over;
  if (over) wake_all();
}

// ---------------------------------------------------------------- faults

void fail_calls(const CallFault &fault) {
  std::lock_guard lock(world().faults_mutex);
  world().call_faults.push_back(fault);
  ++world().faults;
}

void fail_requests(const RequestFault &fault) {
  std::lock_guard lock(world().faults_mutex);
  world().request_faults.push_back(fault);
  ++world().faults;
}

void clear_faults() {
  std::lock_guard lock(world().faults_mutex);
  world().call_faults.clear();
  world().request_faults.clear();
  world().faults = 0;
}

int World::met(Call call, const ibv_context *context) {
  const int device = index_of(context);
  calls[static_cast<size_t>(call)][static_cast<size_t>(device)].fetch_add(1, std::memory_order_relaxed);
  if (faults.load(std::memory_order_relaxed) == 0) return 0;
  std::lock_guard lock(faults_mutex);
  for (CallFault &fault : call_faults) {
    if (fault.call != call || fault.times == 0 || (fault.device >= 0 && fault.device != device)) continue;
    if (fault.skip > 0) {
      --fault.skip;
      continue;
    }
    --fault.times;
    return fault.err;
  }
  return 0;
}

bool World::met(const Qp &qp, const Request &request, RequestFault *out) {
  if (faults.load(std::memory_order_relaxed) == 0) return false;
  std::lock_guard lock(faults_mutex);
  for (RequestFault &fault : request_faults) {
    if (fault.times == 0 || (fault.device >= 0 && fault.device != index_of(qp.context))) continue;
    if (request.bytes == 0 && !fault.empty) continue;
    if (fault.skip > 0) {
      --fault.skip;
      continue;
    }
    --fault.times;
    *out = fault;
    return true;
  }
  return false;
}

void World::misused(const std::string &what) {
  std::lock_guard lock(faults_mutex);
  misuses.push_back(what);
}

// ---------------------------------------------------------------- what happened

Counters counters() {
  const auto &c = world().counted;
  return {c.posts,         c.requests,   c.signalled, c.inlined, c.immediate, c.pieces,
          c.written_bytes, c.read_bytes, c.failed,    c.waited,  c.arms,      c.events};
}

uint64_t calls(Call call, int device) {
  uint64_t sum = 0;
  for (int i = 0; i < kDevices; ++i) {
    if (device < 0 || device == i) sum += world().calls[static_cast<size_t>(call)][static_cast<size_t>(i)];
  }
  return sum;
}

Alive alive() {
  World &w = world();
  std::shared_lock gate(w.gate);
  return {static_cast<int64_t>(w.contexts.size()),
          w.domains,
          w.registrations,
          w.channels,
          static_cast<int64_t>(w.completion_queues.size()),
          static_cast<int64_t>(w.queue_pairs.size()),
          w.workers};
}

std::string text_of(const Alive &a) {
  return std::to_string(a.contexts) + " contexts, " + std::to_string(a.domains) + " protection domains, " +
         std::to_string(a.registrations) + " registrations, " + std::to_string(a.channels) + " channels, " +
         std::to_string(a.completion_queues) + " completion queues, " + std::to_string(a.queue_pairs) +
         " queue pairs, " + std::to_string(a.workers) + " workers";
}

uint64_t requests_waiting(int device) {
  uint64_t sum = 0;
  std::shared_lock gate(world().gate);
  for (const auto &entry : world().queue_pairs) {
    if (device >= 0 && device != index_of(entry.second->context)) continue;
    std::lock_guard lock(entry.second->work_mutex);
    sum += entry.second->requests.size();
  }
  return sum;
}

std::vector<std::string> misuses() {
  std::lock_guard lock(world().faults_mutex);
  return world().misuses;
}

}  // namespace moonpool::standin
