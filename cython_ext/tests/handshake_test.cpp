// SPDX-License-Identifier: Apache-2.0
//
// Both sides of the handshake: who may in, what is said to who may not, and that nobody waits beyond the deadline.
#include "handshake.hpp"

#include <sys/socket.h>

#include <future>

#include "auth.hpp"
#include "status.hpp"
#include "support_raw.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;
using wire::Challenge;
using wire::Hello;
using wire::Proof;
using wire::Welcome;

int64_t after_ms(int64_t ms) { return now_ns() + ms * kMillisecond; }
// Far enough that it never passes in a test that works.
int64_t far() { return now_ns() + kPatienceNs; }

template <class T>
T result_of(std::promise<T> &promise) {
  auto future = promise.get_future();
  EXPECT_EQ(future.wait_for(std::chrono::nanoseconds(kPatienceNs)), std::future_status::ready);
  return future.get();
}

class HandshakeTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_FALSE(io_.start()); }
  void TearDown() override { io_.stop(); }
  IoThread io_{0, 0};
};

// ---------------------------------------------------------------- the accepting side

class GreeterTest : public HandshakeTest {
 protected:
  // Begins to greet; the test plays the client on fd().
  void greet_raw_client(int64_t deadline) {
    Fd server;
    std::tie(client_, server) = tcp_pair();
    finished_ = std::promise<mp_status>();
    accepted_ = false;
    GreeterHooks hooks;
    hooks.admit = [this](const Hello &) { return Admission{refusal_, session_, [this](Fd) { accepted_ = true; }}; };
    hooks.finished = [this](mp_status status) { finished_.set_value(status); };
    greet(identity_, io_, std::move(server), deadline, hooks);
  }
  int fd() const { return client_.get(); }
  mp_status finished() { return result_of(finished_); }

  // A complete exchange with `secret`; the status in the Welcome.
  mp_status exchange(const std::string &secret) {
    hello_ = make_hello(wire::kControl, secret);
    EXPECT_TRUE(send_struct(fd(), hello_));
    EXPECT_TRUE(receive_struct(fd(), &challenge_));
    prove(secret, Role::kClient, hello_, challenge_, proof_.mac);
    EXPECT_TRUE(send_struct(fd(), proof_));
    EXPECT_TRUE(receive_struct(fd(), &welcome_));
    return static_cast<mp_status>(welcome_.status);
  }

  const Identity identity_{"server", random_id(), "the secret"};
  const Id128 session_ = random_id();
  Error refusal_;
  Fd client_;
  std::promise<mp_status> finished_;
  std::atomic<bool> accepted_{false};
  Hello hello_;
  Challenge challenge_;
  Proof proof_;
  Welcome welcome_;
};

TEST_F(GreeterTest, AcceptsWhoKnowsTheSecretAndProvesItselfBack) {
  greet_raw_client(far());
  EXPECT_EQ(exchange("the secret"), MP_OK);
  EXPECT_EQ(finished(), MP_OK);
  EXPECT_TRUE(eventually([&] { return accepted_.load(); }));
  EXPECT_EQ(welcome_.session, session_);
  EXPECT_EQ(wire::get_text(welcome_.name), "server");
  EXPECT_EQ(challenge_.incarnation, identity_.incarnation);
  uint8_t mac[32];
  prove("the secret", Role::kServer, hello_, challenge_, mac);
  EXPECT_TRUE(same_mac(mac, welcome_.mac));
}

TEST_F(GreeterTest, RefusesOtherSecretsAndNoSecretWithoutProvingItself) {
  for (const char *secret : {"another secret", ""}) {
    greet_raw_client(far());
    EXPECT_EQ(exchange(secret), MP_AUTH);
    EXPECT_EQ(finished(), MP_AUTH);
    EXPECT_TRUE(ends(fd()));
    EXPECT_FALSE(accepted_.load());
    EXPECT_EQ(Bytes(welcome_.mac, welcome_.mac + 32), Bytes(32)) << "a proof would help a guesser";
    EXPECT_EQ(welcome_.session, Id128{});
  }
}

