// SPDX-License-Identifier: Apache-2.0
// The C face: checks handles, converts, and keeps everything C++ (exceptions above all) inside.
#include <sys/mman.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

#include "batch.hpp"
#include "engine.hpp"
#include "handles.hpp"
#include "peer.hpp"

using namespace moonpool;

namespace {

constexpr uint64_t kHugePage = 2u << 20;

// Runs `body`; the only C++ exceptions the core can meet are the standard library's.
template <class Body>
mp_status guarded(mp_error *error, Body body) {
  try {
    return export_error(body(), error);
  } catch (const std::bad_alloc &) {
    return export_error(make_error(MP_NO_MEMORY, "out of memory", "free memory, or use smaller batches"), error);
  } catch (const std::exception &fault) {
    Error inner = make_error(MP_INTERNAL, "unexpected fault in the engine", "please report it");
    inner.cause = fault.what();
    return export_error(inner, error);
  }
}

Error null_argument(const char *what) { return make_error(MP_INVALID_ARGUMENT, std::string(what) + " is NULL"); }

Error usable(const Engine &engine) {
  if (engine.forked()) {
    return make_error(MP_FORKED, "this engine was made before the process forked",
                      "make a new engine in the child, or start workers with the spawn method");
  }
  if (engine.closed()) return make_error(MP_CLOSED, "the engine is closed", "make a new engine");
  return {};
}

size_t copy_out(const std::string &text, char *buffer, size_t size) {
  if (buffer != nullptr && size > 0) {
    const size_t n = std::min(size - 1, text.size());
    std::memcpy(buffer, text.data(), n);
    buffer[n] = '\0';
  }
  return text.size() + 1;
}

int64_t until_of(int64_t timeout_ns) { return timeout_ns < 0 ? kNever : deadline_after(timeout_ns); }

Error check_name(const char *name, std::string *out) {
  if (name == nullptr) return {};
  *out = name;
  if (out->empty() || out->size() > wire::kRegionNameMax) {
    return make_error(MP_INVALID_ARGUMENT, "a region name has 1 to 255 bytes", "pass no name for a private region");
  }
  return {};
}

Error add_region(const std::shared_ptr<Engine> &engine, std::shared_ptr<Region> region, mp_region **out) {
  if (Error error = engine->add_region(region)) return error;
  *out = new mp_region{engine, std::move(region)};
  return {};
}

std::shared_ptr<Transfer> make_transfer(const std::shared_ptr<Peer> &peer, mp_op op, const mp_options &options,
                                        const Id128 &incarnation, const std::vector<std::shared_ptr<Region>> &locals,
                                        Error *error) {
  const int64_t deadline =
      options.deadline_ns != 0 ? options.deadline_ns : int64_t{peer->engine().config.deadline_ms} * kMillisecond;
  auto transfer = std::make_shared<Transfer>(peer, op, options.digest != 0, deadline_after(deadline));
  transfer->target_incarnation = incarnation;
  for (const auto &region : locals) {
    if (region == nullptr) continue;
    if (!region->begin_use()) {
      *error =
          make_error(MP_REGION_RELEASED, "local region \"" + region->name + "\" was released", "register it again");
      return nullptr;
    }
    transfer->locals.push_back(region);
  }
  if (options.notify != nullptr) {
    transfer->notify.assign(static_cast<const char *>(options.notify), options.notify_bytes);
    transfer->has_notify = true;
  }
  return transfer;
}

Error check_call(const Peer &peer, mp_op op, const mp_options &options) {
  if (Error error = usable(peer.engine())) return error;
  if (op != MP_READ && op != MP_WRITE) return make_error(MP_INVALID_ARGUMENT, "op is neither MP_READ nor MP_WRITE");
  if (options.notify_bytes > wire::kNotifyBytesMax) {
    return make_error(MP_LIMIT, "a notification has at most 65536 bytes", "send a reference instead of the data");
  }
  return {};
}

void reject(Transfer &transfer, size_t index, size_t count, mp_status status) {
  if (transfer.rejected.empty()) transfer.rejected.assign(count, MP_OK);
  transfer.rejected[index] = static_cast<uint8_t>(status);
}

Error start(const std::shared_ptr<Transfer> &transfer, mp_transfer **out) {
  if (transfer->descs.empty()) return transfer->peer->describe(transfer->rejection, "");
  auto handle = std::make_unique<mp_transfer>(mp_transfer{transfer});
  transfer->peer->engine().run(transfer);
  *out = handle.release();
  return {};
}

}  // namespace

