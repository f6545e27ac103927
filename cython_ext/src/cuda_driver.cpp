// SPDX-License-Identifier: Apache-2.0
#include "cuda_driver.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <mutex>
#include <type_traits>

namespace moonpool::cuda {

namespace {

const char *library_name() {
  const char *name = std::getenv("MOONPOOL_CUDA_LIBRARY");
  return name == nullptr || *name == '\0' ? "libcuda.so.1" : name;
}

class Table {
 public:
  Table() {
    library_ = dlopen(library_name(), RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr) {
      const char *reason = dlerror();
      why_not_ = make_error(MP_CUDA, std::string(library_name()) + " cannot be opened",
                            "install the NVIDIA driver, or give the container its GPUs (--gpus all)");
      why_not_.cause = reason == nullptr ? "unknown" : reason;
      return;
    }
    find_basics();
    find_memory();
    find_streams();
    find_sharing();
    find_newer();
    complete_ = !why_not_;
  }

  Driver driver{};
  // Every call that is needed is there.
  bool usable() const { return complete_; }
  // When it is first needed: a process that forks before anybody has used the driver can still use it in its children.
  // One that does not start, for want of memory perhaps, is tried again the next time.
  Error started() {
    if (!complete_) return why_not_;
    std::lock_guard lock(start_mutex_);
    if (started_) return {};
    Error error = start();
    started_ = !error;
    return error;
  }

 private:
  template <class Member>
  void find_optional(Member *function, const char *name) {
    *function = reinterpret_cast<Member>(dlsym(library_, name));
  }
  template <class Member>
  void find(Member *function, const char *name) {
    find_optional(function, name);
    if (*function != nullptr || why_not_) return;
    why_not_ =
        make_error(MP_CUDA, std::string(library_name()) + " has no " + name, "install a driver for CUDA 11.4 or later");
  }

  void find_basics() {
    find(&driver.init, "cuInit");
    find(&driver.driver_version, "cuDriverGetVersion");
    find(&driver.error_name, "cuGetErrorName");
    find(&driver.error_string, "cuGetErrorString");
    find(&driver.device_get, "cuDeviceGet");
    find(&driver.device_count, "cuDeviceGetCount");
    find(&driver.device_name, "cuDeviceGetName");
    find(&driver.device_uuid, "cuDeviceGetUuid");
    find(&driver.device_pci_bus_id, "cuDeviceGetPCIBusId");
    find(&driver.device_attribute, "cuDeviceGetAttribute");
    find(&driver.primary_context_state, "cuDevicePrimaryCtxGetState");
    find(&driver.primary_context_retain, "cuDevicePrimaryCtxRetain");
    find(&driver.primary_context_release, "cuDevicePrimaryCtxRelease_v2");
    find(&driver.context_current, "cuCtxGetCurrent");
    find(&driver.context_push, "cuCtxPushCurrent_v2");
    find(&driver.context_pop, "cuCtxPopCurrent_v2");
    find(&driver.context_device, "cuCtxGetDevice");
  }

  void find_memory() {
    find(&driver.pointer_attributes, "cuPointerGetAttributes");
    find(&driver.set_pointer_attribute, "cuPointerSetAttribute");
    find(&driver.address_range, "cuMemGetAddressRange_v2");
    find(&driver.allocate, "cuMemAlloc_v2");
    find(&driver.free, "cuMemFree_v2");
    find(&driver.host_register, "cuMemHostRegister_v2");
    find(&driver.host_unregister, "cuMemHostUnregister");
    find(&driver.host_allocate, "cuMemHostAlloc");
    find(&driver.host_free, "cuMemFreeHost");
    find(&driver.allocate_managed, "cuMemAllocManaged");
    find(&driver.copy, "cuMemcpyAsync");
    find(&driver.copy_to_device, "cuMemcpyHtoDAsync_v2");
    find(&driver.copy_to_host, "cuMemcpyDtoHAsync_v2");
    find(&driver.copy_on_device, "cuMemcpyDtoDAsync_v2");
  }

