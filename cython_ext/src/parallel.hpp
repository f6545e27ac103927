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

// How many threads, the calling one included, should share a pass over so many bytes: more than one where it takes much
// longer than a thread takes to start, and no more than there are cores on which nothing runs. Where all are busy, a
// thread more is one to wait for: a turn that it has begun cannot be taken from it.
unsigned threads_for(uint64_t bytes);

// Calls `turn(i)` once for each i of [0, turns), on this thread and up to `threads` - 1 others at the same time.
// Returns when all have returned. `turn` does not throw.
void in_turns(size_t turns, unsigned threads, const std::function<void(size_t)> &turn);

}  // namespace moonpool
