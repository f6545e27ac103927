// SPDX-License-Identifier: Apache-2.0
//
// One table of outcomes: every code has a text, and errors fit the fixed fields of the C face.
#include "status.hpp"

#include <cerrno>
#include <set>

#include "support.hpp"

namespace moonpool {
namespace {

TEST(Status, EveryCodeHasATextOfItsOwn) {
  std::set<std::string> seen;
  for (int code = MP_OK; code <= kLastStatus; ++code) {
    const std::string text = status_text(static_cast<mp_status>(code));
    EXPECT_NE(text, "unknown status") << code;
    EXPECT_TRUE(seen.insert(text).second) << text;
  }
  EXPECT_STREQ(status_text(static_cast<mp_status>(kLastStatus + 1)), "unknown status");
}

TEST(Status, MistakesOfTheCallerAreNotRetryable) {
  for (const mp_status code : {MP_INVALID_ARGUMENT, MP_OUT_OF_RANGE, MP_CONFIG, MP_REGION_READ_ONLY, MP_AUTH,
                               MP_VERSION, MP_REGION_STALE, MP_CLOSED, MP_FORKED}) {
    EXPECT_FALSE(status_retryable(code)) << status_text(code);
  }
  for (const mp_status code : {MP_CONNECT, MP_PEER_LOST, MP_DEADLINE, MP_DIGEST, MP_NOTIFY_FULL, MP_REGION_BUSY}) {
    EXPECT_TRUE(status_retryable(code)) << status_text(code);
  }
}

TEST(Status, LongTextsAreCutToTheirFields) {
  Error error = make_error(MP_CONNECT, std::string(5000, 'm'), std::string(5000, 'h'));
  error.cause = std::string(5000, 'c');
  error.peer = std::string(5000, 'p');
  error.path = std::string(5000, 'q');
  error.item = 12;
  mp_error out;
  std::memset(&out, 0x5a, sizeof out);
  EXPECT_EQ(export_error(error, &out), MP_CONNECT);
  EXPECT_EQ(std::string(out.message), std::string(sizeof out.message - 1, 'm'));
  EXPECT_EQ(std::string(out.hint), std::string(sizeof out.hint - 1, 'h'));
  EXPECT_EQ(std::string(out.cause), std::string(sizeof out.cause - 1, 'c'));
  EXPECT_EQ(std::string(out.peer), std::string(sizeof out.peer - 1, 'p'));
  EXPECT_EQ(std::string(out.path), std::string(sizeof out.path - 1, 'q'));
  EXPECT_EQ(out.item, 12);
  EXPECT_EQ(out.retryable, 1);
}

TEST(Status, SuccessFillsTheErrorToo) {
  mp_error out;
  std::memset(&out, 0x5a, sizeof out);
  EXPECT_EQ(export_error({}, &out), MP_OK);
  EXPECT_EQ(out.code, MP_OK);
  EXPECT_STREQ(out.message, "");
  EXPECT_EQ(out.item, -1);
  EXPECT_EQ(export_error(make_error(MP_LIMIT, "full"), nullptr), MP_LIMIT) << "callers may not care for the text";
}

TEST(Status, SystemErrorsKeepTheNumber) {
  const Error error = system_error(MP_LISTEN, EADDRINUSE, "cannot listen", "use port 0");
  EXPECT_EQ(error.sys_errno, EADDRINUSE);
  EXPECT_NE(error.cause.find("errno 98"), std::string::npos) << error.cause;
}

}  // namespace
}  // namespace moonpool
