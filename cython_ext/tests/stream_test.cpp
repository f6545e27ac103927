// SPDX-License-Identifier: Apache-2.0
//
// Payload arrives where it belongs whatever the sizes of pieces, socket buffers and calls are, and goes nowhere else.
#include "stream.hpp"

#include <fcntl.h>
#include <sys/socket.h>

#include <cerrno>

#include "digest.hpp"
#include "support.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

constexpr size_t kHeadBytes = 40;
constexpr size_t kNextBytes = 56;

class Stream : public ::testing::Test {
 protected:
  void connect(int buffer_bytes) {
    std::tie(out_, in_) = tcp_pair(buffer_bytes);
    ASSERT_EQ(fcntl(in_.get(), F_SETFL, O_NONBLOCK), 0);
  }

  // Sends what `writer` has and receives into `reader` until both are done. `at_step` is called before every step of
  // the reader.
  template <class AtStep>
  void pump(PayloadWriter &writer, PayloadReader &reader, AtStep at_step) {
    const int64_t until = now_ns() + kPatienceNs;
    while (!reader.done()) {
      ASSERT_LT(now_ns(), until);
      if (!writer.done()) {
        ASSERT_NE(writer.step(out_.get()).kind, Step::kFailed);
      }
      at_step();
      size_t got = 0;
      const Step step = reader.step(in_.get(), next_ + next_got_, sizeof next_ - next_got_, &got);
      ASSERT_TRUE(step.kind == Step::kMoved || step.kind == Step::kBlocked) << step.kind << " " << step.err;
      if (step.kind == Step::kMoved) next_got_ += got;
      ASSERT_TRUE(reader.done() || got == 0) << "bytes of the next frame came before the end of this one";
    }
  }
  void pump(PayloadWriter &writer, PayloadReader &reader) {
    pump(writer, reader, [] {});
  }

  Bytes receive_head(PayloadWriter &writer) {
    Bytes head(kHeadBytes);
    for (size_t got = 0; got < head.size();) {
      if (!writer.done()) writer.step(out_.get());
      const Step step = receive_bytes(in_.get(), head.data() + got, head.size() - got);
      EXPECT_NE(step.kind, Step::kFailed);
      if (step.kind == Step::kMoved) got += step.bytes;
    }
    return head;
  }

  Fd out_, in_;
  uint8_t next_[kNextBytes] = {};
  size_t next_got_ = 0;
};

// `total` in random pieces of at most `piece_max`, mostly small ones.
std::vector<size_t> random_pieces(size_t total, size_t piece_max, std::mt19937 &random) {
  std::vector<size_t> pieces;
  while (total > 0) {
    const size_t limit = random() % 4 == 0 ? piece_max : std::min<size_t>(piece_max, 3000);
    pieces.push_back(std::min<size_t>(total, 1 + random() % limit));
    total -= pieces.back();
  }
  return pieces;
}

TEST_F(Stream, ArrivesWholeInPiecesOfAnySize) {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const bool digest = seed % 2 == 1;
    connect(seed % 4 < 2 ? 1 : 0);  // half of them through the smallest buffers there are
    next_got_ = 0;
    const size_t total = 1 + random() % (seed % 8 == 0 ? 4'000'000 : 300'000);
    const Bytes sent = random_data(total, seed), head = random_data(kHeadBytes, seed + 1);
    const Bytes following = random_data(kNextBytes, seed + 2);
    Bytes got(total);

    const std::vector<size_t> out_pieces = random_pieces(total, kDigestLeafBytes, random);
    const std::vector<size_t> in_pieces = digest ? out_pieces : random_pieces(total, 1'000'000, random);
    PayloadWriter writer;
    writer.begin(head.data(), head.size(), digest);
    size_t at = 0;
    for (const size_t n : out_pieces) {
      writer.add(sent.data() + at, n);
      at += n;
    }
    PayloadReader reader;
    reader.begin(digest);
    at = 0;
    for (const size_t n : in_pieces) {
      reader.add(got.data() + at, n);
      at += n;
    }
    EXPECT_EQ(reader.payload_left(), total);
    EXPECT_EQ(receive_head(writer), head);
    // The next frame is on its way before this one has arrived.
    PayloadWriter next_writer;
    next_writer.begin(following.data(), following.size(), false);
    pump(writer, reader, [&] {
      if (writer.done() && !next_writer.done()) next_writer.step(out_.get());
    });
    EXPECT_EQ(got, sent);
    while (!next_writer.done()) next_writer.step(out_.get());
    ASSERT_TRUE(receive_all(in_.get(), next_ + next_got_, kNextBytes - next_got_));
    EXPECT_EQ(std::memcmp(next_, following.data(), kNextBytes), 0) << next_got_ << " bytes came along";
    if (!digest) continue;
    EXPECT_EQ(reader.next_mismatch(0), in_pieces.size());
    EXPECT_EQ(writer.take_digests(), reader.digests());
    EXPECT_EQ(reader.digests().front(), leaf_digest(sent.data(), in_pieces.front()));
  }
}

