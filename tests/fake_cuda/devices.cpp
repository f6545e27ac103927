// SPDX-License-Identifier: Apache-2.0
//
// Initialisation, devices and contexts.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "world.hpp"

namespace fake {

namespace {

thread_local std::vector<Context *> t_stack;

struct Named {
  int code;
  const char *name, *text;
};
const Named kNames[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {34, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {205, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {206, "CUDA_ERROR_UNMAP_FAILED", "unmapping of buffer object failed"},
    {208, "CUDA_ERROR_ALREADY_MAPPED", "resource already mapped"},
    {211, "CUDA_ERROR_NOT_MAPPED", "resource not mapped"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"},
    {218, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."},
    {304, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {702, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

int text_of(int code, const char **out, bool name) {
  for (const Named &one : kNames) {
    if (one.code != code) continue;
    *out = name ? one.name : one.text;
    return kSuccess;
  }
  *out = nullptr;
  return kInvalidValue;
}

// Of an NVIDIA H100, as far as somebody asks.
int attribute_of(int attribute, int device) {
  switch (attribute) {
    case 1:
      return 1024;  // threads of a block
    case 16:
      return 16;  // multiprocessors
    case 19:
      return 1;  // can map host memory
    case 33:
      return 0x10 + device;  // PCI bus
    case 40:
      return 2;  // copy engines
    case 41:
      return 1;  // unified addressing
    case 75:
      return 9;  // compute capability
    case 83:
      return 1;  // managed memory
    case 89:
      return 1;  // managed memory beside the host
    case 102:
      return 1;  // virtual memory management
    case 103:
      return 1;  // with POSIX file descriptors
    case 110:
      return 1;  // GPUDirect RDMA with it
    case 116:
      return 1;  // GPUDirect RDMA
    case 117:
      return 1;  // its writes can be flushed by the host
    case 118:
      return 0;  // and are not ordered
    case 124:
      return 1;  // dma-buf
    case 125:
      return 1;  // events of other processes
    case 134:
      return -1;  // no NUMA node of its own
    default:
      return 0;
  }
}

bool is_device(int device) { return device >= 0 && device < world().device_count; }

// What an active context leaves behind. Without the gate.
void end_context(Context *context) {
  drain(context);
  World &all = world();
  std::vector<std::shared_ptr<Stream>> closing{context->legacy, context->per_thread};
  std::unique_lock gate(all.gate);
  for (auto at = all.streams.begin(); at != all.streams.end();) {
    if (at->second->context == context) closing.push_back(at->second);
    at = at->second->context == context ? all.streams.erase(at) : std::next(at);
  }
  for (auto at = all.events.begin(); at != all.events.end();) {
    at = at->second->context == context ? all.events.erase(at) : std::next(at);
  }
  // As the driver does, it takes the memory with it. Whoever still has an address finds nothing there.
  for (auto at = all.ranges.begin(); at != all.ranges.end();) {
    const Range &range = at->second;
    if (range.context != context || range.on_host()) {
      ++at;
      continue;
    }
    if (range.physical->counted) all.devices[static_cast<size_t>(range.device)].used -= range.physical->nbytes;
    at = all.ranges.erase(at);
  }
  gate.unlock();
  for (const auto &stream : closing) {
    if (stream != nullptr) close_stream(stream);
  }
}

void begin_context(Context *context, int device, bool primary) {
  context->device = device;
  context->primary = primary;
  context->dead = 0;
  context->legacy = make_stream(context, 0);
  context->per_thread = make_stream(context, 1);
}

}  // namespace

Context *current_context() { return t_stack.empty() ? nullptr : t_stack.back(); }

int device_of(const Context *context) { return context->device; }

bool is_context(const Context *context) {
  return context->primary ? context->references > 0 : world().others.count(const_cast<Context *>(context)) > 0;
}

}  // namespace fake

using namespace fake;

FAKE_API int cuGetErrorName(int code, const char **out) { return text_of(code, out, true); }

FAKE_API int cuGetErrorString(int code, const char **out) { return text_of(code, out, false); }

FAKE_API int cuInit(unsigned flags) {
  FAKE_ENTER(kNothing);
  if (flags != 0) return kInvalidValue;
  World &all = world();
  if (all.exiting) return kDeinitialized;
  if (all.device_count == 0) return kNoDevice;
  std::lock_guard gate(all.gate);
  if (all.initialized) return all.pid == getpid() ? kSuccess : kNotInitialized;
  for (int device = 0; device < all.device_count; ++device) {
    all.devices.emplace_back().primary.device = device;
    all.devices.back().primary.primary = true;
    char pci[32];
    std::snprintf(pci, sizeof pci, "0000:%02x:00.0", 0x10 + device);
    std::lock_guard lock(all.settings_mutex);
    const auto at = static_cast<size_t>(device);
    all.devices.back().pci = at < all.pci.size() ? all.pci[at] : pci;
  }
  all.pid = getpid();
  all.initialized = true;
  std::atexit([] { world().exiting = true; });
  return kSuccess;
}

FAKE_API int cuDriverGetVersion(int *version) {
  FAKE_ENTER(kNothing);
  *version = world().driver_version;
  return kSuccess;
}

FAKE_API int cuDeviceGetCount(int *count) {
  FAKE_ENTER(kDriver);
  *count = world().device_count;
  return kSuccess;
}

FAKE_API int cuDeviceGet(int *device, int ordinal) {
  FAKE_ENTER(kDriver);
  if (!is_device(ordinal)) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

FAKE_API int cuDeviceGetName(char *name, int nbytes, int device) {
  FAKE_ENTER(kDriver);
  if (!is_device(device)) return kInvalidDevice;
  if (nbytes <= 0) return kInvalidValue;
  std::snprintf(name, static_cast<size_t>(nbytes), "Stand-in GPU %d", device);
  return kSuccess;
}

FAKE_API int cuDeviceGetUuid(Uuid *uuid, int device) {
  FAKE_ENTER(kDriver);
  if (!is_device(device)) return kInvalidDevice;
  for (size_t i = 0; i < sizeof uuid->bytes; ++i) uuid->bytes[i] = static_cast<char>(0xa0 + i);
  uuid->bytes[15] = static_cast<char>(device);
  return kSuccess;
}

FAKE_API int cuDeviceGetUuid_v2(Uuid *uuid, int device) {
  FAKE_ENTER(kNothing);
  return cuDeviceGetUuid(uuid, device);
}

FAKE_API int cuDeviceGetPCIBusId(char *id, int nbytes, int device) {
  FAKE_ENTER(kDriver);
  if (!is_device(device)) return kInvalidDevice;
  if (nbytes < 13) return kInvalidValue;
  std::snprintf(id, static_cast<size_t>(nbytes), "%s", world().devices[static_cast<size_t>(device)].pci.c_str());
  return kSuccess;
}

FAKE_API int cuDeviceGetAttribute(int *value, int attribute, int device) {
  FAKE_ENTER(kDriver);
  if (!is_device(device)) return kInvalidDevice;
  if (attribute < 1 || attribute > 200) return kInvalidValue;
  World &all = world();
  std::lock_guard lock(all.settings_mutex);
  for (const int of : {device, -1}) {
    const auto found = all.attributes.find({of, attribute});
    if (found == all.attributes.end()) continue;
    *value = found->second;
    return kSuccess;
  }
  *value = attribute_of(attribute, device);
  return kSuccess;
}

FAKE_API int cuDeviceTotalMem_v2(size_t *nbytes, int device) {
  FAKE_ENTER(kDriver);
  if (!is_device(device)) return kInvalidDevice;
  *nbytes = world().device_bytes;
  return kSuccess;
}

// ---------------------------------------------------------------- contexts

FAKE_API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  FAKE_ENTER(kDriver);
  if (!is_device(device)) return kInvalidDevice;
  *flags = 0;
  *active = world().devices[static_cast<size_t>(device)].primary.references > 0;
  return kSuccess;
}

FAKE_API int cuDevicePrimaryCtxRetain(Context **out, int device) {
  FAKE_ENTER(kDriver);
  if (!is_device(device)) return kInvalidDevice;
  Context &context = world().devices[static_cast<size_t>(device)].primary;
  {
    std::lock_guard gate(world().gate);
    if (context.references++ == 0) {
      count(world().primaries_made);
      begin_context(&context, device, true);
    }
  }
  *out = &context;
  return kSuccess;
}

FAKE_API int cuDevicePrimaryCtxRelease_v2(int device) {
  FAKE_ENTER(kDriver);
  if (!is_device(device)) return kInvalidDevice;
  Context &context = world().devices[static_cast<size_t>(device)].primary;
  {
    std::lock_guard gate(world().gate);
    if (context.references == 0) return kInvalidContext;
    if (--context.references > 0) return kSuccess;
  }
  end_context(&context);
  return kSuccess;
}

FAKE_API int cuDevicePrimaryCtxReset_v2(int device) {
  FAKE_ENTER(kDriver);
  if (!is_device(device)) return kInvalidDevice;
  Context &context = world().devices[static_cast<size_t>(device)].primary;
  {
    std::lock_guard gate(world().gate);
    context.references = 0;
  }
  end_context(&context);
  return kSuccess;
}

FAKE_API int cuCtxCreate_v2(Context **out, unsigned flags, int device) {
  FAKE_ENTER(kDriver);
  (void)flags;
  if (!is_device(device)) return kInvalidDevice;
  auto *context = new Context();  // stays: somebody may still ask about it
  begin_context(context, device, false);
  {
    std::lock_guard gate(world().gate);
    world().others.insert(context);
  }
  t_stack.push_back(context);
  *out = context;
  return kSuccess;
}

FAKE_API int cuCtxDestroy_v2(Context *context) {
  FAKE_ENTER(kDriver);
  {
    std::lock_guard gate(world().gate);
    if (context == nullptr || context->primary || world().others.erase(context) == 0) return kInvalidContext;
  }
  if (current_context() == context) t_stack.pop_back();
  end_context(context);
  return kSuccess;
}

FAKE_API int cuCtxGetCurrent(Context **out) {
  FAKE_ENTER(kDriver);
  *out = current_context();
  return kSuccess;
}

FAKE_API int cuCtxSetCurrent(Context *context) {
  FAKE_ENTER(kDriver);
  if (!t_stack.empty()) t_stack.pop_back();
  if (context != nullptr) t_stack.push_back(context);
  return kSuccess;
}

FAKE_API int cuCtxPushCurrent_v2(Context *context) {
  FAKE_ENTER(kDriver);
  std::shared_lock gate(world().gate);
  if (context == nullptr || !is_context(context)) return kInvalidContext;
  t_stack.push_back(context);
  return kSuccess;
}

FAKE_API int cuCtxPopCurrent_v2(Context **out) {
  FAKE_ENTER(kDriver);
  if (t_stack.empty()) return kInvalidContext;
  if (out != nullptr) *out = t_stack.back();
  t_stack.pop_back();
  return kSuccess;
}

FAKE_API int cuCtxGetDevice(int *device) {
  FAKE_ENTER(kDriver);
  if (current_context() == nullptr) return kInvalidContext;
  *device = device_of(current_context());
  return kSuccess;
}

FAKE_API int cuCtxSynchronize(void) {
  FAKE_ENTER(kContext);
  return drain(current_context());
}
