// SPDX-License-Identifier: Apache-2.0
// Copies of ranges where one side, or both, are memory of a GPU: what mp_copy_batch is for memory of the host.
#pragma once

#include <memory>

#include "ranges.hpp"
#include "status.hpp"

namespace moonpool {

class Engine;
class Region;

// One side of the copies.
struct CopySide {
  std::shared_ptr<Region> region;  // nullptr: memory of the host
  uint8_t *base;
  uint64_t nbytes;
  Ranges ranges;
};

// Returns when all bytes are in place, or none is going to be any more; only where a GPU makes no progress for as long
// as the engine's time-out does it return before, and the regions stay in use until that is over. At least one side is
// a region of a GPU. Lengths are those of `to`.
Error copy_device_ranges(Engine &engine, const CopySide &to, const CopySide &from);

}  // namespace moonpool
