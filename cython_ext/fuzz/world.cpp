// SPDX-License-Identifier: Apache-2.0
#include "world.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace moonpool::fuzz {

namespace {

// So many turns without a byte, a connection or a call: the core is looking at something that never changes.
constexpr int kIdleTurnsMax = 1000;
constexpr uint64_t kRandomSeed = 0x9e3779b97f4a7c15;

uint64_t next_random(uint64_t *state) {
  *state ^= *state << 13;
  *state ^= *state >> 7;
  *state ^= *state << 17;
  return *state;
}

}  // namespace

void broken(const char *what, const char *file, int line) {
  std::fprintf(stderr, "%s:%d: does not hold: %s\n", file, line, what);
  std::abort();
}

World &World::get() {
  // Never destroyed: static objects of the core may still close descriptors while the process exits.
  static auto *world = new World();
  return *world;
}

void World::reset() {
  FUZZ_CHECK(loops_.empty());
  sockets_.clear();
  asked_.clear();
  watches_.clear();
  now_ns_ = 1000 * kMillisecond;
  random_ = kRandomSeed;
  progress_ = 0;
}

uint64_t World::random() { return next_random(&random_); }

int World::make_socket(bool core) {
  sockets_.emplace_back();
  sockets_.back().state = Socket::State::kFresh;
  sockets_.back().core = core;
  return kFirstFd + static_cast<int>(sockets_.size()) - 1;
}

int World::connect_to(uint16_t port) {
  for (size_t i = 0; i < sockets_.size(); ++i) {
    if (sockets_[i].state != Socket::State::kListening || sockets_[i].port != port) continue;
    const int ours = make_socket(false), theirs = make_socket(false);
    at(ours).state = at(theirs).state = Socket::State::kOpen;
    at(ours).other = theirs;
    at(theirs).other = ours;
    sockets_[i].backlog.push_back(theirs);
    return ours;
  }
  return -1;
}

int World::accept(int listener) {
  std::deque<int> &backlog = at(listener).backlog;
  if (backlog.empty()) return -1;
  const int fd = backlog.front();
  backlog.pop_front();
  at(fd).core = true;
  note_progress();
  return fd;
}

void World::connect_from_core(int fd) {
  at(fd).state = Socket::State::kConnecting;
  asked_.push_back(fd);
}

int World::accept_from_core() {
  while (!asked_.empty()) {
    const int theirs = asked_.front();
    asked_.pop_front();
    if (at(theirs).state != Socket::State::kConnecting) continue;
    const int ours = make_socket(false);
    at(ours).state = at(theirs).state = Socket::State::kOpen;
    at(ours).other = theirs;
    at(theirs).other = ours;
    return ours;
  }
  return -1;
}

bool World::refuse_from_core() {
  while (!asked_.empty()) {
    const int theirs = asked_.front();
    asked_.pop_front();
    if (at(theirs).state != Socket::State::kConnecting) continue;
    at(theirs).state = Socket::State::kRefused;
    return true;
  }
  return false;
}

bool World::alive(int fd) const { return at(fd).state == Socket::State::kOpen; }

void World::feed(int fd, std::string_view bytes) {
  if (!alive(fd) || at(fd).other < 0) return;
  Socket &theirs = at(at(fd).other);
  if (theirs.state == Socket::State::kOpen && !theirs.end_of_input && !theirs.reset) theirs.in.append(bytes);
}

std::string World::take(int fd, size_t limit) {
  Socket &socket = at(fd);
  const size_t n = std::min(limit, socket.waiting());
  std::string bytes = socket.in.substr(socket.in_at, n);
  socket.in_at += n;
  if (socket.in_at == socket.in.size()) {
    socket.in.clear();
    socket.in_at = 0;
  }
  return bytes;
}

void World::shut(int fd, bool with_reset) {
  if (!alive(fd)) return;
  Socket &ours = at(fd);
  ours.state = Socket::State::kClosed;
  if (ours.other < 0) return;
  Socket &theirs = at(ours.other);
  theirs.end_of_input = true;
  // As with TCP: closing with bytes unread is a reset, and a reset throws away what the receiver has not read.
  if (with_reset || ours.waiting() > 0) {
    theirs.reset = true;
    theirs.in.clear();
    theirs.in_at = 0;
  }
  ours.in.clear();
  ours.in_at = 0;
}

