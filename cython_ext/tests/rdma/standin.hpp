// SPDX-License-Identifier: Apache-2.0
//
// A stand-in for libibverbs with devices in memory: what tests ask of it. The engine opens it by the name of the real
// library. Queue pairs of one process find each other by number; every request is checked as a device would, then moved
// by memcpy.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace moonpool::standin {

// Each has one port, RoCE. 0 and 2 are on one subnet, 1 and 3 on another; every port reaches every other one.
constexpr int kDevices = 4;
// "standin0"; its rail is "standin0:1".
std::string device_name(int device);
// "10.0.0.1", what the engine chooses of its table.
std::string gid_of(int device);

// Everything as in the beginning. Nothing may be alive.
void reset();

// ---------------------------------------------------------------- devices

struct Limits {
  uint64_t mr_bytes_max = uint64_t{1} << 40;
  int qp_wr_max = 1024;
  int sge_max = 16;
  uint32_t inline_max = 256;
  int reads_max = 16;
  uint8_t mtu = IBV_MTU_4096;
};
// Engines ask when they open a device.
void set_limits(int device, const Limits &limits);

// With the event. Requests from or to a port that is down wait, as they do until a device has tried often enough.
void set_port(int device, bool up);
struct GidRow {
  uint32_t index;
  ibv_gid_type type;
  std::array<uint8_t, 16> gid;
};
// With the event.
void set_gids(int device, const std::vector<GidRow> &table);

// ---------------------------------------------------------------- when things happen

// false: requests are executed inside post_send. true: by a thread of each queue pair, some time later.
void set_deferred(bool deferred);
// Requests are posted and not executed, until they are let go.
void hold_requests(bool hold);
// Bytes move, and nobody is told.
enum class Side { kSend, kReceive };
void hold_completions(Side side, bool hold);
// What is not acknowledged (port down, queue pair gone): true fails at once, as if every retry were over.
void set_retries_over(bool over);

// ---------------------------------------------------------------- faults

enum class Call {
  kOpen,
  kRegister,
  kRegisterDmabuf,
  kDeregister,
  kCreateChannel,
  kCreateCq,
  kCreateQp,
  kToInit,
  kToRtr,
  kToRts,
  kPostSend,
  kPostReceive,
  kPoll,  // the completion queue is broken, whatever the errno
  kArm,
  kCount
};
struct CallFault {
  Call call;
  int err;
  uint32_t times = 1;
  int device = -1;    // any
  uint32_t skip = 0;  // so many calls succeed before
};
void fail_calls(const CallFault &fault);

struct RequestFault {
  ibv_wc_status status;
  uint32_t vendor_code = 0;
  uint32_t times = 1;
  int device = -1;      // of the requester; any
  uint32_t skip = 0;    // so many requests are executed before
  bool empty = false;   // requests of no bytes too
  bool landed = false;  // the bytes arrive all the same
};
// The request completes with this status, and its queue pair is in the error state.
void fail_requests(const RequestFault &fault);
// Also forgets the faults that were not met.
void clear_faults();

// ---------------------------------------------------------------- what happened

struct Counters {
  uint64_t posts;     // calls of post_send
  uint64_t requests;  // in them
  uint64_t signalled, inlined, immediate;
  uint64_t pieces;  // in the lists of requests
  uint64_t written_bytes, read_bytes;
  uint64_t failed;  // completed with an error that is not a flush
  uint64_t waited;  // found no receive
  uint64_t arms, events;
};
Counters counters();
// Of this function so far, failed or not. device -1: of any.
uint64_t calls(Call call, int device = -1);

struct Alive {
  int64_t contexts, domains, registrations, channels, completion_queues, queue_pairs, workers;
  bool operator==(const Alive &) const = default;
};
Alive alive();
std::string text_of(const Alive &alive);
// Posted and not executed. device -1: of any.
uint64_t requests_waiting(int device = -1);
// What no program may do to a device, such as a queue that overflows, or an object that goes before its parts.
std::vector<std::string> misuses();

}  // namespace moonpool::standin
