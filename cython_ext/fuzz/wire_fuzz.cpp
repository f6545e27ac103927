// SPDX-License-Identifier: Apache-2.0
//
// The decoders of control bodies and the checks of frame headers: what is taken is within the bounds, and encodes to
// the same bytes again.
#include "script.hpp"
#include "seeds.hpp"
#include "wire.hpp"
#include "world.hpp"

using namespace moonpool;
using namespace moonpool::fuzz;

namespace {

void check_regions(std::string_view body) {
  std::vector<wire::RegionRecord> regions;
  if (!wire::decode_regions(body, &regions)) return;
  std::string again;
  wire::Writer writer(&again);
  for (const wire::RegionRecord &region : regions) {
    FUZZ_CHECK(region.name.size() <= wire::kRegionNameMax);
    wire::encode_region(writer, region);
  }
  FUZZ_CHECK(again == body);
}

void check_notify(std::string_view body) {
  wire::Notify notify;
  if (!wire::decode_notify(body, &notify)) return;
  FUZZ_CHECK(notify.marks.size() <= wire::kNotifyMarksMax && notify.payload.size() <= wire::kNotifyBytesMax);
  std::string again;
  wire::Writer writer(&again);
  wire::encode_notify(writer, notify);
  FUZZ_CHECK(again == body);
}

void check_offers(std::string_view body) {
  std::vector<wire::Offer> offers;
  if (!wire::decode_offer(body, &offers)) return;
  std::string again;
  wire::Writer writer(&again);
  for (const wire::Offer &offer : offers) {
    FUZZ_CHECK(offer.transport.size() < 16 && offer.blob.size() <= wire::kOfferBytesMax);
    wire::encode_offer(writer, offer);
  }
  FUZZ_CHECK(again == body);
}

template <class T>
bool read(std::string_view body, T *out) {
  wire::Reader reader(body);
  return reader.get(out);
}

void check_headers(std::string_view body) {
  wire::RequestHead head;
  if (read(body, &head) && *wire::check_request(head) == '\0') {
    FUZZ_CHECK(head.header.op == MP_READ || head.header.op == MP_WRITE);
    FUZZ_CHECK(head.header.desc_count >= 1 && head.header.desc_count <= wire::kDescsPerFrameMax);
    FUZZ_CHECK(head.header.payload_bytes <= wire::kPayloadPerFrameMax);
  }
  wire::ResponseHeader header;
  if (read(body, &header) && *wire::check_response(header) == '\0') {
    FUZZ_CHECK(header.failed_count <= wire::kDescsPerFrameMax && header.payload_bytes <= wire::kPayloadPerFrameMax);
  }
  wire::Hello hello;
  if (read(body, &hello)) {
    const std::string name = wire::get_text(hello.name);
    char copy[sizeof hello.name];
    wire::set_text(copy, name);
    FUZZ_CHECK(name.size() == sizeof hello.name || wire::get_text(copy) == name);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  Source source(data, size);
  const auto which = source.get<uint8_t>();
  const std::string_view body = source.rest();
  switch (which % 3) {
    case 0:
      check_regions(body);
      check_notify(body);
      break;
    case 1:
      check_offers(body);
      break;
    default:
      check_headers(body);
  }
  return 0;
}

Seeds fuzz::seeds() {
  std::string regions(1, 0), offers(1, 1), request(1, 2), response(1, 2), hello(1, 2);
  wire::Writer region_writer(&regions), offer_writer(&offers);
  wire::encode_region(region_writer, {1, 2, 3, MP_REGION_WRITABLE, "layer 0"});
  wire::encode_region(region_writer, {4, UINT64_MAX, 5, 0, std::string(wire::kRegionNameMax, 'n')});
  wire::encode_offer(offer_writer, {"tcp", ""});
  wire::encode_offer(offer_writer, {"fifteen letters", std::string(wire::kOfferBytesMax, 'b')});
  wire::Writer(&request).put(
      wire::RequestHead{{wire::kRequestMagic, MP_READ, wire::kFlagDigest, 0, 1, 0, 1, 8}, {1, 0, 8}});
  wire::Writer(&response).put(wire::ResponseHeader{wire::kResponseMagic, 0, {}, 1, 0, 1, 8});
  wire::Hello one{};
  wire::set_text(one.name, std::string(63, 'x'));
  wire::Writer(&hello).put(one);
  return Seeds()
      .add("regions", regions)
      .add("offers", offers)
      .add("request", request)
      .add("response", response)
      .add("hello", hello);
}
