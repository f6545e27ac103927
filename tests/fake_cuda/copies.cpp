// SPDX-License-Identifier: Apache-2.0
//
// Copies. They are checked by the call and done by the stream.
#include <algorithm>
#include <cstring>

#include "world.hpp"

namespace fake {

namespace {

struct Copy {
  std::vector<Piece> from, to;
  size_t nbytes = 0;
  Place source = Place::kPageable, target = Place::kPageable;

  bool pageable() const { return source == Place::kPageable || target == Place::kPageable; }
};

bool plan(uint64_t to, uint64_t from, size_t nbytes, Copy *copy) {
  const int device = device_of(current_context());
  copy->nbytes = nbytes;
  return resolve(from, nbytes, device, false, &copy->from, &copy->source) &&
         resolve(to, nbytes, device, true, &copy->to, &copy->target);
}

void count_bytes(const Copy &copy) {
  static std::atomic<uint64_t> &copies = count_of("copies"), &pageable = count_of("pageable copies");
  static std::atomic<uint64_t> &htod = count_of("bytes HtoD"), &dtoh = count_of("bytes DtoH");
  static std::atomic<uint64_t> &dtod = count_of("bytes DtoD"), &htoh = count_of("bytes HtoH");
  count(copies);
  if (copy.pageable()) count(pageable);
  const bool from_device = copy.source == Place::kDevice, to_device = copy.target == Place::kDevice;
  count(from_device ? (to_device ? dtod : dtoh) : (to_device ? htod : htoh), copy.nbytes);
}

void perform(const Copy &copy) {
  size_t source = 0, target = 0, skip_source = 0, skip_target = 0;
  while (source < copy.from.size() && target < copy.to.size()) {
    const Piece &from = copy.from[source], &to = copy.to[target];
    const size_t some = std::min(from.nbytes - skip_source, to.nbytes - skip_target);
    std::memmove(to.data + skip_target, from.data + skip_source, some);
    skip_source += some;
    skip_target += some;
    if (skip_source == from.nbytes) ++source, skip_source = 0;
    if (skip_target == to.nbytes) ++target, skip_target = 0;
  }
  count_bytes(copy);
}

int begin(uint64_t to, uint64_t from, size_t nbytes, void *stream_handle, bool wait) {
  const auto stream = stream_of(stream_handle);
  if (stream == nullptr || stream->context != current_context()) return kInvalidHandle;
  auto copy = std::make_shared<Copy>();
  if (!plan(to, from, nbytes, copy.get())) return kInvalidValue;
  if (nbytes == 0) return kSuccess;
  submit(stream, {[=] {
                    perform(*copy);
                    return 0;
                  },
                  nbytes, true});
  // The driver takes memory that is not pinned through its own, and returns when it has been there.
  return wait || copy->pageable() ? drain(stream) : kSuccess;
}

// The kind of memory that a call names has to be that of its argument.
bool is_device(uint64_t address) {
  std::shared_lock gate(world().gate);
  const Range *range = range_at(address);
  return range != nullptr && !range->on_host();
}

bool is_hidden(uint64_t address) {
  std::shared_lock gate(world().gate);
  const Range *range = range_at(address);
  return range != nullptr && range->on_device();
}

}  // namespace

}  // namespace fake

using namespace fake;

FAKE_API int cuMemcpyAsync(uint64_t to, uint64_t from, size_t nbytes, void *stream) {
  FAKE_ENTER(kContext);
  return begin(to, from, nbytes, stream, false);
}

FAKE_API int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t nbytes, void *stream) {
  FAKE_ENTER(kContext);
  const auto source = reinterpret_cast<uint64_t>(from);
  if (!is_device(to) || is_hidden(source)) return kInvalidValue;
  return begin(to, source, nbytes, stream, false);
}

FAKE_API int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t nbytes, void *stream) {
  FAKE_ENTER(kContext);
  const auto target = reinterpret_cast<uint64_t>(to);
  if (!is_device(from) || is_hidden(target)) return kInvalidValue;
  return begin(target, from, nbytes, stream, false);
}

FAKE_API int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t nbytes, void *stream) {
  FAKE_ENTER(kContext);
  if (!is_device(to) || !is_device(from)) return kInvalidValue;
  return begin(to, from, nbytes, stream, false);
}

FAKE_API int cuMemcpy(uint64_t to, uint64_t from, size_t nbytes) {
  FAKE_ENTER(kContext);
  return begin(to, from, nbytes, nullptr, true);
}

FAKE_API int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t nbytes) {
  FAKE_ENTER(kContext);
  if (!is_device(to)) return kInvalidValue;
  return begin(to, reinterpret_cast<uint64_t>(from), nbytes, nullptr, true);
}

FAKE_API int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t nbytes) {
  FAKE_ENTER(kContext);
  if (!is_device(from)) return kInvalidValue;
  return begin(reinterpret_cast<uint64_t>(to), from, nbytes, nullptr, true);
}

FAKE_API int cuMemsetD8Async(uint64_t to, unsigned char value, size_t nbytes, void *stream_handle) {
  FAKE_ENTER(kContext);
  const auto stream = stream_of(stream_handle);
  if (stream == nullptr || stream->context != current_context()) return kInvalidHandle;
  std::vector<Piece> pieces;
  Place place;
  if (!is_device(to) || !resolve(to, nbytes, device_of(current_context()), true, &pieces, &place)) return kInvalidValue;
  submit(stream, {[=] {
                    for (const Piece &piece : pieces) std::memset(piece.data, value, piece.nbytes);
                    return 0;
                  },
                  nbytes, true});
  return kSuccess;
}

// Of CUDA 12.8. What it copies comes in no order, so the stand-in begins with the last.
FAKE_API int cuMemcpyBatchAsync(uint64_t *to, uint64_t *from, size_t *nbytes, size_t n, MemcpyAttributes *attributes,
                                size_t *attribute_indices, size_t attribute_count, size_t *bad, void *stream_handle) {
  FAKE_ENTER(kContext);
  *bad = SIZE_MAX;
  // The default stream is none of those that it takes.
  if (stream_handle == nullptr || stream_handle == reinterpret_cast<void *>(1)) return kInvalidHandle;
  const auto stream = stream_of(stream_handle);
  if (stream == nullptr || stream->context != current_context()) return kInvalidHandle;
  if (n == 0 || attribute_count == 0 || attribute_count > n || attribute_indices[0] != 0) return kInvalidValue;
  for (size_t i = 0; i < attribute_count; ++i) {
    if (i > 0 && attribute_indices[i] <= attribute_indices[i - 1]) return kInvalidValue;
    if (attributes[i].src_access_order < 1 || attributes[i].src_access_order > 3) return kInvalidValue;
  }
  auto copies = std::make_shared<std::vector<Copy>>(n);
  size_t all = 0;
  for (size_t i = 0; i < n; ++i) {
    Copy &copy = (*copies)[i];
    if (nbytes[i] == 0 || !plan(to[i], from[i], nbytes[i], &copy) || copy.pageable()) {
      *bad = i;
      return kInvalidValue;
    }
    all += nbytes[i];
  }
  submit(stream, {[=] {
                    for (size_t i = n; i-- > 0;) perform((*copies)[i]);
                    return 0;
                  },
                  all, true});
  return kSuccess;
}
