// SPDX-License-Identifier: Apache-2.0
#include "cuda_memory.hpp"

#include <cinttypes>
#include <cstdio>

namespace moonpool::cuda {

namespace {

// A region of virtual memory may be made of so many mappings: 1 TiB in pieces of 2 MiB.
constexpr int kPartsMax = 1 << 19;

std::string hexadecimal(Pointer address) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%" PRIx64, address);
  return text;
}

std::string device_name(int device) { return "cuda:" + std::to_string(device); }

Error wrong_claim(Pointer address, const std::string &is, const std::string &claimed) {
  return make_error(MP_INVALID_ARGUMENT, "the memory at " + hexadecimal(address) + " is " + is + ", not " + claimed,
                    "register it as what it is; the address and device of a tensor are t.data_ptr() and t.device");
}

std::string text_of(const PointerFacts &facts) {
  return facts.device >= 0 && facts.kind != Kind::kPinned
             ? std::string(kind_text(facts.kind)) + " of " + device_name(facts.device)
             : kind_text(facts.kind);
}

}  // namespace

const char *kind_text(Kind kind) {
  switch (kind) {
    case Kind::kHost:
      return "host memory or none";
    case Kind::kPinned:
      return "pinned host memory";
    case Kind::kDevice:
      return "memory";
    case Kind::kManaged:
      return "managed memory";
  }
  return "memory";
}

Error pointer_facts(const Driver &driver, Pointer address, PointerFacts *facts) {
  unsigned type = 0, managed = 0;
  uint64_t buffer_id = 0;
  Context context = nullptr;
  int device = -1;
  int attributes[] = {kAttributeMemoryType, kAttributeIsManaged, kAttributeBufferId, kAttributeContext,
                      kAttributeDeviceOrdinal};
  void *values[] = {&type, &managed, &buffer_id, &context, &device};
  // Unlike cuPointerGetAttribute it succeeds for memory that CUDA does not know, and leaves zeros.
  const Result result = driver.pointer_attributes(std::size(attributes), attributes, values, address);
  if (result != kSuccess) return call_error(driver, result, "cannot look at the memory at " + hexadecimal(address));
  *facts = {};
  if (type == 0) return {};
  facts->kind = managed != 0 ? Kind::kManaged : type == kMemoryDevice ? Kind::kDevice : Kind::kPinned;
  facts->device = device;
  facts->context = context;
  facts->buffer_id = buffer_id;
  return {};
}

Error check_host_memory(const void *address, uint64_t nbytes) {
  const Driver *const driver = Driver::present();
  if (driver == nullptr) return {};
  for (const uint64_t at : {uint64_t{0}, nbytes - 1}) {
    PointerFacts facts;
    const auto pointer = reinterpret_cast<Pointer>(address) + at;
    // A driver that was not started, or does not work, has given out no memory that this could be.
    if (pointer_facts(*driver, pointer, &facts)) return {};
    if (facts.kind == Kind::kDevice) return wrong_claim(pointer, text_of(facts), "host memory");
  }
  return {};
}

DeviceMemory::DeviceMemory(const Driver &driver, Pointer address, uint64_t nbytes, const PointerFacts &first)
    : driver_(driver),
      address_(address),
      nbytes_(nbytes),
      device_(first.device),
      managed_(first.kind == Kind::kManaged),
      context_(first.context),
      first_id_(first.buffer_id),
      last_id_(first.buffer_id) {}

DeviceMemory::~DeviceMemory() {
  // Only gives back what was taken: the primary context lives on with whoever made it.
  if (retained_) driver_.primary_context_release(device_);
}

Error DeviceMemory::open(void *address, uint64_t nbytes, int32_t device, std::shared_ptr<DeviceMemory> *out) {
  Error error;
  const Driver *driver = Driver::load(&error);
  if (driver == nullptr) return error;
  const auto begin = reinterpret_cast<Pointer>(address);
  const std::string claimed = device == MP_CUDA_ANY ? "memory of a GPU" : "memory of " + device_name(device);
  PointerFacts first;
  if ((error = pointer_facts(*driver, begin, &first))) return error;
  if (first.kind != Kind::kDevice && first.kind != Kind::kManaged) return wrong_claim(begin, text_of(first), claimed);
  if (device != MP_CUDA_ANY && first.device != device) return wrong_claim(begin, text_of(first), claimed);
  std::shared_ptr<DeviceMemory> made(new DeviceMemory(*driver, begin, nbytes, first));
  if ((error = made->find_context())) return error;
  if ((error = made->find_end(first))) return error;
  *out = std::move(made);
  return {};
}

// Virtual memory may be mapped in parts that follow each other.
Error DeviceMemory::find_end(const PointerFacts &first) {
  const ContextScope scope(driver_, context_);
  PointerFacts part = first;
  Pointer at = address_;
  for (int parts = 0; parts < kPartsMax && at - address_ < nbytes_; ++parts) {
    if (at != address_) {
      if (Error error = pointer_facts(driver_, at, &part)) return error;
    }
    Pointer start = 0;
    size_t size = 0;
    const bool same = part.kind == first.kind && part.device == first.device;
    // CU_POINTER_ATTRIBUTE_RANGE_* would be those of everything that is reserved, mapped or not.
    const Result result = same ? driver_.address_range(&start, &size, at) : kNotFound;
    if (result != kSuccess && result != kNotFound && result != kInvalidValue) {
      return call_error(driver_, result, "cannot look at the memory at " + hexadecimal(at));
    }
    if (result != kSuccess || size == 0) {
      return make_error(MP_OUT_OF_RANGE,
                        std::to_string(nbytes_) + " bytes at " + hexadecimal(address_) +
                            " go beyond their allocation on " + device_name(device_),
                        "only " + std::to_string(at - address_) + " bytes from there belong to it");
    }
    last_id_ = part.buffer_id;
    at = start + size;
  }
  return {};
}

Error DeviceMemory::find_context() {
  if (context_ != nullptr) return {};
  unsigned flags = 0;
  int active = 0;
  Result result = driver_.primary_context_state(device_, &flags, &active);
  if (result == kSuccess && active == 0) {
    return make_error(MP_CUDA, "this process has memory of " + device_name(device_) + " mapped, but no context there",
                      "make one current before the memory is registered, such as torch.cuda.set_device");
  }
  if (result == kSuccess) result = driver_.primary_context_retain(&context_, device_);
  if (result != kSuccess) return call_error(driver_, result, "cannot use the context of " + device_name(device_));
  retained_ = true;
  return {};
}

Error DeviceMemory::check_alive() const {
  for (const auto &[address, id] : {std::pair{address_, first_id_}, std::pair{address_ + nbytes_ - 1, last_id_}}) {
    PointerFacts facts;
    if (Error error = pointer_facts(driver_, address, &facts)) return error;
    if (facts.buffer_id == id && facts.kind != Kind::kHost) continue;
    return make_error(MP_REGION_RELEASED, "memory of " + device_name(device_) + " was freed while it was registered",
                      "release the region before its memory is freed, and register the new memory");
  }
  return {};
}

}  // namespace moonpool::cuda
