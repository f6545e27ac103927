// SPDX-License-Identifier: Apache-2.0
#include "cuda_ipc_memory.hpp"

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

namespace moonpool::cuda_ipc {

namespace {

constexpr int kPosixDescriptor = 1;      // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
constexpr int kOnDevice = 1;             // CU_MEM_LOCATION_TYPE_DEVICE
constexpr int kReadWrite = 3;            // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
constexpr unsigned kLazyPeerAccess = 1;  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
constexpr char kHowToShare[] =
    "torch 2.5 or later shares what expandable_segments made; with cuMemCreate, ask for "
    "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR";

Error unusable(const cuda::DeviceMemory &memory, cuda::Result result) {
  return call_error(memory.driver(), result,
                    "the context of cuda:" + std::to_string(memory.device()) + " is of no use");
}

// The allocation or mapped part that the address lies in.
Error find_part(const cuda::Driver &driver, cuda::Pointer address, cuda::Pointer *start, uint64_t *nbytes) {
  size_t size = 0;
  const cuda::Result result = driver.address_range(start, &size, address);
  *nbytes = size;
  if (result != cuda::kSuccess) return call_error(driver, result, "the allocation of the memory cannot be found");
  if (*start + size > address) return {};
  return make_error(MP_CUDA, "the driver names an allocation that the memory does not lie in");
}

// Has mappings closed. The driver waits in that for whatever the device has to do, for ever where it hangs, so a thread
// does it that nobody has to wait for. There is one as long as there is something to close.
class Closer {
 public:
  // Waits for its end at most so long, and not at all where one before it has been given up.
  void close(std::function<void()> job, int64_t patience_ns) {
    std::unique_lock lock(mutex_);
    jobs_.push_back(std::move(job));
    const uint64_t mine = ++asked_;
    if (!running_) {
      running_ = true;
      std::thread([this] { run(); }).detach();
    }
    if (hangs_) return;
    const auto over = [&] { return ended_ >= mine; };
    hangs_ = !changed_.wait_for(lock, std::chrono::nanoseconds(patience_ns), over);
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (!jobs_.empty()) {
      const std::function<void()> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
      lock.lock();
      ++ended_;
      hangs_ = false;
      changed_.notify_all();
    }
    running_ = false;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  uint64_t asked_ = 0, ended_ = 0;
  bool running_ = false, hangs_ = false;
};

Closer &closer() {
  static auto *const one = new Closer();  // its thread may outlive everything else
  return *one;
}

std::mutex g_imported_mutex;
// A handle can be open once in a process, whoever uses it.
std::map<std::string, std::weak_ptr<Imported>> &imported() {
  static auto *const all = new std::map<std::string, std::weak_ptr<Imported>>();
  return *all;
}

}  // namespace

Error describe(const cuda::DeviceMemory &memory, Found *out) {
  const cuda::Driver &driver = memory.driver();
  if (memory.managed()) {
    return make_error(MP_TRANSPORT_UNAVAILABLE, "managed memory cannot be shared with another process",
                      "cudaMalloc instead of cudaMallocManaged");
  }
  const cuda::ContextScope scope(driver, memory.context());
  if (scope.result() != cuda::kSuccess) return unusable(memory, scope.result());
  cuda::Result result = driver.device_uuid(&out->device, memory.device());
  if (result != cuda::kSuccess) return call_error(driver, result, "the device has no UUID");
  cuda::Pointer start = 0;
  uint64_t nbytes = 0;
  if (Error error = find_part(driver, memory.address(), &start, &nbytes)) return error;
  out->offset = memory.address() - start;
  out->length = memory.nbytes();
  out->parts = 0;
  if (!memory.virtual_memory()) {
    result = driver.ipc_export_memory(&out->handle, start);
    if (result == cuda::kSuccess) return {};
    return call_error(driver, result, "the driver makes no handle of the memory for another process");
  }
  const cuda::Pointer end = memory.address() + memory.nbytes();
  for (cuda::Pointer at = memory.address(); at < end; at = start + nbytes) {
    if (Error error = find_part(driver, at, &start, &nbytes)) return error;
    if (++out->parts <= kPartsMax) continue;
    return make_error(MP_LIMIT, "a region of more than " + std::to_string(kPartsMax) + " allocations is not shared",
                      "register smaller regions");
  }
  return {};
}

Error export_part(const cuda::DeviceMemory &memory, uint32_t part, Fd *fd, uint64_t *nbytes) {
  const cuda::Driver &driver = memory.driver();
  const cuda::ContextScope scope(driver, memory.context());
  if (scope.result() != cuda::kSuccess) return unusable(memory, scope.result());
  const cuda::Pointer end = memory.address() + memory.nbytes();
  cuda::Pointer at = memory.address(), start = 0;
  for (uint32_t i = 0; i <= part; ++i, at = start + *nbytes) {
    if (at >= end) return make_error(MP_OUT_OF_RANGE, "the region has no such part");
    if (Error error = find_part(driver, at, &start, nbytes)) return error;
  }
  if (driver.retain_allocation == nullptr || driver.export_allocation == nullptr) {
    return make_error(MP_CUDA, "the driver cannot share mapped memory", "a driver for CUDA 11 or later");
  }
  cuda::AllocationHandle allocation = 0;
  cuda::Result result = driver.retain_allocation(&allocation, reinterpret_cast<void *>(start));
  if (result != cuda::kSuccess) return call_error(driver, result, "the allocation of a part cannot be found");
  int number = -1;
  result = driver.export_allocation(&number, allocation, kPosixDescriptor, 0);
  driver.release_allocation(allocation);
  if (result != cuda::kSuccess) {
    Error error = call_error(driver, result, "memory that was allocated without a descriptor cannot be shared");
    error.hint = kHowToShare;
    return error;
  }
  *fd = Fd(number);
  return {};
}

bool is_device_of(const cuda::DeviceMemory &memory, const cuda::Uuid &device) {
  cuda::Uuid uuid{};
  return memory.driver().device_uuid(&uuid, memory.device()) == cuda::kSuccess &&
         std::memcmp(&uuid, &device, sizeof uuid) == 0;
}

std::string why_not_visible(const cuda::Driver &driver, const cuda::Uuid &device) {
  int count = 0;
  if (driver.device_count(&count) != cuda::kSuccess) count = 0;
  for (int i = 0; i < count; ++i) {
    cuda::Device one = 0;
    cuda::Uuid uuid{};
    if (driver.device_get(&one, i) != cuda::kSuccess || driver.device_uuid(&uuid, one) != cuda::kSuccess) continue;
    if (std::memcmp(&uuid, &device, sizeof uuid) == 0) return {};
  }
  std::string text = "the peer's GPU ";
  for (const uint8_t byte : device.bytes) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", byte);
    text += digits;
  }
  return text + " is not visible to this process (CUDA_VISIBLE_DEVICES, or the GPUs of its container)";
}

std::shared_ptr<Imported> Imported::open(const cuda::DeviceMemory &here, const Found &found, std::vector<Part> parts,
                                         int64_t patience_ns, Error *error) {
  const cuda::Driver &driver = here.driver();
  if (std::string why_not = why_not_visible(driver, found.device); !why_not.empty()) {
    *error = make_error(MP_TRANSPORT_UNAVAILABLE, std::move(why_not), "show both processes the same GPUs");
    return nullptr;
  }
  const cuda::ContextScope scope(driver, here.context());
  if (scope.result() != cuda::kSuccess) {
    *error = unusable(here, scope.result());
    return nullptr;
  }
  if (found.parts == 0) return open_handle(here, found, patience_ns, error);
  std::shared_ptr<Imported> made(new Imported(here, true, patience_ns));
  *error = made->map(here, std::move(parts));
  return *error ? nullptr : made;
}

// With the context.
std::shared_ptr<Imported> Imported::open_handle(const cuda::DeviceMemory &here, const Found &found, int64_t patience_ns,
                                                Error *error) {
  const std::string name(reinterpret_cast<const char *>(found.handle.bytes), sizeof found.handle.bytes);
  std::unique_lock lock(g_imported_mutex, std::defer_lock);
  for (const int64_t until = now_ns() + patience_ns; !lock.try_lock() && now_ns() < until;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (!lock) {
    *error = make_error(MP_CUDA, "the driver still closes memory of another process: a device hangs");
    return nullptr;
  }
  std::weak_ptr<Imported> &entry = imported()[name];
  if (std::shared_ptr<Imported> open = entry.lock()) return open;
  std::shared_ptr<Imported> made(new Imported(here, false, patience_ns));
  const cuda::Result result = here.driver().ipc_open_memory(&made->base_, found.handle, kLazyPeerAccess);
  if (result != cuda::kSuccess) {
    made->base_ = 0;
    std::erase_if(imported(), [](const auto &one) { return one.second.expired(); });
    *error = call_error(here.driver(), result, "the driver does not open the peer's memory");
    error->hint =
        "give both containers the host's IPC namespace (--ipc=host), and see whether the GPUs reach each other";
    return nullptr;
  }
  entry = made;
  return made;
}

// With the context.
Error Imported::map(const cuda::DeviceMemory &here, std::vector<Part> parts) {
  for (const Part &part : parts) reserved_bytes_ += part.nbytes;
  cuda::Result result = driver_.reserve_address(&base_, reserved_bytes_, 0, 0, 0);
  if (result != cuda::kSuccess) {
    base_ = 0;
    return call_error(driver_, result, "no addresses for the peer's memory");
  }
  cuda::Pointer at = base_;
  for (Part &part : parts) {
    cuda::AllocationHandle allocation = 0;
    // The driver takes the number where it takes a pointer.
    void *const number = reinterpret_cast<void *>(static_cast<uintptr_t>(part.fd.get()));
    result = driver_.import_allocation(&allocation, number, kPosixDescriptor);
    if (result != cuda::kSuccess) return call_error(driver_, result, "the driver does not take the peer's memory");
    result = driver_.map(at, part.nbytes, 0, allocation, 0);
    driver_.release_allocation(allocation);
    if (result != cuda::kSuccess) return call_error(driver_, result, "the peer's memory cannot be mapped");
    mappings_.emplace_back(at, part.nbytes);
    at += part.nbytes;
    part.fd.reset();
  }
  return let(here);
}

Error Imported::let(const cuda::DeviceMemory &here) {
  if (!mapped_) return {};
  std::lock_guard lock(mutex_);
  if (let_.count(here.device()) != 0) return {};
  const cuda::ContextScope scope(driver_, here.context());
  if (scope.result() != cuda::kSuccess) return unusable(here, scope.result());
  const cuda::AccessDescription access{{kOnDevice, here.device()}, kReadWrite};
  const cuda::Result result = driver_.set_access(base_, reserved_bytes_, &access, 1);
  if (result == cuda::kSuccess) let_.insert(here.device());
  if (result == cuda::kSuccess) return {};
  return call_error(driver_, result, "cuda:" + std::to_string(here.device()) + " gets no access to the peer's memory");
}

Imported::~Imported() {
  if (base_ == 0) return;
  const auto close = [&driver = driver_, context = context_, mapped = mapped_, base = base_, bytes = reserved_bytes_,
                      mappings = std::move(mappings_)] {
    std::unique_lock lock(g_imported_mutex, std::defer_lock);
    // Whoever opens it next does so after it was closed.
    if (!mapped) lock.lock();
    const cuda::ContextScope scope(driver, context);
    // With its context the mapping has gone.
    if (scope.result() != cuda::kSuccess) return;
    if (!mapped) {
      driver.ipc_close_memory(base);
      return;
    }
    for (const auto &[at, nbytes] : mappings) driver.unmap(at, nbytes);
    driver.free_address(base, bytes);
  };
  closer().close(close, patience_ns_);
}

}  // namespace moonpool::cuda_ipc
