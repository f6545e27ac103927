// SPDX-License-Identifier: Apache-2.0
#include "stats.hpp"

#include "support_core.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

std::string quoted(const std::string &text) {
  std::string out;
  append_json_string(&out, text);
  return out;
}

TEST(Stats, TextsAreValidJson) {
  EXPECT_EQ(quoted("plain"), R"("plain")");
  EXPECT_EQ(quoted(R"(say "hi" \ bye)"), R"("say \"hi\" \\ bye")");
  EXPECT_EQ(quoted("a\nb\x01"), R"("a\u000ab\u0001")");
  EXPECT_EQ(quoted("Gr\u00fc\u00dfe"), "\"Gr\u00fc\u00dfe\"");
}

TEST(Stats, EveryEndIsCountedOnItsPath) {
  QuietEngine quiet;
  Stats stats;
  Transfer read(quiet.peer, MP_READ, false, kNever), write(quiet.peer, MP_WRITE, false, kNever);
  read.bytes = 10;
  write.bytes = 300;
  stats.count_transfer(read, "tcp", MP_COMPLETED);
  stats.count_transfer(write, "tcp", MP_COMPLETED);
  for (const mp_transfer_state state : {MP_FAILED, MP_STOPPED, MP_EXPIRED}) stats.count_transfer(read, "tcp", state);
  stats.count_transfer(read, "local", MP_COMPLETED);
  EXPECT_EQ(stats.tcp.transfers.load(), 5u);
  EXPECT_EQ(stats.tcp.completed.load(), 2u);
  EXPECT_EQ(stats.tcp.failed.load(), 1u);
  EXPECT_EQ(stats.tcp.stopped.load(), 1u);
  EXPECT_EQ(stats.tcp.expired.load(), 1u);
  EXPECT_EQ(stats.tcp.read_bytes.load(), 10u) << "only of those that completed";
  EXPECT_EQ(stats.tcp.written_bytes.load(), 300u);
  EXPECT_EQ(stats.local.transfers.load(), 1u);
}

// The C face cuts what does not fit and says how much would.
TEST(Stats, JsonIsCopiedAsFarAsItFits) {
  mp_engine handle{};
  QuietEngine quiet;
  handle.engine = quiet.engine;
  const size_t needed = mp_engine_stats_json(&handle, nullptr, 0);
  ASSERT_GT(needed, 100u);
  std::string whole(needed, 'x'), part(10, 'x');
  EXPECT_EQ(mp_engine_stats_json(&handle, whole.data(), whole.size()), needed);
  EXPECT_EQ(whole.find('\0'), needed - 1);
  EXPECT_EQ(mp_engine_stats_json(&handle, part.data(), part.size()), needed);
  EXPECT_EQ(part, whole.substr(0, 9) + std::string(1, '\0'));
}

}  // namespace
}  // namespace moonpool
