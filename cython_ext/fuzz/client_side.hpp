// SPDX-License-Identifier: Apache-2.0
//
// An engine that connects to a peer and moves bytes, and a target that plays the peer: it answers handshakes, announces
// regions, acknowledges and answers requests, right, slightly wrong or with nonsense.
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

class ClientSide {
 public:
  enum Step : uint8_t {
    kConnect,   //
    kAnswer,    // u8 connection, spoil: the next message of a handshake
    kAuto,      // u8 on: handshakes are answered, regions announced, fences and notifications acknowledged
    kRefuse,    //
    kRaw,       // u8 connection, bytes
    kMessage,   // u8 connection, u8 type, body
    kAnnounce,  // u8 connection
    kResponse,  // u8 connection, spoil of the header, spoil of the payload, n x (u8 descriptor, u8 status)
    kCut,       // u8 connection, u8 with a reset
    kCuts,      // u8 connection, u32 cuts: how the engine's calls move bytes, see Socket
    kRoom,      // u8 connection, u32 bytes
    kAdvance,   // u16 in 10 ms
    kSubmit,    // u8 flags (see kWrite...), u8 deadline in 20 ms (0: the default), u8 n, n x (u8 local, u8 remote,
                // u32 local offset, u32 remote offset, u32 length)
    kCancel,    // u8 transfer
    kRelease,   // u8 piece
    kSteps
  };
  enum SubmitFlags : uint8_t { kWrite = 1, kDigest = 2, kNotify = 4, kPlan = 8, kRemembered = 16 };
  // What has happened before the script begins.
  enum class Start { kNothing, kControl, kLanes };

  explicit ClientSide(Start start);
  // Checks that every transfer ends and that the engine leaves nothing behind.
  ~ClientSide();
  ClientSide(const ClientSide &) = delete;

  void run(const std::vector<ScriptStep> &script);

 private:
  struct Request {
    wire::RequestHeader header;
    std::vector<wire::WireDesc> descs;
  };
  struct Connection {
    int fd = -1;
    wire::Hello hello{};
    wire::Challenge challenge{};
    enum class Stage { kFresh, kHello, kChallenged, kProved, kOpen } stage = Stage::kFresh;
    std::string received;
    std::deque<Request> requests;
    std::deque<std::string> answers;  // to fences and notifications, not sent yet
  };
  struct Running {
    mp_transfer *handle;
    mp_op op;
    std::vector<int64_t> local_offsets, remote_offsets, lengths;
    std::vector<uint32_t> locals, remotes;
    std::vector<mp_remote_region> regions;
  };

  void step(uint8_t what, Source source);
  Connection *pick(Source &source);
  // Lets the engine and the peer go on until neither has anything to do.
  void pump();
  bool serve();
  bool read(Connection &connection);
  bool read_requests(Connection &connection);
  bool read_messages(Connection &connection);
  void answer(Connection &connection, Source &spoiling);
  void announce(Connection &connection);
  void respond(Connection &connection, Source &source);
  void submit(Source &source);
  void check_request(const Request &request, std::string_view payload) const;
  void check_read(const Running &running) const;
  void check_transfers();

  mp_engine *engine_ = nullptr;
  mp_peer *peer_ = nullptr;
  const Id128 incarnation_;
  const Id128 token_;
  std::vector<mp_region *> regions_;
  std::deque<Connection> connections_;
  std::vector<Running> running_;
  std::vector<mp_remote_region> remembered_;
  bool auto_ = false;
  bool faultless_ = true;  // the peer has sent nothing that is not right
  bool reads_ = false;     // local memory changes
  uint64_t bytes_ = 0;     // of all transfers
  uint64_t welcomes_ = 0;  // with a right proof
};

// The body of the targets that differ only in where they start.
int run_client_script(ClientSide::Start start, const uint8_t *data, size_t size);

}  // namespace moonpool::fuzz
