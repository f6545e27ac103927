// SPDX-License-Identifier: Apache-2.0
//
// Engines through their C face, with handles that free themselves.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "moonpool/engine.h"
#include "support.hpp"

namespace moonpool::testing {

template <auto Free>
struct Freer {
  template <class T>
  void operator()(T *handle) const {
    Free(handle);
  }
};
using RegionHandle = std::unique_ptr<mp_region, Freer<mp_region_free>>;
using PeerHandle = std::unique_ptr<mp_peer, Freer<mp_peer_free>>;
using PlanHandle = std::unique_ptr<mp_plan, Freer<mp_plan_free>>;
using TransferHandle = std::unique_ptr<mp_transfer, Freer<mp_transfer_free>>;

struct Item {
  int64_t local = 0;
  int64_t remote = 0;
  int64_t length = 0;
};

struct SubmitOptions {
  int64_t deadline_ns = kPatienceNs;
  std::string notify;
  bool digest = false;
};

class TestEngine {
 public:
  // Listens on a free loopback port with tcp only, unless `change` says otherwise.
  explicit TestEngine(const std::function<void(mp_config &)> &change = [](mp_config &) {});
  ~TestEngine() { mp_engine_free(raw_); }
  TestEngine(const TestEngine &) = delete;

  mp_engine *get() const { return raw_; }
  std::string address() const { return mp_engine_address(raw_); }
  uint16_t port() const;
  void close() { EXPECT_EQ(mp_engine_close(raw_, nullptr), MP_OK); }
  // The number at a path of keys such as {"serving", "lanes"}.
  int64_t stat(const std::vector<std::string> &keys) const;

  RegionHandle allocate(uint64_t nbytes, const char *name = nullptr);
  RegionHandle add(Bytes &memory, const char *name, uint32_t flags = MP_REGION_WRITABLE);
  PeerHandle connect(const std::string &address);
  PeerHandle connect(const TestEngine &other) { return connect(other.address()); }

 private:
  mp_engine *raw_ = nullptr;
};

uint8_t *bytes_of(const RegionHandle &region);
// Waits until the peer has announced it.
mp_remote_region look_up(const PeerHandle &peer, const char *name);

TransferHandle submit(const PeerHandle &peer, mp_op op, const RegionHandle &local, const mp_remote_region &remote,
                      const std::vector<Item> &items, const SubmitOptions &options = {}, mp_error *error = nullptr);
// Submits and waits for a settled end.
mp_transfer_state transfer(const PeerHandle &peer, mp_op op, const RegionHandle &local, const mp_remote_region &remote,
                           const std::vector<Item> &items, const SubmitOptions &options = {});
// Waits for a settled end; MP_RUNNING when patience ended first.
mp_transfer_state finish(const TransferHandle &transfer);
std::vector<uint8_t> statuses(const TransferHandle &transfer);
mp_error error_of(const TransferHandle &transfer);

}  // namespace moonpool::testing
