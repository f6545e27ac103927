// SPDX-License-Identifier: Apache-2.0
//
// Types and numbers of the driver's interface, as https://docs.nvidia.com/cuda/cuda-driver-api/ gives them. Written
// apart from those of the engine, so that a wrong number there is found.
#pragma once

#include <cstddef>
#include <cstdint>

#define FAKE_API extern "C" __attribute__((visibility("default")))

namespace fake {

enum Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kDeinitialized = 4,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kMapFailed = 205,
  kAlreadyMapped = 208,
  kNotMapped = 211,
  kInvalidPtx = 218,
  kOperatingSystem = 304,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kContextIsDestroyed = 709,
  kHostMemoryAlreadyRegistered = 712,
  kHostMemoryNotRegistered = 713,
  kNotPermitted = 800,
  kNotSupported = 801,
};

enum PointerAttribute : int {
  kContextOf = 1,
  kMemoryType = 2,
  kDevicePointer = 3,
  kHostPointer = 4,
  kSyncMemops = 6,
  kBufferId = 7,
  kIsManaged = 8,
  kDeviceOrdinal = 9,
  kLegacyIpcCapable = 10,
  kRangeStart = 11,
  kRangeSize = 12,
  kMapped = 13,
  kAllowedHandleTypes = 14,
  kGpuDirectCapable = 15,
  kAccessFlags = 16,
  kMappingSize = 18,
  kMappingBase = 19,
};

enum MemoryType : unsigned { kHostMemory = 1, kDeviceMemory = 2 };

struct Location {
  int type;  // 1: device; 2: host
  int id;
};

struct AllocationProp {
  int type;                    // 1: pinned
  int requested_handle_types;  // 1: POSIX file descriptor
  Location location;
  void *win32_meta_data;
  struct {
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};

struct AccessDesc {
  Location location;
  int flags;  // 0: none; 1: read; 3: read and write
};

struct MemcpyAttributes {
  int src_access_order;  // 1: stream; 2: during the call; 3: any
  Location src_hint, dst_hint;
  unsigned flags;
};

struct IpcHandle {
  char bytes[64];
};

struct Uuid {
  char bytes[16];
};

constexpr size_t kPage = 4096;
constexpr size_t kGranularity = size_t{2} << 20;

constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

}  // namespace fake
