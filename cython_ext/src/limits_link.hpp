// SPDX-License-Identifier: Apache-2.0
//
// What the handles of limits_api.h are made of, and the way from exceptions to statuses.
#pragma once

#include <new>
#include <system_error>

#include "limits_socket.hpp"

struct mpl_listener {
  moonpool::limits::Socket socket;
  std::atomic<bool> aborted{false};
};

struct mpl_link {
  std::vector<moonpool::limits::Socket> sockets;
  std::atomic<bool> aborted{false};
};

namespace moonpool::limits {

// Nothing may leave the C face as an exception.
template <typename Function>
mpl_status guarded(mpl_error *error, Function function) {
  try {
    return function();
  } catch (const std::bad_alloc &) {
    return fail(error, MPL_NO_MEMORY, 0, "out of memory");
  } catch (const std::system_error &problem) {
    return fail(error, MPL_SYSTEM, problem.code().value(), "cannot start a thread");
  }
}

}  // namespace moonpool::limits
