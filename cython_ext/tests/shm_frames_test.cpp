// SPDX-License-Identifier: Apache-2.0
//
// Frames of the Unix socket: what was sent comes out, and nothing else is taken for a frame.
#include "shm_frames.hpp"

#include <unistd.h>

#include <cerrno>
#include <functional>
#include <map>

#include "status.hpp"
#include "support.hpp"

namespace moonpool::shm {
namespace {

using namespace moonpool::testing;

RequestHeader copy_header(mp_op op, const std::vector<Desc> &descs, uint8_t flags = 0) {
  RequestHeader header = request_header(kCopy, 7);
  header.op = static_cast<uint8_t>(op);
  header.flags = flags;
  header.count = static_cast<uint32_t>(descs.size());
  for (const Desc &desc : descs) header.bytes += desc.length;
  return header;
}

std::vector<Desc> some_descs(size_t n) {
  std::vector<Desc> descs;
  for (size_t i = 0; i < n; ++i) descs.push_back({i * 3 + 1, i << 40, 1000 + i, 0x7f0000000000 + i});
  return descs;
}

std::string encoded(const RequestHeader &header, const std::vector<Desc> &descs = {}) {
  std::string out;
  encode(header, descs.data(), &out);
  return out;
}

CopyResponse copied(std::vector<wire::FailedDesc> failed, std::vector<uint64_t> digests) {
  CopyResponse response;
  response.header = {
      kResponseMagic, kCopied, 0, 0, static_cast<uint32_t>(failed.size()), static_cast<uint32_t>(digests.size()), 9, 0};
  response.failed = std::move(failed);
  response.digests = std::move(digests);
  return response;
}

std::string encoded(const CopyResponse &response) {
  std::string out;
  encode(response, &out);
  return out;
}

Decoded decoded_request(std::string_view bytes) {
  CopyRequest request;
  return decode_request(&bytes, &request);
}
Decoded decoded_response(std::string_view bytes) {
  CopyResponse response;
  return decode_response(&bytes, &response);
}

TEST(ShmFrames, RequestsComeOutAsTheyWentIn) {
  const std::vector<Desc> descs = some_descs(kDescsPerFrameMax);
  std::string bytes = encoded(request_header(kOpen, 0x1234, 0x5678)) + encoded(request_header(kMap, 11)) +
                      encoded(copy_header(MP_WRITE, descs), descs) + encoded(request_header(kUnmap, 11));
  std::string_view rest = bytes;
  CopyRequest request;
  ASSERT_EQ(decode_request(&rest, &request), Decoded::kFrame);
  EXPECT_EQ(request.header.type, kOpen);
  EXPECT_EQ(request.header.id, 0x1234u);
  EXPECT_EQ(request.header.bytes, 0x5678u);
  ASSERT_EQ(decode_request(&rest, &request), Decoded::kFrame);
  EXPECT_EQ(request.header.type, kMap);
  EXPECT_EQ(request.header.id, 11u);
  ASSERT_EQ(decode_request(&rest, &request), Decoded::kFrame);
  EXPECT_EQ(request.header.op, MP_WRITE);
  ASSERT_EQ(request.descs.size(), descs.size());
  EXPECT_EQ(std::memcmp(request.descs.data(), descs.data(), descs.size() * sizeof(Desc)), 0);
  ASSERT_EQ(decode_request(&rest, &request), Decoded::kFrame);
  EXPECT_EQ(request.header.type, kUnmap);
  EXPECT_TRUE(request.descs.empty()) << "left over from the frame before";
  EXPECT_TRUE(rest.empty());
  EXPECT_EQ(decode_request(&rest, &request), Decoded::kMore);
}

TEST(ShmFrames, ResponsesComeOutAsTheyWentIn) {
  const CopyResponse sent = copied({{0, MP_OUT_OF_RANGE}, {4, MP_REGION_UNKNOWN}, {999, MP_INTERNAL}}, {0, 1, 2, 3, 0});
  CopyResponse opened;
  opened.header = {kResponseMagic, kOpened, MP_TRANSPORT_UNAVAILABLE, 0, 0, EPERM, 0, 0};
  CopyResponse readable;
  readable.header = {kResponseMagic, kReadable, MP_OK, 0, 0, 3, 8, 4096};
  readable.address = 0x7000'0000'1234;
  const std::string bytes = encoded(opened) + encoded(sent) + encoded(readable) + encoded(copied({}, {}));
  std::string_view rest = bytes;
  CopyResponse response;
  ASSERT_EQ(decode_response(&rest, &response), Decoded::kFrame);
  EXPECT_EQ(response.header.status, MP_TRANSPORT_UNAVAILABLE);
  EXPECT_EQ(response.header.value, static_cast<uint32_t>(EPERM));
  ASSERT_EQ(decode_response(&rest, &response), Decoded::kFrame);
  EXPECT_EQ(response.header.id, 9u);
  ASSERT_EQ(response.failed.size(), 3u);
  EXPECT_EQ(response.failed[2].desc, 999u);
  EXPECT_EQ(response.digests, sent.digests);
  ASSERT_EQ(decode_response(&rest, &response), Decoded::kFrame);
  EXPECT_EQ(response.address, readable.address);
  EXPECT_EQ(response.header.bytes, 4096u);
  ASSERT_EQ(decode_response(&rest, &response), Decoded::kFrame);
  EXPECT_EQ(response.address, 0u) << "left over from the frame before";
  EXPECT_TRUE(response.failed.empty());
  EXPECT_TRUE(response.digests.empty());
  EXPECT_TRUE(rest.empty());
}

TEST(ShmFrames, EveryPartOfAFrameWaitsForMoreAndTakesNothing) {
  const std::vector<Desc> descs = some_descs(3);
  const std::string request = encoded(copy_header(MP_READ, descs), descs);
  for (size_t n = 0; n < request.size(); ++n) {
    std::string_view part(request.data(), n);
    CopyRequest out;
    EXPECT_EQ(decode_request(&part, &out), Decoded::kMore) << n;
    EXPECT_EQ(part.size(), n);
  }
  const std::string response = encoded(copied({{1, MP_SYSTEM}}, {5, 0, 7}));
  for (size_t n = 0; n < response.size(); ++n) {
    std::string_view part(response.data(), n);
    CopyResponse out;
    EXPECT_EQ(decode_response(&part, &out), Decoded::kMore) << n;
    EXPECT_EQ(part.size(), n);
  }
}

TEST(ShmFrames, MalformedRequestsAreRefused) {
  const std::vector<Desc> descs = some_descs(2);
  const RequestHeader good = copy_header(MP_READ, descs);
  ASSERT_EQ(decoded_request(encoded(good, descs)), Decoded::kFrame);
  const std::map<std::string, std::function<void(RequestHeader &)>> changes = {
      {"magic", [](RequestHeader &h) { h.magic ^= 1; }},
      {"magic of a response", [](RequestHeader &h) { h.magic = kResponseMagic; }},
      {"type 0", [](RequestHeader &h) { h.type = 0; }},
      {"type beyond the last", [](RequestHeader &h) { h.type = kCopy + 1; }},
      {"descriptors of a frame that has none", [](RequestHeader &h) { h.type = kMap; }},
      {"no op", [](RequestHeader &h) { h.op = 0; }},
      {"unknown op", [](RequestHeader &h) { h.op = 3; }},
      {"unknown flag", [](RequestHeader &h) { h.flags = 2; }},
      {"no descriptors", [](RequestHeader &h) { h.count = 0; }},
      {"too many descriptors", [](RequestHeader &h) { h.count = kDescsPerFrameMax + 1; }},
      {"very many descriptors", [](RequestHeader &h) { h.count = UINT32_MAX; }},
      {"too many bytes", [](RequestHeader &h) { h.bytes = kBytesPerFrameMax + 1; }},
      {"another sum", [](RequestHeader &h) { --h.bytes; }},
  };
  for (const auto &[what, change] : changes) {
    RequestHeader header = good;
    change(header);
    // Two descriptors follow whatever the header says.
    std::string bytes(reinterpret_cast<const char *>(&header), sizeof header);
    bytes.append(reinterpret_cast<const char *>(descs.data()), descs.size() * sizeof(Desc));
    EXPECT_EQ(decoded_request(bytes), Decoded::kBad) << what;
  }
}

TEST(ShmFrames, LengthsThatWrapRoundToTheSumAreRefused) {
  std::vector<Desc> descs = {{1, 0, UINT64_MAX, 0}, {1, 0, 101, 0}};
  EXPECT_EQ(decoded_request(encoded(copy_header(MP_READ, descs), descs)), Decoded::kBad);
  descs = {{1, 0, uint64_t{1} << 63, 0}, {1, 0, uint64_t{1} << 63, 0}, {1, 0, 5, 0}};
  EXPECT_EQ(decoded_request(encoded(copy_header(MP_WRITE, descs), descs)), Decoded::kBad);
}

TEST(ShmFrames, WithDigestsADescriptorIsAtMostALeaf) {
  std::vector<Desc> descs = {{1, 0, MP_DIGEST_LEAF_BYTES, 0}};
  EXPECT_EQ(decoded_request(encoded(copy_header(MP_READ, descs, wire::kFlagDigest), descs)), Decoded::kFrame);
  ++descs[0].length;
  EXPECT_EQ(decoded_request(encoded(copy_header(MP_READ, descs, wire::kFlagDigest), descs)), Decoded::kBad);
  EXPECT_EQ(decoded_request(encoded(copy_header(MP_READ, descs), descs)), Decoded::kFrame);
}

TEST(ShmFrames, MalformedResponsesAreRefused) {
  const CopyResponse good = copied({{1, MP_SYSTEM}, {3, MP_OUT_OF_RANGE}}, {1, 2});
  ASSERT_EQ(decoded_response(encoded(good)), Decoded::kFrame);
  const std::map<std::string, std::function<void(CopyResponse &)>> changes = {
      {"magic", [](CopyResponse &r) { r.header.magic = kRequestMagic; }},
      {"type 0", [](CopyResponse &r) { r.header.type = 0; }},
      {"type beyond the last", [](CopyResponse &r) { r.header.type = kReadable + 1; }},
      {"unknown status", [](CopyResponse &r) { r.header.status = kLastStatus + 1; }},
      {"failures of a frame that has none", [](CopyResponse &r) { r.header.type = kMapped; }},
      {"too many failures", [](CopyResponse &r) { r.header.count = kDescsPerFrameMax + 1; }},
      {"too many digests", [](CopyResponse &r) { r.header.value = kDescsPerFrameMax + 1; }},
      {"a failure twice", [](CopyResponse &r) { r.failed[1].desc = 1; }},
      {"failures out of order", [](CopyResponse &r) { r.failed[1].desc = 0; }},
      {"a failure that is none", [](CopyResponse &r) { r.failed[0].status = MP_OK; }},
      {"a failure that is not over", [](CopyResponse &r) { r.failed[0].status = MP_PENDING; }},
      {"an unknown failure", [](CopyResponse &r) { r.failed[1].status = kLastStatus + 1; }},
  };
  for (const auto &[what, change] : changes) {
    CopyResponse response = good;
    change(response);
    EXPECT_EQ(decoded_response(encoded(response)), Decoded::kBad) << what;
  }
}

// Whatever the bytes: an answer, nothing read outside, and what was taken is a frame.
TEST(ShmFrames, RandomChangesOfGoodFrames) {
  std::mt19937 random(1);
  const std::vector<Desc> descs = some_descs(5);
  const std::string request = encoded(copy_header(MP_READ, descs), descs);
  const std::string response = encoded(copied({{1, MP_SYSTEM}}, {1, 2, 3}));
  int frames = 0;
  for (int round = 0; round < 40000; ++round) {
    std::string bytes = round % 2 == 0 ? request : response;
    for (size_t flips = 1 + random() % 4; flips > 0; --flips) {
      bytes[random() % bytes.size()] ^= static_cast<char>(1u << (random() % 8));
    }
    bytes.resize(random() % (bytes.size() + 1));
    // On the heap and of this length, so that the sanitizer sees a read beyond it.
    const std::vector<char> exact(bytes.begin(), bytes.end());
    std::string_view rest(exact.data(), exact.size());
    const size_t had = rest.size();
    CopyRequest asked;
    CopyResponse answered;
    const Decoded decoded = round % 2 == 0 ? decode_request(&rest, &asked) : decode_response(&rest, &answered);
    if (decoded != Decoded::kFrame) {
      EXPECT_TRUE(decoded == Decoded::kBad || rest.size() == had);
      continue;
    }
    ++frames;
    EXPECT_EQ(had - rest.size(), round % 2 == 0
                                     ? sizeof(RequestHeader) + asked.descs.size() * sizeof(Desc)
                                     : sizeof(ResponseHeader) + answered.failed.size() * sizeof(wire::FailedDesc) +
                                           answered.digests.size() * sizeof(uint64_t));
  }
  EXPECT_GT(frames, 0) << "some changes leave a good frame";
}

// ---------------------------------------------------------------- who shares a host with whom

HostIdentity somebody() { return {"boot", 1000, 1, 2, 3, "moonpool-socket"}; }

TEST(HostIdentity, ComesOutAsItWentIn) {
  const std::string blob = encode_identity(somebody());
  HostIdentity out;
  ASSERT_TRUE(decode_identity(blob, &out));
  EXPECT_EQ(why_apart(somebody(), out), "");
  EXPECT_EQ(out.boot_id, "boot");
  EXPECT_EQ(out.uid, 1000u);
  EXPECT_EQ(out.pid_namespace, 1u);
  EXPECT_EQ(out.user_namespace, 2u);
  EXPECT_EQ(out.net_namespace, 3u);
  EXPECT_EQ(out.socket, "moonpool-socket");
}

TEST(HostIdentity, PartsAndSurplusAreRefused) {
  const std::string blob = encode_identity(somebody());
  HostIdentity out;
  for (size_t n = 0; n < blob.size(); ++n) EXPECT_FALSE(decode_identity(std::string_view(blob).substr(0, n), &out));
  EXPECT_FALSE(decode_identity(blob + "x", &out));
  HostIdentity talkative = somebody();
  talkative.socket = std::string(101, 's');
  EXPECT_FALSE(decode_identity(encode_identity(talkative), &out)) << "no name of a Unix socket";
  talkative = somebody();
  talkative.boot_id = std::string(65, 'b');
  EXPECT_FALSE(decode_identity(encode_identity(talkative), &out));
}

TEST(HostIdentity, EachDifferenceIsNamed) {
  const std::map<std::string, std::function<void(HostIdentity &)>> differences = {
      {"another host", [](HostIdentity &i) { i.boot_id = "other"; }},
      {"which host", [](HostIdentity &i) { i.boot_id.clear(); }},
      {"another user (1001, this process as 1000)", [](HostIdentity &i) { i.uid = 1001; }},
      {"PID namespace", [](HostIdentity &i) { ++i.pid_namespace; }},
      {"user namespace", [](HostIdentity &i) { ++i.user_namespace; }},
      {"network namespace", [](HostIdentity &i) { ++i.net_namespace; }},
      {"Unix socket", [](HostIdentity &i) { i.socket.clear(); }},
  };
  for (const auto &[words, change] : differences) {
    HostIdentity theirs = somebody();
    change(theirs);
    EXPECT_NE(why_apart(somebody(), theirs).find(words), std::string::npos) << why_apart(somebody(), theirs);
  }
  // One that only reads and writes needs no socket.
  HostIdentity silent = somebody();
  silent.socket.clear();
  EXPECT_EQ(why_apart(silent, somebody()), "");
}

TEST(HostIdentity, OfThisProcessIsComplete) {
  const HostIdentity here = HostIdentity::of_this_process();
  EXPECT_NE(here.boot_id, "");
  EXPECT_EQ(here.uid, geteuid());
  EXPECT_NE(here.pid_namespace, 0u);
  EXPECT_NE(here.user_namespace, 0u);
  EXPECT_NE(here.net_namespace, 0u);
  EXPECT_EQ(here.socket, "");
}

}  // namespace
}  // namespace moonpool::shm
