// SPDX-License-Identifier: Apache-2.0
// Mutual proof of the cluster secret: HMAC-SHA256 over role, kind, lane, both incarnations, both nonces and the
// session.
#pragma once

#include <string>

#include "wire.hpp"

namespace moonpool {

enum class Role { kClient, kServer };

void prove(const std::string &secret, Role role, const wire::Hello &hello, const wire::Challenge &challenge,
           uint8_t mac[32]);
// Constant time.
bool same_mac(const uint8_t a[32], const uint8_t b[32]);

}  // namespace moonpool