void World::close(int fd) {
  note_progress();
  Socket &socket = at(fd);
  if (socket.state == Socket::State::kOpen) return shut(fd, false);
  for (const int waiting : socket.backlog) shut(waiting, true);
  socket.backlog.clear();
  socket.state = Socket::State::kClosed;
}

void World::set_cuts(int fd, uint64_t cuts) {
  if (at(fd).other >= 0) at(at(fd).other).cuts = cuts;
}

void World::set_room(int fd, size_t bytes) { at(fd).room = bytes; }

size_t World::open_sockets() const {
  return static_cast<size_t>(std::count_if(sockets_.begin(), sockets_.end(), [](const Socket &socket) {
    return socket.core && socket.state != Socket::State::kClosed;
  }));
}

size_t World::part(Socket &socket, size_t n) {
  if (socket.cuts == 0 || n == 0) return n;
  const uint64_t value = next_random(&socket.cuts);
  if ((value & 7) == 0) return 0;
  // Single bytes as often as large parts.
  const size_t most = size_t{1} << ((value >> 3) % 16);
  return std::min(n, 1 + (value >> 8) % most);
}

World::Watch *World::find_watch(const Handler *handler) {
  const auto it =
      std::find_if(watches_.begin(), watches_.end(), [&](const Watch &watch) { return watch.handler == handler; });
  return it == watches_.end() ? nullptr : &*it;
}

void World::watch(Handler *handler, uint32_t events) {
  if (Watch *known = find_watch(handler)) {
    known->events = events;
  } else {
    watches_.push_back({handler, events});
  }
}

void World::unwatch(Handler *handler) {
  std::erase_if(watches_, [&](const Watch &watch) { return watch.handler == handler; });
}

uint32_t World::ready_events(Handler *handler) {
  Watch *watch = find_watch(handler);
  if (watch == nullptr || watch->events == 0 || !mine(handler->fd())) return 0;
  const Socket &socket = at(handler->fd());
  uint32_t ready = 0;
  switch (socket.state) {
    case Socket::State::kListening:
      if (!socket.backlog.empty()) ready |= EPOLLIN;
      break;
    case Socket::State::kRefused:
      ready |= EPOLLOUT | EPOLLERR | EPOLLHUP;
      break;
    case Socket::State::kOpen: {
      const Socket &other = at(socket.other);
      if (socket.waiting() > 0 || socket.end_of_input) ready |= EPOLLIN;
      if (socket.end_of_input) ready |= EPOLLRDHUP;
      if (socket.reset) ready |= EPOLLERR | EPOLLHUP;
      if (other.state != Socket::State::kOpen || other.waiting() < other.room) ready |= EPOLLOUT;
      break;
    }
    case Socket::State::kClosed:
    case Socket::State::kFresh:
    case Socket::State::kConnecting:
      break;
  }
  ready &= watch->events | EPOLLERR | EPOLLHUP;
  if (ready != 0 && (watch->events & EPOLLONESHOT) != 0) watch->events = 0;
  return ready;
}

void World::add_loop(IoThread *loop, std::function<bool()> turn, std::function<int64_t()> next_timer) {
  loops_.push_back({loop, std::move(turn), std::move(next_timer)});
}

void World::remove_loop(IoThread *loop) {
  std::erase_if(loops_, [&](const Loop &one) { return one.thread == loop; });
}

void World::run() {
  int idle_turns = 0;
  for (bool more = true; more;) {
    more = false;
    const uint64_t before = progress_;
    for (size_t i = 0; i < loops_.size(); ++i) more = loops_[i].turn() || more;
    idle_turns = progress_ == before ? idle_turns + 1 : 0;
    if (idle_turns > kIdleTurnsMax) broken("the core comes to rest when nothing happens", __FILE__, __LINE__);
  }
}

void World::advance(int64_t ns) {
  const int64_t until = now_ns_ + ns;
  // From timer to timer.
  for (;;) {
    run();
    int64_t next = kNever;
    for (const Loop &loop : loops_) next = std::min(next, loop.next_timer());
    if (next > until) break;
    sleep_until(next);
  }
  sleep_until(until);
}

}  // namespace moonpool::fuzz
