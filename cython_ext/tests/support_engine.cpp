// SPDX-License-Identifier: Apache-2.0
#include "support_engine.hpp"

#include <cstdlib>

namespace moonpool::testing {

TestEngine::TestEngine(const std::function<void(mp_config &)> &change) {
  mp_config config;
  mp_config_init(&config);
  config.listen = "127.0.0.1:0";
  config.transports = "tcp";
  config.lanes = 2;
  config.io_threads = 2;
  config.connect_timeout_ms = static_cast<uint32_t>(kPatienceNs / kMillisecond);
  config.progress_timeout_ms = config.deadline_ms = config.connect_timeout_ms;
  change(config);
  mp_error error;
  if (mp_engine_open(&config, &raw_, &error) != MP_OK) ADD_FAILURE() << error.message << ": " << error.cause;
}

uint16_t TestEngine::port() const {
  const std::string text = address();
  return static_cast<uint16_t>(std::atoi(text.c_str() + text.rfind(':') + 1));
}

int64_t TestEngine::stat(const std::vector<std::string> &keys) const {
  std::string text(mp_engine_stats_json(raw_, nullptr, 0), '\0');
  mp_engine_stats_json(raw_, text.data(), text.size());
  size_t at = 0;
  for (const std::string &key : keys) {
    const std::string quoted = "\"" + key + "\": ";
    at = text.find(quoted, at);
    if (at == std::string::npos) {
      ADD_FAILURE() << key << " is not in " << text;
      return -1;
    }
    at += quoted.size();
  }
  return std::atoll(text.c_str() + at);
}

RegionHandle TestEngine::allocate(uint64_t nbytes, const char *name) {
  mp_region *region = nullptr;
  mp_error error;
  EXPECT_EQ(mp_region_allocate(raw_, nbytes, name, nullptr, &region, &error), MP_OK) << error.message;
  return RegionHandle(region);
}

RegionHandle TestEngine::add(Bytes &memory, const char *name, uint32_t flags) {
  mp_region *region = nullptr;
  mp_error error;
  EXPECT_EQ(mp_region_register(raw_, memory.data(), memory.size(), name, flags, &region, &error), MP_OK)
      << error.message;
  return RegionHandle(region);
}

PeerHandle TestEngine::connect(const std::string &address) {
  mp_peer *peer = nullptr;
  mp_error error;
  EXPECT_EQ(mp_peer_connect(raw_, address.c_str(), 0, nullptr, nullptr, &peer, &error), MP_OK)
      << error.message << ": " << error.cause;
  return PeerHandle(peer);
}

uint8_t *bytes_of(const RegionHandle &region) {
  mp_region_info info;
  mp_region_get_info(region.get(), &info);
  return static_cast<uint8_t *>(info.address);
}

mp_remote_region look_up(const PeerHandle &peer, const char *name) {
  mp_remote_region region{};
  mp_error error;
  EXPECT_EQ(mp_peer_find_region(peer.get(), name, kPatienceNs, &region, &error), MP_OK) << error.message;
  return region;
}

TransferHandle submit(const PeerHandle &peer, mp_op op, const RegionHandle &local, const mp_remote_region &remote,
                      const std::vector<Item> &items, const SubmitOptions &options, mp_error *error) {
  static_assert(sizeof(Item) == 3 * sizeof(int64_t), "the arrays walk over items");
  mp_region *locals[1] = {local.get()};
  const mp_remote_region *remotes[1] = {&remote};
  mp_batch batch{};
  batch.count = items.size();
  batch.local_offsets = &items[0].local;
  batch.remote_offsets = &items[0].remote;
  batch.lengths = &items[0].length;
  batch.local_offsets_stride = batch.remote_offsets_stride = batch.lengths_stride = 3;
  batch.locals = locals;
  batch.locals_count = 1;
  batch.remotes = remotes;
  batch.remotes_count = 1;
  mp_options chosen{};
  chosen.deadline_ns = options.deadline_ns;
  if (!options.notify.empty()) {
    chosen.notify = options.notify.data();
    chosen.notify_bytes = options.notify.size();
  }
  chosen.digest = options.digest ? 1 : 0;
  mp_transfer *out = nullptr;
  mp_error local_error;
  mp_error *where = error == nullptr ? &local_error : error;
  const mp_status status = mp_submit(peer.get(), op, &batch, &chosen, &out, where);
  // Who does not ask for the error does not expect one.
  if (error == nullptr) {
    EXPECT_EQ(status, MP_OK) << where->message << ": " << where->cause;
  }
  return TransferHandle(out);
}

mp_transfer_state finish(const TransferHandle &transfer) {
  if (transfer == nullptr || mp_transfer_wait_settled(transfer.get(), kPatienceNs) != MP_OK) return MP_RUNNING;
  return mp_transfer_get_state(transfer.get());
}

mp_transfer_state transfer(const PeerHandle &peer, mp_op op, const RegionHandle &local, const mp_remote_region &remote,
                           const std::vector<Item> &items, const SubmitOptions &options) {
  return finish(submit(peer, op, local, remote, items, options));
}

std::vector<uint8_t> statuses(const TransferHandle &transfer) {
  std::vector<uint8_t> out(mp_transfer_count(transfer.get()), 0xff);
  mp_transfer_item_status(transfer.get(), out.data(), out.size());
  return out;
}

mp_error error_of(const TransferHandle &transfer) {
  mp_error error;
  mp_transfer_get_error(transfer.get(), &error);
  return error;
}

}  // namespace moonpool::testing
