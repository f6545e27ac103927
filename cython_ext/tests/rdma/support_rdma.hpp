// SPDX-License-Identifier: Apache-2.0
//
// Two engines on the stand-in's devices: the source has 0 and 1, the target 2 and 3. After each test nothing may be
// left of them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "standin.hpp"
#include "support_engine.hpp"

namespace moonpool::testing {

constexpr int kSourceDevice = 0, kTargetDevice = 2;

// Of what happens at a random moment: fewer where each takes some twenty times as long. A multiple of six.
constexpr uint32_t rounds(uint32_t n) {
#if defined(__SANITIZE_THREAD__)
  return n / 24 * 6;
#else
  return n;
#endif
}

class EngineRdma : public ::testing::Test {
 protected:
  using Change = std::function<void(mp_config &)>;
  explicit EngineRdma(uint64_t bytes = 16u << 20) : bytes_(bytes) {}
  void SetUp() override;
  void TearDown() override;

  static void use(mp_config &config, const char *devices);
  // Engines with what `change` says, regions and a peer.
  void open(const Change &source = [](mp_config &) {}, const Change &target = [](mp_config &) {});
  void open_engines(const Change &source = [](mp_config &) {}, const Change &target = [](mp_config &) {});
  void add_regions();
  void connect();

  mp_peer_info info() const;
  std::string fallback() const { return info().fallback; }
  // Of one rail of an engine, by its place.
  static int64_t rail(const TestEngine &engine, int at, const char *key);
  int64_t moved_by(const char *path) const;
  // Both sides get other bytes, every one of them.
  void shuffle(uint32_t seed);
  bool same(const std::vector<Item> &items) const;
  // It completes, and the bytes are those of the side they came from.
  void expect_moved(mp_op op, const std::vector<Item> &items, const SubmitOptions &options = {});
  TransferHandle start(mp_op op, const std::vector<Item> &items, const SubmitOptions &options = {});
  // Everything goes, in an order that is allowed.
  void close();

  const uint64_t bytes_;
  // Before the engines, since registered memory has to outlive them.
  Bytes local_memory_, remote_memory_;
  std::unique_ptr<TestEngine> target_, source_;
  RegionHandle local_, remote_region_;
  PeerHandle peer_;
  mp_remote_region remote_{};
  size_t descriptors_ = 0;
};

std::string text_of(const TransferHandle &transfer);
bool contains(const std::string &text, const std::string &part);

}  // namespace moonpool::testing