// ---------------------------------------------------------------- engine

void mp_config_init(mp_config *config) {
  std::memset(config, 0, sizeof *config);
  config->abi_version = MP_ABI_VERSION;
  config->transports = "auto";
  config->spin_us = UINT32_MAX;
}

mp_status mp_engine_open(const mp_config *config, mp_engine **engine, mp_error *error) {
  return guarded(error, [&]() -> Error {
    if (config == nullptr || engine == nullptr) return null_argument("config or engine");
    Config resolved;
    std::vector<std::unique_ptr<Transport>> transports = all_transports();
    if (Error bad = resolve_config(*config, transports, &resolved)) return bad;
    auto made = std::make_shared<Engine>(std::move(resolved), std::move(transports));
    if (Error bad = made->open()) {
      made->close();
      return bad;
    }
    *engine = new mp_engine{std::move(made)};
    return {};
  });
}

mp_status mp_engine_close(mp_engine *engine, mp_error *error) {
  return guarded(error, [&]() -> Error {
    if (engine == nullptr) return null_argument("engine");
    engine->engine->close();
    return {};
  });
}

void mp_engine_free(mp_engine *engine) {
  // A child has none of the threads that the destructors would join, so it leaves the parent's objects alone.
  if (engine == nullptr || engine->engine->forked()) return;
  engine->engine->close();
  delete engine;
}

const char *mp_engine_address(const mp_engine *engine) { return engine->engine->address().c_str(); }

void mp_engine_incarnation(const mp_engine *engine, uint8_t incarnation[16]) {
  std::memcpy(incarnation, engine->engine->identity.incarnation.data(), 16);
}

size_t mp_engine_stats_json(mp_engine *engine, char *buffer, size_t size) {
  return copy_out(stats_json(*engine->engine), buffer, size);
}

size_t mp_probe_json(char *buffer, size_t size) {
  std::string text = "[";
  for (const auto &transport : all_transports()) {
    const Probe probe = transport->probe();
    if (text.size() > 1) text += ", ";
    text += "{\"transport\": ";
    append_json_string(&text, transport->name());
    text += std::string(", \"available\": ") + (probe.available ? "true" : "false") + ", \"reason\": ";
    append_json_string(&text, probe.reason);
    text += "}";
  }
  return copy_out(text + "]", buffer, size);
}

// ---------------------------------------------------------------- regions

mp_status mp_region_allocate(mp_engine *engine, uint64_t nbytes, const char *name, mp_region **region,
                             mp_error *error) {
  return guarded(error, [&]() -> Error {
    if (engine == nullptr || region == nullptr) return null_argument("engine or region");
    Engine &core = *engine->engine;
    if (Error bad = usable(core)) return bad;
    std::string text;
    if (Error bad = check_name(name, &text)) return bad;
    if (nbytes == 0) return make_error(MP_OUT_OF_RANGE, "cannot allocate 0 bytes", "ask for 1 byte or more");
    void *memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      return system_error(MP_NO_MEMORY, errno, "cannot allocate " + std::to_string(nbytes) + " bytes",
                          "check free memory and `ulimit -v`");
    }
    if (nbytes >= kHugePage) madvise(memory, nbytes, MADV_HUGEPAGE);
    auto made = std::make_shared<Region>(core.next_region_id(), static_cast<uint8_t *>(memory), nbytes, std::move(text),
                                         MP_REGION_WRITABLE, true);
    return add_region(engine->engine, std::move(made), region);
  });
}