TEST_F(GreeterTest, AReplayedProofIsRefused) {
  greet_raw_client(far());
  ASSERT_EQ(exchange("the secret"), MP_OK);
  finished();
  ASSERT_TRUE(eventually([&] { return accepted_.load(); }));
  const Hello seen_hello = hello_;
  const Proof seen_proof = proof_;
  accepted_ = false;
  greet_raw_client(far());
  ASSERT_TRUE(send_struct(fd(), seen_hello));
  ASSERT_TRUE(receive_struct(fd(), &challenge_));
  ASSERT_TRUE(send_struct(fd(), seen_proof));
  ASSERT_TRUE(receive_struct(fd(), &welcome_));
  EXPECT_EQ(welcome_.status, MP_AUTH);
  EXPECT_EQ(finished(), MP_AUTH);
  EXPECT_FALSE(accepted_.load());
}

TEST_F(GreeterTest, AProofForAnotherLaneOrSessionIsRefused) {
  for (const bool change_lane : {true, false}) {
    greet_raw_client(far());
    hello_ = make_hello(wire::kLane, "the secret");
    ASSERT_TRUE(send_struct(fd(), hello_));
    ASSERT_TRUE(receive_struct(fd(), &challenge_));
    Hello other = hello_;
    if (change_lane) {
      other.lane_id ^= 1;
    } else {
      other.session[0] ^= 1;
    }
    prove("the secret", Role::kClient, other, challenge_, proof_.mac);
    ASSERT_TRUE(send_struct(fd(), proof_));
    ASSERT_TRUE(receive_struct(fd(), &welcome_));
    EXPECT_EQ(welcome_.status, MP_AUTH);
    EXPECT_EQ(finished(), MP_AUTH);
  }
}

TEST_F(GreeterTest, AnswersAnotherVersionWithItsOwn) {
  greet_raw_client(far());
  hello_ = make_hello(wire::kControl, "the secret");
  hello_.version = wire::kVersion + 1;
  ASSERT_TRUE(send_struct(fd(), hello_));
  ASSERT_TRUE(receive_struct(fd(), &challenge_));
  EXPECT_EQ(challenge_.status, MP_VERSION);
  EXPECT_EQ(challenge_.version, wire::kVersion);
  EXPECT_NE(wire::get_text(challenge_.message), "");
  EXPECT_EQ(finished(), MP_VERSION);
  EXPECT_TRUE(ends(fd()));
}

TEST_F(GreeterTest, RefusesAnUnknownKindOfConnection) {
  greet_raw_client(far());
  hello_ = make_hello(static_cast<wire::Kind>(wire::kCudaIpc + 1), "the secret");
  ASSERT_TRUE(send_struct(fd(), hello_));
  ASSERT_TRUE(receive_struct(fd(), &challenge_));
  EXPECT_EQ(challenge_.status, MP_PROTOCOL);
  EXPECT_EQ(finished(), MP_PROTOCOL);
}

TEST_F(GreeterTest, ClosesGarbageAtItsFirstBytes) {
  const std::string garbage[] = {"GET / HTTP/1.1\r\n\r\n", "x", std::string(5000, '\0'), "MOONPOOX"};
  for (const std::string &bytes : garbage) {
    greet_raw_client(far());
    ASSERT_TRUE(send_all(fd(), bytes.data(), bytes.size()));
    EXPECT_EQ(finished(), MP_PROTOCOL) << bytes.substr(0, 20);
    EXPECT_TRUE(ends(fd())) << bytes.substr(0, 20);
  }
}

TEST_F(GreeterTest, HalfAFrameEndsAtTheDeadline) {
  const Hello hello = make_hello(wire::kControl, "the secret");
  for (const size_t part : {size_t{0}, size_t{1}, size_t{8}, sizeof hello - 1}) {
    greet_raw_client(after_ms(30));
    ASSERT_TRUE(send_all(fd(), &hello, part));
    EXPECT_EQ(finished(), MP_DEADLINE) << part << " bytes";
    EXPECT_TRUE(ends(fd()));
  }
  greet_raw_client(after_ms(500));
  ASSERT_TRUE(send_struct(fd(), hello));
  ASSERT_TRUE(receive_struct(fd(), &challenge_));
  ASSERT_TRUE(send_all(fd(), &proof_, sizeof proof_ - 1));
  EXPECT_EQ(finished(), MP_DEADLINE);
}

