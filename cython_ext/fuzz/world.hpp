// SPDX-License-Identifier: Apache-2.0
//
// The world that fuzz targets run the core in: sockets that are byte queues, a clock that only moves when told, random
// numbers that repeat, and one thread. So the input decides where a stream is cut and in which order things happen, a
// replay is exact, and thousands of connections a second cost no port.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "io_thread.hpp"

namespace moonpool::fuzz {

// Ends the run as a finding of the fuzzer, saying what does not hold.
[[noreturn]] void broken(const char *what, const char *file, int line);
#define FUZZ_CHECK(condition) \
  ((condition) ? static_cast<void>(0) : ::moonpool::fuzz::broken(#condition, __FILE__, __LINE__))

struct Socket {
  enum class State { kClosed, kFresh, kListening, kConnecting, kRefused, kOpen } state = State::kClosed;
  bool core = false;  // the core holds it
  int other = -1;     // the other end of the connection
  std::string in;     // arrived, not read yet
  size_t in_at = 0;
  bool end_of_input = false;
  bool reset = false;
  size_t room = SIZE_MAX;  // bytes that may wait here before the sender is blocked
  uint64_t cuts = 0;       // not 0: calls move random parts, and are sometimes told to come again
  uint16_t port = 0;
  std::deque<int> backlog;  // of a listener: connections to accept

  size_t waiting() const { return in.size() - in_at; }
};

class World {
 public:
  static World &get();
  // An empty world at time 1 s, with random numbers from the start.
  void reset();

  // ---- for targets: the ends of connections that the core does not hold
  // The end of a new connection to the core's listener. -1 when nothing listens.
  int connect_to(uint16_t port);
  // The other end of the oldest connection that the core has asked for, now accepted. -1 when there is none.
  int accept_from_core();
  // The same, refused.
  bool refuse_from_core();
  void feed(int fd, std::string_view bytes);
  // Everything that the core has sent on this connection.
  std::string take(int fd, size_t limit = SIZE_MAX);
  void shut(int fd, bool with_reset);
  bool alive(int fd) const;
  // How the core's end of the connection moves bytes from now on.
  void set_cuts(int fd, uint64_t cuts);
  // How many bytes this end takes before the core is blocked.
  void set_room(int fd, size_t bytes);
  // Sockets that the core holds and has not closed.
  size_t open_sockets() const;

  // Runs the core's loops until nothing is left to do at this time.
  void run();
  // Moves the clock, running what comes due.
  void advance(int64_t ns);
  // Somebody slept until then, and nothing happened meanwhile.
  void sleep_until(int64_t ns) { now_ns_ = std::max(now_ns_, ns); }
  int64_t now() const { return now_ns_; }
  uint64_t random();

  // ---- for the loops
  // `turn` does what is due and says whether there was anything, `next_timer` when the next thing is due.
  void add_loop(IoThread *loop, std::function<bool()> turn, std::function<int64_t()> next_timer);
  void remove_loop(IoThread *loop);
  void watch(Handler *handler, uint32_t events);
  void unwatch(Handler *handler);
  // What epoll would report for it now, 0 for nothing. Disarms a one-shot.
  uint32_t ready_events(Handler *handler);

  // ---- for the calls of the core
  static bool mine(int fd) { return fd >= kFirstFd; }
  Socket &at(int fd) { return sockets_.at(static_cast<size_t>(fd - kFirstFd)); }
  const Socket &at(int fd) const { return sockets_.at(static_cast<size_t>(fd - kFirstFd)); }
  int make_socket(bool core);
  int accept(int listener);
  void connect_from_core(int fd);
  // How many of `n` bytes this call moves; 0 for "come again".
  size_t part(Socket &socket, size_t n);
  // The core closed it.
  void close(int fd);
  void note_progress() { ++progress_; }

 private:
  // Far above what the kernel gives out, so that no call mistakes one for the other.
  static constexpr int kFirstFd = 1 << 24;

  struct Loop {
    IoThread *thread;
    std::function<bool()> turn;
    std::function<int64_t()> next_timer;
  };
  struct Watch {
    Handler *handler;
    uint32_t events;
  };
  Watch *find_watch(const Handler *handler);

  int64_t now_ns_ = 0;
  uint64_t random_ = 0;
  uint64_t progress_ = 0;
  std::deque<Socket> sockets_;
  std::deque<int> asked_;  // connections that the core has asked for
  std::vector<Loop> loops_;
  std::vector<Watch> watches_;
};

}  // namespace moonpool::fuzz
