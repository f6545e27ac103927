// SPDX-License-Identifier: Apache-2.0
// libcuda, opened when somebody first hands over memory that is not plainly the host's, so that one build runs on hosts
// with and without a GPU. The prototypes are declared here: CUDA's headers are not needed to build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "status.hpp"

namespace moonpool::cuda {

using Result = int;  // CUresult
using Device = int;  // CUdevice: the ordinal
using Pointer = uint64_t;
using Context = struct ContextObject *;
using Stream = struct StreamObject *;
using Event = struct EventObject *;
using Module = struct ModuleObject *;
using Function = struct FunctionObject *;
using AllocationHandle = uint64_t;

constexpr Result kSuccess = 0;
constexpr Result kInvalidValue = 1;
constexpr Result kOutOfMemory = 2;
constexpr Result kNotInitialized = 3;
constexpr Result kDeinitialized = 4;
constexpr Result kNoDevice = 100;
constexpr Result kInvalidContext = 201;
constexpr Result kPeerAccessAlreadyEnabled = 704;
constexpr Result kNotFound = 500;
constexpr Result kNotReady = 600;
constexpr Result kNotSupported = 801;

// CU_POINTER_ATTRIBUTE_*
enum PointerAttribute : int {
  kAttributeContext = 1,
  kAttributeMemoryType = 2,
  kAttributeSyncMemops = 6,
  kAttributeBufferId = 7,
  kAttributeIsManaged = 8,
  kAttributeDeviceOrdinal = 9,
  kAttributeIsLegacyIpcCapable = 10,
  kAttributeRangeStart = 11,
  kAttributeRangeSize = 12,
  kAttributeMapped = 13,
};
// CU_MEMORYTYPE_*
constexpr unsigned kMemoryHost = 1;
constexpr unsigned kMemoryDevice = 2;

constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventBlockingSync = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kEventInterprocess = 4;
constexpr unsigned kHostAllocPortable = 1;
constexpr unsigned kHostRegisterPortable = 1;

struct Uuid {
  uint8_t bytes[16];
};
// CUipcMemHandle and CUipcEventHandle.
struct IpcHandle {
  uint8_t bytes[64];
};
struct Location {  // CUmemLocation
  int type;
  int id;
};
struct AllocationProperties {  // CUmemAllocationProp
  int type;
  int requested_handle_types;
  Location location;
  void *win32_metadata;
  struct {
    uint8_t compression_type;
    uint8_t gpu_direct_rdma_capable;
    uint16_t usage;
    uint8_t reserved[4];
  } flags;
};
struct AccessDescription {  // CUmemAccessDesc
  Location location;
  int flags;
};
// CUmemcpyAttributes
struct CopyAttributes {
  int source_access_order;
  Location source_hint;
  Location target_hint;
  unsigned flags;
};
constexpr int kSourceAccessOrderStream = 1;

// Only the functions that are used. Those marked optional may be nullptr; who uses one has another way without it.
struct Driver {
  Result (*init)(unsigned);
  Result (*driver_version)(int *);
  Result (*error_name)(Result, const char **);
  Result (*error_string)(Result, const char **);

  Result (*device_get)(Device *, int);
  Result (*device_count)(int *);
  Result (*device_name)(char *, int, Device);
  Result (*device_uuid)(Uuid *, Device);
  Result (*device_pci_bus_id)(char *, int, Device);
  Result (*device_attribute)(int *, int, Device);
  Result (*primary_context_state)(Device, unsigned *, int *);
  Result (*primary_context_retain)(Context *, Device);
  Result (*primary_context_release)(Device);

  Result (*context_current)(Context *);
  Result (*context_push)(Context);
  Result (*context_pop)(Context *);
  Result (*context_device)(Device *);

  Result (*pointer_attributes)(unsigned, int *, void **, Pointer);
  Result (*set_pointer_attribute)(const void *, int, Pointer);
  Result (*address_range)(Pointer *, size_t *, Pointer);
  Result (*allocate)(Pointer *, size_t);
  Result (*free)(Pointer);
  Result (*host_register)(void *, size_t, unsigned);
  Result (*host_unregister)(void *);
  Result (*host_allocate)(void **, size_t, unsigned);
  Result (*host_free)(void *);
  Result (*allocate_managed)(Pointer *, size_t, unsigned);