mp_status mp_region_register(mp_engine *engine, void *address, uint64_t nbytes, const char *name, uint32_t flags,
                             mp_region **region, mp_error *error) {
  return guarded(error, [&]() -> Error {
    if (engine == nullptr || region == nullptr) return null_argument("engine or region");
    Engine &core = *engine->engine;
    if (Error bad = usable(core)) return bad;
    std::string text;
    if (Error bad = check_name(name, &text)) return bad;
    if (address == nullptr) return null_argument("address");
    if (nbytes == 0) return make_error(MP_OUT_OF_RANGE, "cannot register 0 bytes", "register at least one byte");
    const auto begin = reinterpret_cast<uintptr_t>(address);
    if (begin + nbytes < begin) {
      return make_error(MP_OUT_OF_RANGE, "address + length wraps around", "check the address and the length");
    }
    if ((flags & ~MP_REGION_WRITABLE) != 0) return make_error(MP_INVALID_ARGUMENT, "unknown region flags");
    auto made = std::make_shared<Region>(core.next_region_id(), static_cast<uint8_t *>(address), nbytes,
                                         std::move(text), flags, false);
    return add_region(engine->engine, std::move(made), region);
  });
}

mp_status mp_region_release(mp_region *region, mp_error *error) {
  return guarded(error, [&]() -> Error {
    if (region == nullptr) return null_argument("region");
    if (region->engine->forked()) return usable(*region->engine);
    return region->engine->release_region(*region->region);
  });
}

void mp_region_free(mp_region *region) {
  if (region == nullptr || region->engine->forked()) return;
  delete region;
}

void mp_region_get_info(const mp_region *region, mp_region_info *info) {
  const Region &core = *region->region;
  *info = {core.id, core.key, core.generation, core.length, core.base, core.flags, core.engine_owned ? 1 : 0};
}

// ---------------------------------------------------------------- peers

mp_status mp_peer_connect(mp_engine *engine, const char *address, uint32_t timeout_ms, mp_peer **peer,
                          mp_error *error) {
  return guarded(error, [&]() -> Error {
    if (engine == nullptr || address == nullptr || peer == nullptr) return null_argument("engine, address or peer");
    Engine &core = *engine->engine;
    if (Error bad = usable(core)) return bad;
    const int64_t timeout = timeout_ms == 0 ? core.config.connect_timeout_ms : timeout_ms;
    const int64_t deadline = deadline_after(timeout * kMillisecond);
    std::vector<SocketAddress> resolved;
    if (Error bad = resolve_address(address, false, deadline, &resolved)) return bad;
    std::shared_ptr<Peer> made = Peer::make(engine->engine, address, std::move(resolved));
    if (!core.add_peer(made)) {
      made->close(make_error(MP_CLOSED, "the engine is closed", "make a new engine"));
      return usable(core);
    }
    if (Error bad = made->ensure(deadline)) {
      made->close(bad);
      return bad;
    }
    *peer = new mp_peer{std::move(made)};
    return {};
  });
}

mp_status mp_peer_ensure(mp_peer *peer, uint32_t timeout_ms, mp_error *error) {
  return guarded(error, [&]() -> Error {
    if (peer == nullptr) return null_argument("peer");
    Engine &core = peer->peer->engine();
    if (Error bad = usable(core)) return bad;
    const int64_t timeout = timeout_ms == 0 ? core.config.connect_timeout_ms : timeout_ms;
    return peer->peer->ensure(deadline_after(timeout * kMillisecond));
  });
}

mp_status mp_peer_close(mp_peer *peer, mp_error *error) {
  return guarded(error, [&]() -> Error {
    if (peer == nullptr) return null_argument("peer");
    if (peer->peer->engine().forked()) return usable(peer->peer->engine());
    peer->peer->close(make_error(MP_CLOSED, "the peer was closed", "connect again"));
    return {};
  });
}

void mp_peer_free(mp_peer *peer) {
  if (peer == nullptr || peer->peer->engine().forked()) return;
  delete peer;
}

void mp_peer_get_info(const mp_peer *peer, mp_peer_info *info) { peer->peer->info(info); }

mp_status mp_peer_find_region(mp_peer *peer, const char *name, int64_t timeout_ns, mp_remote_region *region,
                              mp_error *error) {
  return guarded(error, [&]() -> Error {
    if (peer == nullptr || name == nullptr || region == nullptr) return null_argument("peer, name or region");
    if (Error bad = usable(peer->peer->engine())) return bad;
    return peer->peer->find_region(name, until_of(timeout_ns), region);
  });
}

