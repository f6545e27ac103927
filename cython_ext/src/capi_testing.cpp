// SPDX-License-Identifier: Apache-2.0
// The C face of moonpool/testing.h, and how engines are opened over given transports.
#include "capi_support.hpp"
#include "fault_link.hpp"
#include "moonpool/testing.h"

using namespace moonpool;

namespace {

// The rules that all transports of an engine share; nullptr when it has none.
FaultRules *rules_of(const Engine &engine) {
  for (const auto &transport : engine.transports) {
    if (const auto *faulty = dynamic_cast<const FaultTransport *>(transport.get())) return &faulty->rules();
  }
  return nullptr;
}

Error not_for_tests() {
  return make_error(MP_INVALID_ARGUMENT, "the engine was not opened with faults", "open it with mp_testing_open");
}

}  // namespace

Error moonpool::open_engine(const mp_config &config, std::vector<std::unique_ptr<Transport>> transports,
                            mp_engine **engine) {
  Config resolved;
  if (Error bad = resolve_config(config, transports, &resolved)) return bad;
  auto made = std::make_shared<Engine>(std::move(resolved), std::move(transports));
  if (Error bad = made->open()) {
    made->close();
    return bad;
  }
  *engine = new mp_engine{std::move(made)};
  return {};
}

void mp_faults_init(mp_faults *faults) {
  *faults = {};
  faults->abi_version = MP_ABI_VERSION;
  faults->delay_min_us = 1000;
  faults->delay_max_us = 10'000;
  faults->error_status = MP_PEER_LOST;
  faults->partial_share = 0.5;
  faults->partial_status = MP_REGION_UNKNOWN;
}

mp_status mp_testing_open(const mp_config *config, const mp_faults *faults, mp_engine **engine, mp_error *error) {
  return guarded(error, [&]() -> Error {
    if (config == nullptr || faults == nullptr || engine == nullptr) return null_argument("config, faults or engine");
    if (Error bad = check_faults(*faults)) return bad;
    const auto rules = std::make_shared<FaultRules>(*faults);
    std::vector<std::unique_ptr<Transport>> transports = all_transports();
    for (auto &transport : transports) transport = std::make_unique<FaultTransport>(std::move(transport), rules);
    return open_engine(*config, std::move(transports), engine);
  });
}

mp_status mp_testing_set_faults(mp_engine *engine, const mp_faults *faults, mp_error *error) {
  return call<While::kOpenOrClosed>(engine, "engine", error, [&]() -> Error {
    if (faults == nullptr) return null_argument("faults");
    if (Error bad = check_faults(*faults)) return bad;
    FaultRules *rules = rules_of(*engine->engine);
    if (rules == nullptr) return not_for_tests();
    rules->set(*faults);
    return {};
  });
}

mp_status mp_testing_faults_made(mp_engine *engine, mp_faults_made *made, mp_error *error) {
  return call<While::kOpenOrClosed>(engine, "engine", error, [&]() -> Error {
    if (made == nullptr) return null_argument("made");
    const FaultRules *rules = rules_of(*engine->engine);
    if (rules == nullptr) return not_for_tests();
    *made = rules->made();
    return {};
  });
}
