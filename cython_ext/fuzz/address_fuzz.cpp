// SPDX-License-Identifier: Apache-2.0
//
// "host:port" as users and environment variables write it: what is taken has a host and a port, and what is printed
// again means the same.
#include <cctype>
#include <cstring>

#include "address.hpp"
#include "seeds.hpp"
#include "world.hpp"

using namespace moonpool;
using namespace moonpool::fuzz;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  World::get().reset();
  // As the C face gets it.
  const std::string text(reinterpret_cast<const char *>(data), strnlen(reinterpret_cast<const char *>(data), size));
  for (const bool zero : {false, true}) {
    std::string host;
    uint16_t port = 0;
    const Error split = split_address(text, zero, &host, &port);
    std::vector<SocketAddress> resolved;
    const Error error = resolve_address(text, zero, kNever, {}, &resolved);
    if (split) {
      FUZZ_CHECK(split.code == MP_ADDRESS && !split.message.empty());
      FUZZ_CHECK(error.code == split.code);
      continue;
    }
    FUZZ_CHECK(!host.empty() && host.find_first_of("[] \t\n") == std::string::npos);
    FUZZ_CHECK(zero || port != 0);
    if (error) continue;
    FUZZ_CHECK(!resolved.empty());
    for (const SocketAddress &address : resolved) {
      std::vector<SocketAddress> again;
      FUZZ_CHECK(!resolve_address(address.text(), zero, kNever, {}, &again));
      FUZZ_CHECK(again.size() == 1 && again[0].text() == address.text() && again[0].loopback() == address.loopback());
    }
  }
  return 0;
}

Seeds fuzz::seeds() {
  Seeds all;
  for (const char *text : {"127.0.0.1:7700", "[::1]:7700", "0.0.0.0:0", "[::ffff:127.0.0.1]:1", "[fe80::1%lo]:7700",
                           "node-7.cluster:65535", "127.1:80", "0x7f000001:80", "::1:7700", "[::1]", ":7700",
                           "host:", "host:65536", "[]:1", "[x]:1", "a b:1"}) {
    std::string name(text);
    for (char &c : name) c = std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '-';
    all.add(name, text);
  }
  return all;
}
