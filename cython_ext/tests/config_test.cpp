// SPDX-License-Identifier: Apache-2.0
//
// Settings are strict: what is impossible is refused by name, with the choice there is.
#include <limits>

#include "engine.hpp"
#include "support.hpp"

namespace moonpool {
namespace {

mp_config defaults() {
  mp_config raw;
  mp_config_init(&raw);
  return raw;
}

Error resolve(const mp_config &raw, Config *config) {
  Config fresh;
  const Error error = resolve_config(raw, all_transports(), &fresh);
  *config = fresh;
  return error;
}

TEST(Config, DefaultsAreTheDocumentedOnes) {
  Config config;
  ASSERT_FALSE(resolve(defaults(), &config));
  EXPECT_EQ(config.name, "engine");
  EXPECT_EQ(config.listen, "") << "accepts nobody";
  std::vector<std::string> here;
  for (const auto &transport : all_transports()) {
    if (transport->probe().available) here.emplace_back(transport->name());
  }
  EXPECT_EQ(config.transports, here);
  EXPECT_EQ(config.slice_bytes, 1u << 20);
  EXPECT_EQ(config.connect_timeout_ms, 5000u);
  EXPECT_EQ(config.progress_timeout_ms, 10000u);
  EXPECT_EQ(config.deadline_ms, 60000u);
  EXPECT_EQ(config.regions_max, 1u << 20);
  EXPECT_EQ(config.peers_max, 4096u);
  EXPECT_EQ(config.notifications_max, 65536u);
  EXPECT_GE(config.lanes, 1u);
  EXPECT_GE(config.io_threads, 1u);
  EXPECT_LE(config.spin_us, 10000u);
  EXPECT_FALSE(config.insecure);
}

template <class T>
struct Bound {
  const char *name;
  T mp_config::*raw;
  T Config::*resolved;
  T low, high;
};

template <class T>
void expect_bounds(const Bound<T> &bound) {
  SCOPED_TRACE(bound.name);
  Config config;
  for (const T good : {bound.low, bound.high}) {
    mp_config raw = defaults();
    raw.*bound.raw = good;
    const Error error = resolve(raw, &config);
    EXPECT_FALSE(error) << error.message;
    EXPECT_EQ(config.*bound.resolved, good);
  }
  std::vector<T> bad;
  if (bound.low > 1) bad.push_back(bound.low - 1);
  if (bound.high < std::numeric_limits<T>::max()) bad.push_back(bound.high + 1);
  for (const T value : bad) {
    mp_config raw = defaults();
    raw.*bound.raw = value;
    const Error error = resolve(raw, &config);
    EXPECT_EQ(error.code, MP_CONFIG);
    EXPECT_NE(error.message.find(std::string(bound.name) + "=" + std::to_string(value)), std::string::npos)
        << error.message;
    EXPECT_NE(error.hint.find(std::to_string(bound.high)), std::string::npos) << error.hint;
  }
}

TEST(Config, NumbersAreBounded) {
  constexpr uint32_t kDayMs = 86'400'000;
  expect_bounds<uint32_t>({"lanes", &mp_config::lanes, &Config::lanes, 1, 64});
  expect_bounds<uint32_t>({"io_threads", &mp_config::io_threads, &Config::io_threads, 1, 64});
  expect_bounds<uint64_t>({"slice_bytes", &mp_config::slice_bytes, &Config::slice_bytes, 65536, 32u << 20});
  expect_bounds<uint32_t>(
      {"connect_timeout_ms", &mp_config::connect_timeout_ms, &Config::connect_timeout_ms, 1, kDayMs});
  expect_bounds<uint32_t>(
      {"progress_timeout_ms", &mp_config::progress_timeout_ms, &Config::progress_timeout_ms, 1, kDayMs});
  expect_bounds<uint32_t>({"deadline_ms", &mp_config::deadline_ms, &Config::deadline_ms, 1, kDayMs});
  expect_bounds<uint32_t>({"regions_max", &mp_config::regions_max, &Config::regions_max, 1, UINT32_MAX});
  expect_bounds<uint32_t>({"peers_max", &mp_config::peers_max, &Config::peers_max, 1, 1u << 20});
  expect_bounds<uint32_t>(
      {"notifications_max", &mp_config::notifications_max, &Config::notifications_max, 1, 1u << 24});
  expect_bounds<uint32_t>({"spin_us", &mp_config::spin_us, &Config::spin_us, 0, 10000});
}

template <class T>
struct RdmaBound {
  const char *name;
  T mp_config::*raw;
  T RdmaConfig::*resolved;
  T low, high, fallback;
};

template <class T>
void expect_rdma_bounds(const RdmaBound<T> &bound) {
  SCOPED_TRACE(bound.name);
  Config config;
  ASSERT_FALSE(resolve(defaults(), &config));
  EXPECT_EQ(config.rdma.*bound.resolved, bound.fallback);
  for (const T good : {bound.low, bound.high}) {
    mp_config raw = defaults();
    raw.*bound.raw = good;
    const Error error = resolve(raw, &config);
    EXPECT_FALSE(error) << error.message;
    EXPECT_EQ(config.rdma.*bound.resolved, good);
  }
  std::vector<T> bad = {bound.high + 1};
  if (bound.low > 1) bad.push_back(bound.low - 1);
  for (const T value : bad) {
    mp_config raw = defaults();
    raw.*bound.raw = value;
    const Error error = resolve(raw, &config);
    EXPECT_EQ(error.code, MP_CONFIG);
    EXPECT_NE(error.message.find(std::string(bound.name) + "=" + std::to_string(value)), std::string::npos)
        << error.message;
    EXPECT_NE(error.hint.find(std::to_string(bound.high)), std::string::npos) << error.hint;
  }
}

TEST(Config, RdmaHasBoundsOnAnyHost) {
  expect_rdma_bounds<uint32_t>({"rdma_queue_pairs", &mp_config::rdma_queue_pairs, &RdmaConfig::queue_pairs, 1, 16, 2});
  expect_rdma_bounds<uint32_t>(
      {"rdma_queue_pairs_max", &mp_config::rdma_queue_pairs_max, &RdmaConfig::queue_pairs_max, 1, 65536, 1024});
  expect_rdma_bounds<uint32_t>(
      {"rdma_queue_depth", &mp_config::rdma_queue_depth, &RdmaConfig::queue_depth, 16, 16384, 256});
  expect_rdma_bounds<uint32_t>(
      {"rdma_inline_bytes", &mp_config::rdma_inline_bytes, &RdmaConfig::inline_bytes, 0, 4096, 128});
  expect_rdma_bounds<uint32_t>(
      {"rdma_service_level", &mp_config::rdma_service_level, &RdmaConfig::service_level, 0, 15, 0});
  expect_rdma_bounds<uint32_t>(
      {"rdma_traffic_class", &mp_config::rdma_traffic_class, &RdmaConfig::traffic_class, 0, 255, 0});
  expect_rdma_bounds<uint32_t>({"rdma_pkey_index", &mp_config::rdma_pkey_index, &RdmaConfig::pkey_index, 0, 65535, 0});
  expect_rdma_bounds<uint64_t>({"rdma_registration_bytes_max", &mp_config::rdma_registration_bytes_max,
                                &RdmaConfig::registration_bytes_max, 2u << 20, uint64_t{1} << 40, uint64_t{1} << 40});
}

TEST(Config, NamedDevicesNeedTheTransportThatUsesThem) {
  mp_config raw = defaults();
  raw.transports = "tcp";
  raw.rdma_devices = "mlx5_0";
  Config config;
  Error error = resolve(raw, &config);
  EXPECT_EQ(error.code, MP_CONFIG);
  EXPECT_NE(error.message.find("mlx5_0"), std::string::npos) << error.message;
  EXPECT_NE(error.hint.find("transports"), std::string::npos) << error.hint;
  raw.rdma_devices = "mlx5_0:";
  error = resolve(raw, &config);
  EXPECT_EQ(error.code, MP_CONFIG);
  EXPECT_NE(error.hint.find("NAME:PORT"), std::string::npos) << error.hint;
  raw.rdma_devices = "";
  EXPECT_FALSE(resolve(raw, &config));
}

// What is asked for by name and is not here ends with the reason, not with another transport.
TEST(Config, ATransportThatThisHostLacksIsRefusedWithTheReason) {
  std::string reason;
  for (const auto &transport : all_transports()) {
    if (std::string_view(transport->name()) == "rdma" && !transport->probe().available)
      reason = transport->probe().reason;
  }
  if (reason.empty()) GTEST_SKIP() << "this host has RDMA devices";
  mp_config named = defaults(), required = defaults();
  named.transports = "rdma,tcp";
  required.require = "rdma";
  for (const mp_config &raw : {named, required}) {
    Config config;
    const Error error = resolve(raw, &config);
    EXPECT_EQ(error.code, MP_TRANSPORT_UNAVAILABLE);
    EXPECT_EQ(error.cause, reason);
    EXPECT_NE(error.hint.find("doctor"), std::string::npos) << error.hint;
  }
}

TEST(Config, TransportsAreTakenAsNamed) {
  const auto chosen = [](const char *text) {
    mp_config raw = defaults();
    raw.transports = text;
    Config config;
    const Error error = resolve(raw, &config);
    EXPECT_FALSE(error) << error.message;
    return config.transports;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(chosen("tcp"), Names{"tcp"});
  EXPECT_EQ(chosen(" tcp , local "), (Names{"tcp", "local"}));
  EXPECT_EQ(chosen("tcp,tcp"), Names{"tcp"});
}

TEST(Config, UnknownTransportsAreRefusedWithTheChoice) {
  for (const char *text : {"quic", "TCP", "tcp,quic", "tcp;local"}) {
    mp_config raw = defaults();
    raw.transports = text;
    Config config;
    const Error error = resolve(raw, &config);
    EXPECT_EQ(error.code, MP_TRANSPORT_UNAVAILABLE) << text;
    EXPECT_NE(error.hint.find("local, shm, cuda_ipc, rdma, tcp"), std::string::npos) << error.hint;
  }
  for (const char *text : {"", ",", "  ", "shm,,tcp", "tcp,", ",tcp", "shm, ,tcp"}) {
    mp_config raw = defaults();
    raw.transports = text;
    Config config;
    const Error error = resolve(raw, &config);
    EXPECT_EQ(error.code, MP_CONFIG) << "\"" << text << "\"";
    EXPECT_NE(error.message.find("transports="), std::string::npos) << error.message;
    EXPECT_NE(error.hint, "");
  }
}

TEST(Config, WhatIsRequiredMustBeAllowed) {
  mp_config raw = defaults();
  Config config;
  raw.require = "tcp";
  EXPECT_FALSE(resolve(raw, &config));
  EXPECT_EQ(config.require, "tcp");
  raw.transports = "local";
  EXPECT_EQ(resolve(raw, &config).code, MP_CONFIG);
  raw.require = "quic";
  EXPECT_EQ(resolve(raw, &config).code, MP_TRANSPORT_UNAVAILABLE);
}

TEST(Config, NamesAndSecretsAreChecked) {
  mp_config raw = defaults();
  Config config;
  const std::string longest(63, 'n'), too_long(64, 'n');
  raw.name = longest.c_str();
  EXPECT_FALSE(resolve(raw, &config));
  raw.name = too_long.c_str();
  EXPECT_EQ(resolve(raw, &config).code, MP_CONFIG);
  raw.name = "";
  EXPECT_FALSE(resolve(raw, &config));
  EXPECT_EQ(config.name, "engine");
  const uint8_t secret[3] = {0, 1, 2};
  raw.secret = secret;
  raw.secret_bytes = 0;
  EXPECT_EQ(resolve(raw, &config).code, MP_CONFIG) << "an empty secret is a mistake, not the absence of one";
  raw.secret_bytes = 3;
  EXPECT_FALSE(resolve(raw, &config));
  EXPECT_EQ(config.secret, std::string("\0\1\2", 3));
}

TEST(Config, AnotherAbiIsRefused) {
  mp_config raw = defaults();
  raw.abi_version = MP_ABI_VERSION + 1;
  Config config;
  EXPECT_EQ(resolve(raw, &config).code, MP_CONFIG);
}

TEST(Config, TheCheapestTransportComesFirst) {
  int cost = 0;
  for (const auto &transport : all_transports()) {
    EXPECT_GT(transport->cost(), cost) << transport->name();
    cost = transport->cost();
  }
}

}  // namespace
}  // namespace moonpool
