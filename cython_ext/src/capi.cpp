// SPDX-License-Identifier: Apache-2.0
// The C face: checks handles, converts, and keeps everything C++ (exceptions above all) inside.
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "capi_support.hpp"
#include "cuda_memory.hpp"

using namespace moonpool;

namespace {

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
    return make_error(MP_INVALID_ARGUMENT, "a region name has 1 to 255 bytes",
                      "leave the name out for a private region");
  }
  return {};
}

Error unknown_flags() {
  return make_error(MP_INVALID_ARGUMENT, "unknown region flags", "MP_REGION_WRITABLE, or 0 when peers only read");
}

Error check_memory(const void *address, uint64_t nbytes, uint32_t flags) {
  if (address == nullptr) return null_argument("address");
  if (nbytes == 0) return make_error(MP_OUT_OF_RANGE, "cannot register 0 bytes", "register at least one byte");
  const auto begin = reinterpret_cast<uintptr_t>(address);
  if (begin + nbytes < begin) {
    return make_error(MP_OUT_OF_RANGE, "address + length wraps around", "check the address and the length");
  }
  return (flags & ~MP_REGION_WRITABLE) != 0 ? unknown_flags() : Error{};
}

Error add_region(const std::shared_ptr<Engine> &engine, std::shared_ptr<Region> region, mp_region **out) {
  if (Error error = engine->add_region(region)) return error;
  *out = new mp_region{engine, std::move(region)};
  return {};
}

}  // namespace

// ---------------------------------------------------------------- engine

void mp_config_init(mp_config *config) {
  std::memset(config, 0, sizeof *config);
  config->abi_version = MP_ABI_VERSION;
  config->transports = "auto";
  config->spin_us = UINT32_MAX;
  config->cuda_staging = 1;
  config->rdma_inline_bytes = UINT32_MAX;
}

mp_status mp_engine_open(const mp_config *config, mp_engine **engine, mp_error *error) {
  return guarded(error, [&]() -> Error {
    if (config == nullptr || engine == nullptr) return null_argument("config or engine");
    return open_engine(*config, all_transports(), engine);
  });
}

mp_status mp_engine_close(mp_engine *engine, mp_error *error) {
  return guarded(error, [&]() -> Error {
    if (engine == nullptr) return null_argument("engine");
    if (!inherited(*engine)) engine->engine->close();
    return {};
  });
}

mp_status mp_engine_fence(mp_engine *engine, const uint8_t incarnation[16], uint32_t *sessions, mp_error *error) {
  return call(engine, "engine", error, [&]() -> Error {
    if (incarnation == nullptr) return null_argument("incarnation");
    Id128 id;
    std::memcpy(id.data(), incarnation, id.size());
    uint32_t ended = 0;
    Error failed = engine->engine->fence(id, &ended);
    if (sessions != nullptr) *sessions = ended;
    return failed;
  });
}

void mp_engine_free(mp_engine *engine) {
  // A child has none of the threads that the destructors would join, so it leaves the parent's objects alone.
  if (engine == nullptr || inherited(*engine)) return;
  engine->engine->close();
  delete engine;
}

const char *mp_engine_address(const mp_engine *engine) { return engine->engine->address().c_str(); }

void mp_engine_incarnation(const mp_engine *engine, uint8_t incarnation[16]) {
  std::memcpy(incarnation, engine->engine->identity.incarnation.data(), 16);
}

