// SPDX-License-Identifier: Apache-2.0
//
// An engine that listens, and a target that plays all its clients: handshakes, control connections and lanes, right,
// slightly wrong or nonsense, while regions come and go.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "moonpool/engine.h"
#include "pieces.hpp"
#include "script.hpp"
#include "wire.hpp"
#include "world.hpp"

namespace moonpool::fuzz {

class ServerSide {
 public:
  enum Step : uint8_t {
    kConnect,   //
    kRaw,       // u8 connection, bytes
    kHello,     // u8 connection, u8 kind, u8 session, u8 lane, spoil
    kProof,     // u8 connection, spoil
    kMessage,   // u8 connection, u8 type, body
    kRequest,   // u8 connection, u8 op and flags, spoil of the header, u8 n, n x (u8 region, u32 offset, u32 length),
                // spoil of a digest, payload
    kRelease,   // u8 piece
    kRegister,  // u8 piece
    kCut,       // u8 connection, u8 with a reset
    kCuts,      // u8 connection, u32 cuts: how the engine's calls move bytes, see Socket
    kRoom,      // u8 connection, u32 bytes
    kTake,      // u8 connection, u32 bytes
    kAdvance,   // u16 in 10 ms
    kNotices,   //
    kSteps
  };
  // What has happened before the script begins.
  enum class Start { kNothing, kControl, kLane };

  explicit ServerSide(Start start);
  // Checks that the engine still serves and that it leaves nothing behind.
  ~ServerSide();
  ServerSide(const ServerSide &) = delete;

  void run(const std::vector<ScriptStep> &script);

 private:
  // A request that was sent without faults on a connection without faults: its answer is known.
  struct Expected {
    wire::RequestHeader header;
    std::vector<wire::WireDesc> descs;
    std::vector<mp_status> statuses;  // when it was sent; a release may come in between
    std::vector<bool> spoilt;         // digests
    bool overlapping = false;         // descriptors go to the same bytes, so one may change what another brought
  };
  struct Connection {
    int fd = -1;
    wire::Hello hello{};
    wire::Challenge challenge{};
    wire::Welcome welcome{};
    enum class Stage { kFresh, kGreeted, kProved, kOpen } stage = Stage::kFresh;
    bool greeted = false;  // a Hello was sent
    bool faultless = true;
    std::string received;
    std::deque<Expected> expected;
  };
  struct Known {  // a region that was registered at some time
    size_t piece;
    uint64_t key;
    mp_region *handle;
    bool released;
  };

  void step(uint8_t what, Source source);
  Connection *pick(Source &source);
  size_t connect();
  void send_hello(Connection &connection, wire::Kind kind, const Id128 &session, uint64_t lane, Source &spoiling);
  void send_proof(Connection &connection, Source &spoiling);
  size_t open(wire::Kind kind, const Id128 &session, uint64_t lane);
  void send_request(Connection &connection, Source &source);
  void register_piece(size_t piece);
  void receive(Connection &connection, size_t limit);
  void check_messages(Connection &connection);
  void check_responses(Connection &connection);
  bool overlap(const std::vector<wire::WireDesc> &descs) const;
  void check_response(const Expected &request, const wire::ResponseHeader &header, const wire::FailedDesc *failed,
                      const uint8_t *payload) const;
  mp_status expected_status(const wire::WireDesc &desc, bool write) const;
  void check_service();

  mp_engine *engine_ = nullptr;
  const Id128 incarnation_;
  const Id128 peer_id_;
  Id128 session_{};  // of the latest control connection
  std::vector<Known> regions_;
  std::vector<Connection> connections_;
  uint64_t proofs_ = 0;  // right ones
  size_t lanes_ = 0;     // that were ever open
  uint64_t next_request_ = 1;
  uint64_t payload_left_;  // that requests may still ask for or bring, so that runs stay short
};

// The body of the targets that differ only in where they start.
int run_server_script(ServerSide::Start start, const uint8_t *data, size_t size);

}  // namespace moonpool::fuzz
