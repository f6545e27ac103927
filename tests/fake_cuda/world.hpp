// SPDX-License-Identifier: Apache-2.0
//
// The stand-in's objects, and what all of its functions do first.
//
// Locks: the world's gate before a stream's. Nobody executes work under either. As in the stand-in for verbs, readers
// of the gate are not ordered, so that the thread sanitizer sees no order between threads that a real driver would not
// make.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include "abi.hpp"

namespace fake {

// ---------------------------------------------------------------- objects

// Memory of a device: pages of a memfd, and the stand-in's own way to them.
struct Physical {
  Physical(int fd, size_t nbytes, int device);
  ~Physical();
  Physical(const Physical &) = delete;
  Physical &operator=(const Physical &) = delete;

  static std::shared_ptr<Physical> make(size_t nbytes, int device);

  const int fd;
  const size_t nbytes;  // whole pages
  const int device;
  const uint64_t id;
  uint8_t *data = nullptr;
  bool counted = false;  // among the bytes of the device
  AllocationProp prop{};
};

struct Stream;

struct Context {
  int device = 0;
  bool primary = false;
  std::atomic<int> references{0};
  std::atomic<int> dead{0};  // the code of the sticky error
  std::shared_ptr<Stream> legacy, per_thread;
};

enum class Kind { kDevice, kMapped, kImported, kManaged, kPinned, kRegistered };

// Addresses that the driver knows.
struct Range {
  uint64_t base = 0;
  size_t nbytes = 0;
  Kind kind = Kind::kDevice;
  std::shared_ptr<Physical> physical;  // not of host memory
  size_t offset = 0;                   // in it
  Context *context = nullptr;
  int device = 0;
  uint64_t buffer_id = 0;
  bool sync_memops = false;
  std::map<int, int> access;  // of kMapped: by device
  int opens = 1;              // of kImported
  std::string handle;         // of kImported

  bool on_device() const { return kind == Kind::kDevice || kind == Kind::kMapped || kind == Kind::kImported; }
  bool on_host() const { return kind == Kind::kPinned || kind == Kind::kRegistered; }
  uint8_t *bytes(uint64_t address) const;
};

struct Op {
  std::function<int()> run;
  size_t nbytes = 0;
  bool timed = false;  // takes the delays that are set, and may meet a fault
};

struct Stream {
  Context *context = nullptr;
  unsigned flags = 0;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Op> ops;
  uint64_t submitted = 0, finished = 0;
  bool running = false;  // has a thread
  bool closing = false;
};

// In a page that other processes may have, too.
struct EventWords {
  std::atomic<uint32_t> recorded, done;
};

struct Event {
  Context *context = nullptr;
  unsigned flags = 0;
  std::shared_ptr<Physical> page;
  EventWords *words() const { return reinterpret_cast<EventWords *>(page->data); }
};

struct Handle {
  std::shared_ptr<Physical> physical;
  int references = 1;
};

// ---------------------------------------------------------------- the world

struct Fault {
  std::string name;
  uint64_t nth;
  int code;
  bool sticky;
};

struct Device {
  Context primary;
  std::string pci;
  std::atomic<size_t> used{0};
};

struct World {
  World();

  std::shared_mutex gate;  // over what follows, up to the next comment
  std::deque<Device> devices;
  std::map<uint64_t, Range> ranges;
  std::map<uint64_t, size_t> reservations;
  std::map<uint64_t, Handle> handles;
  std::map<size_t, std::vector<uint64_t>> free_addresses;  // by length; used first, so that addresses come again
  std::map<void *, std::shared_ptr<Stream>> streams;
  std::map<void *, std::shared_ptr<Event>> events;
  std::map<void *, std::shared_ptr<void>> modules;
  std::set<Context *> others;                        // contexts that are not primary
  std::map<int, std::pair<size_t, size_t>> dmabufs;  // offset in its memory and length, by descriptor
  uint64_t next_buffer_id = 1;

  // Settings.
  std::atomic<int> device_count{1};
  std::atomic<int> driver_version{13000};
  std::atomic<size_t> device_bytes{size_t{1} << 30};
  std::atomic<uint64_t> delay_us{0}, ns_per_kib{0};
  std::mutex settings_mutex;
  std::vector<Fault> faults;
  std::map<std::pair<int, int>, int> attributes;  // (device or -1, attribute)
  std::vector<std::string> pci;
  std::atomic<int> fault_count{0};

  // What was and is.
  std::atomic<bool> initialized{false}, exiting{false};
  std::atomic<int> pid{0};
  std::mutex counts_mutex;
  std::map<std::string, std::atomic<uint64_t>> counts;
  std::atomic<uint64_t> all_calls{0}, primaries_made{0};

  std::mutex hold_mutex;
  std::condition_variable hold_changed;
  bool held = false;
};

// Never destroyed: streams may still work while the process ends.
World &world();

bool set(World *world, const std::string &settings);
std::atomic<uint64_t> &count_of(const char *name);
inline void count(std::atomic<uint64_t> &counter, uint64_t n = 1) { counter.fetch_add(n, std::memory_order_relaxed); }
// Code of the fault that this meets, or 0.
int met(const char *name, bool *sticky);

// ---------------------------------------------------------------- what functions do first

enum class Needs { kNothing, kDriver, kContext };
// The code that the call has to return at once, or 0.
int enter(const char *name, std::atomic<uint64_t> &counter, Needs needs);
#define FAKE_ENTER(needs)                                                                     \
  do {                                                                                        \
    static std::atomic<uint64_t> &entered = fake::count_of(__func__);                         \
    if (const int failed = fake::enter(__func__, entered, fake::Needs::needs)) return failed; \
  } while (false)

// The one on top of this thread's stack, or nullptr.
Context *current_context();
bool is_context(const Context *context);  // under the gate
int device_of(const Context *context);

// ---------------------------------------------------------------- memory

// Under the gate. The range that has this address, or nullptr.
Range *range_at(uint64_t address);
// Some of the bytes that are copied, where the stand-in reaches them.
struct Piece {
  uint8_t *data;
  size_t nbytes;
  std::shared_ptr<Physical> keep;
};
enum class Place { kDevice, kPinned, kPageable };
// The pieces of this memory; device memory may lie in several mappings. False: some of it is none that the device may
// use. Takes the gate.
bool resolve(uint64_t address, size_t nbytes, int device, bool write, std::vector<Piece> *pieces, Place *place);
// Addresses that nobody can touch, aligned as the driver aligns large memory. 0: there are none.
uint64_t hide(size_t nbytes);
// Maps memory of a device there, or at new addresses with 0, where programs see it and cannot touch it.
uint64_t map_hidden(const Physical &physical, size_t offset, size_t nbytes, uint64_t at);

// ---------------------------------------------------------------- streams

// The stream that a handle means in the current context, or nullptr.
std::shared_ptr<Stream> stream_of(void *handle);
void submit(const std::shared_ptr<Stream> &stream, Op op);
// Until what was submitted before is done, or the context is dead: its code.
int drain(const std::shared_ptr<Stream> &stream);
// All streams of a context.
int drain(Context *context);
std::shared_ptr<Stream> make_stream(Context *context, unsigned flags);
void close_stream(const std::shared_ptr<Stream> &stream);
// Waits for a record of an event. 0, or the code of the context that is dead.
int await_event(const std::shared_ptr<Event> &event, uint32_t record, const Context *context);

}  // namespace fake
