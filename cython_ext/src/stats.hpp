// SPDX-License-Identifier: Apache-2.0
// Counters of one engine. Relaxed: they are read for people, not for decisions.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "moonpool/engine.h"

namespace moonpool {

class Engine;
class Transfer;

struct PathCounters {
  std::atomic<uint64_t> transfers{0}, completed{0}, failed{0}, stopped{0}, expired{0};
  std::atomic<uint64_t> read_bytes{0}, written_bytes{0};
};

struct Stats {
  PathCounters local, shm, cuda_ipc, rdma, tcp;  // by the path that the transfer, or its rest, was handed to last
  std::atomic<uint64_t> retries{0}, lane_errors{0}, paths_failed{0};
  std::atomic<uint64_t> served_read_bytes{0}, served_write_bytes{0};
  std::atomic<uint64_t> requests_refused{0}, protocol_errors{0};
  std::atomic<uint64_t> handshakes_ok{0}, handshakes_refused{0}, handshakes_broken{0};
  std::atomic<uint64_t> notifications_refused{0};
  std::atomic<uint64_t> regions_not_mapped{0};
  std::atomic<uint64_t> regions_not_imported{0};
  std::atomic<int64_t> regions_imported{0};
  std::atomic<uint64_t> regions_not_registered{0};              // with RDMA devices
  std::atomic<uint64_t> regions_dmabuf{0}, regions_peermem{0};  // memory of GPUs that they took
  std::atomic<uint64_t> gpu_flushes_failed{0};
  std::atomic<int64_t> lanes{0}, server_lanes{0}, handshakes_pending{0}, regions_mapped{0};

  void count_transfer(const Transfer &transfer, const char *path, mp_transfer_state state);
};

std::string stats_json(const Engine &engine);
// Appends `text` as a JSON string.
void append_json_string(std::string *out, const std::string &text);

}  // namespace moonpool