size_t mp_peer_list_regions(mp_peer *peer, mp_remote_region *regions, size_t capacity) {
  const std::vector<mp_remote_region> all = peer->peer->regions();
  std::copy_n(all.begin(), std::min(capacity, all.size()), regions);
  return all.size();
}

// ---------------------------------------------------------------- transfers

mp_status mp_submit(mp_peer *peer, mp_op op, const mp_batch *batch, const mp_options *options, mp_transfer **transfer,
                    mp_error *error) {
  return guarded(error, [&]() -> Error {
    if (peer == nullptr || batch == nullptr || transfer == nullptr) return null_argument("peer, batch or transfer");
    const mp_options chosen = options == nullptr ? mp_options{} : *options;
    if (Error bad = check_call(*peer->peer, op, chosen)) return bad;
    Batch checked;
    Error bad = Batch::open(*peer->peer, *batch, &checked);
    if (bad) return bad;
    auto made = make_transfer(peer->peer, op, chosen, checked.incarnation(), checked.locals(), &bad);
    if (made == nullptr) return bad;
    made->count = checked.count();
    DescBuilder builder(*made, peer->peer->engine().config.slice_bytes);
    for (size_t i = 0; i < made->count; ++i) {
      const Item item = checked.item(i);
      const mp_status status = check_direction(item, op);
      if (status == MP_OK) {
        builder.add(static_cast<uint32_t>(i), item);
        continue;
      }
      if (made->rejected.empty()) made->rejection = checked.explain(i, status);
      reject(*made, i, made->count, status);
    }
    return start(made, transfer);
  });
}

mp_status mp_plan_create(mp_peer *peer, const mp_batch *batch, mp_plan **plan, mp_error *error) {
  return guarded(error, [&]() -> Error {
    if (peer == nullptr || batch == nullptr || plan == nullptr) return null_argument("peer, batch or plan");
    if (Error bad = usable(peer->peer->engine())) return bad;
    Batch checked;
    if (Error bad = Batch::open(*peer->peer, *batch, &checked)) return bad;
    auto made = std::make_shared<Plan>(Plan{peer->peer, {}, checked.locals(), checked.incarnation()});
    made->items.reserve(checked.count());
    for (size_t i = 0; i < checked.count(); ++i) {
      const Item item = checked.item(i);
      if (item.status != MP_OK) return checked.explain(i, static_cast<mp_status>(item.status));
      made->items.push_back(item);
    }
    *plan = new mp_plan{std::move(made)};
    return {};
  });
}

mp_status mp_plan_post(mp_plan *plan, mp_op op, const int64_t *indices, size_t count, const mp_options *options,
                       mp_transfer **transfer, mp_error *error) {
  return guarded(error, [&]() -> Error {
    if (plan == nullptr || transfer == nullptr) return null_argument("plan or transfer");
    const Plan &core = *plan->plan;
    const mp_options chosen = options == nullptr ? mp_options{} : *options;
    if (Error bad = check_call(*core.peer, op, chosen)) return bad;
    const size_t n = indices == nullptr ? core.items.size() : count;
    if (n == 0) return make_error(MP_INVALID_ARGUMENT, "the post names no items", "pass at least one index");
    if (n > UINT32_MAX) return make_error(MP_LIMIT, "a transfer holds at most 2^32 - 1 items", "split it");
    Error bad;
    auto made = make_transfer(core.peer, op, chosen, core.incarnation, core.locals, &bad);
    if (made == nullptr) return bad;
    made->count = n;
    DescBuilder builder(*made, core.peer->engine().config.slice_bytes);
    for (size_t i = 0; i < n; ++i) {
      const int64_t index = indices == nullptr ? static_cast<int64_t>(i) : indices[i];
      const bool known = index >= 0 && static_cast<uint64_t>(index) < core.items.size();
      const mp_status status = known ? check_direction(core.items[static_cast<size_t>(index)], op) : MP_OUT_OF_RANGE;
      if (status == MP_OK) {
        builder.add(static_cast<uint32_t>(i), core.items[static_cast<size_t>(index)]);
        continue;
      }
      if (made->rejected.empty()) {
        made->rejection =
            known ? make_error(status, "item " + std::to_string(index) + " of the plan would write a read-only region",
                               "register it with writable=True")
                  : make_error(status,
                               "index " + std::to_string(index) + " is outside the plan of " +
                                   std::to_string(core.items.size()) + " items",
                               "indices count from 0");
        made->rejection.item = static_cast<int64_t>(i);
      }
      reject(*made, i, n, status);
    }
    return start(made, transfer);
  });
}

