// SPDX-License-Identifier: Apache-2.0
//
// Control messages arrive whole and in order; a peer that breaks the rules or does not read is given up.
#include "control.hpp"

#include <sys/socket.h>

#include <cerrno>

#include "support_raw.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

class ControlTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_FALSE(io_.start());
    Fd ours;
    std::tie(other_, ours) = tcp_pair();
    ControlHooks hooks;
    hooks.message = [this](wire::Message type, std::string_view body) {
      std::lock_guard lock(mutex_);
      messages_.push_back({static_cast<uint16_t>(type), std::string(body)});
      return answer_ ? answer_() : Error{};
    };
    hooks.malformed = [this] {
      std::lock_guard lock(mutex_);
      ++malformed_;
      uint8_t byte = 0;
      open_when_malformed_ = recv(other(), &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN;
    };
    hooks.lost = [this](const Error &cause, bool peer_closed) {
      std::lock_guard lock(mutex_);
      ++lost_;
      cause_ = cause;
      peer_closed_ = peer_closed;
    };
    control_ = std::make_shared<ControlConnection>(io_, std::move(ours), std::move(hooks));
    control_->start();
  }
  void TearDown() override {
    control_->close();
    io_.stop();
  }
  size_t received() {
    std::lock_guard lock(mutex_);
    return messages_.size();
  }
  bool lost() {
    return eventually([&] {
      std::lock_guard lock(mutex_);
      return lost_ > 0;
    });
  }
  int other() const { return other_.get(); }

  IoThread io_{0, 0};
  Fd other_;
  std::shared_ptr<ControlConnection> control_;
  std::function<Error()> answer_;
  std::mutex mutex_;
  std::vector<ControlMessage> messages_;
  int lost_ = 0, malformed_ = 0;
  bool open_when_malformed_ = false;
  Error cause_;
  bool peer_closed_ = false;
};

TEST_F(ControlTest, MessagesArriveWholeHoweverTheyAreCut) {
  std::mt19937 random(1);
  std::string stream;
  std::vector<std::string> bodies;
  for (int i = 0; i < 100; ++i) {
    bodies.emplace_back(random() % 3000, static_cast<char>('a' + i % 26));
    wire::append_message(&stream, static_cast<wire::Message>(i), bodies.back());
  }
  for (size_t at = 0; at < stream.size();) {
    const size_t n = std::min<size_t>(stream.size() - at, 1 + random() % 5000);
    ASSERT_TRUE(send_all(other(), stream.data() + at, n));
    at += n;
  }
  ASSERT_TRUE(eventually([&] { return received() == 100; }));
  for (size_t i = 0; i < 100; ++i) {
    EXPECT_EQ(messages_[i].type, i);
    EXPECT_EQ(messages_[i].body, bodies[i]);
  }
}

TEST_F(ControlTest, TheLargestMessageIsTakenAndALargerOneEndsTheConnection) {
  ASSERT_TRUE(send_message(other(), wire::kRegions, std::string(wire::kControlMessageMax, 'm')));
  ASSERT_TRUE(eventually([&] { return received() == 1; }));
  EXPECT_EQ(messages_[0].body.size(), wire::kControlMessageMax);
  // The header is enough: nothing is kept for a body that is too large.
  const wire::MessageHeader header{wire::kControlMessageMax + 1, wire::kRegions, 0};
  ASSERT_TRUE(send_struct(other(), header));
  ASSERT_TRUE(lost());
  EXPECT_EQ(cause_.code, MP_PROTOCOL);
  EXPECT_FALSE(peer_closed_);
  EXPECT_TRUE(ends(other()));
  EXPECT_EQ(malformed_, 1);
}

TEST_F(ControlTest, AMessageThatIsRefusedEndsTheConnection) {
  answer_ = [] { return make_error(MP_PROTOCOL, "malformed"); };
  ASSERT_TRUE(send_message(other(), wire::kNotify, "?"));
  send_message(other(), wire::kNotify, "never looked at");
  ASSERT_TRUE(lost());
  EXPECT_EQ(cause_.message, "malformed");
  EXPECT_EQ(received(), 1u);
  EXPECT_TRUE(ends(other()));
  EXPECT_EQ(malformed_, 1);
  EXPECT_TRUE(open_when_malformed_) << "who sees the end finds it counted";
}

