// SPDX-License-Identifier: Apache-2.0
#include "cuda_ipc_frames.hpp"

#include <cstring>

namespace moonpool::cuda_ipc {

namespace {

template <class T>
void append(std::string *out, const T &item) {
  out->append(reinterpret_cast<const char *>(&item), sizeof item);
}

template <class T>
void take(std::string_view *in, T *item) {
  std::memcpy(item, in->data(), sizeof *item);
  in->remove_prefix(sizeof *item);
}

bool well_formed(const ResponseHeader &header) {
  if (header.magic != kResponseMagic || header.type < kTable || header.type > kPartIs) return false;
  if (header.status == MP_PENDING || header.status > kLastStatus) return false;
  return header.status == MP_OK ? header.reason_bytes == 0 : header.reason_bytes <= kReasonMax;
}

bool has_found(const ResponseHeader &header) { return header.type == kFound && header.status == MP_OK; }

bool well_formed(const Found &found) {
  return found.length > 0 && found.offset <= UINT64_MAX - found.length && found.parts <= kPartsMax &&
         found.writable <= 1;
}

}  // namespace

Request make_request(RequestType type, uint64_t key, uint32_t part) { return {kRequestMagic, type, {}, part, 0, key}; }

Decoded decode(std::string_view *in, Request *out) {
  if (in->size() < sizeof *out) return Decoded::kMore;
  take(in, out);
  const bool good = out->magic == kRequestMagic && out->type >= kFind && out->type <= kDrop && out->part < kPartsMax;
  return good ? Decoded::kFrame : Decoded::kBad;
}

Decoded decode(std::string_view *in, Response *out) {
  ResponseHeader &header = out->header;
  if (in->size() < sizeof header) return Decoded::kMore;
  std::memcpy(&header, in->data(), sizeof header);
  if (!well_formed(header)) return Decoded::kBad;
  const size_t body = has_found(header) ? sizeof(Found) : header.reason_bytes;
  if (in->size() < sizeof header + body) return Decoded::kMore;
  in->remove_prefix(sizeof header);
  out->reason = in->substr(0, header.reason_bytes);
  in->remove_prefix(header.reason_bytes);
  if (!has_found(header)) return Decoded::kFrame;
  take(in, &out->found);
  return well_formed(out->found) ? Decoded::kFrame : Decoded::kBad;
}

void encode(const Request &request, std::string *out) { append(out, request); }

void encode(const Response &response, std::string *out) {
  ResponseHeader header = response.header;
  const bool good = header.status == MP_OK;
  const std::string reason = good ? "" : response.reason.substr(0, kReasonMax);
  header.magic = kResponseMagic;
  header.reason_bytes = static_cast<uint16_t>(reason.size());
  append(out, header);
  *out += reason;
  if (has_found(header)) append(out, response.found);
}

}  // namespace moonpool::cuda_ipc
