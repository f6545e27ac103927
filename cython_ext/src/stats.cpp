// SPDX-License-Identifier: Apache-2.0
#include "stats.hpp"

#include <cstdio>

#include "engine.hpp"

namespace moonpool {

void Stats::count_transfer(const Transfer &transfer, const char *path_name, mp_transfer_state state) {
  constexpr auto relaxed = std::memory_order_relaxed;
  const std::string name = path_name;
  PathCounters &path = name == "local"      ? local
                       : name == "shm"      ? shm
                       : name == "cuda_ipc" ? cuda_ipc
                       : name == "rdma"     ? rdma
                                            : tcp;
  path.transfers.fetch_add(1, relaxed);
  switch (state) {
    case MP_COMPLETED:
      path.completed.fetch_add(1, relaxed);
      (transfer.op == MP_READ ? path.read_bytes : path.written_bytes).fetch_add(transfer.bytes, relaxed);
      break;
    case MP_STOPPED:
      path.stopped.fetch_add(1, relaxed);
      break;
    case MP_EXPIRED:
      path.expired.fetch_add(1, relaxed);
      break;
    default:
      path.failed.fetch_add(1, relaxed);
      break;
  }
}

void append_json_string(std::string *out, const std::string &text) {
  out->push_back('"');
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out->push_back('\\');
      out->push_back(c);
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
      out->append(escaped);
    } else {
      out->push_back(c);
    }
  }
  out->push_back('"');
}

namespace {

class JsonObject {
 public:
  JsonObject &field(const char *name, uint64_t value) {
    key(name);
    text_ += std::to_string(value);
    return *this;
  }
  JsonObject &field(const char *name, const JsonObject &value) {
    key(name);
    text_ += value.done();
    return *this;
  }
  JsonObject &field(const char *name, const std::string &value) {
    key(name);
    append_json_string(&text_, value);
    return *this;
  }
  JsonObject &raw(const char *name, const std::string &json) {
    key(name);
    text_ += json;
    return *this;
  }
  std::string done() const { return text_ + "}"; }

 private:
  void key(const char *name) {
    if (text_.size() > 1) text_ += ", ";
    append_json_string(&text_, name);
    text_ += ": ";
  }
  std::string text_ = "{";
};

JsonObject path_json(const PathCounters &path) {
  return JsonObject()
      .field("transfers", path.transfers)
      .field("completed", path.completed)
      .field("failed", path.failed)
      .field("stopped", path.stopped)
      .field("expired", path.expired)
      .field("read_bytes", path.read_bytes)
      .field("written_bytes", path.written_bytes);
}

uint64_t gauge(const std::atomic<int64_t> &value) {
  const int64_t now = value.load();
  return now > 0 ? static_cast<uint64_t>(now) : 0;
}

std::string rails_json(const Engine &engine) {
  std::string text = "[";
  if (engine.rdma != nullptr) {
    for (const auto &rail : engine.rdma->rails()) {
      const RailState state = rail->state();
      if (text.size() > 1) text += ", ";
      text += JsonObject()
                  .field("rail", rail->label())
                  .raw("up", state.up ? "true" : "false")
                  .field("gid", gid_text(state.gid))
                  .raw("gid_index", gid_is_null(state.gid) ? "null" : std::to_string(state.gid_index))
                  .field("reason", state.reason)
                  .raw("numa_node",
                       rail->device->place.numa_node < 0 ? "null" : std::to_string(rail->device->place.numa_node))
                  .field("queue_pairs", gauge(rail->queue_pairs))
                  .field("read_bytes", rail->read_bytes)
                  .field("written_bytes", rail->written_bytes)
                  .field("errors", rail->errors)
                  .done();
    }
  }
  return text + "]";
}

}  // namespace

std::string stats_json(const Engine &engine) {
  const Stats &s = engine.stats;
  return JsonObject()
      .field("paths", JsonObject()
                          .field("local", path_json(s.local))
                          .field("shm", path_json(s.shm))
                          .field("cuda_ipc", path_json(s.cuda_ipc))
                          .field("rdma", path_json(s.rdma))
                          .field("tcp", path_json(s.tcp)))
      .field("transfers_running", engine.running.size())
      .field("retries", s.retries)
      .field("lane_errors", s.lane_errors)
      .field("paths_failed", s.paths_failed)
      .field("lanes", gauge(s.lanes))
      .field("regions_mapped", gauge(s.regions_mapped))
      .field("regions_not_mapped", s.regions_not_mapped)
      .field("regions_imported", gauge(s.regions_imported))
      .field("regions_not_imported", s.regions_not_imported)
      .field("regions_not_registered", s.regions_not_registered)
      .field("registration_problem", engine.registration_problem())
      .field("regions_dmabuf", s.regions_dmabuf)
      .field("regions_peermem", s.regions_peermem)
      .field("gpu_flushes_failed", s.gpu_flushes_failed)
      .field("staged_to_gpu_bytes", engine.staging.counters.to_device_bytes)
      .field("staged_from_gpu_bytes", engine.staging.counters.to_host_bytes)
      .field("staging_waits", engine.staging.counters.waits)
      .raw("rails", rails_json(engine))
      .field("peers", engine.peer_count())
      .field("regions", engine.regions.size())
      .field("io_threads", engine.io_count())
      .field("serving", JsonObject()
                            .field("sessions", engine.session_count())
                            .field("lanes", gauge(s.server_lanes))
                            .field("read_bytes", s.served_read_bytes)
                            .field("written_bytes", s.served_write_bytes)
                            .field("requests_refused", s.requests_refused)
                            .field("protocol_errors", s.protocol_errors)
                            .field("handshakes_ok", s.handshakes_ok)
                            .field("handshakes_refused", s.handshakes_refused)
                            .field("handshakes_broken", s.handshakes_broken)
                            .field("handshakes_pending", gauge(s.handshakes_pending)))
      .field("notifications",
             JsonObject().field("queued", engine.notifications.size()).field("refused", s.notifications_refused))
      .done();
}

}  // namespace moonpool
