// SPDX-License-Identifier: Apache-2.0
//
// Messages come back as they were sent, and whatever else arrives is refused without reading past its end.
#include "wire.hpp"

#include "support.hpp"

namespace moonpool::wire {
namespace {

using moonpool::testing::random_data;

std::string encoded(const std::vector<RegionRecord> &regions) {
  std::string body;
  Writer writer(&body);
  for (const RegionRecord &region : regions) encode_region(writer, region);
  return body;
}

std::vector<RegionRecord> some_regions() {
  return {{1, 4096, 7, MP_REGION_WRITABLE, "kv"},
          {UINT64_MAX, UINT64_MAX, 0, 0, ""},
          {0x0123456789abcdef, 1, 2, 0, std::string(kRegionNameMax, 'n')}};
}

TEST(Wire, RegionsComeBackAsTheyWereSent) {
  const std::vector<RegionRecord> sent = some_regions();
  std::vector<RegionRecord> got;
  ASSERT_TRUE(decode_regions(encoded(sent), &got));
  ASSERT_EQ(got.size(), sent.size());
  for (size_t i = 0; i < sent.size(); ++i) {
    EXPECT_EQ(got[i].key, sent[i].key);
    EXPECT_EQ(got[i].length, sent[i].length);
    EXPECT_EQ(got[i].generation, sent[i].generation);
    EXPECT_EQ(got[i].flags, sent[i].flags);
    EXPECT_EQ(got[i].name, sent[i].name);
  }
}

TEST(Wire, RegionsCutShortAreRefused) {
  const std::vector<RegionRecord> sent = some_regions();
  const std::string body = encoded(sent);
  std::vector<size_t> whole = {0};
  for (size_t n = 1; n <= sent.size(); ++n) whole.push_back(encoded({sent.begin(), sent.begin() + n}).size());
  for (size_t n = 0; n <= body.size(); ++n) {
    // A copy of its own, so that the address sanitizer sees a read past the end.
    const std::vector<char> cut(body.begin(), body.begin() + static_cast<std::ptrdiff_t>(n));
    std::vector<RegionRecord> got;
    const bool complete = std::find(whole.begin(), whole.end(), n) != whole.end();
    EXPECT_EQ(decode_regions({cut.data(), cut.size()}, &got), complete) << n << " bytes";
  }
}

TEST(Wire, RegionNamesLongerThanTheBoundAreRefused) {
  std::vector<RegionRecord> got;
  EXPECT_FALSE(decode_regions(encoded({{1, 1, 1, 0, std::string(kRegionNameMax + 1, 'n')}}), &got));
}

TEST(Wire, NotificationsComeBackAsTheyWereSent) {
  std::string body;
  Writer writer(&body);
  encode_notify(writer, {7, {{1, 2, 0}, {UINT64_MAX, UINT32_MAX, 0}}, "payload"});
  Notify got;
  ASSERT_TRUE(decode_notify(body, &got));
  EXPECT_EQ(got.id, 7u);
  ASSERT_EQ(got.marks.size(), 2u);
  EXPECT_EQ(got.marks[0].mark, 2u);
  EXPECT_EQ(got.marks[1].lane, UINT64_MAX);
  EXPECT_EQ(got.payload, "payload");
  for (size_t n = 0; n < body.size(); ++n) {
    const std::vector<char> cut(body.begin(), body.begin() + static_cast<std::ptrdiff_t>(n));
    EXPECT_FALSE(decode_notify({cut.data(), cut.size()}, &got)) << n << " bytes";
  }
  EXPECT_FALSE(decode_notify(body + "?", &got));
  // What is reserved is 0.
  body.clear();
  encode_notify(writer, {7, {{1, 2, 0}, {3, 4, 1}}, "payload"});
  EXPECT_FALSE(decode_notify(body, &got));
}

TEST(Wire, RandomBytesAreNeverReadPastTheirEnd) {
  std::mt19937 random(17);
  for (uint32_t round = 0; round < 5000; ++round) {
    auto bytes = random_data(random() % 200, round);
    // Small length fields now and then, or nothing would ever be accepted.
    for (size_t at = 28; at + 4 <= bytes.size(); at += 32) bytes[at + 1] = bytes[at + 2] = bytes[at + 3] = 0;
    const std::string_view body(reinterpret_cast<const char *>(bytes.data()), bytes.size());
    std::vector<RegionRecord> regions;
    std::vector<Offer> offers;
    decode_regions(body, &regions);
    decode_offer(body, &offers);
    for (const RegionRecord &region : regions) EXPECT_LE(region.name.size(), kRegionNameMax);
    for (const Offer &offer : offers) {
      EXPECT_LE(offer.transport.size(), 15u);
      EXPECT_LE(offer.blob.size(), kOfferBytesMax);
    }
  }
}

TEST(Wire, OffersComeBackAsTheyWereSent) {
  const std::vector<Offer> sent = {{"local", ""}, {"tcp", std::string("\0\1", 2)}, {"cuda_ipc", std::string(512, 'b')}};
  std::string body;
  Writer writer(&body);
  for (const Offer &offer : sent) encode_offer(writer, offer);
  std::vector<Offer> got;
  ASSERT_TRUE(decode_offer(body, &got));
  ASSERT_EQ(got.size(), sent.size());
  for (size_t i = 0; i < sent.size(); ++i) {
    EXPECT_EQ(got[i].transport, sent[i].transport);
    EXPECT_EQ(got[i].blob, sent[i].blob);
  }
  EXPECT_FALSE(decode_offer(std::string_view(body).substr(0, body.size() - 1), &got));
}

TEST(Wire, OffersThatDoNotFitAreRefused) {
  for (const Offer &offer : {Offer{std::string(16, 't'), ""}, Offer{"tcp", std::string(kOfferBytesMax + 1, 'b')}}) {
    std::string body;
    Writer writer(&body);
    encode_offer(writer, offer);
    std::vector<Offer> got;
    EXPECT_FALSE(decode_offer(body, &got)) << offer.transport;
  }
}

TEST(Wire, ReaderFailsForGoodAfterTheFirstShortField) {
  std::string body;
  Writer writer(&body);
  writer.put(uint32_t{5});
  Reader reader(body);
  uint64_t wide = 0;
  uint32_t narrow = 0;
  EXPECT_FALSE(reader.get(&wide));
  EXPECT_FALSE(reader.get(&narrow)) << "four bytes are there, but the message is already known to be malformed";
  EXPECT_FALSE(reader.done());
}

TEST(Wire, ReaderIsDoneOnlyAtTheEnd) {
  std::string body;
  Writer writer(&body);
  writer.put_bytes("payload");
  writer.put(uint8_t{1});
  Reader reader(body);
  std::string_view bytes;
  ASSERT_TRUE(reader.get_bytes(&bytes, 7));
  EXPECT_EQ(bytes, "payload");
  EXPECT_FALSE(reader.done()) << "one byte is left";
  uint8_t last = 0;
  ASSERT_TRUE(reader.get(&last));
  EXPECT_TRUE(reader.done());
}

TEST(Wire, MessagesCarryTheLengthOfTheirBody) {
  std::string out = "before";
  append_message(&out, kNotify, "hello");
  ASSERT_EQ(out.size(), 6 + sizeof(MessageHeader) + 5);
  MessageHeader header;
  std::memcpy(&header, out.data() + 6, sizeof header);
  EXPECT_EQ(header.bytes, 5u);
  EXPECT_EQ(header.type, kNotify);
  EXPECT_EQ(header.reserved, 0u);
  EXPECT_EQ(out.substr(out.size() - 5), "hello");
}

TEST(Wire, TextsAreCutAndNothingOfAnEarlierOneIsLeft) {
  char field[8];
  std::memset(field, 'x', sizeof field);
  set_text(field, "abc");
  EXPECT_EQ(std::string(field, sizeof field), std::string("abc\0\0\0\0\0", 8));
  set_text(field, "0123456789");
  EXPECT_EQ(get_text(field), "0123456");
  std::memset(field, 'x', sizeof field);
  EXPECT_EQ(get_text(field), "xxxxxxxx") << "a text from the wire may lack its end";
}

RequestHead good_request() { return {{kRequestMagic, MP_READ, 0, 0, 1, 0, 1, 4096}, {1, 0, 4096}}; }

TEST(Wire, RequestsWithinTheBoundsAreAccepted) {
  RequestHead head = good_request();
  EXPECT_STREQ(check_request(head), "");
  head.header.op = MP_WRITE;
  head.header.flags = kFlagDigest;
  head.header.desc_count = kDescsPerFrameMax;
  head.header.payload_bytes = kPayloadPerFrameMax;
  EXPECT_STREQ(check_request(head), "");
}

TEST(Wire, RequestsBeyondTheBoundsAreRefused) {
  const auto refused = [](auto change) {
    RequestHead head = good_request();
    change(head.header);
    return *check_request(head) != '\0';
  };
  EXPECT_TRUE(refused([](RequestHeader &h) { h.magic ^= 1; }));
  EXPECT_TRUE(refused([](RequestHeader &h) { h.op = 0; }));
  EXPECT_TRUE(refused([](RequestHeader &h) { h.op = 3; }));
  EXPECT_TRUE(refused([](RequestHeader &h) { h.flags = 2; }));
  EXPECT_TRUE(refused([](RequestHeader &h) { h.flags = kFlagDigest | 0x80; }));
  EXPECT_TRUE(refused([](RequestHeader &h) { h.desc_count = 0; }));
  EXPECT_TRUE(refused([](RequestHeader &h) { h.desc_count = kDescsPerFrameMax + 1; }));
  EXPECT_TRUE(refused([](RequestHeader &h) { h.payload_bytes = kPayloadPerFrameMax + 1; }));
}

TEST(Wire, ResponsesBeyondTheBoundsAreRefused) {
  const ResponseHeader good{kResponseMagic, 0, {}, 0, 0, 1, 0};
  EXPECT_STREQ(check_response(good), "");
  const auto refused = [&](auto change) {
    ResponseHeader header = good;
    change(header);
    return *check_response(header) != '\0';
  };
  EXPECT_TRUE(refused([](ResponseHeader &h) { h.magic = kRequestMagic; }));
  EXPECT_TRUE(refused([](ResponseHeader &h) { h.failed_count = kDescsPerFrameMax + 1; }));
  EXPECT_TRUE(refused([](ResponseHeader &h) { h.payload_bytes = kPayloadPerFrameMax + 1; }));
}

}  // namespace
}  // namespace moonpool::wire
