// SPDX-License-Identifier: Apache-2.0
// What every function of the C face begins with.
#pragma once

#include <memory>
#include <new>
#include <string>
#include <vector>

#include "engine.hpp"
#include "handles.hpp"

namespace moonpool {

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

inline Error usable(const Engine &engine) {
  if (engine.forked()) {
    return make_error(MP_FORKED, "this engine was made before the process forked",
                      "make a new engine in the child, or start workers with the spawn method");
  }
  if (engine.closed()) return make_error(MP_CLOSED, "the engine is closed", "make a new engine");
  return {};
}

}  // namespace moonpool