size_t mp_plan_count(const mp_plan *plan) { return plan->plan->items.size(); }

void mp_plan_free(mp_plan *plan) {
  if (plan == nullptr || plan->plan->peer->engine().forked()) return;
  delete plan;
}

mp_transfer_state mp_transfer_get_state(const mp_transfer *transfer) { return transfer->transfer->state(); }

mp_status mp_transfer_wait(mp_transfer *transfer, int64_t timeout_ns) {
  if (transfer->transfer->peer->engine().forked()) return MP_FORKED;
  return transfer->transfer->wait(timeout_ns, false);
}

mp_status mp_transfer_wait_settled(mp_transfer *transfer, int64_t timeout_ns) {
  if (transfer->transfer->peer->engine().forked()) return MP_FORKED;
  return transfer->transfer->wait(timeout_ns, true);
}

mp_status mp_transfer_cancel(mp_transfer *transfer, int64_t timeout_ns) {
  Transfer &core = *transfer->transfer;
  if (core.peer->engine().forked()) return MP_FORKED;
  core.stop(core.peer->describe(make_error(MP_CANCELLED, "the transfer was cancelled"), ""));
  return core.wait(timeout_ns, true);
}

void mp_transfer_get_error(const mp_transfer *transfer, mp_error *error) {
  export_error(transfer->transfer->error(), error);
}

size_t mp_transfer_count(const mp_transfer *transfer) { return transfer->transfer->count; }

void mp_transfer_item_status(const mp_transfer *transfer, uint8_t *status, size_t count) {
  transfer->transfer->item_status(status, count);
}

mp_status mp_transfer_digests(const mp_transfer *transfer, uint64_t *digests, size_t count) {
  const Transfer &core = *transfer->transfer;
  const mp_transfer_state state = core.state();
  if (!core.digest || state == MP_RUNNING || state == MP_UNSETTLED) return MP_INVALID_ARGUMENT;
  core.digests(digests, count);
  return MP_OK;
}

mp_status mp_transfer_set_eventfd(mp_transfer *transfer, int fd) {
  if (transfer->transfer->peer->engine().forked()) return MP_FORKED;
  transfer->transfer->set_eventfd(fd);
  return MP_OK;
}

void mp_transfer_free(mp_transfer *transfer) {
  if (transfer == nullptr || transfer->transfer->peer->engine().forked()) return;
  delete transfer;
}

// ---------------------------------------------------------------- notifications

mp_status mp_notification_take(mp_engine *engine, int64_t timeout_ns, mp_notification *notification) {
  Engine &core = *engine->engine;
  if (core.forked()) return MP_FORKED;
  Notice notice;
  if (!core.notifications.take(timeout_ns, &notice)) return core.notifications.closed() ? MP_CLOSED : MP_WAIT_TIMEOUT;
  std::memset(notification, 0, sizeof *notification);
  notification->payload = static_cast<uint8_t *>(std::malloc(notice.payload.size() + 1));
  if (notification->payload == nullptr) return MP_NO_MEMORY;
  std::memcpy(notification->payload, notice.payload.data(), notice.payload.size());
  notification->payload_bytes = notice.payload.size();
  std::memcpy(notification->incarnation, notice.incarnation.data(), notice.incarnation.size());
  wire::set_text(notification->peer, notice.peer);
  return MP_OK;
}

void mp_notification_clear(mp_notification *notification) {
  std::free(notification->payload);
  notification->payload = nullptr;
  notification->payload_bytes = 0;
}
