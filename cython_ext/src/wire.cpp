// SPDX-License-Identifier: Apache-2.0
#include "wire.hpp"

namespace moonpool::wire {

const char *check_request(const RequestHead &head) {
  const RequestHeader &h = head.header;
  if (h.magic != kRequestMagic) return "a request that does not begin with its magic";
  if (h.op != MP_READ && h.op != MP_WRITE) return "a request with an unknown operation";
  if ((h.flags & ~kFlagDigest) != 0) return "a request with unknown flags";
  if (h.desc_count == 0 || h.desc_count > kDescsPerFrameMax) return "a request with an impossible descriptor count";
  if (h.payload_bytes > kPayloadPerFrameMax) return "a request with an impossible payload";
  return "";
}

const char *check_response(const ResponseHeader &h) {
  if (h.magic != kResponseMagic) return "a response that does not begin with its magic";
  if (h.failed_count > kDescsPerFrameMax) return "a response with an impossible failure count";
  if (h.payload_bytes > kPayloadPerFrameMax) return "a response with an impossible payload";
  return "";
}

void append_message(std::string *out, Message type, std::string_view body) {
  const MessageHeader header{static_cast<uint32_t>(body.size()), type, 0};
  out->append(reinterpret_cast<const char *>(&header), sizeof header);
  out->append(body);
}

void encode_region(Writer &writer, const RegionRecord &region) {
  writer.put(region.key);
  writer.put(region.length);
  writer.put(region.generation);
  writer.put(region.flags);
  writer.put_bytes(region.name);
}

void encode_notify(Writer &writer, const Notify &notify) {
  writer.put(notify.id);
  writer.put(static_cast<uint32_t>(notify.marks.size()));
  for (const Mark &mark : notify.marks) writer.put(mark);
  writer.put_bytes(notify.payload);
}

bool decode_notify(std::string_view body, Notify *notify) {
  Reader reader(body);
  uint32_t count = 0;
  if (!reader.get(&notify->id) || !reader.get(&count) || count > kNotifyMarksMax) return false;
  notify->marks.resize(count);
  for (Mark &mark : notify->marks) {
    if (!reader.get(&mark) || mark.reserved != 0) return false;
  }
  return reader.get_bytes(&notify->payload, kNotifyBytesMax) && reader.done();
}

bool decode_regions(std::string_view body, std::vector<RegionRecord> *out) {
  Reader reader(body);
  while (!reader.done()) {
    RegionRecord region;
    std::string_view name;
    if (!reader.get(&region.key) || !reader.get(&region.length) || !reader.get(&region.generation) ||
        !reader.get(&region.flags) || !reader.get_bytes(&name, kRegionNameMax)) {
      return false;
    }
    region.name = name;
    out->push_back(std::move(region));
  }
  return true;
}

void encode_offer(Writer &writer, const Offer &offer) {
  writer.put_bytes(offer.transport);
  writer.put_bytes(offer.blob);
}

bool decode_offer(std::string_view body, std::vector<Offer> *offers) {
  Reader reader(body);
  while (!reader.done()) {
    std::string_view name, blob;
    if (!reader.get_bytes(&name, 15) || !reader.get_bytes(&blob, kOfferBytesMax)) return false;
    offers->push_back({std::string(name), std::string(blob)});
  }
  return true;
}

}  // namespace moonpool::wire
