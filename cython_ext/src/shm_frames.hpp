// SPDX-License-Identifier: Apache-2.0
// What travels over the Unix socket of a same-host connection, after the handshake. Payload does not.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "wire.hpp"

namespace moonpool::shm {

constexpr uint32_t kRequestMagic = 0x5153504d;   // "MPSQ"
constexpr uint32_t kResponseMagic = 0x5253504d;  // "MPSR"
constexpr uint32_t kDescsPerFrameMax = 1000;     // both sides of a process_vm call take at most 1024 pieces (IOV_MAX)
constexpr uint64_t kBytesPerFrameMax = 64u << 20;

enum Request : uint8_t {
  kOpen = 1,   // first: proves which process this is. `id`: address of 8 bytes here, `bytes`: their content
  kMap = 2,    // `id`: key of a region
  kUnmap = 3,  // `id`: key of a region that the client reaches by itself no more. Has no response
  kCopy = 4,   // descriptors follow; the owner of the regions copies
};

struct RequestHeader {
  uint32_t magic;
  uint8_t type;   // Request
  uint8_t op;     // kCopy: mp_op
  uint8_t flags;  // kCopy: wire::kFlagDigest
  uint8_t reserved;
  uint32_t count;  // kCopy: descriptors
  uint32_t reserved2;
  uint64_t id;
  uint64_t bytes;  // kCopy: sum of the descriptors' lengths
};
static_assert(sizeof(RequestHeader) == 32);

// The client names its own memory, and nothing but its own.
struct Desc {
  uint64_t key;
  uint64_t offset;
  uint64_t length;
  uint64_t address;
};
static_assert(sizeof(Desc) == 32);

enum Response : uint8_t {
  // With the descriptor of the UseTable. `status`: whether the client's memory can be reached; `value`: errno;
  // `id`: address of 8 bytes there, `bytes`: their content
  kOpened = 1,
  kMapped = 2,    // with the region's descriptor when `status` is MP_OK. `value`: slot, `bytes`: length
  kCopied = 3,    // `count` FailedDesc, then `value` digests
  kReadable = 4,  // for kMap, when it cannot be mapped: the region's address follows. `value`: slot, `bytes`: length
};

struct ResponseHeader {
  uint32_t magic;
  uint8_t type;    // Response
  uint8_t status;  // mp_status
  uint16_t reserved;
  uint32_t count;
  uint32_t value;
  uint64_t id;
  uint64_t bytes;
};
static_assert(sizeof(ResponseHeader) == 32);

struct CopyRequest {
  RequestHeader header;
  std::vector<Desc> descs;
};

struct CopyResponse {
  ResponseHeader header;
  std::vector<wire::FailedDesc> failed;  // ordered by desc
  std::vector<uint64_t> digests;         // of every descriptor, 0 for a failed one
  uint64_t address = 0;
};

enum class Decoded { kFrame, kMore, kBad };

// Take one frame off the front of `in`. kMore: it is not all there yet; kBad: it is no frame of this protocol.
Decoded decode_request(std::string_view *in, CopyRequest *out);
Decoded decode_response(std::string_view *in, CopyResponse *out);
void encode(const RequestHeader &header, const Desc *descs, std::string *out);
void encode(const CopyResponse &response, std::string *out);
RequestHeader request_header(Request type, uint64_t id, uint64_t bytes = 0);

// What an engine tells its peers, so that they know whether they share a host with it.
struct HostIdentity {
  std::string boot_id;  // of the kernel
  uint32_t uid = 0;
  uint64_t pid_namespace = 0, user_namespace = 0, net_namespace = 0;
  std::string socket;  // the engine's; its name in the abstract namespace, "" when it has none

  static HostIdentity of_this_process();
};
std::string encode_identity(const HostIdentity &identity);
bool decode_identity(std::string_view blob, HostIdentity *out);
// "" when memory can be shared between the two, otherwise what differs.
std::string why_apart(const HostIdentity &ours, const HostIdentity &theirs);

}  // namespace moonpool::shm