TEST_F(ControlTest, KnowsWhenTheOtherSideHasClosed) {
  ASSERT_TRUE(send_message(other(), wire::kSync, {}));
  other_.reset();
  ASSERT_TRUE(lost());
  EXPECT_EQ(received(), 1u) << "what was sent before is still delivered";
  EXPECT_EQ(cause_.code, MP_PEER_LOST);
  EXPECT_TRUE(peer_closed_);
  EXPECT_EQ(lost_, 1);
}

TEST_F(ControlTest, KnowsWhenTheOtherSideHasReset) {
  reset_on_close(other());
  other_.reset();
  ASSERT_TRUE(lost());
  EXPECT_EQ(cause_.code, MP_PEER_LOST);
  EXPECT_NE(cause_.cause, "");
}

TEST_F(ControlTest, NobodyHearsOfItsOwnClose) {
  control_->close();
  control_->close();
  EXPECT_TRUE(ends(other()));
  control_->send(wire::kSync, "dropped");
  io_.stop();
  EXPECT_EQ(lost_, 0);
}

TEST_F(ControlTest, MayBeClosedWhileAMessageIsHandled) {
  answer_ = [this] {
    control_->close();
    return make_error(MP_PROTOCOL, "nobody wants to know");
  };
  ASSERT_TRUE(send_message(other(), wire::kSync, {}));
  EXPECT_TRUE(ends(other()));
  io_.stop();
  EXPECT_EQ(lost_, 0);
}

TEST_F(ControlTest, MessagesOfSeveralThreadsDoNotMix) {
  constexpr size_t kEach = 300;
  std::vector<std::thread> senders;
  for (int i = 0; i < 3; ++i) {
    senders.emplace_back([&, i] {
      for (size_t n = 0; n < kEach; ++n)
        control_->send(wire::kNotify, std::string(1000 + n, static_cast<char>('a' + i)));
    });
  }
  size_t next[3] = {};
  ControlMessage message;
  for (size_t n = 0; n < 3 * kEach; ++n) {
    ASSERT_TRUE(receive_message(other(), &message));
    const size_t sender = static_cast<size_t>(message.body.at(0) - 'a');
    ASSERT_LT(sender, 3u);
    EXPECT_EQ(message.body, std::string(1000 + next[sender]++, message.body[0]));
  }
  for (std::thread &sender : senders) sender.join();
}

TEST_F(ControlTest, WhatDoesNotFitTheSocketIsSentLater) {
  const std::string large(wire::kControlMessageMax, 'l');
  for (int i = 0; i < 16; ++i) control_->send(wire::kRegions, large);
  ControlMessage message;
  for (int i = 0; i < 16; ++i) {
    ASSERT_TRUE(receive_message(other(), &message));
    EXPECT_EQ(message.body, large);
  }
}

TEST_F(ControlTest, APeerThatDoesNotReadIsGivenUp) {
  const std::string large(wire::kControlMessageMax, 'l');
  // 256 MiB may wait, and some MiB are in the sockets.
  for (int i = 0; i < 300; ++i) control_->send(wire::kRegions, large);
  ASSERT_TRUE(lost());
  EXPECT_EQ(cause_.code, MP_PEER_LOST);
  EXPECT_NE(cause_.cause.find("does not read"), std::string::npos) << cause_.cause;
  EXPECT_FALSE(peer_closed_) << "its process may be alive and writing";
  EXPECT_EQ(lost_, 1);
}

TEST_F(ControlTest, MayBeClosedBeforeItStarts) {
  auto [one, two] = tcp_pair();
  auto control = std::make_shared<ControlConnection>(io_, std::move(one), ControlHooks{});
  control->close();
  control->start();
  EXPECT_TRUE(ends(two.get()));
  EXPECT_EQ(io_.handler_count(), 1u) << "only the other connection of this test";
}

}  // namespace
}  // namespace moonpool