TEST_F(GreeterTest, AClientThatLeavesIsCountedAsLost) {
  greet_raw_client(far());
  const Hello hello = make_hello(wire::kControl, "the secret");
  ASSERT_TRUE(send_all(fd(), &hello, 20));
  client_.reset();
  EXPECT_EQ(finished(), MP_PEER_LOST);
}

TEST_F(GreeterTest, TakesBytesOneByOne) {
  greet_raw_client(far());
  hello_ = make_hello(wire::kControl, "the secret");
  for (size_t i = 0; i < sizeof hello_; ++i) {
    ASSERT_TRUE(send_all(fd(), reinterpret_cast<uint8_t *>(&hello_) + i, 1));
  }
  ASSERT_TRUE(receive_struct(fd(), &challenge_));
  prove("the secret", Role::kClient, hello_, challenge_, proof_.mac);
  for (size_t i = 0; i < sizeof proof_; ++i) ASSERT_TRUE(send_all(fd(), proof_.mac + i, 1));
  ASSERT_TRUE(receive_struct(fd(), &welcome_));
  EXPECT_EQ(welcome_.status, MP_OK);
}

TEST_F(GreeterTest, TellsWhyAProvenClientIsNotAdmitted) {
  refusal_ = make_error(MP_LIMIT, "7 peers are connected already");
  greet_raw_client(far());
  EXPECT_EQ(exchange("the secret"), MP_LIMIT);
  EXPECT_EQ(wire::get_text(welcome_.message), "7 peers are connected already");
  EXPECT_EQ(finished(), MP_LIMIT);
  EXPECT_FALSE(accepted_.load());
}

// ---------------------------------------------------------------- the connecting side

class DialerTest : public HandshakeTest {
 protected:
  DialerTest() : listener_(listen_on_loopback(&port_)) {}

  SocketAddress address_of(uint16_t port) {
    std::vector<SocketAddress> out;
    EXPECT_FALSE(resolve_address("127.0.0.1:" + std::to_string(port), false, far(), {}, &out));
    return out.at(0);
  }
  void dial_to(std::vector<SocketAddress> addresses, int64_t deadline) {
    dialed_ = std::promise<Dialed>();
    dial(identity_, io_, {std::move(addresses), wire::kControl, random_id(), 0, deadline},
         [this](Dialed dialed) { dialed_.set_value(std::move(dialed)); });
  }
  void dial_raw_server(int64_t deadline = far()) {
    dial_to({address_of(port_)}, deadline);
    server_ = Fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    ASSERT_TRUE(server_);
    ASSERT_TRUE(receive_struct(fd(), &hello_));
  }
  int fd() const { return server_.get(); }
  // Answers as a server that knows `secret`.
  void answer(const std::string &secret, Role role = Role::kServer) {
    challenge_ = make_challenge(secret);
    ASSERT_TRUE(send_struct(fd(), challenge_));
    ASSERT_TRUE(receive_struct(fd(), &proof_));
    std::memset(&welcome_, 0, sizeof welcome_);
    prove(secret, role, hello_, challenge_, welcome_.mac);
    ASSERT_TRUE(send_struct(fd(), welcome_));
  }

  const Identity identity_{"client", random_id(), "the secret"};
  uint16_t port_ = 0;
  Fd listener_, server_;
  std::promise<Dialed> dialed_;
  Hello hello_;
  Challenge challenge_;
  Proof proof_;
  Welcome welcome_;
};

TEST_F(DialerTest, AcceptsAServerThatProvesItself) {
  dial_raw_server();
  EXPECT_EQ(hello_.incarnation, identity_.incarnation);
  EXPECT_EQ(wire::get_text(hello_.name), "client");
  answer("the secret");
  const Dialed dialed = result_of(dialed_);
  EXPECT_FALSE(dialed.error) << dialed.error.message;
  EXPECT_TRUE(dialed.fd);
  EXPECT_EQ(dialed.challenge.incarnation, challenge_.incarnation);
}

TEST_F(DialerTest, RefusesAServerThatDoesNotKnowTheSecret) {
  dial_raw_server();
  answer("another secret");
  const Dialed dialed = result_of(dialed_);
  EXPECT_EQ(dialed.error.code, MP_AUTH);
  EXPECT_NE(dialed.error.message.find("did not prove"), std::string::npos) << dialed.error.message;
  EXPECT_FALSE(dialed.fd);
  EXPECT_TRUE(ends(fd()));
}

