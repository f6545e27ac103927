// SPDX-License-Identifier: Apache-2.0
//
// Streams are threads that work through a queue; events are numbers in a page that other processes may map.
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <ctime>

#include "world.hpp"

namespace fake {

namespace {

// How often somebody who waits looks whether the context is dead. A test's patience, not a wait for anything.
constexpr auto kLook = std::chrono::milliseconds(5);

void await_release() {
  World &all = world();
  std::unique_lock lock(all.hold_mutex);
  all.hold_changed.wait(lock, [&] { return !all.held; });
}

void take_time(size_t nbytes) {
  const World &all = world();
  const uint64_t us = all.delay_us + all.ns_per_kib * (nbytes / 1024) / 1000;
  if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

void execute(const std::shared_ptr<Stream> &stream, const Op &op) {
  Context *context = stream->context;
  await_release();
  if (context->dead != 0) return;
  if (op.timed) {
    take_time(op.nbytes);
    bool sticky;
    if (const int code = met("execute", &sticky)) {
      context->dead = code;
      return;
    }
  }
  if (const int code = op.run()) context->dead = code;
}

void work(std::shared_ptr<Stream> stream) {
  std::unique_lock lock(stream->mutex);
  for (;;) {
    stream->changed.wait(lock, [&] { return !stream->ops.empty() || stream->closing; });
    if (stream->ops.empty()) return;
    {
      const Op op = std::move(stream->ops.front());
      stream->ops.pop_front();
      lock.unlock();
      execute(stream, op);
    }
    lock.lock();
    ++stream->finished;
    stream->changed.notify_all();
  }
}

bool reached(const EventWords &words, uint32_t record) {
  return static_cast<int32_t>(words.done.load(std::memory_order_acquire) - record) >= 0;
}

void finish_record(const std::shared_ptr<Event> &event, uint32_t record) {
  EventWords &words = *event->words();
  uint32_t done = words.done.load();
  while (static_cast<int32_t>(record - done) > 0 && !words.done.compare_exchange_weak(done, record)) {
  }
  syscall(SYS_futex, &words.done, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

std::shared_ptr<Event> event_of(void *handle) {
  std::shared_lock gate(world().gate);
  const auto found = world().events.find(handle);
  return found == world().events.end() ? nullptr : found->second;
}

std::shared_ptr<Physical> private_page() {
  void *data = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  auto page = std::make_shared<Physical>(-1, kPage, -1);
  page->data = static_cast<uint8_t *>(data);
  return page;
}

int create(void **out, unsigned flags) {
  if (flags > 1) return kInvalidValue;
  const std::shared_ptr<Stream> stream = make_stream(current_context(), flags);
  std::lock_guard gate(world().gate);
  world().streams[stream.get()] = stream;
  *out = stream.get();
  return kSuccess;
}

}  // namespace

std::shared_ptr<Stream> make_stream(Context *context, unsigned flags) {
  auto stream = std::make_shared<Stream>();
  stream->context = context;
  stream->flags = flags;
  return stream;
}

std::shared_ptr<Stream> stream_of(void *handle) {
  Context *context = current_context();
  if (handle == nullptr || handle == reinterpret_cast<void *>(1)) return context->legacy;
  if (handle == reinterpret_cast<void *>(2)) return context->per_thread;
  std::shared_lock gate(world().gate);
  const auto found = world().streams.find(handle);
  return found == world().streams.end() ? nullptr : found->second;
}

void submit(const std::shared_ptr<Stream> &stream, Op op) {
  std::lock_guard lock(stream->mutex);
  stream->ops.push_back(std::move(op));
  ++stream->submitted;
  if (!stream->running) {
    stream->running = true;
    std::thread(work, stream).detach();
  }
  stream->changed.notify_all();
}

int drain(const std::shared_ptr<Stream> &stream) {
  std::unique_lock lock(stream->mutex);
  const uint64_t until = stream->submitted;
  while (stream->finished < until && stream->context->dead == 0) stream->changed.wait_for(lock, kLook);
  return stream->context->dead;
}

int drain(Context *context) {
  std::vector<std::shared_ptr<Stream>> all{context->legacy, context->per_thread};
  {
    std::shared_lock gate(world().gate);
    for (const auto &[handle, stream] : world().streams) {
      if (stream->context == context) all.push_back(stream);
    }
  }
  for (const auto &stream : all) {
    if (const int dead = drain(stream)) return dead;
  }
  return context->dead;
}

void close_stream(const std::shared_ptr<Stream> &stream) {
  std::lock_guard lock(stream->mutex);
  stream->closing = true;
  stream->changed.notify_all();
}

int await_event(const std::shared_ptr<Event> &event, uint32_t record, const Context *context) {
  EventWords &words = *event->words();
  while (!reached(words, record)) {
    if (context->dead != 0) return context->dead;
    const uint32_t seen = words.done.load();
    const timespec look{0, std::chrono::nanoseconds(kLook).count()};
    if (!reached(words, record)) syscall(SYS_futex, &words.done, FUTEX_WAIT, seen, &look, nullptr, 0);
  }
  return kSuccess;
}

}  // namespace fake

using namespace fake;

// ---------------------------------------------------------------- streams

FAKE_API int cuStreamCreate(void **out, unsigned flags) {
  FAKE_ENTER(kContext);
  return create(out, flags);
}

FAKE_API int cuStreamCreateWithPriority(void **out, unsigned flags, int priority) {
  FAKE_ENTER(kContext);
  (void)priority;
  return create(out, flags);
}

FAKE_API int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  FAKE_ENTER(kContext);
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return kSuccess;
}

// What was begun is done to the end, and the call does not wait for it.
FAKE_API int cuStreamDestroy_v2(void *handle) {
  FAKE_ENTER(kDriver);
  std::shared_ptr<Stream> stream;
  {
    std::lock_guard gate(world().gate);
    const auto found = world().streams.find(handle);
    if (found == world().streams.end()) return kInvalidHandle;
    stream = found->second;
    world().streams.erase(found);
  }
  close_stream(stream);
  return stream->context->dead;
}

FAKE_API int cuStreamQuery(void *handle) {
  FAKE_ENTER(kContext);
  const auto stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  std::lock_guard lock(stream->mutex);
  if (stream->context->dead != 0) return stream->context->dead;
  return stream->finished == stream->submitted ? kSuccess : kNotReady;
}

FAKE_API int cuStreamSynchronize(void *handle) {
  FAKE_ENTER(kContext);
  const auto stream = stream_of(handle);
  return stream == nullptr ? kInvalidHandle : drain(stream);
}

FAKE_API int cuStreamWaitEvent(void *handle, void *event_handle, unsigned flags) {
  FAKE_ENTER(kContext);
  const auto stream = stream_of(handle);
  const auto event = event_of(event_handle);
  if (stream == nullptr || event == nullptr) return kInvalidHandle;
  if (flags > 1) return kInvalidValue;
  // The last record so far; none is waited for when there is none.
  const uint32_t record = event->words()->recorded;
  submit(stream, {[=] { return await_event(event, record, stream->context); }, 0, false});
  return kSuccess;
}

// ---------------------------------------------------------------- events

FAKE_API int cuEventCreate(void **out, unsigned flags) {
  FAKE_ENTER(kContext);
  // Events of several processes have no time: 2 is that, 4 is the other.
  if (flags > 7 || ((flags & 4) != 0 && (flags & 2) == 0)) return kInvalidValue;
  auto event = std::make_shared<Event>();
  event->context = current_context();
  event->flags = flags;
  event->page = (flags & 4) != 0 ? Physical::make(kPage, -1) : private_page();
  if (event->page == nullptr) return kOutOfMemory;
  std::lock_guard gate(world().gate);
  world().events[event.get()] = event;
  *out = event.get();
  return kSuccess;
}

FAKE_API int cuEventDestroy_v2(void *handle) {
  FAKE_ENTER(kDriver);
  std::lock_guard gate(world().gate);
  const auto found = world().events.find(handle);
  if (found == world().events.end()) return kInvalidHandle;
  const int dead = found->second->context->dead;
  world().events.erase(found);
  return dead;
}

FAKE_API int cuEventRecord(void *handle, void *stream_handle) {
  FAKE_ENTER(kContext);
  const auto event = event_of(handle);
  const auto stream = stream_of(stream_handle);
  if (event == nullptr || stream == nullptr || event->context != stream->context) return kInvalidHandle;
  const uint32_t record = ++event->words()->recorded;
  submit(stream, {[=] {
                    finish_record(event, record);
                    return 0;
                  },
                  0, false});
  return kSuccess;
}

FAKE_API int cuEventQuery(void *handle) {
  FAKE_ENTER(kDriver);
  const auto event = event_of(handle);
  if (event == nullptr) return kInvalidHandle;
  if (event->context->dead != 0) return event->context->dead;
  return reached(*event->words(), event->words()->recorded) ? kSuccess : kNotReady;
}

FAKE_API int cuEventSynchronize(void *handle) {
  FAKE_ENTER(kDriver);
  const auto event = event_of(handle);
  return event == nullptr ? kInvalidHandle : await_event(event, event->words()->recorded, event->context);
}
