// SPDX-License-Identifier: Apache-2.0
//
// mp_config: whatever a caller puts into it, it is refused with a reason, or every setting is within its bounds.
#include <algorithm>

#include "engine.hpp"
#include "script.hpp"
#include "seeds.hpp"
#include "world.hpp"

using namespace moonpool;
using namespace moonpool::fuzz;

namespace {

// Texts are separated by 0, as C strings are. One that begins with 0xff stands for NULL.
const char *text_of(std::string_view *left, std::string *hold) {
  const size_t end = std::min(left->find('\0'), left->size());
  *hold = left->substr(0, end);
  left->remove_prefix(std::min(end + 1, left->size()));
  return !hold->empty() && (*hold)[0] == '\xff' ? nullptr : hold->c_str();
}

void check(const Config &config, const std::vector<std::unique_ptr<Transport>> &transports) {
  const auto known = [&](const std::string &name) {
    return std::any_of(transports.begin(), transports.end(), [&](const auto &t) { return t->name() == name; });
  };
  FUZZ_CHECK(!config.name.empty() && config.name.size() <= 63);
  FUZZ_CHECK(!config.transports.empty() && std::all_of(config.transports.begin(), config.transports.end(), known));
  FUZZ_CHECK(config.transports.size() <= transports.size());
  FUZZ_CHECK(config.require.empty() || known(config.require));
  FUZZ_CHECK(config.lanes >= 1 && config.lanes <= 64 && config.io_threads >= 1 && config.io_threads <= 64);
  FUZZ_CHECK(config.slice_bytes >= (64u << 10) && config.slice_bytes <= (32u << 20));
  FUZZ_CHECK(config.spin_us <= 10000);
  FUZZ_CHECK(config.connect_timeout_ms >= 1 && config.progress_timeout_ms >= 1 && config.deadline_ms >= 1);
  const RdmaConfig &rdma = config.rdma;
  FUZZ_CHECK(rdma.queue_pairs >= 1 && rdma.queue_pairs <= 16 && rdma.queue_depth >= 16 && rdma.queue_depth <= 16384);
  FUZZ_CHECK(rdma.inline_bytes <= 4096 && rdma.service_level <= 15 && rdma.traffic_class <= 255);
  FUZZ_CHECK(rdma.pkey_index <= 65535);
  FUZZ_CHECK(rdma.registration_bytes_max >= (2u << 20) && rdma.registration_bytes_max <= (uint64_t{1} << 40));
  FUZZ_CHECK(rdma.devices.empty() || std::count(config.transports.begin(), config.transports.end(), "rdma") == 1);
  FUZZ_CHECK(config.regions_max >= 1 && config.peers_max >= 1 && config.notifications_max >= 1);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const auto *transports = new std::vector<std::unique_ptr<Transport>>(all_transports());
  Source source(data, size);
  mp_config raw;
  mp_config_init(&raw);
  // A set bit takes a field from the input, so that most inputs get past most fields.
  const auto fields = source.get<uint32_t>();
  const auto take = [&](unsigned bit, auto *field) {
    if ((fields & (1u << bit)) != 0) *field = source.get<std::remove_reference_t<decltype(*field)>>();
  };
  take(0, &raw.abi_version);
  take(1, &raw.insecure);
  take(2, &raw.lanes);
  take(3, &raw.io_threads);
  take(4, &raw.slice_bytes);
  take(5, &raw.spin_us);
  take(6, &raw.connect_timeout_ms);
  take(7, &raw.progress_timeout_ms);
  take(8, &raw.deadline_ms);
  take(9, &raw.regions_max);
  take(10, &raw.peers_max);
  take(11, &raw.notifications_max);
  take(12, &raw.rdma_queue_pairs);
  take(13, &raw.rdma_queue_depth);
  take(14, &raw.rdma_inline_bytes);
  take(15, &raw.rdma_service_level);
  take(16, &raw.rdma_traffic_class);
  take(17, &raw.rdma_pkey_index);
  take(18, &raw.rdma_registration_bytes_max);
  take(19, &raw.rdma_queue_pairs_max);
  take(20, &raw.cuda_staging_bytes);
  std::string_view texts = source.rest();
  std::string hold[6];
  raw.name = text_of(&texts, &hold[0]);
  raw.listen = text_of(&texts, &hold[1]);
  raw.transports = text_of(&texts, &hold[2]);
  raw.require = text_of(&texts, &hold[3]);
  raw.secret = reinterpret_cast<const uint8_t *>(text_of(&texts, &hold[4]));
  raw.secret_bytes = raw.secret == nullptr ? 0 : hold[4].size();
  raw.rdma_devices = text_of(&texts, &hold[5]);
  Config config;
  if (const Error error = resolve_config(raw, *transports, &config)) {
    FUZZ_CHECK(error.code == MP_CONFIG || error.code == MP_TRANSPORT_UNAVAILABLE);
    FUZZ_CHECK(!error.message.empty() && !error.hint.empty());
  } else {
    check(config, *transports);
  }
  return 0;
}

Seeds fuzz::seeds() {
  const auto with = [](uint32_t fields, std::string_view numbers, std::string_view texts) {
    std::string bytes(reinterpret_cast<const char *>(&fields), sizeof fields);
    return bytes.append(numbers).append(texts);
  };
  using namespace std::string_view_literals;
  Seeds all;
  all.add("defaults", with(0, "", "\xff\0\xff\0\xff\0\xff\0\xff"sv));
  all.add("texts", with(0, "", "engine 7\0[::1]:7700\0tcp, local,tcp\0tcp\0a secret"sv));
  all.add("auto-require", with(0, "", "\0\0auto\0local\0\xff"sv));
  all.add("unknown-transport", with(0, "", "\0\0tcp,rdmaa\0\0\xff"sv));
  all.add("no-transport", with(0, "", "\0\0 , ,\0\0\xff"sv));
  all.add("require-what-is-not-allowed", with(0, "", "\0\0tcp\0local\0\xff"sv));
  all.add("empty-secret", with(0, "", "\0\0auto\0\0"sv));
  all.add("lanes-and-threads", with(0xc, "\x04\0\0\0\x02\0\0\0"sv, "\0\0auto\0\0\xff"sv));
  all.add("all-numbers", with(0x7ffff, std::string(88, '\x01'), "\0\0auto\0\0\xff"sv));
  all.add("rdma-numbers",
          with(0x7f000, "\x04\0\0\0\x20\0\0\0\x40\0\0\0\x03\0\0\0\x68\0\0\0\x01\0\0\0\0\0\x40\0\0\0\0\0"sv,
               "\0\0auto\0\0\xff\0\0"sv));
  all.add("rdma-devices", with(0, "", "\0\0auto\0\0\xff\0mlx5_0:1@3,mlx5_1\0"sv));
  all.add("long-name", with(0, "", std::string(64, 'n') + std::string("\0\0auto\0\0\xff"sv)));
  return all;
}
