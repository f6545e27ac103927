// SPDX-License-Identifier: Apache-2.0
// The tree digest of mp_digest: leaves of 256 KiB hashed with XXH3-64, then XXH3-64 over the leaf values.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moonpool/engine.h"

namespace moonpool {

constexpr uint64_t kDigestLeafBytes = MP_DIGEST_LEAF_BYTES;

uint64_t leaf_digest(const void *data, size_t nbytes);
// Combines the digests of the leaves of one item, at any address. One leaf is its own digest.
uint64_t combine_leaves(const void *leaves, size_t count);

}  // namespace moonpool
