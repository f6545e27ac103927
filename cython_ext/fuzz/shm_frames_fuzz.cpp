// SPDX-License-Identifier: Apache-2.0
//
// Frames on the Unix socket of a same-host connection, and the identity that says whether two engines share a host:
// what is taken is within the bounds and encodes to the same bytes again; a frame that is cut anywhere is waited for.
#include "script.hpp"
#include "seeds.hpp"
#include "shm_frames.hpp"
#include "world.hpp"

using namespace moonpool;
using namespace moonpool::fuzz;
using shm::Decoded;

namespace {

void check(const shm::CopyRequest &request) {
  const shm::RequestHeader &header = request.header;
  FUZZ_CHECK(header.type >= shm::kOpen && header.type <= shm::kCopy);
  FUZZ_CHECK(request.descs.size() == header.count && header.count <= shm::kDescsPerFrameMax);
  if (header.type != shm::kCopy) return;
  unsigned __int128 sum = 0;
  for (const shm::Desc &desc : request.descs) {
    FUZZ_CHECK((header.flags & wire::kFlagDigest) == 0 || desc.length <= MP_DIGEST_LEAF_BYTES);
    sum += desc.length;
  }
  FUZZ_CHECK(sum == header.bytes && header.bytes <= shm::kBytesPerFrameMax);
  FUZZ_CHECK(header.op == MP_READ || header.op == MP_WRITE);
}

void check(const shm::CopyResponse &response) {
  FUZZ_CHECK(response.header.status <= kLastStatus);
  FUZZ_CHECK(response.failed.size() <= shm::kDescsPerFrameMax && response.digests.size() <= shm::kDescsPerFrameMax);
  for (size_t i = 0; i < response.failed.size(); ++i) {
    FUZZ_CHECK(i == 0 || response.failed[i].desc > response.failed[i - 1].desc);
  }
}

std::string encoded(const shm::CopyRequest &request) {
  std::string out;
  shm::encode(request.header, request.descs.data(), &out);
  return out;
}

std::string encoded(const shm::CopyResponse &response) {
  std::string out;
  shm::encode(response, &out);
  return out;
}

// Decodes frame after frame, each also with less than all of it.
template <class Frame>
void check_stream(std::string_view in, Decoded (*decode)(std::string_view *, Frame *), size_t cut) {
  for (;;) {
    const std::string_view before = in;
    Frame frame;
    if (decode(&in, &frame) != Decoded::kFrame) return;
    check(frame);
    const std::string_view taken = before.substr(0, before.size() - in.size());
    FUZZ_CHECK(encoded(frame) == taken);
    std::string_view part = taken.substr(0, cut % taken.size());
    const std::string_view all_of_it = part;
    FUZZ_CHECK(decode(&part, &frame) == Decoded::kMore && part.data() == all_of_it.data());
  }
}

void check_identity(std::string_view blob) {
  shm::HostIdentity identity;
  if (!shm::decode_identity(blob, &identity)) return;
  FUZZ_CHECK(shm::encode_identity(identity) == blob);
  shm::HostIdentity other = identity;
  const bool reachable = !identity.socket.empty() && !identity.boot_id.empty();
  FUZZ_CHECK(shm::why_apart(identity, other).empty() == reachable);
  other.boot_id += "x";
  FUZZ_CHECK(!shm::why_apart(identity, other).empty());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  Source source(data, size);
  const auto which = source.get<uint8_t>();
  const auto cut = source.get<uint16_t>();
  switch (which % 3) {
    case 0:
      check_stream<shm::CopyRequest>(source.rest(), shm::decode_request, cut);
      break;
    case 1:
      check_stream<shm::CopyResponse>(source.rest(), shm::decode_response, cut);
      break;
    default:
      check_identity(source.rest());
  }
  return 0;
}

Seeds fuzz::seeds() {
  std::string requests("\0\x21\0", 3), responses("\1\x21\0", 3), identities("\2\0\0", 3);
  const auto request = [&](shm::RequestHeader header, const std::vector<shm::Desc> &descs) {
    header.count = static_cast<uint32_t>(descs.size());
    for (const shm::Desc &desc : descs) header.bytes += desc.length;
    shm::encode(header, descs.data(), &requests);
  };
  request(shm::request_header(shm::kOpen, 4096, 8), {});
  request(shm::request_header(shm::kMap, 7), {});
  shm::RequestHeader copy = shm::request_header(shm::kCopy, 3);
  copy.op = MP_WRITE;
  copy.flags = wire::kFlagDigest;
  request(copy, {{7, 0, 100, 4096}, {8, 4096, MP_DIGEST_LEAF_BYTES, 8192}});
  request(shm::request_header(shm::kUnmap, 7), {});
  shm::encode({{shm::kResponseMagic, shm::kOpened, MP_OK, 0, 0, 0, 0, 0}, {}, {}}, &responses);
  shm::encode({{shm::kResponseMagic, shm::kMapped, MP_OK, 0, 0, 2, 7, 4096}, {}, {}}, &responses);
  shm::encode({{shm::kResponseMagic, shm::kReadable, MP_OK, 0, 0, 3, 8, 4096}, {}, {}, 8192}, &responses);
  shm::encode({{shm::kResponseMagic, shm::kCopied, MP_OK, 0, 2, 3, 3, 0},
               {{0, MP_OUT_OF_RANGE}, {2, MP_REGION_RELEASED}},
               {0, 77, 0}},
              &responses);
  shm::HostIdentity identity;
  identity.boot_id = "a boot";
  identity.socket = "moonpool-0123";
  identity.uid = 1000;
  identities += shm::encode_identity(identity);
  return Seeds().add("requests", requests).add("responses", responses).add("identity", identities);
}