// As after a release in the middle of a write: the bytes go on arriving, and go nowhere.
TEST_F(Stream, DiscardedRangesAreNotWrittenAnyMore) {
  for (uint32_t seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const bool digest = seed % 3 == 0;
    connect(1);
    constexpr size_t kRegion = 200'000;
    const Bytes sent = random_data(3 * kRegion, seed), head(kHeadBytes);
    Bytes got(3 * kRegion);
    PayloadWriter writer;
    PayloadReader reader;
    writer.begin(head.data(), head.size(), digest);
    reader.begin(digest);
    // The pieces of three regions, none across a border.
    size_t at = 0;
    for (int region = 0; region < 3; ++region) {
      for (const size_t n : random_pieces(kRegion, 50'000, random)) {
        writer.add(sent.data() + at, n);
        reader.add(got.data() + at, n);
        at += n;
      }
    }
    receive_head(writer);
    uint8_t *low = got.data() + kRegion, *high = low + kRegion;
    uint64_t discard_at = 1 + random() % (3 * kRegion);
    Bytes as_it_was;
    pump(writer, reader, [&] {
      if (as_it_was.empty() && 3 * kRegion - reader.payload_left() >= discard_at) {
        reader.discard(low, high);
        as_it_was.assign(low, high);
      }
    });
    if (as_it_was.empty()) as_it_was.assign(low, high);
    EXPECT_EQ(Bytes(low, high), as_it_was);
    EXPECT_EQ(std::memcmp(got.data(), sent.data(), kRegion), 0);
    EXPECT_EQ(std::memcmp(got.data() + 2 * kRegion, sent.data() + 2 * kRegion, kRegion), 0);
    if (digest) {
      EXPECT_EQ(reader.next_mismatch(0), reader.digests().size()) << "discarded pieces do not count";
    }
  }
}

TEST_F(Stream, DiscardAllThrowsTheRestAway) {
  connect(1);
  const Bytes sent = random_data(500'000, 1), head(kHeadBytes);
  Bytes got(sent.size());
  PayloadWriter writer;
  PayloadReader reader;
  writer.begin(head.data(), head.size(), false);
  reader.begin(false);
  writer.add(sent.data(), sent.size());
  for (size_t at = 0; at < got.size(); at += 1000) reader.add(got.data() + at, 1000);
  receive_head(writer);
  Bytes as_it_was;
  pump(writer, reader, [&] {
    if (as_it_was.empty() && reader.payload_left() < got.size() / 2) {
      reader.discard_all();
      as_it_was = got;
    }
  });
  ASSERT_FALSE(as_it_was.empty());
  EXPECT_EQ(got, as_it_was);
}

// A read in which some descriptors failed: their payload is not sent, so their places are empty.
TEST_F(Stream, PlacesOfFailedDescriptorsAreSkipped) {
  for (uint32_t seed = 0; seed < 64; ++seed) {
    SCOPED_TRACE("failed pieces: " + std::to_string(seed));
    const bool digest = seed % 2 == 1;
    connect(0);
    const Bytes sent = random_data(6000, seed), head(kHeadBytes);
    Bytes got(6000);
    PayloadWriter writer;
    PayloadReader reader;
    writer.begin(head.data(), head.size(), digest);
    reader.begin(digest);
    for (unsigned piece = 0; piece < 6; ++piece) {
      if ((seed >> piece & 1) != 0) {
        writer.add_absent();
        reader.add(nullptr, 0);
      } else {
        writer.add(sent.data() + piece * 1000, 1000);
        reader.add(got.data() + piece * 1000, 1000);
      }
    }
    receive_head(writer);
    pump(writer, reader);
    if (HasFatalFailure()) return;
    for (unsigned piece = 0; piece < 6; ++piece) {
      const Bytes expected = (seed >> piece & 1) != 0
                                 ? Bytes(1000)
                                 : Bytes(sent.begin() + piece * 1000, sent.begin() + (piece + 1) * 1000);
      EXPECT_EQ(Bytes(got.begin() + piece * 1000, got.begin() + (piece + 1) * 1000), expected) << "piece " << piece;
    }
    if (digest) {
      EXPECT_EQ(reader.next_mismatch(0), 6u);
    }
  }
}

TEST_F(Stream, AFlippedByteIsFoundInItsPieceAndOnlyThere) {
  const std::vector<size_t> pieces = {1, 1000, kDigestLeafBytes, 4096, 70'000};
  size_t total = 0;
  for (const size_t n : pieces) total += n;
  const Bytes sent = random_data(total, 4), head(kHeadBytes);
  for (size_t bad = 0; bad < pieces.size(); ++bad) {
    connect(0);
    PayloadWriter writer;
    PayloadReader reader;
    Bytes got(total);
    writer.begin(head.data(), head.size(), true);
    reader.begin(true);
    size_t at = 0, bad_at = 0;
    for (size_t i = 0; i < pieces.size(); ++i) {
      if (i == bad) bad_at = at + pieces[i] / 2;
      writer.add(sent.data() + at, pieces[i]);
      reader.add(got.data() + at, pieces[i]);
      at += pieces[i];
    }
    // Everything that goes over the wire, with one bit turned on the way.
    Bytes frame(head.size() + total + pieces.size() * sizeof(uint64_t));
    std::thread receiver([&] { EXPECT_TRUE(receive_all(in_.get(), frame.data(), frame.size())); });
    while (!writer.done()) ASSERT_NE(writer.step(out_.get()).kind, Step::kFailed);
    receiver.join();
    frame[head.size() + bad_at] ^= 0x10;
    std::thread sender(
        [&] { EXPECT_TRUE(send_all(out_.get(), frame.data() + head.size(), frame.size() - head.size())); });
    pump(writer, reader);
    sender.join();
    EXPECT_EQ(reader.next_mismatch(0), bad);
    EXPECT_EQ(reader.next_mismatch(bad + 1), pieces.size());
  }
}

TEST_F(Stream, AWriterKnowsWhichMemoryItStillNeeds) {
  connect(1);
  const Bytes head(kHeadBytes), first = random_data(1000, 1), second = random_data(3'000'000, 2);
  PayloadWriter writer;
  writer.begin(head.data(), head.size(), false);
  writer.add(first.data(), first.size());
  writer.add(second.data(), second.size());
  EXPECT_TRUE(writer.touches(first.data(), first.data() + first.size()));
  // As far as the socket goes without a reader.
  while (writer.step(out_.get()).kind == Step::kMoved) {
  }
  ASSERT_FALSE(writer.done());
  EXPECT_FALSE(writer.touches(first.data(), first.data() + first.size()));
  EXPECT_TRUE(writer.touches(second.data(), second.data() + second.size()));
}

TEST_F(Stream, MoreThanOneSystemCallTakesArrive) {
  connect(0);
  constexpr size_t kPieces = 4096;  // IOV_MAX is 1024
  const Bytes sent = random_data(kPieces * 8, 1), head(kHeadBytes);
  for (const bool digest : {false, true}) {
    Bytes got(sent.size());
    PayloadWriter writer;
    PayloadReader reader;
    writer.begin(head.data(), head.size(), digest);
    reader.begin(digest);
    for (size_t i = 0; i < kPieces; ++i) {
      writer.add(sent.data() + i * 8, 8);
      reader.add(got.data() + i * 8, 8);
    }
    receive_head(writer);
    pump(writer, reader);
    EXPECT_EQ(got, sent);
  }
}

TEST_F(Stream, TellsBlockedFromEndedFromFailed) {
  connect(0);
  Bytes got(100);
  PayloadReader reader;
  reader.begin(false);
  reader.add(got.data(), got.size());
  size_t next = 0;
  EXPECT_EQ(reader.step(in_.get(), next_, sizeof next_, &next).kind, Step::kBlocked);
  ASSERT_TRUE(send_all(out_.get(), "x", 1));
  ASSERT_TRUE(eventually([&] { return reader.step(in_.get(), next_, sizeof next_, &next).kind == Step::kMoved; }));
  EXPECT_EQ(reader.payload_left(), 99u);
  ::shutdown(out_.get(), SHUT_WR);
  Step step{};
  ASSERT_TRUE(eventually([&] {
    step = reader.step(in_.get(), next_, sizeof next_, &next);
    return step.kind != Step::kBlocked;
  }));
  EXPECT_EQ(step.kind, Step::kEnded);
  EXPECT_FALSE(reader.done());

  connect(0);
  reset_on_close(out_.get());
  out_.reset();
  ASSERT_TRUE(eventually([&] {
    step = receive_bytes(in_.get(), got.data(), got.size());
    return step.kind != Step::kBlocked;
  }));
  EXPECT_EQ(step.kind, Step::kFailed);
  EXPECT_EQ(step.err, ECONNRESET);
  PayloadWriter writer;
  writer.begin(got.data(), got.size(), false);
  EXPECT_EQ(writer.step(in_.get()).kind, Step::kFailed);
}

}  // namespace
}  // namespace moonpool
