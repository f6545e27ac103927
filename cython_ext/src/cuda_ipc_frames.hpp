// SPDX-License-Identifier: Apache-2.0
// What travels over the Unix socket of a cuda_ipc connection, after the handshake. Payload does not.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "cuda_driver.hpp"
#include "wire.hpp"

namespace moonpool::cuda_ipc {

constexpr uint32_t kRequestMagic = 0x5143504d;   // "MPCQ"
constexpr uint32_t kResponseMagic = 0x5243504d;  // "MPCR"
// Allocations that a region may be made of: 80 GiB of torch's expandable segments.
constexpr uint32_t kPartsMax = 4096;
constexpr size_t kReasonMax = 400;

enum RequestType : uint8_t {
  kFind = 1,  // how the region is reached
  kPart = 2,  // part `part` of a region that is made of several
  kDrop = 3,  // the client has unmapped it. Has no response
};

struct Request {
  uint32_t magic;
  uint8_t type;  // RequestType
  uint8_t reserved[3];
  uint32_t part;
  uint32_t reserved2;
  uint64_t key;  // of a region
};
static_assert(sizeof(Request) == 24);
Request make_request(RequestType type, uint64_t key, uint32_t part = 0);

enum ResponseType : uint8_t {
  kTable = 1,   // first, unasked: with the descriptor of the UseTable. `value` 1: the client may write
  kFound = 2,   // Found, or why not
  kPartIs = 3,  // with the part's descriptor: `bytes` long. Or why not
};

struct ResponseHeader {
  uint32_t magic;
  uint8_t type;    // ResponseType
  uint8_t status;  // mp_status; the reason follows anything but MP_OK
  uint16_t reason_bytes;
  uint32_t value;  // kFound: slot in the table. kPartIs: its number
  uint32_t reserved;
  uint64_t key;
  uint64_t bytes;
};
static_assert(sizeof(ResponseHeader) == 32);

// How a region is reached from another process of its host.
struct Found {
  uint64_t length;      // of the region
  uint64_t generation;  // of the region
  uint64_t offset;      // of the region in its allocation, or in its first part
  uint32_t parts;       // 0: one allocation with a handle; otherwise so many that come as descriptors
  uint32_t writable;
  cuda::Uuid device;
  cuda::IpcHandle handle;
};
static_assert(sizeof(Found) == 112);

struct Response {
  ResponseHeader header{};
  Found found{};
  std::string reason;
};

enum class Decoded { kFrame, kMore, kBad };

// Take one frame off the front of `in`. kMore: it is not all there yet; kBad: it is no frame of this protocol.
Decoded decode(std::string_view *in, Request *out);
Decoded decode(std::string_view *in, Response *out);
void encode(const Request &request, std::string *out);
void encode(const Response &response, std::string *out);

}  // namespace moonpool::cuda_ipc
