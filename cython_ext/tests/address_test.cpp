// SPDX-License-Identifier: Apache-2.0
#include "address.hpp"

#include <sys/socket.h>

#include "support.hpp"

namespace moonpool {
namespace {

struct Split {
  std::string host;
  uint16_t port = 0;
};

mp_status split(const std::string &text, Split *out, bool allow_port_zero = false) {
  return split_address(text, allow_port_zero, &out->host, &out->port).code;
}

int64_t soon() { return now_ns() + moonpool::testing::kPatienceNs; }

TEST(Address, SplitsHostAndPort) {
  Split got;
  ASSERT_EQ(split("127.0.0.1:7700", &got), MP_OK);
  EXPECT_EQ(got.host, "127.0.0.1");
  EXPECT_EQ(got.port, 7700);
  ASSERT_EQ(split("node-7.rack.example:65535", &got), MP_OK);
  EXPECT_EQ(got.host, "node-7.rack.example");
  EXPECT_EQ(got.port, 65535);
  ASSERT_EQ(split("[::1]:1", &got), MP_OK);
  EXPECT_EQ(got.host, "::1");
  ASSERT_EQ(split("[fe80::1%eth0]:1", &got), MP_OK);
  EXPECT_EQ(got.host, "fe80::1%eth0");
  ASSERT_EQ(split("0.0.0.0:0", &got, true), MP_OK);
  EXPECT_EQ(got.port, 0);
}

TEST(Address, RefusesWhatIsNoAddressAndSaysHowToWriteIt) {
  for (const char *text : {"",
                           "localhost",
                           "localhost:",
                           "localhost:http",
                           "localhost:7700x",
                           "localhost:-1",
                           "localhost:+1",
                           "localhost:65536",
                           "localhost:99999999999999999999",
                           "localhost:0",
                           ":7700",
                           "::1:7700",
                           "[::1:7700",
                           "::1]:7700",
                           "[]:7700",
                           "[localhost]:7700",
                           "[::g]:7700",
                           "[fe80::1%eth0]]:7700",
                           "[fe80::1%eth0:1]:7700",
                           "a b:1",
                           "[::1]7700",
                           "127.0.0.1:77 00",
                           "::1"}) {
    Split got;
    std::string host;
    uint16_t port = 0;
    const Error error = split_address(text, false, &host, &port);
    EXPECT_EQ(error.code, MP_ADDRESS) << text;
    EXPECT_NE(error.message.find(text), std::string::npos) << error.message;
    EXPECT_NE(error.hint, "") << text;
  }
}

TEST(Address, ResolvesNumericAddressesWithoutAResolver) {
  std::vector<SocketAddress> got;
  ASSERT_FALSE(resolve_address("127.0.0.1:7700", false, soon(), {}, &got));
  ASSERT_EQ(got.size(), 1u);
  EXPECT_EQ(got[0].family(), AF_INET);
  EXPECT_EQ(got[0].text(), "127.0.0.1:7700");
  ASSERT_FALSE(resolve_address("[2001:db8::7]:80", false, soon(), {}, &got));
  ASSERT_EQ(got.size(), 1u);
  EXPECT_EQ(got[0].family(), AF_INET6);
  EXPECT_EQ(got[0].text(), "[2001:db8::7]:80");
}

TEST(Address, KnowsLoopback) {
  const auto loopback = [](const std::string &text) {
    std::vector<SocketAddress> got;
    EXPECT_FALSE(resolve_address(text, true, soon(), {}, &got));
    return got.at(0).loopback();
  };
  EXPECT_TRUE(loopback("127.0.0.1:0"));
  EXPECT_TRUE(loopback("127.255.1.2:0"));
  EXPECT_TRUE(loopback("[::1]:0"));
  EXPECT_TRUE(loopback("[::ffff:127.0.0.1]:0"));
  EXPECT_FALSE(loopback("0.0.0.0:0"));
  EXPECT_FALSE(loopback("128.0.0.1:0"));
  EXPECT_FALSE(loopback("[::]:0"));
  EXPECT_FALSE(loopback("[::ffff:10.0.0.1]:0"));
}

// glibc looks names up in a thread of its own that no interceptor of the thread sanitizer knows.
#ifndef __SANITIZE_THREAD__
TEST(Address, ResolvesNames) {
  std::vector<SocketAddress> got;
  ASSERT_FALSE(resolve_address("localhost:7700", false, soon(), {}, &got));
  ASSERT_FALSE(got.empty());
  EXPECT_TRUE(got[0].loopback());
}

TEST(Address, GivesNamesUpAtTheDeadline) {
  std::vector<SocketAddress> got;
  const Error error = resolve_address("no-such-host.invalid:7700", false, now_ns() - 1, {}, &got);
  EXPECT_EQ(error.code, MP_ADDRESS);
  EXPECT_NE(error.cause, "");
}
#endif

TEST(Address, TellsWhereASocketIs) {
  uint16_t port = 0;
  const Fd listener = moonpool::testing::listen_on_loopback(&port);
  EXPECT_EQ(local_address(listener.get()).text(), "127.0.0.1:" + std::to_string(port));
}

}  // namespace
}  // namespace moonpool
