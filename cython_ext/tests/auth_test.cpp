// SPDX-License-Identifier: Apache-2.0
//
// A proof holds for one secret, one role and one pair of messages, and for nothing else.
#include "auth.hpp"

#include "support.hpp"

namespace moonpool {
namespace {

using wire::Challenge;
using wire::Hello;

constexpr char kSecret[] = "moonpool test secret";

template <class T>
T patterned(unsigned factor, unsigned start) {
  T out;
  auto *bytes = reinterpret_cast<uint8_t *>(&out);
  for (unsigned i = 0; i < sizeof out; ++i) bytes[i] = static_cast<uint8_t>(i * factor + start);
  return out;
}

const Hello kHello = patterned<Hello>(7, 1);
const Challenge kChallenge = patterned<Challenge>(11, 3);

std::string proof(const std::string &secret, Role role, const Hello &hello, const Challenge &challenge) {
  uint8_t mac[32];
  prove(secret, role, hello, challenge, mac);
  std::string hex;
  for (const uint8_t byte : mac) {
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  return hex;
}

// Computed with Python's hmac module over b"moonpool proof " + role + hello + challenge.
TEST(Auth, ProofIsHmacSha256OfLabelHelloAndChallenge) {
  EXPECT_EQ(proof(kSecret, Role::kClient, kHello, kChallenge),
            "c92fe30b5ac2dc19567dc3ba1a7049add817360ceea353f05514efee6fb8f26e");
  EXPECT_EQ(proof(kSecret, Role::kServer, kHello, kChallenge),
            "2899331bd2f3dd182c321debccd1181ef0f07647cd6432cf3b9c3f6845dced8e");
  EXPECT_EQ(proof("", Role::kClient, kHello, kChallenge),
            "8aeb50ed189806574d35fa126e5d5a8675b9d1b0b807fc8d7edf409229cda391");
}

// Every field counts: nonces, incarnations, kind, session, lane, flags and names.
TEST(Auth, EveryBitOfBothMessagesChangesTheProof) {
  const std::string good = proof(kSecret, Role::kClient, kHello, kChallenge);
  for (size_t bit = 0; bit < sizeof(Hello) * 8; ++bit) {
    Hello hello = kHello;
    reinterpret_cast<uint8_t *>(&hello)[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
    ASSERT_NE(proof(kSecret, Role::kClient, hello, kChallenge), good) << "bit " << bit << " of the Hello";
  }
  for (size_t bit = 0; bit < sizeof(Challenge) * 8; ++bit) {
    Challenge challenge = kChallenge;
    reinterpret_cast<uint8_t *>(&challenge)[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
    ASSERT_NE(proof(kSecret, Role::kClient, kHello, challenge), good) << "bit " << bit << " of the Challenge";
  }
}

TEST(Auth, EveryBitOfTheSecretChangesTheProof) {
  const std::string good = proof(kSecret, Role::kClient, kHello, kChallenge);
  for (size_t bit = 0; bit < (sizeof kSecret - 1) * 8; ++bit) {
    std::string secret = kSecret;
    secret[bit / 8] = static_cast<char>(secret[bit / 8] ^ (1 << (bit % 8)));
    ASSERT_NE(proof(secret, Role::kClient, kHello, kChallenge), good) << "bit " << bit;
  }
  EXPECT_NE(proof("", Role::kClient, kHello, kChallenge), good);
}

// Otherwise a server could send a client's own proof back to it.
TEST(Auth, RolesProveDifferently) {
  EXPECT_NE(proof(kSecret, Role::kClient, kHello, kChallenge), proof(kSecret, Role::kServer, kHello, kChallenge));
}

TEST(Auth, MacsAreComparedWhole) {
  uint8_t a[32], b[32];
  prove(kSecret, Role::kClient, kHello, kChallenge, a);
  std::memcpy(b, a, sizeof b);
  EXPECT_TRUE(same_mac(a, b));
  for (size_t bit = 0; bit < 256; ++bit) {
    b[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
    EXPECT_FALSE(same_mac(a, b)) << "bit " << bit;
    b[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
  }
}

}  // namespace
}  // namespace moonpool
