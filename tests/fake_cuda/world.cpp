// SPDX-License-Identifier: Apache-2.0
#include "world.hpp"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <sstream>

namespace fake {

namespace {

bool number(const std::string &text, uint64_t *out) {
  if (text.empty() || text.find_first_not_of("0123456789") != std::string::npos) return false;
  *out = std::strtoull(text.c_str(), nullptr, 10);
  return true;
}

std::vector<std::string> split(const std::string &text, char by) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, by);) parts.push_back(part);
  return parts;
}

bool set_fault(World *world, const std::string &value) {
  std::lock_guard lock(world->settings_mutex);
  if (value.empty()) {
    world->faults.clear();
  } else {
    const std::vector<std::string> parts = split(value, ':');
    uint64_t nth, code;
    if (parts.size() < 3 || parts.size() > 4 || !number(parts[1], &nth) || nth == 0 || !number(parts[2], &code) ||
        (parts.size() == 4 && parts[3] != "sticky")) {
      return false;
    }
    world->faults.push_back({parts[0], nth, static_cast<int>(code), parts.size() == 4 || parts[0] == "execute"});
  }
  world->fault_count = static_cast<int>(world->faults.size());
  return true;
}

bool set_attribute(World *world, const std::string &name, const std::string &value) {
  const std::vector<std::string> parts = split(name, '@');
  uint64_t attribute, device = 0, to;
  if (parts.empty() || parts.size() > 2 || !number(parts[0], &attribute) || !number(value, &to)) return false;
  if (parts.size() == 2 && !number(parts[1], &device)) return false;
  std::lock_guard lock(world->settings_mutex);
  world->attributes[{parts.size() == 2 ? static_cast<int>(device) : -1, static_cast<int>(attribute)}] =
      static_cast<int>(to);
  return true;
}

bool set_one(World *world, const std::string &name, const std::string &value) {
  if (name == "fail") return set_fault(world, value);
  if (name.rfind("attribute.", 0) == 0) return set_attribute(world, name.substr(10), value);
  if (name == "pci") {
    std::lock_guard lock(world->settings_mutex);
    world->pci = split(value, ',');
    return true;
  }
  uint64_t n;
  if (!number(value, &n)) return false;
  if (name == "devices" && !world->initialized && n <= 16) {
    world->device_count = static_cast<int>(n);
  } else if (name == "memory") {
    world->device_bytes = n;
  } else if (name == "driver") {
    world->driver_version = static_cast<int>(n);
  } else if (name == "delay_us") {
    world->delay_us = n;
  } else if (name == "ns_per_kib") {
    world->ns_per_kib = n;
  } else {
    return false;
  }
  return true;
}

}  // namespace

World::World() {
  const char *settings = std::getenv("FAKE_CUDA");
  if (settings != nullptr && !set(this, settings)) {
    std::fprintf(stderr, "FAKE_CUDA=%s makes no sense: see tests/fake_cuda/fake_cuda.h\n", settings);
    std::abort();
  }
}

World &world() {
  static World *only = new World();
  return *only;
}

bool set(World *world, const std::string &settings) {
  for (const std::string &one : split(settings, ';')) {
    const size_t equals = one.find('=');
    if (equals == std::string::npos || !set_one(world, one.substr(0, equals), one.substr(equals + 1))) return false;
  }
  return true;
}

std::atomic<uint64_t> &count_of(const char *name) {
  std::lock_guard lock(world().counts_mutex);
  return world().counts[name];
}

int met(const char *name, bool *sticky) {
  World &all = world();
  if (all.fault_count.load(std::memory_order_relaxed) == 0) return 0;
  std::lock_guard lock(all.settings_mutex);
  int code = 0;
  for (auto fault = all.faults.begin(); fault != all.faults.end();) {
    if (fault->name != name || --fault->nth > 0) {
      ++fault;
      continue;
    }
    code = fault->code;
    *sticky = fault->sticky;
    fault = all.faults.erase(fault);
  }
  all.fault_count = static_cast<int>(all.faults.size());
  return code;
}

int enter(const char *name, std::atomic<uint64_t> &counter, Needs needs) {
  World &all = world();
  count(counter);
  count(all.all_calls);
  bool sticky = false;
  const int code = met(name, &sticky);
  Context *context = current_context();
  if (code != 0) {
    if (sticky && context != nullptr) context->dead = code;
    return code;
  }
  if (needs == Needs::kNothing) return kSuccess;
  if (all.exiting) return kDeinitialized;
  // A driver does not come along into a forked child.
  if (!all.initialized || all.pid != getpid()) return kNotInitialized;
  if (needs == Needs::kDriver) return kSuccess;
  std::shared_lock gate(all.gate);
  if (context == nullptr) return kInvalidContext;
  if (!is_context(context)) return kContextIsDestroyed;
  return context->dead;
}

}  // namespace fake
