// SPDX-License-Identifier: Apache-2.0
//
// An engine without a network, for tests of what lies below the C face.
#pragma once

#include "engine.hpp"
#include "handles.hpp"
#include "peer.hpp"
#include "support.hpp"

namespace moonpool::testing {

class QuietEngine {
 public:
  QuietEngine() {
    mp_config raw;
    mp_config_init(&raw);
    raw.io_threads = 1;
    Config config;
    auto transports = all_transports();
    EXPECT_FALSE(resolve_config(raw, transports, &config));
    engine = std::make_shared<Engine>(std::move(config), std::move(transports));
    EXPECT_FALSE(engine->open());
    peer = Peer::make(engine, "nowhere:1", {});
  }
  ~QuietEngine() {
    peer->close(make_error(MP_CLOSED, "the test is over"));
    engine->close();
  }
  QuietEngine(const QuietEngine &) = delete;

  // Memory that nobody looks at.
  std::shared_ptr<Region> region(const std::string &name, uint64_t length, uint32_t flags = MP_REGION_WRITABLE) {
    next_base_ += uint64_t{1} << 40;
    return std::make_shared<Region>(engine->next_region_id(), reinterpret_cast<uint8_t *>(next_base_), length, name,
                                    flags);
  }

  std::shared_ptr<Engine> engine;
  std::shared_ptr<Peer> peer;

 private:
  uint64_t next_base_ = 0;
};

}  // namespace moonpool::testing
