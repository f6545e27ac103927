// SPDX-License-Identifier: Apache-2.0
// What the opaque handles of the C face point to.
#pragma once

#include <memory>

#include "moonpool/engine.h"

namespace moonpool {
class Engine;
class Peer;
class Region;
class Transfer;
struct Plan;
}  // namespace moonpool

struct mp_engine {
  std::shared_ptr<moonpool::Engine> engine;
};
struct mp_region {
  std::shared_ptr<moonpool::Engine> engine;
  std::shared_ptr<moonpool::Region> region;
};
struct mp_peer {
  std::shared_ptr<moonpool::Peer> peer;
};
struct mp_plan {
  std::shared_ptr<moonpool::Plan> plan;
};
struct mp_transfer {
  std::shared_ptr<moonpool::Transfer> transfer;
};