size_t mp_engine_stats_json(mp_engine *engine, char *buffer, size_t size) {
  // A child must not take locks that a thread of the parent may have held when the process forked.
  return copy_out(inherited(*engine) ? "{}" : stats_json(*engine->engine), buffer, size);
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

void mp_allocation_init(mp_allocation *allocation) {
  *allocation = {MP_REGION_WRITABLE, MP_HUGE_PAGES_AUTO, MP_NUMA_ANY};
}

mp_status mp_region_allocate(mp_engine *engine, uint64_t nbytes, const char *name, const mp_allocation *allocation,
                             mp_region **region, mp_error *error) {
  return call(engine, "engine", error, [&]() -> Error {
    if (region == nullptr) return null_argument("region");
    Engine &core = *engine->engine;
    std::string text;
    if (Error bad = check_name(name, &text)) return bad;
    if (nbytes == 0) return make_error(MP_OUT_OF_RANGE, "cannot allocate 0 bytes", "ask for 1 byte or more");
    mp_allocation chosen;
    mp_allocation_init(&chosen);
    if (allocation != nullptr) chosen = *allocation;
    if ((chosen.flags & ~MP_REGION_WRITABLE) != 0) return unknown_flags();
    if (chosen.huge_pages < MP_HUGE_PAGES_AUTO || chosen.huge_pages > MP_HUGE_PAGES_REQUIRED) {
      return make_error(MP_INVALID_ARGUMENT, "huge_pages is none of MP_HUGE_PAGES_*",
                        "mp_allocation_init sets a valid one");
    }
    if (chosen.numa_node < MP_NUMA_ANY) {
      return make_error(MP_INVALID_ARGUMENT, "numa_node is negative", "MP_NUMA_ANY leaves the choice to the kernel");
    }
    const bool peers_write = (chosen.flags & MP_REGION_WRITABLE) != 0;
    std::unique_ptr<Memory> memory;
    const Allocation wanted{nbytes, !text.empty(), peers_write, chosen.huge_pages, chosen.numa_node};
    if (Error bad = Memory::allocate(wanted, &memory)) return bad;
    return add_region(
        engine->engine,
        std::make_shared<Region>(core.next_region_id(), std::move(memory), nbytes, std::move(text), chosen.flags),
        region);
  });
}

mp_status mp_region_register(mp_engine *engine, void *address, uint64_t nbytes, const char *name, uint32_t flags,
                             mp_region **region, mp_error *error) {
  return call(engine, "engine", error, [&]() -> Error {
    if (region == nullptr) return null_argument("region");
    Engine &core = *engine->engine;
    std::string text;
    if (Error bad = check_name(name, &text)) return bad;
    if (Error bad = check_memory(address, nbytes, flags)) return bad;
    if (Error bad = cuda::check_host_memory(address, nbytes)) return bad;
    auto made = std::make_shared<Region>(core.next_region_id(), static_cast<uint8_t *>(address), nbytes,
                                         std::move(text), flags);
    return add_region(engine->engine, std::move(made), region);
  });
}

mp_status mp_region_register_cuda(mp_engine *engine, void *address, uint64_t nbytes, int32_t device, const char *name,
                                  uint32_t flags, mp_region **region, mp_error *error) {
  return call(engine, "engine", error, [&]() -> Error {
    if (region == nullptr) return null_argument("region");
    std::string text;
    if (Error bad = check_name(name, &text)) return bad;
    if (Error bad = check_memory(address, nbytes, flags)) return bad;
    std::shared_ptr<cuda::DeviceMemory> memory;
    if (Error bad = cuda::DeviceMemory::open(address, nbytes, device, &memory)) return bad;
    auto made = std::make_shared<Region>(engine->engine->next_region_id(), static_cast<uint8_t *>(address), nbytes,
                                         std::move(text), flags, std::move(memory));
    return add_region(engine->engine, std::move(made), region);
  });
}

mp_status mp_cuda_memory_kind(const void *address, uint64_t nbytes, mp_memory_kind *kind, int32_t *device,
                              mp_error *error) {
  return guarded(error, [&]() -> Error {
    if (kind == nullptr || device == nullptr) return null_argument("kind or device");
    if (Error bad = check_memory(address, nbytes, 0)) return bad;
    Error bad;
    const cuda::Driver *const driver = cuda::Driver::load(&bad);
    if (driver == nullptr) return bad;
    const auto begin = reinterpret_cast<cuda::Pointer>(address);
    cuda::PointerFacts first, last;
    if ((bad = cuda::pointer_facts(*driver, begin, &first))) return bad;
    if ((bad = cuda::pointer_facts(*driver, begin + nbytes - 1, &last))) return bad;
    if (first.kind != last.kind || first.device != last.device) {
      return make_error(MP_INVALID_ARGUMENT, "the first and the last byte are of different kinds of memory",
                        "check the address and the length");
    }
    *kind = static_cast<mp_memory_kind>(first.kind);
    *device = first.device;
    return {};
  });
}

size_t mp_region_location(const mp_region *region, char *buffer, size_t size) {
  return copy_out(region->region->location(), buffer, size);
}

mp_status mp_region_release(mp_region *region, mp_error *error) {
  return call<While::kOpenOrClosed>(region, "region", error,
                                    [&] { return region->engine->release_region(*region->region); });
}

void mp_region_free(mp_region *region) {
  if (region == nullptr || inherited(*region)) return;
  delete region;
}

void mp_region_get_info(const mp_region *region, mp_region_info *info) {
  const Region &core = *region->region;
  const bool own = core.memory != nullptr;
  *info = {core.id,   core.key,   core.generation, core.length,
           core.base, core.flags, own ? 1 : 0,     own ? core.memory->page_bytes() : 0};
}

// ---------------------------------------------------------------- peers

mp_status mp_peer_connect(mp_engine *engine, const char *address, uint32_t timeout_ms, mp_interrupt interrupt,
                          void *context, mp_peer **peer, mp_error *error) {
  return call(engine, "engine", error, [&]() -> Error {
    if (address == nullptr || peer == nullptr) return null_argument("address or peer");
    Engine &core = *engine->engine;
    const int64_t timeout = timeout_ms == 0 ? core.config.connect_timeout_ms : timeout_ms;
    const int64_t deadline = deadline_after(timeout * kMillisecond);
    std::vector<SocketAddress> resolved;
    if (Error bad = resolve_address(address, false, deadline, {interrupt, context}, &resolved)) return bad;
    std::shared_ptr<Peer> made = Peer::make(engine->engine, address, std::move(resolved));
    if (!core.add_peer(made)) {
      const Error closed = make_error(MP_CLOSED, "the engine is closed", "make a new engine");
      made->close(closed);
      return closed;
    }
    if (Error bad = made->ensure(deadline, {interrupt, context})) {
      made->close(bad);
      return bad;
    }
    *peer = new mp_peer{std::move(made)};
    return {};
  });
}

mp_status mp_peer_ensure(mp_peer *peer, uint32_t timeout_ms, mp_interrupt interrupt, void *context, mp_error *error) {
  return call(peer, "peer", error, [&] {
    const int64_t timeout = timeout_ms == 0 ? engine_of(*peer).config.connect_timeout_ms : timeout_ms;
    return peer->peer->ensure(deadline_after(timeout * kMillisecond), {interrupt, context});
  });
}

mp_status mp_peer_close(mp_peer *peer, mp_error *error) {
  return call<While::kOpenOrClosed>(peer, "peer", error, [&]() -> Error {
    peer->peer->close(make_error(MP_CLOSED, "the peer was closed", "connect again"));
    return {};
  });
}

void mp_peer_free(mp_peer *peer) {
  if (peer == nullptr || inherited(*peer)) return;
  delete peer;
}

void mp_peer_get_info(const mp_peer *peer, mp_peer_info *info) {
  if (inherited(*peer)) {
    std::memset(info, 0, sizeof *info);
    info->state = MP_PEER_CLOSED;
    return;
  }
  peer->peer->info(info);
}

mp_status mp_peer_find_region(mp_peer *peer, const char *name, int64_t timeout_ns, mp_remote_region *region,
                              mp_error *error) {
  return call(peer, "peer", error, [&]() -> Error {
    if (name == nullptr || region == nullptr) return null_argument("name or region");
    return peer->peer->find_region(name, until_of(timeout_ns), region);
  });
}

size_t mp_peer_list_regions(mp_peer *peer, mp_remote_region *regions, size_t capacity) {
  if (inherited(*peer)) return 0;
  const std::vector<mp_remote_region> all = peer->peer->regions();
  std::copy_n(all.begin(), std::min(capacity, all.size()), regions);
  return all.size();
}
