// SPDX-License-Identifier: Apache-2.0
// Copies between memory of one host. Much at once goes past the caches: the destination is not read first, and what
// others work with is not pushed out. docs/decisions/0004-same-host.md has the measurement.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moonpool {

// Transfers of so much or more are copied past the caches.
constexpr uint64_t kStreamingBytes = 64u << 10;

// Ranges may overlap.
void copy_bytes(void *to, const void *from, size_t nbytes, bool streaming);
// The same for one leaf of a digest. Returns the digest of the bytes that were put at `to`, even when somebody changes
// `from` meanwhile.
uint64_t copy_leaf(void *to, const void *from, size_t nbytes, bool streaming);

}  // namespace moonpool
