// SPDX-License-Identifier: Apache-2.0
#include "shm_frames.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <fstream>

#include "status.hpp"

namespace moonpool::shm {

namespace {

template <class T>
void append(std::string *out, const T *items, size_t count) {
  if (count > 0) out->append(reinterpret_cast<const char *>(items), count * sizeof *items);
}

template <class T>
void take(std::string_view *in, T *items, size_t count) {
  if (count > 0) std::memcpy(items, in->data(), count * sizeof *items);
  in->remove_prefix(count * sizeof *items);
}

bool well_formed(const RequestHeader &header) {
  if (header.magic != kRequestMagic || header.type < kOpen || header.type > kCopy) return false;
  if (header.type != kCopy) return header.count == 0;
  return (header.op == MP_READ || header.op == MP_WRITE) && (header.flags & ~wire::kFlagDigest) == 0 &&
         header.count >= 1 && header.count <= kDescsPerFrameMax && header.bytes <= kBytesPerFrameMax;
}

bool well_formed(const CopyRequest &request) {
  uint64_t sum = 0;
  for (const Desc &desc : request.descs) {
    if (desc.length > kBytesPerFrameMax) return false;
    if ((request.header.flags & wire::kFlagDigest) != 0 && desc.length > MP_DIGEST_LEAF_BYTES) return false;
    sum += desc.length;
  }
  return request.header.type != kCopy || sum == request.header.bytes;
}

bool well_formed(const ResponseHeader &header) {
  if (header.magic != kResponseMagic || header.type < kOpened || header.type > kReadable) return false;
  if (header.status > kLastStatus) return false;
  if (header.type != kCopied) return header.count == 0;
  return header.count <= kDescsPerFrameMax && header.value <= kDescsPerFrameMax;
}

uint64_t namespace_id(const char *name) {
  struct stat status{};
  const std::string path = std::string("/proc/self/ns/") + name;
  return stat(path.c_str(), &status) == 0 ? status.st_ino : 0;
}

}  // namespace

RequestHeader request_header(Request type, uint64_t id, uint64_t bytes) {
  return {kRequestMagic, type, 0, 0, 0, 0, 0, id, bytes};
}

Decoded decode_request(std::string_view *in, CopyRequest *out) {
  RequestHeader &header = out->header;
  if (in->size() < sizeof header) return Decoded::kMore;
  std::memcpy(&header, in->data(), sizeof header);
  if (!well_formed(header)) return Decoded::kBad;
  if (in->size() - sizeof header < header.count * sizeof(Desc)) return Decoded::kMore;
  in->remove_prefix(sizeof header);
  out->descs.resize(header.count);
  take(in, out->descs.data(), header.count);
  return well_formed(*out) ? Decoded::kFrame : Decoded::kBad;
}

Decoded decode_response(std::string_view *in, CopyResponse *out) {
  ResponseHeader &header = out->header;
  if (in->size() < sizeof header) return Decoded::kMore;
  std::memcpy(&header, in->data(), sizeof header);
  if (!well_formed(header)) return Decoded::kBad;
  const bool copied = header.type == kCopied;
  const size_t failed = copied ? header.count : 0, digests = copied ? header.value : 0;
  const size_t addresses = header.type == kReadable ? 1 : 0;
  if (in->size() - sizeof header < failed * sizeof(wire::FailedDesc) + (digests + addresses) * sizeof(uint64_t)) {
    return Decoded::kMore;
  }
  in->remove_prefix(sizeof header);
  out->failed.resize(failed);
  take(in, out->failed.data(), failed);
  out->digests.resize(digests);
  take(in, out->digests.data(), digests);
  out->address = 0;
  take(in, &out->address, addresses);
  for (size_t i = 0; i < failed; ++i) {
    const wire::FailedDesc &one = out->failed[i];
    const bool ordered = i == 0 || one.desc > out->failed[i - 1].desc;
    if (!ordered || one.status <= MP_PENDING || one.status > kLastStatus) return Decoded::kBad;
  }
  return Decoded::kFrame;
}

void encode(const RequestHeader &header, const Desc *descs, std::string *out) {
  append(out, &header, 1);
  append(out, descs, header.count);
}

void encode(const CopyResponse &response, std::string *out) {
  append(out, &response.header, 1);
  append(out, response.failed.data(), response.failed.size());
  append(out, response.digests.data(), response.digests.size());
  if (response.header.type == kReadable) append(out, &response.address, 1);
}

HostIdentity HostIdentity::of_this_process() {
  HostIdentity identity;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> identity.boot_id;
  identity.uid = geteuid();
  identity.pid_namespace = namespace_id("pid");
  identity.user_namespace = namespace_id("user");
  identity.net_namespace = namespace_id("net");
  return identity;
}

std::string encode_identity(const HostIdentity &identity) {
  std::string blob;
  wire::Writer writer(&blob);
  writer.put_bytes(identity.boot_id);
  writer.put(identity.uid);
  writer.put(identity.pid_namespace);
  writer.put(identity.user_namespace);
  writer.put(identity.net_namespace);
  writer.put_bytes(identity.socket);
  return blob;
}

bool decode_identity(std::string_view blob, HostIdentity *out) {
  wire::Reader reader(blob);
  std::string_view boot_id, socket;
  if (!reader.get_bytes(&boot_id, 64) || !reader.get(&out->uid) || !reader.get(&out->pid_namespace) ||
      !reader.get(&out->user_namespace) || !reader.get(&out->net_namespace) || !reader.get_bytes(&socket, 100) ||
      !reader.done()) {
    return false;
  }
  out->boot_id = boot_id;
  out->socket = socket;
  return true;
}

std::string why_apart(const HostIdentity &ours, const HostIdentity &theirs) {
  if (ours.boot_id.empty() || theirs.boot_id.empty()) return "a side cannot tell which host it is on";
  if (ours.boot_id != theirs.boot_id) return "the peer is on another host";
  if (ours.net_namespace != theirs.net_namespace) return "the peer is in another container (network namespace)";
  if (ours.user_namespace != theirs.user_namespace) return "the peer is in another container (user namespace)";
  if (ours.pid_namespace != theirs.pid_namespace) return "the peer is in another container (PID namespace)";
  if (ours.uid != theirs.uid) {
    return "the peer runs as another user (" + std::to_string(theirs.uid) + ", this process as " +
           std::to_string(ours.uid) + ")";
  }
  if (theirs.socket.empty()) return "the peer could not open a Unix socket";
  return {};
}

}  // namespace moonpool::shm
