// SPDX-License-Identifier: Apache-2.0
#include "status.hpp"

#include <algorithm>
#include <cstring>
#include <system_error>

namespace moonpool {

namespace {

template <size_t N>
void copy_text(char (&out)[N], const std::string &text) {
  const size_t n = std::min(text.size(), N - 1);
  std::memcpy(out, text.data(), n);
  out[n] = '\0';
}

}  // namespace

Error make_error(mp_status code, std::string message, std::string hint) {
  Error error;
  error.code = code;
  error.message = std::move(message);
  error.hint = std::move(hint);
  return error;
}

Error system_error(mp_status code, int err, std::string what, std::string hint) {
  Error error = make_error(code, std::move(what), std::move(hint));
  error.sys_errno = err;
  error.cause = errno_text(err);
  return error;
}

std::string errno_text(int err) {
  return std::generic_category().message(err) + " (errno " + std::to_string(err) + ")";
}

Error refused_by_peer(mp_status code) {
  Error error = make_error(code, std::string("the peer refused a descriptor: ") + status_text(code));
  if (code == MP_CUDA) {
    error.message += " there";
    error.hint = "see the GPU of the peer's region: a call of the peer's driver failed, or its context is dead";
  } else if (code == MP_NO_MEMORY) {
    error.message += " there";
    error.hint = "the peer had no memory to pass the bytes through: a smaller cuda_staging_bytes there, or free some";
  } else if (code == MP_TRANSPORT_UNAVAILABLE) {
    error.hint = "cuda_staging=True at the peer lets the bytes pass through its host on their way to its GPU";
  } else if (code == MP_REGION_RELEASED) {
    error.hint = "look the region up again. Memory of a GPU that was freed while it was registered counts as released";
  }
  return error;
}

const char *status_text(mp_status code) {
  switch (code) {
    case MP_OK:
      return "ok";
    case MP_PENDING:
      return "not finished";
    case MP_INVALID_ARGUMENT:
      return "invalid argument";
    case MP_OUT_OF_RANGE:
      return "outside the region";
    case MP_CONFIG:
      return "bad setting";
    case MP_TRANSPORT_UNAVAILABLE:
      return "transport unavailable";
    case MP_REGION_UNKNOWN:
      return "unknown region";
    case MP_REGION_RELEASED:
      return "region released";
    case MP_REGION_READ_ONLY:
      return "region is read-only";
    case MP_REGION_BUSY:
      return "region busy";
    case MP_REGION_STALE:
      return "region of an earlier incarnation";
    case MP_ADDRESS:
      return "bad address";
    case MP_LISTEN:
      return "cannot listen";
    case MP_CONNECT:
      return "cannot connect";
    case MP_PEER_LOST:
      return "peer lost";
    case MP_PROTOCOL:
      return "protocol error";
    case MP_VERSION:
      return "protocol version differs";
    case MP_AUTH:
      return "cluster secret differs";
    case MP_DEADLINE:
      return "deadline passed";
    case MP_CANCELLED:
      return "cancelled";
    case MP_WAIT_TIMEOUT:
      return "wait timed out";
    case MP_DIGEST:
      return "digest mismatch";
    case MP_NOTIFY_FULL:
      return "notification queue full";
    case MP_NO_MEMORY:
      return "out of memory";
    case MP_LIMIT:
      return "limit reached";
    case MP_CLOSED:
      return "closed";
    case MP_FORKED:
      return "used in a forked child";
    case MP_SYSTEM:
      return "system error";
    case MP_INTERNAL:
      return "internal error";
    case MP_CUDA:
      return "CUDA driver error";
  }
  return "unknown status";
}

bool status_retryable(mp_status code) {
  switch (code) {
    case MP_REGION_BUSY:
    case MP_CONNECT:
    case MP_PEER_LOST:
    case MP_DEADLINE:
    case MP_WAIT_TIMEOUT:
    case MP_DIGEST:
    case MP_NOTIFY_FULL:
    case MP_NO_MEMORY:
    case MP_LIMIT:
      return true;
    default:
      return false;
  }
}

Error interrupted_error() { return make_error(MP_CANCELLED, "the wait for the connection was interrupted"); }

mp_status export_error(const Error &error, mp_error *out) {
  if (out != nullptr) {
    out->code = error.code;
    out->sys_errno = error.sys_errno;
    out->item = error.item;
    out->retryable = status_retryable(error.code) ? 1 : 0;
    copy_text(out->path, error.path);
    copy_text(out->peer, error.peer);
    copy_text(out->message, error.message);
    copy_text(out->cause, error.cause);
    copy_text(out->hint, error.hint);
  }
  return error.code;
}

}  // namespace moonpool
