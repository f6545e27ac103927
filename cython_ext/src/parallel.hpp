// SPDX-License-Identifier: Apache-2.0
// Passes over much memory, shared among as many threads as are worth starting for it. None stays: there is nothing to
// keep awake, to configure or to lose in a fork.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace moonpool {

// So much is done in a turn, so that threads end together.
constexpr uint64_t kTurnBytes = 1u << 20;

// Calls `turn(i)` once for each i of [0, turns): on this thread, and for many bytes on others at the same time.
// Returns when all have returned. `turn` does not throw.
void in_turns(size_t turns, uint64_t bytes, const std::function<void(size_t)> &turn);

}  // namespace moonpool
