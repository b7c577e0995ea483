// SPDX-License-Identifier: Apache-2.0
//
// Encoded addresses and keys for the control plane, and listen addresses as users write them.

#include <gmock/gmock.h>

#ifdef ROPETEAM_HAVE_OFI

#include "transport/blob.h"
#include "transport/ip_address.h"
#include "transport/ofi/codec.h"

namespace ropeteam::ofi {
namespace {

using testing::HasSubstr;

EndpointAddress Address() {
  EndpointAddress address;
  address.instance = 0x1122334455667788;
  address.hello_address = 7;
  address.hello_key = UINT64_MAX;
  address.address_format = 3;
  address.provider = "tcp;ofi_rxm";
  address.name = std::string("\0\1\2name", 7);
  return address;
}

TEST(OfiCodecTest, AddressComesBack) {
  EndpointAddress decoded;
  ASSERT_TRUE(Decode(Encode(Address()), &decoded).ok());
  EXPECT_EQ(decoded.instance, Address().instance);
  EXPECT_EQ(decoded.hello_address, 7u);
  EXPECT_EQ(decoded.hello_key, UINT64_MAX);
  EXPECT_EQ(decoded.address_format, 3u);
  EXPECT_EQ(decoded.provider, "tcp;ofi_rxm");
  EXPECT_EQ(decoded.name, Address().name);
}

TEST(OfiCodecTest, EveryFlippedBitAndEveryCutIsNoticed) {
  const std::string address = Encode(Address()), key = Encode(RegionKey{1, 2, 3, 4});
  EndpointAddress decoded_address;
  RegionKey decoded_key;
  for (size_t i = 0; i < address.size(); i++) {
    EXPECT_FALSE(Decode(std::string_view(address).substr(0, i), &decoded_address).ok()) << i;
    for (int bit = 0; bit < 8; bit++) {
      std::string flipped = address;
      flipped[i] = static_cast<char>(flipped[i] ^ (1 << bit));
      EXPECT_FALSE(Decode(flipped, &decoded_address).ok()) << i << " bit " << bit;
    }
  }
  for (size_t i = 0; i < key.size(); i++) {
    EXPECT_FALSE(Decode(std::string_view(key).substr(0, i), &decoded_key).ok()) << i;
    std::string flipped = key;
    flipped[i] = static_cast<char>(flipped[i] ^ 0x10);
    EXPECT_FALSE(Decode(flipped, &decoded_key).ok()) << i;
  }
  EXPECT_EQ(decoded_address.instance, 0u) << "a failed call leaves its output untouched";
  EXPECT_EQ(decoded_key.instance, 0u);
}

// The number of keys is a byte, so it can exceed kRailsMax.
TEST(OfiCodecTest, AKeyThatSaysItHasMoreRailsThanThereMayBeIsRefused) {
  RailsKey key{1, 2, 3, std::vector<uint64_t>(kRailsMax, 7)};
  std::string bytes = Encode(key);
  RailsKey decoded;
  ASSERT_TRUE(Decode(bytes, &decoded).ok());
  EXPECT_EQ(decoded.keys, key.keys);
  bytes.resize(bytes.size() - sizeof(uint64_t));
  bytes[bytes.size() - kRailsMax * sizeof(uint64_t) - 1] = 100;
  const uint64_t checksum = BlobChecksum(bytes);
  bytes.append(reinterpret_cast<const char*>(&checksum), sizeof(checksum));
  EXPECT_EQ(Decode(bytes, &decoded).code(), Code::kInvalidArgument);
}

TEST(OfiAddressTest, ReadsNumericAddresses) {
  EXPECT_EQ(ToText(ParseIpAddress("127.0.0.1").value()), "127.0.0.1:0");
  EXPECT_EQ(ToText(ParseIpAddress("10.2.3.4:7000").value()), "10.2.3.4:7000");
  EXPECT_EQ(ToText(ParseIpAddress("::1").value()), "[::1]:0");
  EXPECT_EQ(ToText(ParseIpAddress("[fd00::2]:65535").value()), "[fd00::2]:65535");
  EXPECT_EQ(PortOf(WithPort(ParseIpAddress("[::1]:9").value(), 10)), 10);
}

TEST(OfiAddressTest, RefusesWhatIsNoAddressOfOneInterface) {
  for (const char* bad :
       {"", "localhost", "localhost:1", "0.0.0.0", "0.0.0.0:7000", "::", "[::]:1", "255.255.255.255",
        "224.0.0.1", "ff02::1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:-1",
        "127.0.0.1:1:2", "[::1", "[::1]x", "1.2.3", "1.2.3.4.5"}) {
    const auto parsed = ParseIpAddress(bad);
    ASSERT_FALSE(parsed.ok()) << bad;
    EXPECT_EQ(parsed.status().code(), Code::kInvalidArgument) << bad;
    EXPECT_THAT(parsed.status().message(), HasSubstr(bad));
  }
}

TEST(OfiAddressTest, KnowsTheInterfaceOfLoopback) {
  EXPECT_EQ(InterfaceOf(ParseIpAddress("127.0.0.1").value()), "lo");
  EXPECT_EQ(InterfaceOf(ParseIpAddress("127.9.8.7").value()), "lo");
  EXPECT_EQ(InterfaceOf(ParseIpAddress("203.0.113.9").value()), "");
  EXPECT_EQ(ToText(AddressOfInterface("lo").value()), "127.0.0.1:0");
  EXPECT_EQ(AddressOfInterface("nosuch0").status().code(), Code::kInvalidArgument);
  EXPECT_THAT(AddressOfInterface("nosuch0").status().message(), HasSubstr("lo"));
}

}  // namespace
}  // namespace ropeteam::ofi

#endif  // ROPETEAM_HAVE_OFI
