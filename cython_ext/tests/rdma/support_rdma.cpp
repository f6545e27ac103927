// SPDX-License-Identifier: Apache-2.0
#include "support_rdma.hpp"

#include <filesystem>

namespace moonpool::testing {

namespace {

size_t descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

// Into memory that no other thread knows of.
#if defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize_thread))
#endif
void make_words(uint64_t *out, size_t n, uint64_t from) {
  for (size_t i = 0; i < n; ++i) out[i] = (from + i * sizeof(uint64_t)) * 0x9e3779b97f4a7c15;
}

}  // namespace

void EngineRdma::SetUp() {
  standin::reset();
  descriptors_ = descriptors();
}

void EngineRdma::TearDown() {
  close();
  // A handle that the test held may have been the last but one.
  EXPECT_EQ(standin::alive(), standin::Alive{}) << standin::text_of(standin::alive());
  EXPECT_EQ(standin::misuses(), std::vector<std::string>{});
  EXPECT_EQ(descriptors(), descriptors_);
}

void EngineRdma::close() {
  standin::hold_requests(false);
  standin::hold_completions(standin::Side::kSend, false);
  standin::hold_completions(standin::Side::kReceive, false);
  peer_.reset();
  local_.reset();
  remote_region_.reset();
  source_.reset();
  target_.reset();
}

void EngineRdma::use(mp_config &config, const char *devices) {
  config.transports = "rdma,tcp";
  config.rdma_devices = devices;
}

void EngineRdma::open_engines(const Change &source, const Change &target) {
  target_ = std::make_unique<TestEngine>([&](mp_config &config) {
    use(config, "standin2,standin3");
    target(config);
  });
  source_ = std::make_unique<TestEngine>([&](mp_config &config) {
    use(config, "standin0,standin1");
    source(config);
  });
}

void EngineRdma::add_regions() {
  local_memory_.resize(bytes_);
  remote_memory_.resize(bytes_);
  shuffle(0);
  remote_region_ = target_->add(remote_memory_, "kv");
  local_ = source_->add(local_memory_, nullptr);
}

void EngineRdma::connect() {
  peer_ = source_->connect(*target_);
  remote_ = look_up(peer_, "kv");
}

void EngineRdma::open(const Change &source, const Change &target) {
  open_engines(source, target);
  add_regions();
  connect();
}

mp_peer_info EngineRdma::info() const {
  mp_peer_info info;
  mp_peer_get_info(peer_.get(), &info);
  return info;
}

int64_t EngineRdma::rail(const TestEngine &engine, int at, const char *key) {
  std::vector<std::string> keys{"rails"};
  for (int i = 0; i <= at; ++i) keys.emplace_back("rail");
  keys.emplace_back(key);
  return engine.stat(keys);
}

int64_t EngineRdma::moved_by(const char *path) const {
  return source_->stat({"paths", path, "read_bytes"}) + source_->stat({"paths", path, "written_bytes"});
}

void EngineRdma::shuffle(uint32_t seed) {
  // Quicker than random_data(). Regions are written to block by block, which sanitizers watch at little cost.
  const auto fill = [](Bytes &memory, uint64_t from) {
    std::vector<uint64_t> block(8192);
    const size_t block_bytes = block.size() * sizeof(uint64_t);
    for (size_t at = 0; at < memory.size(); at += block_bytes) {
      make_words(block.data(), block.size(), from + at);
      std::memcpy(memory.data() + at, block.data(), std::min(block_bytes, memory.size() - at));
    }
  };
  fill(local_memory_, uint64_t{seed} * 12345678901 + 1);
  fill(remote_memory_, uint64_t{seed} * 12345678901 + 2);
}

bool EngineRdma::same(const std::vector<Item> &items) const {
  for (const Item &item : items) {
    if (std::memcmp(local_memory_.data() + item.local, remote_memory_.data() + item.remote,
                    static_cast<size_t>(item.length)) != 0) {
      return false;
    }
  }
  return true;
}

TransferHandle EngineRdma::start(mp_op op, const std::vector<Item> &items, const SubmitOptions &options) {
  return submit(peer_, op, local_, remote_, items, options);
}

void EngineRdma::expect_moved(mp_op op, const std::vector<Item> &items, const SubmitOptions &options) {
  static uint32_t seed = 0;
  shuffle(++seed);
  // What must be everywhere afterwards, also beside the items.
  Bytes local = local_memory_, remote = remote_memory_;
  for (const Item &item : items) {
    const auto n = static_cast<size_t>(item.length);
    uint8_t *here = local.data() + item.local, *there = remote.data() + item.remote;
    op == MP_READ ? std::memcpy(here, there, n) : std::memcpy(there, here, n);
  }
  const TransferHandle moving = start(op, items, options);
  ASSERT_EQ(finish(moving), MP_COMPLETED) << text_of(moving);
  EXPECT_TRUE(local_memory_ == local);
  EXPECT_TRUE(remote_memory_ == remote);
}

std::string text_of(const TransferHandle &transfer) {
  const mp_error error = error_of(transfer);
  return std::string(error.message) + ": " + error.cause + " (" + error.hint + ")";
}

bool contains(const std::string &text, const std::string &part) { return text.find(part) != std::string::npos; }

}  // namespace moonpool::testing
