// SPDX-License-Identifier: Apache-2.0
//
// A client of the shm transport by hand: one that stops in the middle of a copy, lies, or sends garbage.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "memory.hpp"
#include "shm_frames.hpp"
#include "shm_table.hpp"
#include "support.hpp"
#include "support_raw.hpp"

namespace moonpool::testing {

// The Unix sockets of this process that are connected to engines of this process, on the serving side.
std::vector<int> served_unix_sockets();

class RawShmClient {
 public:
  // Opens a control connection to the engine and looks at its offer.
  explicit RawShmClient(uint16_t port) : raw_(port) {}

  // Each returns false when the engine hangs up instead.
  bool connect();
  bool open();
  struct Mapped {
    mp_status status = MP_PENDING;
    uint32_t slot = 0;
    std::shared_ptr<Mapping> memory;  // nullptr when the region is to be read where it lies
    uint64_t address = 0, length = 0;
  };
  bool map(uint64_t key, Mapped *out);
  bool send(const shm::RequestHeader &header, const std::vector<shm::Desc> &descs = {});
  bool send_bytes(const std::string &bytes) { return send_all(fd_.get(), bytes.data(), bytes.size()); }
  // The next response, with the descriptor that came along.
  std::optional<shm::CopyResponse> receive(Fd *fd = nullptr);
  // A copy request, and the answer to it.
  std::optional<shm::CopyResponse> copy(mp_op op, const std::vector<shm::Desc> &descs, uint8_t flags = 0);

  RawClient &raw() { return raw_; }
  int fd() const { return fd_.get(); }
  UseTable &table() { return *table_; }
  mp_status status() const { return status_; }
  void close() { fd_.reset(); }
  // A handshake of any kind on a new connection to the engine's Unix socket.
  Fd dial(wire::Kind kind, const Id128 &session, uint64_t lane_id);
  Fd dial_without_handshake();

 private:
  RawClient raw_;
  std::string socket_;
  Fd fd_;
  std::string in_;
  std::shared_ptr<UseTable> table_;
  mp_status status_ = MP_PENDING;  // whether the engine can reach this process's memory
};

}  // namespace moonpool::testing
