// SPDX-License-Identifier: Apache-2.0
// What every function of the C face begins with.
#pragma once

#include <memory>
#include <new>
#include <string>
#include <vector>

#include "batch.hpp"
#include "engine.hpp"
#include "handles.hpp"
#include "peer.hpp"

namespace moonpool {

inline Engine &engine_of(const mp_engine &handle) { return *handle.engine; }
inline Engine &engine_of(const mp_region &handle) { return *handle.engine; }
inline Engine &engine_of(const mp_peer &handle) { return handle.peer->engine(); }
inline Engine &engine_of(const mp_plan &handle) { return handle.plan->peer->engine(); }
inline Engine &engine_of(const mp_transfer &handle) { return handle.transfer->peer->engine(); }

// Made before this process forked. Nothing behind the handle may be touched then: threads of the parent may hold its
// locks, and its devices are the parent's.
template <class Handle>
bool inherited(const Handle &handle) {
  return engine_of(handle).forked();
}

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

inline Error null_argument(const char *what) { return make_error(MP_INVALID_ARGUMENT, std::string(what) + " is NULL"); }

// Opens an engine over these transports and makes its handle.
Error open_engine(const mp_config &config, std::vector<std::unique_ptr<Transport>> transports, mp_engine **engine);

inline Error forked_error() {
  return make_error(MP_FORKED, "this engine was made before the process forked",
                    "make a new engine in the child, or start workers with the spawn method");
}

// What the engine has to be for a call.
enum class While { kOpen, kOpenOrClosed };

// Every call with a handle and a status begins here, and `body` never runs in a forked child. Calls without a status
// ask inherited(). tests/tidy knows which calls have no need of either.
template <While when = While::kOpen, class Handle, class Body>
mp_status call(Handle *handle, const char *what, mp_error *error, Body body) {
  return guarded(error, [&]() -> Error {
    if (handle == nullptr) return null_argument(what);
    if (inherited(*handle)) return forked_error();
    if (when == While::kOpen && engine_of(*handle).closed()) {
      return make_error(MP_CLOSED, "the engine is closed", "make a new engine");
    }
    return body();
  });
}

}  // namespace moonpool