// A server without the secret could only send the client's own proof back.
TEST_F(DialerTest, ItsOwnProofIsNoProofOfTheServer) {
  dial_raw_server();
  answer("the secret", Role::kClient);
  EXPECT_EQ(result_of(dialed_).error.code, MP_AUTH);
}

TEST_F(DialerTest, NamesBothVersions) {
  dial_raw_server();
  challenge_ = make_challenge("the secret");
  challenge_.version = wire::kVersion + 6;
  challenge_.status = MP_VERSION;
  ASSERT_TRUE(send_struct(fd(), challenge_));
  const Dialed dialed = result_of(dialed_);
  EXPECT_EQ(dialed.error.code, MP_VERSION);
  EXPECT_NE(dialed.error.message.find("version " + std::to_string(wire::kVersion + 6)), std::string::npos)
      << dialed.error.message;
  EXPECT_NE(dialed.error.message.find("speaks " + std::to_string(wire::kVersion)), std::string::npos)
      << dialed.error.message;
}

TEST_F(DialerTest, RecognizesAnotherService) {
  dial_raw_server();
  const std::string page = "HTTP/1.1 400 Bad Request\r\n" + std::string(300, ' ');
  ASSERT_TRUE(send_all(fd(), page.data(), page.size()));
  EXPECT_EQ(result_of(dialed_).error.code, MP_PROTOCOL);
}

TEST_F(DialerTest, RecognizesAnotherServiceThatSaysLittleAndStays) {
  dial_raw_server();
  ASSERT_TRUE(send_all(fd(), "HTTP", 4));
  EXPECT_EQ(result_of(dialed_).error.code, MP_PROTOCOL);
}

TEST_F(DialerTest, PassesOnWhyItWasRefused) {
  for (const auto &[status, code] : {std::pair<uint16_t, mp_status>{MP_LIMIT, MP_LIMIT},
                                     {MP_CLOSED, MP_CLOSED},
                                     {MP_AUTH, MP_AUTH},
                                     {MP_PENDING, MP_PROTOCOL},
                                     {MP_FORKED, MP_PROTOCOL},
                                     {kLastStatus + 1, MP_PROTOCOL},
                                     {0xffff, MP_PROTOCOL}}) {
    dial_raw_server();
    challenge_ = make_challenge("the secret");
    challenge_.status = status;
    wire::set_text(challenge_.message, "because of a test");
    ASSERT_TRUE(send_struct(fd(), challenge_));
    const Error error = result_of(dialed_).error;
    EXPECT_EQ(error.code, code) << status;
    EXPECT_NE(error.message.find("because of a test"), std::string::npos) << error.message;
  }
}

TEST_F(DialerTest, AServerThatClosesInTheMiddleIsAFailedConnect) {
  dial_raw_server();
  challenge_ = make_challenge("the secret");
  ASSERT_TRUE(send_all(fd(), &challenge_, sizeof challenge_ / 2));
  server_.reset();
  const Error error = result_of(dialed_).error;
  EXPECT_EQ(error.code, MP_CONNECT);
  EXPECT_NE(error.cause, "");
}

TEST_F(DialerTest, ASilentServerIsGivenUpAtTheDeadline) {
  dial_raw_server(after_ms(100));
  const Error error = result_of(dialed_).error;
  EXPECT_EQ(error.code, MP_CONNECT);
  EXPECT_NE(error.cause.find("not answered"), std::string::npos) << error.cause;
  EXPECT_TRUE(ends(fd()));
}

TEST_F(DialerTest, AddressesAreTriedInTurnAndTheFirstCauseIsKept) {
  uint16_t closed_port = 0;
  listen_on_loopback(&closed_port).reset();
  dial_to({address_of(closed_port), address_of(port_)}, far());
  server_ = Fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  ASSERT_TRUE(receive_struct(fd(), &hello_));
  answer("the secret");
  EXPECT_FALSE(result_of(dialed_).error);

  dial_to({address_of(closed_port), address_of(closed_port)}, far());
  const Error error = result_of(dialed_).error;
  EXPECT_EQ(error.code, MP_CONNECT);
  EXPECT_NE(error.cause.find("refused"), std::string::npos) << error.cause;
  EXPECT_NE(error.message.find(std::to_string(closed_port)), std::string::npos) << error.message;
}

}  // namespace
}  // namespace moonpool
