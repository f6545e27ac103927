// SPDX-License-Identifier: Apache-2.0
//
// Frames on the Unix socket of a cuda_ipc connection: what is taken is within the bounds and encodes to the same bytes
// again; a frame that is cut anywhere is waited for.
#include "cuda_ipc_frames.hpp"
#include "script.hpp"
#include "seeds.hpp"
#include "status.hpp"
#include "world.hpp"

using namespace moonpool;
using namespace moonpool::fuzz;
using cuda_ipc::Decoded;

namespace {

void check(const cuda_ipc::Request &request) {
  FUZZ_CHECK(request.type >= cuda_ipc::kFind && request.type <= cuda_ipc::kDrop);
  FUZZ_CHECK(request.part < cuda_ipc::kPartsMax);
}

void check(const cuda_ipc::Response &response) {
  const cuda_ipc::ResponseHeader &header = response.header;
  FUZZ_CHECK(header.type >= cuda_ipc::kTable && header.type <= cuda_ipc::kPartIs && header.status <= kLastStatus);
  FUZZ_CHECK(response.reason.size() <= cuda_ipc::kReasonMax && (header.status != MP_OK || response.reason.empty()));
  if (header.type != cuda_ipc::kFound || header.status != MP_OK) return;
  const cuda_ipc::Found &found = response.found;
  FUZZ_CHECK(found.length > 0 && found.offset + found.length >= found.length);
  FUZZ_CHECK(found.parts <= cuda_ipc::kPartsMax && found.writable <= 1);
}

// Decodes frame after frame, each also with less than all of it.
template <class Frame>
void check_stream(std::string_view in, size_t cut) {
  for (;;) {
    const std::string_view before = in;
    Frame frame;
    if (cuda_ipc::decode(&in, &frame) != Decoded::kFrame) return;
    check(frame);
    const std::string_view taken = before.substr(0, before.size() - in.size());
    std::string again;
    cuda_ipc::encode(frame, &again);
    FUZZ_CHECK(again == taken);
    std::string_view part = taken.substr(0, cut % taken.size());
    const std::string_view all_of_it = part;
    FUZZ_CHECK(cuda_ipc::decode(&part, &frame) == Decoded::kMore && part.data() == all_of_it.data());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  Source source(data, size);
  const auto which = source.get<uint8_t>();
  const auto cut = source.get<uint16_t>();
  if (which % 2 == 0) {
    check_stream<cuda_ipc::Request>(source.rest(), cut);
  } else {
    check_stream<cuda_ipc::Response>(source.rest(), cut);
  }
  return 0;
}

Seeds fuzz::seeds() {
  std::string requests("\0\x21\0", 3), responses("\1\x21\0", 3);
  cuda_ipc::encode(cuda_ipc::make_request(cuda_ipc::kFind, 7), &requests);
  cuda_ipc::encode(cuda_ipc::make_request(cuda_ipc::kPart, 7, 3), &requests);
  cuda_ipc::encode(cuda_ipc::make_request(cuda_ipc::kDrop, 7), &requests);
  cuda_ipc::Response response;
  response.header.type = cuda_ipc::kTable;
  response.header.value = 1;
  cuda_ipc::encode(response, &responses);
  response.header.type = cuda_ipc::kFound;
  response.found.length = 1000;
  response.found.parts = 2;
  cuda_ipc::encode(response, &responses);
  response.header.type = cuda_ipc::kPartIs;
  response.header.bytes = 2u << 20;
  cuda_ipc::encode(response, &responses);
  response.header.status = MP_REGION_RELEASED;
  response.reason = "the region is not there any more";
  cuda_ipc::encode(response, &responses);
  return Seeds().add("requests", requests).add("responses", responses);
}
