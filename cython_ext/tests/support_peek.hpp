// SPDX-License-Identifier: Apache-2.0
//
// Looks at memory that an I/O thread may be writing. A race by intent: it is how a test knows how far a frame has come,
// so the thread sanitizer is not asked about it.
#pragma once

#include <cstdint>

namespace moonpool::testing {

#if defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize_thread))
#endif
inline uint8_t
peek(const volatile uint8_t *byte) {
  return *byte;
}

}  // namespace moonpool::testing
