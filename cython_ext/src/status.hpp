// SPDX-License-Identifier: Apache-2.0
// Errors inside the core. They become mp_error at the C face and never travel as C++ exceptions.
#pragma once

#include <string>

#include "moonpool/engine.h"

namespace moonpool {

constexpr mp_status kLastStatus = MP_CUDA;

struct Error {
  mp_status code = MP_OK;
  int sys_errno = 0;
  int64_t item = -1;
  std::string message;  // what was attempted and what happened
  std::string cause;    // the first cause
  std::string hint;     // what to try
  std::string peer;
  std::string path;

  explicit operator bool() const { return code != MP_OK; }
};

Error make_error(mp_status code, std::string message, std::string hint = {});
// An operating-system call failed with `err` while doing `what`.
Error system_error(mp_status code, int err, std::string what, std::string hint = {});
std::string errno_text(int err);
// The field's word for a status, e.g. "region released".
const char *status_text(mp_status code);
// Of a descriptor of which the peer has said no more than this number.
Error refused_by_peer(mp_status code);
// Whether the same call may succeed later without a change by the caller.
bool status_retryable(mp_status code);
// What a long wait asks now and then, and what it ends with when the answer is yes.
struct Interrupt {
  mp_interrupt call = nullptr;
  void *context = nullptr;
  bool operator()() const { return call != nullptr && call(context) != 0; }
};
constexpr int64_t kInterruptEveryNs = 100'000'000;
Error interrupted_error();
mp_status export_error(const Error &error, mp_error *out);

}  // namespace moonpool