  Result (*copy)(Pointer, Pointer, size_t, Stream);
  Result (*copy_to_device)(Pointer, const void *, size_t, Stream);
  Result (*copy_to_host)(void *, Pointer, size_t, Stream);
  Result (*copy_on_device)(Pointer, Pointer, size_t, Stream);
  // Optional, 12.8: targets, sources, sizes, count, attributes, first copy of each attribute, attributes' count, the
  // copy that failed, stream.
  Result (*copy_batch)(Pointer *, Pointer *, size_t *, size_t, CopyAttributes *, size_t *, size_t, size_t *, Stream);

  Result (*stream_create)(Stream *, unsigned, int);
  Result (*stream_destroy)(Stream);
  Result (*stream_wait)(Stream, Event, unsigned);
  Result (*stream_query)(Stream);
  Result (*stream_synchronize)(Stream);
  Result (*event_create)(Event *, unsigned);
  Result (*event_record)(Event, Stream);
  Result (*event_query)(Event);
  Result (*event_destroy)(Event);

  Result (*ipc_export_memory)(IpcHandle *, Pointer);
  Result (*ipc_open_memory)(Pointer *, IpcHandle, unsigned);
  Result (*ipc_close_memory)(Pointer);
  Result (*ipc_export_event)(IpcHandle *, Event);
  Result (*ipc_open_event)(Event *, IpcHandle);

  // Virtual memory management, optional as a whole: 10.2.
  Result (*reserve_address)(Pointer *, size_t, size_t, Pointer, uint64_t);
  Result (*free_address)(Pointer, size_t);
  Result (*create_allocation)(AllocationHandle *, size_t, const AllocationProperties *, uint64_t);
  Result (*release_allocation)(AllocationHandle);
  Result (*map)(Pointer, size_t, size_t, AllocationHandle, uint64_t);
  Result (*unmap)(Pointer, size_t);
  Result (*set_access)(Pointer, size_t, const AccessDescription *, size_t);
  Result (*retain_allocation)(AllocationHandle *, void *);
  Result (*export_allocation)(void *, AllocationHandle, int, uint64_t);
  Result (*import_allocation)(AllocationHandle *, void *, int);
  Result (*allocation_properties)(AllocationProperties *, AllocationHandle);
  Result (*allocation_granularity)(size_t *, const AllocationProperties *, int);

  Result (*range_handle)(void *, Pointer, size_t, int, uint64_t);  // optional, 11.7
  Result (*flush_rdma_writes)(int, int);                           // optional, 11.3

  Result (*module_load)(Module *, const void *);
  Result (*module_unload)(Module);
  Result (*module_function)(Function *, Module, const char *);
  Result (*launch)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void **,
                   void **);

  int version = 0;  // as cuDriverGetVersion says: 12080 is 12.8

  // nullptr with the reason when it cannot be used here. The library stays open to the end of the process.
  // MOONPOOL_CUDA_LIBRARY names another file than libcuda.so.1.
  static const Driver *load(Error *why_not);
  // The same without starting it, in a process that has it open: who has memory of a GPU has. Otherwise nullptr.
  static const Driver *present();
};

// "CUDA_ERROR_ILLEGAL_ADDRESS".
std::string result_name(const Driver &driver, Result result);
// A driver call failed while doing `what`. The name is in the cause.
Error call_error(const Driver &driver, Result result, std::string what);

// A context that is current for the calling thread as long as this lives.
class ContextScope {
 public:
  ContextScope(const Driver &driver, Context context) : driver_(driver), result_(driver.context_push(context)) {}
  ~ContextScope() {
    Context popped = nullptr;
    if (result_ == kSuccess) driver_.context_pop(&popped);
  }
  ContextScope(const ContextScope &) = delete;
  ContextScope &operator=(const ContextScope &) = delete;
  // Whether it is: a context that was destroyed cannot be.
  Result result() const { return result_; }

 private:
  const Driver &driver_;
  const Result result_;
};

}  // namespace moonpool::cuda
