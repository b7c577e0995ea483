// SPDX-License-Identifier: Apache-2.0
//
// The messages of verbs transports as bytes, and the answers to invalid bytes.

#include <gmock/gmock.h>

#include <random>

#include "transport/verbs/codec.h"

namespace ropeteam::verbs {
namespace {

using testing::HasSubstr;

PortAddress SomePort() { return {0x1122334455667788, 0x99aabbccddeeff00, 17, 1, 5}; }

TransportAddress SomeAddress(size_t rails) {
  TransportAddress address{0x123456789abcdef0, 0x7fffffff, {}};
  for (size_t i = 0; i < rails; i++)
    address.rails.push_back({SomePort(), static_cast<uint32_t>(100 + i), 400'000});
  return address;
}

Message SomeRequest() {
  Message message;
  message.kind = MessageKind::kRequest;
  message.sender = 1;
  message.receiver = 2;
  message.connection = 3;
  message.superseded = 4;
  message.sender_rail = 5;
  message.receiver_rail = 6;
  message.reads = 16;
  message.queue_pair = 0xffffff;
  message.sequence = 0xabcdef;
  message.datagram_queue_pair = 7;
  message.datagram_key = 8;
  message.port = SomePort();
  return message;
}

template <typename T>
bool Same(T a, T b) {
  return a.Fields() == b.Fields();
}

TEST(VerbsCodec, AnAddressOfAsManyDevicesAsThereMayBeFitsAndComesBack) {
  const TransportAddress address = SomeAddress(kRailsMax);
  const std::string bytes = Encode(address);
  EXPECT_LE(bytes.size(), 512u);
  TransportAddress decoded;
  ASSERT_TRUE(Decode(bytes, &decoded).ok());
  EXPECT_EQ(decoded.instance, address.instance);
  EXPECT_EQ(decoded.datagram_key, address.datagram_key);
  ASSERT_EQ(decoded.rails.size(), kRailsMax);
  for (size_t i = 0; i < kRailsMax; i++) EXPECT_TRUE(Same(decoded.rails[i], address.rails[i])) << i;
}

TEST(VerbsCodec, AKeyComesBack) {
  const RegionKey key{7, 0x7fff00000000, 1 << 20, {1, 0xffffffff}};
  RegionKey decoded;
  ASSERT_TRUE(Decode(Encode(key), &decoded).ok());
  EXPECT_TRUE(Same(decoded, key));
}

TEST(VerbsCodec, AMessageComesBackAndFitsADatagramOfAnyNetwork) {
  const Message message = SomeRequest();
  const std::string bytes = Encode(message);
  EXPECT_LE(bytes.size(), kMessageBytesMax);
  Message decoded;
  ASSERT_TRUE(Decode(bytes, &decoded).ok());
  EXPECT_TRUE(Same(decoded, message));
}

// Refuses every shorter length, one byte too many, and every single flipped bit.
template <typename T>
void ExpectRefusesDamage(const T& value) {
  const std::string bytes = Encode(value);
  T decoded;
  for (size_t length = 0; length < bytes.size(); length++)
    EXPECT_EQ(Decode(bytes.substr(0, length), &decoded).code(), Code::kInvalidArgument) << length;
  EXPECT_EQ(Decode(bytes + "x", &decoded).code(), Code::kInvalidArgument);
  for (size_t bit = 0; bit < 8 * bytes.size(); bit++) {
    std::string damaged = bytes;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    EXPECT_EQ(Decode(damaged, &decoded).code(), Code::kInvalidArgument) << "bit " << bit;
  }
}

TEST(VerbsCodec, DamageIsRefused) {
  ExpectRefusesDamage(SomeAddress(3));
  ExpectRefusesDamage(RegionKey{7, 0, 100, {1, 2, 3}});
  ExpectRefusesDamage(SomeRequest());
}

TEST(VerbsCodec, NoiseIsRefused) {
  std::mt19937 random(1);
  for (int i = 0; i < 2000; i++) {
    std::string bytes(random() % 600, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    Message message;
    TransportAddress address;
    RegionKey key;
    EXPECT_FALSE(Decode(bytes, &message).ok());
    EXPECT_FALSE(Decode(bytes, &address).ok());
    EXPECT_FALSE(Decode(bytes, &key).ok());
  }
}

TEST(VerbsCodec, SaysWhatIsWrong) {
  TransportAddress address;
  EXPECT_THAT(Decode("hello", &address).message(), HasSubstr("cut short"));
  EXPECT_THAT(Decode(Encode(SomeRequest()), &address).message(), HasSubstr("not a verbs address"));
  EXPECT_THAT(Decode(std::string(5000, 'x'), &address).message(), HasSubstr("5000 bytes, limit 512"));
}

TEST(VerbsCodec, ValuesThatCannotBeAreRefused) {
  const auto refused = [](auto value, auto change) {
    change(value);
    decltype(value) decoded;
    return Decode(Encode(value), &decoded).code() == Code::kInvalidArgument;
  };
  EXPECT_TRUE(refused(SomeAddress(1), [](auto& a) { a.instance = 0; }));
  EXPECT_TRUE(refused(SomeAddress(1), [](auto& a) { a.rails.clear(); }));
  EXPECT_TRUE(refused(SomeAddress(1), [](auto& a) { a.rails[0].queue_pair = 0; }));
  EXPECT_TRUE(refused(SomeAddress(1), [](auto& a) { a.rails[0].queue_pair = 1 << 24; }));
  EXPECT_TRUE(refused(SomeAddress(1), [](auto& a) { a.rails[0].port.mtu = 6; }));
  EXPECT_TRUE(refused(RegionKey{7, 0, 100, {1}}, [](auto& k) { k.keys.clear(); }));
  EXPECT_TRUE(refused(RegionKey{7, 0, 100, {1}}, [](auto& k) { k.length = 0; }));
  EXPECT_TRUE(refused(SomeRequest(), [](auto& m) { m.kind = static_cast<MessageKind>(0); }));
  EXPECT_TRUE(refused(SomeRequest(), [](auto& m) { m.kind = static_cast<MessageKind>(6); }));
  EXPECT_TRUE(refused(SomeRequest(), [](auto& m) { m.refusal = Refusal::kFull; }));
  EXPECT_TRUE(refused(SomeRequest(), [](auto& m) { m.kind = MessageKind::kRefuse; }));
  EXPECT_TRUE(refused(SomeRequest(), [](auto& m) { m.connection = 0; }));
  EXPECT_TRUE(refused(SomeRequest(), [](auto& m) { m.receiver_rail = kRailsMax; }));
  EXPECT_TRUE(refused(SomeRequest(), [](auto& m) { m.reads = 0; }));
  EXPECT_TRUE(refused(SomeRequest(), [](auto& m) { m.queue_pair = 0; }));
  EXPECT_TRUE(refused(SomeRequest(), [](auto& m) { m.sequence = 1 << 24; }));
  EXPECT_TRUE(refused(SomeRequest(), [](auto& m) { m.port.ethernet = 2; }));
}

}  // namespace
}  // namespace ropeteam::verbs
