// SPDX-License-Identifier: Apache-2.0
#include "auth.hpp"

#include <sodium.h>

namespace moonpool {

void prove(const std::string &secret, Role role, const wire::Hello &hello, const wire::Challenge &challenge,
           uint8_t mac[32]) {
  static_assert(crypto_auth_hmacsha256_BYTES == 32);
  crypto_auth_hmacsha256_state state;
  crypto_auth_hmacsha256_init(&state, reinterpret_cast<const unsigned char *>(secret.data()), secret.size());
  const auto add = [&state](const auto &field) {
    crypto_auth_hmacsha256_update(&state, reinterpret_cast<const unsigned char *>(&field), sizeof field);
  };
  const char label[16] = {'m', 'o', 'o', 'n', 'p', 'o', 'o', 'l',
                          ' ', 'p', 'r', 'o', 'o', 'f', ' ', role == Role::kClient ? 'c' : 's'};
  add(label);
  add(hello);      // version, kind, flags, lane, session, the client's incarnation and nonce
  add(challenge);  // version, flags, the server's incarnation and nonce
  crypto_auth_hmacsha256_final(&state, mac);
}

bool same_mac(const uint8_t a[32], const uint8_t b[32]) { return sodium_memcmp(a, b, 32) == 0; }

}  // namespace moonpool