  void find_streams() {
    find(&driver.stream_create, "cuStreamCreateWithPriority");
    find(&driver.stream_destroy, "cuStreamDestroy_v2");
    find(&driver.stream_wait, "cuStreamWaitEvent");
    find(&driver.stream_query, "cuStreamQuery");
    find(&driver.stream_synchronize, "cuStreamSynchronize");
    find(&driver.event_create, "cuEventCreate");
    find(&driver.event_record, "cuEventRecord");
    find(&driver.event_query, "cuEventQuery");
    find(&driver.event_destroy, "cuEventDestroy_v2");
    find(&driver.module_load, "cuModuleLoadData");
    find(&driver.module_unload, "cuModuleUnload");
    find(&driver.module_function, "cuModuleGetFunction");
    find(&driver.launch, "cuLaunchKernel");
  }

  void find_sharing() {
    find(&driver.ipc_export_memory, "cuIpcGetMemHandle");
    find(&driver.ipc_open_memory, "cuIpcOpenMemHandle_v2");
    find(&driver.ipc_close_memory, "cuIpcCloseMemHandle");
    find(&driver.ipc_export_event, "cuIpcGetEventHandle");
    find(&driver.ipc_open_event, "cuIpcOpenEventHandle");
  }

  void find_newer() {
    find_optional(&driver.reserve_address, "cuMemAddressReserve");
    find_optional(&driver.free_address, "cuMemAddressFree");
    find_optional(&driver.create_allocation, "cuMemCreate");
    find_optional(&driver.release_allocation, "cuMemRelease");
    find_optional(&driver.map, "cuMemMap");
    find_optional(&driver.unmap, "cuMemUnmap");
    find_optional(&driver.set_access, "cuMemSetAccess");
    find_optional(&driver.retain_allocation, "cuMemRetainAllocationHandle");
    find_optional(&driver.export_allocation, "cuMemExportToShareableHandle");
    find_optional(&driver.import_allocation, "cuMemImportFromShareableHandle");
    find_optional(&driver.allocation_properties, "cuMemGetAllocationPropertiesFromHandle");
    find_optional(&driver.allocation_granularity, "cuMemGetAllocationGranularity");
    find_optional(&driver.copy_batch, "cuMemcpyBatchAsync");
    find_optional(&driver.range_handle, "cuMemGetHandleForAddressRange");
    find_optional(&driver.flush_rdma_writes, "cuFlushGPUDirectRDMAWrites");
  }

  Error start() {
    Result result = driver.init(0);
    if (result == kSuccess) result = driver.driver_version(&driver.version);
    if (result == kSuccess) return {};
    Error error = call_error(driver, result, "the CUDA driver does not start");
    error.hint = "see whether nvidia-smi works in the same container, and CUDA_VISIBLE_DEVICES";
    return error;
  }

  void *library_ = nullptr;
  bool complete_ = false;
  Error why_not_;
  std::mutex start_mutex_;
  bool started_ = false;
};

Table &table() {
  // Never destroyed: engines may still close while the process exits.
  static auto *const loaded = new Table();
  return *loaded;
}

}  // namespace

const Driver *Driver::load(Error *why_not) {
  *why_not = table().started();
  return *why_not ? nullptr : &table().driver;
}

const Driver *Driver::present() {
  void *library = dlopen(library_name(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  dlclose(library);
  return table().usable() ? &table().driver : nullptr;
}

std::string result_name(const Driver &driver, Result result) {
  const char *name = nullptr;
  if (driver.error_name(result, &name) != kSuccess || name == nullptr) return "CUresult " + std::to_string(result);
  return name;
}

Error call_error(const Driver &driver, Result result, std::string what) {
  Error error = make_error(result == kOutOfMemory ? MP_NO_MEMORY : MP_CUDA, std::move(what));
  const char *text = nullptr;
  error.cause = result_name(driver, result);
  if (driver.error_string(result, &text) == kSuccess && text != nullptr) error.cause += std::string(": ") + text;
  if (result == kOutOfMemory) {
    error.hint = "free memory of the device, or lower cuda_staging_bytes";
  } else if (result == kNotInitialized) {
    error.hint = "CUDA cannot be used in a child that was forked after its parent used it: start it with spawn";
  } else {
    error.hint = "a context that met an illegal access stays broken: restart the process if every call fails";
  }
  return error;
}

}  // namespace moonpool::cuda
