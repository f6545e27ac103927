// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "engine.hpp"

namespace moonpool {

namespace {

// Empty ones too.
std::vector<std::string> split_names(const std::string &text) {
  std::vector<std::string> names;
  size_t at = 0;
  while (at <= text.size()) {
    const size_t comma = std::min(text.find(',', at), text.size());
    std::string name = text.substr(at, comma - at);
    name.erase(0, name.find_first_not_of(' '));
    name.erase(name.find_last_not_of(' ') + 1);
    names.push_back(std::move(name));
    at = comma + 1;
  }
  return names;
}

Error unknown_transport(const std::string &name, const std::vector<std::unique_ptr<Transport>> &transports) {
  std::string known;
  for (const auto &transport : transports) known += (known.empty() ? "" : ", ") + std::string(transport->name());
  return make_error(MP_TRANSPORT_UNAVAILABLE, "there is no transport \"" + name + "\" in this build",
                    "choose from " + known + ", or \"auto\"");
}

Error not_here(const char *what, const std::string &name, const Probe &probe) {
  Error error = make_error(MP_TRANSPORT_UNAVAILABLE, std::string(what) + " \"" + name + "\" is not available here",
                           "`mooncake-bench doctor` says what this host offers and what is missing");
  error.cause = probe.reason;
  return error;
}

Error choose_transports(const mp_config &raw, const std::vector<std::unique_ptr<Transport>> &transports,
                        Config *config) {
  const std::string text = raw.transports == nullptr ? "auto" : raw.transports;
  const auto find = [&](const std::string &name) {
    return std::find_if(transports.begin(), transports.end(), [&](const auto &t) { return t->name() == name; });
  };
  if (text == "auto") {
    for (const auto &transport : transports) {
      if (transport->probe().available) config->transports.emplace_back(transport->name());
    }
  } else {
    for (const std::string &name : split_names(text)) {
      if (name.empty()) {
        return make_error(MP_CONFIG, "transports=\"" + text + "\" has an empty name",
                          "names with one comma between two of them, such as \"shm,tcp\", or \"auto\"");
      }
      const auto it = find(name);
      if (it == transports.end()) return unknown_transport(name, transports);
      const Probe probe = (*it)->probe();
      if (!probe.available) return not_here("transport", name, probe);
      if (std::find(config->transports.begin(), config->transports.end(), name) == config->transports.end()) {
        config->transports.push_back(name);
      }
    }
  }
  if (raw.require == nullptr || *raw.require == '\0') return {};
  config->require = raw.require;
  if (find(config->require) == transports.end()) return unknown_transport(config->require, transports);
  if (std::find(config->transports.begin(), config->transports.end(), config->require) != config->transports.end()) {
    return {};
  }
  if (text == "auto") {
    return not_here("the required transport", config->require, (*find(config->require))->probe());
  }
  return make_error(MP_CONFIG, "require=\"" + config->require + "\" is not among the transports of this engine",
                    "add it to `transports`, or leave `require` out");
}

Error out_of_bounds(const char *name, uint64_t value, uint64_t low, uint64_t high) {
  return make_error(MP_CONFIG, std::string(name) + "=" + std::to_string(value) + " is impossible",
                    "choose from " + std::to_string(low) + " to " + std::to_string(high));
}

template <class T>
Error bounded(const char *name, T raw, T fallback, T low, T high, T *out) {
  *out = raw == 0 ? fallback : raw;
  return *out < low || *out > high ? out_of_bounds(name, *out, low, high) : Error{};
}

Error resolve_rdma(const mp_config &raw, const std::vector<std::unique_ptr<Transport>> &transports, Config *config) {
  RdmaConfig &rdma = config->rdma;
  rdma.devices = raw.rdma_devices == nullptr ? "" : raw.rdma_devices;
  rdma.inline_bytes = raw.rdma_inline_bytes == UINT32_MAX ? 128 : raw.rdma_inline_bytes;
  rdma.service_level = raw.rdma_service_level;
  rdma.traffic_class = raw.rdma_traffic_class;
  rdma.pkey_index = raw.rdma_pkey_index;
  Error error;
  if ((error = bounded("rdma_queue_pairs", raw.rdma_queue_pairs, 2u, 1u, 16u, &rdma.queue_pairs)) ||
      (error = bounded("rdma_queue_pairs_max", raw.rdma_queue_pairs_max, 1024u, 1u, 65536u, &rdma.queue_pairs_max)) ||
      (error = bounded("rdma_queue_depth", raw.rdma_queue_depth, 256u, 16u, 16384u, &rdma.queue_depth)) ||
      (error = bounded<uint64_t>("rdma_registration_bytes_max", raw.rdma_registration_bytes_max, uint64_t{1} << 40,
                                 2u << 20, uint64_t{1} << 40, &rdma.registration_bytes_max))) {
    return error;
  }
  if (rdma.inline_bytes > 4096) return out_of_bounds("rdma_inline_bytes", rdma.inline_bytes, 0, 4096);
  if (rdma.service_level > 15) return out_of_bounds("rdma_service_level", rdma.service_level, 0, 15);
  if (rdma.traffic_class > 255) return out_of_bounds("rdma_traffic_class", rdma.traffic_class, 0, 255);
  if (rdma.pkey_index > 65535) return out_of_bounds("rdma_pkey_index", rdma.pkey_index, 0, 65535);
  std::vector<DeviceChoice> choices;
  if ((error = parse_device_choices(rdma.devices, &choices))) return error;
  const auto &chosen = config->transports;
  if (choices.empty() || std::find(chosen.begin(), chosen.end(), "rdma") != chosen.end()) return {};
  error = make_error(MP_CONFIG, "rdma_devices=\"" + rdma.devices + "\", but rdma is not among the transports",
                     "add \"rdma\" to `transports`, or leave rdma_devices out");
  for (const auto &transport : transports) {
    if (std::string_view(transport->name()) != "rdma") continue;
    const Probe probe = transport->probe();
    if (!probe.available) error.cause = probe.reason;
  }
  return error;
}

}  // namespace

Error resolve_config(const mp_config &raw, const std::vector<std::unique_ptr<Transport>> &transports, Config *config) {
  if (raw.abi_version != MP_ABI_VERSION) {
    return make_error(MP_CONFIG, "the caller was built for ABI version " + std::to_string(raw.abi_version),
                      "build it again with this release's moonpool/engine.h");
  }
  config->name = raw.name == nullptr || *raw.name == '\0' ? "engine" : raw.name;
  if (config->name.size() > 63) return make_error(MP_CONFIG, "name is longer than 63 bytes", "shorten it");
  config->listen = raw.listen == nullptr ? "" : raw.listen;
  if (raw.secret != nullptr) {
    if (raw.secret_bytes == 0)
      return make_error(MP_CONFIG, "the cluster secret is empty", "leave the secret out for none");
    config->secret.assign(reinterpret_cast<const char *>(raw.secret), raw.secret_bytes);
  }
  config->insecure = raw.insecure != 0;
  config->cuda_staging = raw.cuda_staging != 0;
  if (Error error = choose_transports(raw, transports, config)) return error;
  const unsigned cpus = cpu_count();
  const uint32_t lanes = cpus >= 8 ? 4 : 2;
  constexpr uint32_t kDayMs = 86'400'000;
  Error error;
  if ((error = bounded("lanes", raw.lanes, lanes, 1u, 64u, &config->lanes)) ||
      (error = bounded("io_threads", raw.io_threads, std::min(4u, cpus), 1u, 64u, &config->io_threads)) ||
      (error =
           bounded<uint64_t>("slice_bytes", raw.slice_bytes, 1u << 20, 64u << 10, 32u << 20, &config->slice_bytes)) ||
      (error = bounded("connect_timeout_ms", raw.connect_timeout_ms, 5000u, 1u, kDayMs, &config->connect_timeout_ms)) ||
      (error =
           bounded("progress_timeout_ms", raw.progress_timeout_ms, 10000u, 1u, kDayMs, &config->progress_timeout_ms)) ||
      (error = bounded("deadline_ms", raw.deadline_ms, 60000u, 1u, kDayMs, &config->deadline_ms)) ||
      (error = bounded("regions_max", raw.regions_max, 1u << 20, 1u, UINT32_MAX, &config->regions_max)) ||
      (error = bounded("peers_max", raw.peers_max, 4096u, 1u, 1u << 20, &config->peers_max)) ||
      (error = bounded("notifications_max", raw.notifications_max, 65536u, 1u, 1u << 24, &config->notifications_max))) {
    return error;
  }
  error = bounded<uint64_t>("cuda_staging_bytes", raw.cuda_staging_bytes, 64u << 20, 4u << 20, uint64_t{16} << 30,
                            &config->cuda_staging_bytes);
  if (error) return error;
  config->spin_us = raw.spin_us == UINT32_MAX ? (cpus > 1 ? 50 : 0) : raw.spin_us;
  if (config->spin_us > 10000) return out_of_bounds("spin_us", config->spin_us, 0, 10000);
  return resolve_rdma(raw, transports, config);
}

}  // namespace moonpool
