// SPDX-License-Identifier: Apache-2.0
#include "cuda_ipc_frames.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "status.hpp"

namespace moonpool::cuda_ipc {
namespace {

Response found_response() {
  Response response;
  response.header.type = kFound;
  response.header.key = 7;
  response.header.value = 3;
  response.found.length = 1000;
  response.found.offset = 4096;
  response.found.parts = 2;
  response.found.handle.bytes[63] = 9;
  return response;
}

std::string encoded(const Response &response) {
  std::string out;
  encode(response, &out);
  return out;
}

TEST(CudaIpcFrames, ARequestComesBackWhole) {
  std::string out;
  encode(make_request(kPart, 0x0102030405060708, 5), &out);
  for (size_t n = 0; n < out.size(); ++n) {
    std::string_view part(out.data(), n);
    Request request;
    EXPECT_EQ(decode(&part, &request), Decoded::kMore) << n;
  }
  out += "next";
  std::string_view in = out;
  Request request;
  ASSERT_EQ(decode(&in, &request), Decoded::kFrame);
  EXPECT_EQ(in, "next");
  EXPECT_EQ(request.key, 0x0102030405060708u);
  EXPECT_EQ(request.part, 5u);
}

TEST(CudaIpcFrames, WrongRequestsAreBad) {
  const auto with = [](const std::function<void(Request &)> &change) {
    Request request = make_request(kFind, 1);
    change(request);
    std::string out;
    encode(request, &out);
    std::string_view in = out;
    return decode(&in, &request);
  };
  EXPECT_EQ(with([](Request &) {}), Decoded::kFrame);
  EXPECT_EQ(with([](Request &request) { request.magic = kResponseMagic; }), Decoded::kBad);
  EXPECT_EQ(with([](Request &request) { request.type = 0; }), Decoded::kBad);
  EXPECT_EQ(with([](Request &request) { request.type = kDrop + 1; }), Decoded::kBad);
  EXPECT_EQ(with([](Request &request) { request.part = kPartsMax; }), Decoded::kBad);
}

TEST(CudaIpcFrames, AResponseComesBackWhole) {
  Response refused;
  refused.header.type = kFound;
  refused.header.status = MP_LIMIT;
  refused.reason = std::string(kReasonMax + 10, 'x');
  for (const Response &sent : {found_response(), refused}) {
    const std::string whole = encoded(sent) + "next";
    for (size_t n = 0; n + 4 < whole.size(); ++n) {
      std::string_view part(whole.data(), n);
      Response got;
      EXPECT_EQ(decode(&part, &got), Decoded::kMore) << n;
    }
    std::string_view in = whole;
    Response got;
    ASSERT_EQ(decode(&in, &got), Decoded::kFrame);
    EXPECT_EQ(in, "next");
    EXPECT_EQ(got.header.status, sent.header.status);
    EXPECT_EQ(got.reason, sent.reason.substr(0, kReasonMax));
    EXPECT_EQ(std::memcmp(&got.found, &sent.found, sizeof got.found), 0);
  }
}

TEST(CudaIpcFrames, WrongResponsesAreBad) {
  const auto with = [](const std::function<void(Response &)> &change) {
    Response response = found_response();
    change(response);
    const std::string out = encoded(response);
    std::string_view in = out;
    Response got;
    return decode(&in, &got);
  };
  EXPECT_EQ(with([](Response &) {}), Decoded::kFrame);
  EXPECT_EQ(with([](Response &response) { response.header.type = 0; }), Decoded::kBad);
  EXPECT_EQ(with([](Response &response) { response.header.type = kPartIs + 1; }), Decoded::kBad);
  EXPECT_EQ(with([](Response &response) { response.header.status = MP_PENDING; }), Decoded::kBad);
  EXPECT_EQ(with([](Response &response) { response.header.status = kLastStatus + 1; }), Decoded::kBad);
  EXPECT_EQ(with([](Response &response) { response.found.length = 0; }), Decoded::kBad);
  EXPECT_EQ(with([](Response &response) { response.found.offset = UINT64_MAX - 999; }), Decoded::kBad)
      << "the region does not end";
  EXPECT_EQ(with([](Response &response) { response.found.parts = kPartsMax + 1; }), Decoded::kBad);
  EXPECT_EQ(with([](Response &response) { response.found.writable = 2; }), Decoded::kBad);
}

}  // namespace
}  // namespace moonpool::cuda_ipc
