// SPDX-License-Identifier: Apache-2.0
#include "handshake.hpp"

#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "auth.hpp"
#include "stream.hpp"

namespace moonpool {

using wire::Challenge;
using wire::Hello;
using wire::Proof;
using wire::Welcome;

void tune_socket(int fd) {
  const int on = 1, idle_s = 30, interval_s = 10, probes = 3;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

namespace {

// What a server may refuse a client with. Anything else is none of the client's own outcomes.
mp_status reason_of(uint16_t status) {
  switch (status) {
    case MP_VERSION:
    case MP_AUTH:
    case MP_LIMIT:
    case MP_CLOSED:
    case MP_PEER_LOST:
      return static_cast<mp_status>(status);
    default:
      return MP_PROTOCOL;
  }
}

// Reads one fixed-size message and writes another; what both sides of a handshake are made of.
class Exchange : public Handler, public std::enable_shared_from_this<Exchange> {
 public:
  Exchange(const Identity &identity, IoThread &io, int64_t deadline)
      : identity_(identity), io_(io), deadline_(deadline) {}

  void on_events(uint32_t events) final {
    const std::shared_ptr<Exchange> self = shared_from_this();
    if (ended_) return;
    if (connecting()) {
      on_connected();
      return;
    }
    if ((events & EPOLLOUT) != 0 && !flush()) return;
    while (!ended_ && in_left_ > 0) {
      const Step step = receive_bytes(fd(), in_, in_left_);
      if (step.kind == Step::kBlocked) return;
      if (step.kind != Step::kMoved) {
        on_broken(step.kind == Step::kEnded ? "the other side closed the connection" : errno_text(step.err));
        return;
      }
      in_ += step.bytes;
      in_left_ -= step.bytes;
      if (in_left_ == 0) {
        on_message();
      } else if (!early_check()) {
        return;
      }
    }
  }

 protected:
  virtual bool connecting() const { return false; }
  virtual void on_connected() {}
  virtual void on_message() = 0;
  virtual void on_broken(const std::string &cause) = 0;
  virtual void on_deadline() = 0;
  // Called after a part of a message; false when it ended the exchange.
  virtual bool early_check() { return true; }

  void watch(Fd fd, uint32_t events) {
    fd_ = std::move(fd);
    if (Error error = io_.add(shared_from_this(), events)) on_broken(error.cause);
  }
  void start_deadline() {
    io_.call_at(deadline_, [weak = weak_from_this()] {
      const auto self = weak.lock();
      if (self != nullptr && !self->ended_) self->on_deadline();
    });
  }
  template <class T>
  void expect(T *message) {
    in_ = reinterpret_cast<uint8_t *>(message);
    in_left_ = sizeof *message;
  }
  template <class T>
  void send(const T &message) {
    out_.append(reinterpret_cast<const char *>(&message), sizeof message);
    flush();
  }
  // False when the connection broke.
  bool flush() {
    while (!out_.empty()) {
      const ssize_t n = ::send(fd(), out_.data(), out_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n < 0 && (errno == EAGAIN || errno == EINTR)) break;
      if (n <= 0) {
        on_broken(errno_text(errno));
        return false;
      }
      out_.erase(0, static_cast<size_t>(n));
    }
    io_.modify(*this, out_.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT);
    return true;
  }
  // Stops watching and gives the socket away.
  Fd end() {
    ended_ = true;
    in_left_ = 0;
    io_.remove(*this);
    return std::move(fd_);
  }
  void unwatch() { io_.remove(*this); }
  template <class T>
  size_t got(const T *message) const {
    return static_cast<size_t>(in_ - reinterpret_cast<const uint8_t *>(message));
  }
  bool flushed() const { return out_.empty(); }

  const Identity &identity_;
  IoThread &io_;
  const int64_t deadline_;
  bool ended_ = false;

 private:
  uint8_t *in_ = nullptr;
  size_t in_left_ = 0;
  std::string out_;
};

class Dialer final : public Exchange {
 public:
  Dialer(const Identity &identity, IoThread &io, DialRequest request, std::function<void(Dialed)> done)
      : Exchange(identity, io, request.deadline_ns), request_(std::move(request)), done_(std::move(done)) {}

  void start() {
    start_deadline();
    try_next();
  }

 private:
  enum class State { kConnecting, kChallenge, kWelcome };

  bool connecting() const override { return state_ == State::kConnecting; }
  const std::string where() const { return request_.addresses[at_ - 1].text(); }

  void try_next() {
    if (at_ == request_.addresses.size()) {
      Error error = make_error(MP_CONNECT, "cannot connect to " + where(),
                               "check that the peer listens there (its `address`) and that no firewall is between");
      error.cause = first_cause_;
      return fail(std::move(error));
    }
    const SocketAddress &address = request_.addresses[at_++];
    state_ = State::kConnecting;
    Fd fd(socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd) return next_after(errno_text(errno));
    tune_socket(fd.get());
    if (::connect(fd.get(), address.get(), address.length) != 0 && errno != EINPROGRESS) {
      return next_after(errno_text(errno));
    }
    watch(std::move(fd), EPOLLOUT);
  }

  void next_after(const std::string &cause) {
    if (first_cause_.empty()) first_cause_ = cause;
    try_next();
  }

  void on_connected() override {
    int err = 0;
    socklen_t size = sizeof err;
    getsockopt(fd(), SOL_SOCKET, SO_ERROR, &err, &size);
    if (err != 0) {
      unwatch();
      fd_.reset();
      return next_after(errno_text(err));
    }
    std::memset(&hello_, 0, sizeof hello_);
    std::memcpy(hello_.magic, wire::kMagic, sizeof hello_.magic);
    hello_.version = wire::kVersion;
    hello_.kind = request_.kind;
    hello_.flags = identity_.secret.empty() ? 0 : wire::kHasSecret;
    hello_.incarnation = identity_.incarnation;
    random_bytes(hello_.nonce, sizeof hello_.nonce);
    hello_.session = request_.session;
    hello_.lane_id = request_.lane_id;
    wire::set_text(hello_.name, identity_.name);
    state_ = State::kChallenge;
    expect(&result_.challenge);
    send(hello_);
  }

  // Another service is recognized by its first bytes, not after a whole message or the deadline.
  bool early_check() override {
    const Challenge &challenge = result_.challenge;
    if (state_ != State::kChallenge) return true;
    const size_t n = std::min(got(&challenge), sizeof challenge.magic);
    if (std::memcmp(challenge.magic, wire::kMagic, n) == 0) return true;
    fail(another_service());
    return false;
  }

  Error another_service() const {
    return make_error(MP_PROTOCOL, where() + " does not speak the Moonpool protocol",
                      "check host and port: another service listens there");
  }

  void on_message() override {
    if (state_ == State::kChallenge) {
      on_challenge();
    } else {
      on_welcome();
    }
  }

  void on_challenge() {
    const Challenge &challenge = result_.challenge;
    if (std::memcmp(challenge.magic, wire::kMagic, sizeof challenge.magic) != 0) {
      return fail(another_service());
    }
    if (challenge.status == MP_VERSION || challenge.version != wire::kVersion) {
      return fail(make_error(MP_VERSION,
                             where() + " speaks protocol version " + std::to_string(challenge.version) +
                                 ", this engine speaks " + std::to_string(wire::kVersion),
                             "run the same Moonpool release on both sides"));
    }
    if (challenge.status != MP_OK) return refused(challenge.status, wire::get_text(challenge.message));
    Proof proof;
    prove(identity_.secret, Role::kClient, hello_, challenge, proof.mac);
    state_ = State::kWelcome;
    expect(&result_.welcome);
    send(proof);
  }

  void on_welcome() {
    const Welcome &welcome = result_.welcome;
    if (welcome.status != MP_OK) return refused(welcome.status, wire::get_text(welcome.message));
    uint8_t mac[32];
    prove(identity_.secret, Role::kServer, hello_, result_.challenge, mac);
    if (!same_mac(mac, welcome.mac)) {
      return fail(make_error(MP_AUTH, where() + " did not prove that it knows the cluster secret",
                             "give both engines the same `secret`"));
    }
    result_.fd = end();
    finish();
  }

  void refused(uint16_t status, const std::string &message) {
    const mp_status code = reason_of(status);
    std::string hint = "look at the peer: its address, its settings, how many peers it has";
    if (code == MP_AUTH) {
      const bool peer_has = (result_.challenge.flags & wire::kHasSecret) != 0;
      hint = identity_.secret.empty() ? "give this engine the cluster's `secret`"
             : peer_has               ? "give both engines the same `secret`"
                                      : "the peer was started without a `secret`: give it the cluster's";
    }
    fail(make_error(code, where() + " refused the connection: " + message, hint));
  }

  void on_broken(const std::string &cause) override {
    if (state_ == State::kConnecting) return next_after(cause);
    Error error = make_error(MP_CONNECT, "the handshake with " + where() + " broke off",
                             "check host and port, and that the peer runs a compatible Moonpool release");
    error.cause = cause;
    fail(std::move(error));
  }

  void on_deadline() override {
    Error error = make_error(MP_CONNECT, "no answer from " + where() + " within the connect deadline",
                             "check that the host is up and the peer is not stopped, or raise connect_timeout");
    error.cause = state_ == State::kConnecting
                      ? (first_cause_.empty() ? "the TCP connection was not accepted" : first_cause_)
                      : "connected, but the handshake was not answered";
    fail(std::move(error));
  }

  void fail(Error error) {
    result_.error = std::move(error);
    result_.error.path = "tcp";
    end().reset();
    finish();
  }

  void finish() {
    const std::function<void(Dialed)> done = std::move(done_);
    if (done) done(std::move(result_));
  }

  const DialRequest request_;
  std::function<void(Dialed)> done_;
  size_t at_ = 0;
  State state_ = State::kConnecting;
  std::string first_cause_;
  Hello hello_;
  Dialed result_;
};

class Greeter final : public Exchange {
 public:
  Greeter(const Identity &identity, IoThread &io, int64_t deadline, GreeterHooks hooks)
      : Exchange(identity, io, deadline), hooks_(std::move(hooks)) {}

  void start(Fd fd) {
    start_deadline();
    expect(&hello_);
    watch(std::move(fd), EPOLLIN);
  }

 private:
  // Garbage is recognized by its first bytes, not after a whole message or a deadline.
  bool early_check() override {
    const size_t n = std::min(got(&hello_), sizeof hello_.magic);
    if (proving_ || std::memcmp(hello_.magic, wire::kMagic, n) == 0) return true;
    close(MP_PROTOCOL);
    return false;
  }

  void on_message() override {
    if (proving_) {
      on_proof();
    } else {
      on_hello();
    }
  }

  void on_hello() {
    if (std::memcmp(hello_.magic, wire::kMagic, sizeof hello_.magic) != 0) return close(MP_PROTOCOL);
    std::memset(&challenge_, 0, sizeof challenge_);
    std::memcpy(challenge_.magic, wire::kMagic, sizeof challenge_.magic);
    challenge_.version = wire::kVersion;
    challenge_.flags = identity_.secret.empty() ? 0 : wire::kHasSecret;
    challenge_.incarnation = identity_.incarnation;
    random_bytes(challenge_.nonce, sizeof challenge_.nonce);
    if (hello_.version != wire::kVersion) {
      challenge_.status = MP_VERSION;
      wire::set_text(challenge_.message, "protocol version " + std::to_string(hello_.version) + " is not spoken here");
      send(challenge_);
      return close(MP_VERSION);
    }
    if (hello_.kind < wire::kControl || hello_.kind > wire::kCudaIpc) {
      challenge_.status = MP_PROTOCOL;
      wire::set_text(challenge_.message, "a connection of an unknown kind");
      send(challenge_);
      return close(MP_PROTOCOL);
    }
    proving_ = true;
    expect(&proof_);
    send(challenge_);
  }

  void on_proof() {
    uint8_t mac[32];
    Welcome welcome;
    std::memset(&welcome, 0, sizeof welcome);
    prove(identity_.secret, Role::kClient, hello_, challenge_, mac);
    Admission admission;
    if (!same_mac(mac, proof_.mac)) {
      admission.error = make_error(MP_AUTH, "the cluster secrets differ");
    } else {
      admission = hooks_.admit(hello_);
    }
    if (admission.error) {
      welcome.status = static_cast<uint16_t>(admission.error.code);
      wire::set_text(welcome.message, admission.error.message);
      send(welcome);
      return close(admission.error.code);
    }
    prove(identity_.secret, Role::kServer, hello_, challenge_, welcome.mac);
    welcome.session = admission.session;
    wire::set_text(welcome.name, identity_.name);
    send(welcome);
    // A client that does not take 400 bytes is not worth waiting for.
    if (ended_ || !flushed()) return close(MP_PEER_LOST);
    Fd fd = end();
    hooks_.finished(MP_OK);
    admission.accepted(std::move(fd));
  }

  void on_broken(const std::string &) override { close(MP_PEER_LOST); }
  void on_deadline() override { close(MP_DEADLINE); }

  void close(mp_status status) {
    if (ended_) return;
    end().reset();
    hooks_.finished(status);
  }

  const GreeterHooks hooks_;
  bool proving_ = false;
  Hello hello_;
  Challenge challenge_;
  Proof proof_;
};

}  // namespace

void dial(const Identity &identity, IoThread &io, DialRequest request, std::function<void(Dialed)> done) {
  auto dialer = std::make_shared<Dialer>(identity, io, std::move(request), std::move(done));
  io.post([dialer] { dialer->start(); });
}

void greet(const Identity &identity, IoThread &io, Fd fd, int64_t deadline_ns, const GreeterHooks &hooks) {
  auto greeter = std::make_shared<Greeter>(identity, io, deadline_ns, hooks);
  auto shared_fd = std::make_shared<Fd>(std::move(fd));
  io.post([greeter, shared_fd] { greeter->start(std::move(*shared_fd)); });
}

}  // namespace moonpool
