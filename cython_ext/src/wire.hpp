// SPDX-License-Identifier: Apache-2.0
// The wire protocol: fixed-size handshake structs, framed control messages, lane requests and responses. All integers
// are little-endian. docs/protocol.md describes the exchange.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "moonpool/engine.h"
#include "system.hpp"

namespace moonpool::wire {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "structs go to the wire as they are in memory");

constexpr char kMagic[8] = {'M', 'O', 'O', 'N', 'P', 'O', 'O', 'L'};
constexpr uint16_t kVersion = 2;
constexpr uint16_t kHasSecret = 1;  // Hello.flags, Challenge.flags

// What a handshake or a lane may ask for at most. A peer that asks for more is broken or hostile.
constexpr uint32_t kDescsPerFrameMax = 4096;
constexpr uint64_t kPayloadPerFrameMax = 64u << 20;
constexpr uint32_t kControlMessageMax = 1u << 20;
constexpr uint32_t kNotifyBytesMax = 1u << 16;
constexpr uint32_t kNotifyMarksMax = 1024;
constexpr uint32_t kRegionNameMax = 255;
constexpr uint32_t kOfferBytesMax = 512;

enum Kind : uint16_t { kControl = 1, kLane = 2, kShm = 3, kRdma = 4, kCudaIpc = 5 };

// ---- handshake: Hello ->, <- Challenge, Proof ->, <- Welcome

struct Hello {
  char magic[8];
  uint16_t version;
  uint16_t kind;
  uint16_t flags;
  uint16_t reserved;
  Id128 incarnation;
  uint8_t nonce[32];
  Id128 session;  // control: the client's peer id. lane: the session token of the control connection's Welcome
  uint64_t lane_id;
  char name[64];
};
static_assert(sizeof(Hello) == 152);

struct Challenge {
  char magic[8];
  uint16_t version;
  uint16_t status;  // mp_status; the connection ends after anything but MP_OK
  uint16_t flags;
  uint16_t reserved;
  Id128 incarnation;
  uint8_t nonce[32];
  char message[96];
};
static_assert(sizeof(Challenge) == 160);

struct Proof {
  uint8_t mac[32];
};

struct Welcome {
  uint16_t status;
  uint8_t reserved[6];
  uint8_t mac[32];
  Id128 session;
  char name[64];
  char message[96];
};
static_assert(sizeof(Welcome) == 216);

// ---- control messages

enum Message : uint16_t {
  kOffer = 1,       // server: transports it offers, each with a blob; first message of a session
  kRegions = 2,     // server: regions added
  kRegionGone = 3,  // server: key released
  kSync = 4,        // server: all regions that existed at the handshake have been sent
  kNotify = 5,      // client: id, marks, payload
  kNotifyAck = 6,   // server: id, status
  kFence = 7,       // client: tear down lane_id
  kFenced = 8,      // server: lane_id can write nothing any more
};

// A lane of a transport whose bytes pass no processor marks them, and a notification comes after its marks have.
struct Mark {
  uint64_t lane;
  uint32_t mark;  // how many it has made
  uint32_t reserved;
};
static_assert(sizeof(Mark) == 16);

struct Notify {
  uint64_t id = 0;
  std::vector<Mark> marks;
  std::string_view payload;
};

struct MessageHeader {
  uint32_t bytes;  // of the body
  uint16_t type;
  uint16_t reserved;
};
static_assert(sizeof(MessageHeader) == 8);

// What a peer says about one of its transports. Only that transport understands the blob.
struct Offer {
  std::string transport;
  std::string blob;
};

struct RegionRecord {
  uint64_t key;
  uint64_t length;
  uint64_t generation;
  uint32_t flags;
  std::string name;
};

// ---- lanes

constexpr uint32_t kRequestMagic = 0x5152504d;   // "MPRQ"
constexpr uint32_t kResponseMagic = 0x5352504d;  // "MPRS"
constexpr uint8_t kFlagDigest = 1;

struct RequestHeader {
  uint32_t magic;
  uint8_t op;  // mp_op
  uint8_t flags;
  uint16_t reserved;
  uint32_t desc_count;
  uint32_t reserved2;
  uint64_t id;
  uint64_t payload_bytes;  // sum of the descriptors' lengths
};
static_assert(sizeof(RequestHeader) == 32);

struct WireDesc {
  uint64_t key;
  uint64_t offset;
  uint64_t length;
};
static_assert(sizeof(WireDesc) == 24);

// Every request has at least one descriptor, so header and first descriptor are read together.
struct RequestHead {
  RequestHeader header;
  WireDesc first;
};
static_assert(sizeof(RequestHead) == 56);

// A response carries, in this order: failed_count records of FailedDesc, for a read the payload of the descriptors that
// did not fail, and with kFlagDigest for a read one leaf digest per descriptor (0 for a failed one).
struct ResponseHeader {
  uint32_t magic;
  uint8_t flags;
  uint8_t reserved[3];
  uint32_t failed_count;
  uint32_t reserved2;
  uint64_t id;
  uint64_t payload_bytes;
};
static_assert(sizeof(ResponseHeader) == 32);

struct FailedDesc {
  uint32_t desc;
  uint32_t status;
};

// "" when the head is well-formed, otherwise what is wrong with it.
const char *check_request(const RequestHead &head);
const char *check_response(const ResponseHeader &header);

// ---- encoding of control bodies

class Writer {
 public:
  explicit Writer(std::string *out) : out_(out) {}
  template <class T>
  void put(const T &value) {
    static_assert(std::is_trivially_copyable_v<T>);
    out_->append(reinterpret_cast<const char *>(&value), sizeof value);
  }
  void put_bytes(std::string_view bytes) {
    put(static_cast<uint32_t>(bytes.size()));
    out_->append(bytes);
  }

 private:
  std::string *out_;
};

// Reads what Writer wrote; after the first short or oversized field everything fails.
class Reader {
 public:
  explicit Reader(std::string_view in) : in_(in) {}
  template <class T>
  bool get(T *value) {
    static_assert(std::is_trivially_copyable_v<T>);
    if (bad_ || in_.size() < sizeof *value) return !(bad_ = true);
    std::memcpy(value, in_.data(), sizeof *value);
    in_.remove_prefix(sizeof *value);
    return true;
  }
  bool get_bytes(std::string_view *bytes, size_t max) {
    uint32_t n = 0;
    if (!get(&n)) return false;
    if (n > max || in_.size() < n) return !(bad_ = true);
    *bytes = in_.substr(0, n);
    in_.remove_prefix(n);
    return true;
  }
  bool done() const { return !bad_ && in_.empty(); }

 private:
  std::string_view in_;
  bool bad_ = false;
};

void append_message(std::string *out, Message type, std::string_view body);
void encode_region(Writer &writer, const RegionRecord &region);
// False when the body is malformed.
void encode_notify(Writer &writer, const Notify &notify);
bool decode_notify(std::string_view body, Notify *notify);
bool decode_regions(std::string_view body, std::vector<RegionRecord> *out);
void encode_offer(Writer &writer, const Offer &offer);
bool decode_offer(std::string_view body, std::vector<Offer> *offers);

template <size_t N>
void set_text(char (&out)[N], std::string_view text) {
  const size_t n = text.size() < N ? text.size() : N - 1;
  std::memcpy(out, text.data(), n);
  std::memset(out + n, 0, N - n);
}
template <size_t N>
std::string get_text(const char (&in)[N]) {
  return std::string(in, strnlen(in, N));
}

}  // namespace moonpool::wire
