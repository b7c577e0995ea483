// SPDX-License-Identifier: Apache-2.0
//
// All bytes that two tcp transports exchange. Through the control plane: an address and a region's key (blob.h). Over a
// connection, first the initiator's Hello and the target's Welcome, each Padded(), then requests of the initiator and, in
// their order, the target's replies:
//
//   put   Request, then `length` bytes     Reply
//   get   Request                          Reply, then Reply::length bytes
//
// Little-endian, without padding. kVersion and kHelloMagic change with every format.

#ifndef ROPETEAM_TRANSPORT_TCP_CODEC_H_
#define ROPETEAM_TRANSPORT_TCP_CODEC_H_

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"
#include "transport/ip_address.h"

namespace ropeteam::tcp {

inline constexpr size_t kLanesMax = 8;
// 128 bits: cannot be guessed.
using Secret = std::array<uint8_t, 16>;
using Mac = std::array<uint8_t, 16>;

struct EndpointAddress {
  struct Lane {
    IpAddress address;
    uint64_t link_mbps = 0;  // 0: unknown
  };
  uint64_t instance = 0;         // identifies one transport object: random, never 0
  Secret secret{};               // proves to this instance that the sender has its address, and the reverse
  uint64_t operation_bytes = 0;  // the longest request that it accepts
  std::vector<Lane> lanes;       // 1 to kLanesMax
};

struct RegionKey {
  uint64_t instance = 0;  // of the transport that registered it
  uint64_t key = 0;
  uint64_t length = 0;
};

std::string Encode(const EndpointAddress& address);
std::string Encode(const RegionKey& key);
Status Decode(std::string_view bytes, EndpointAddress* address);
Status Decode(std::string_view bytes, RegionKey* key);

inline constexpr uint64_t kHelloMagic = 0x3270637474505452;    // "RTPttcp2"
inline constexpr uint64_t kWelcomeMagic = 0x31656d6f636c6577;  // "welcome1"

struct Hello {
  uint64_t magic = kHelloMagic;
  uint64_t initiator = 0, target = 0;  // instances
  uint32_t channel = 0;                // the initiator's number of the peer
  uint32_t lane = 0;
  uint64_t counter = 0;  // higher than in any earlier hello of this initiator
  std::array<uint8_t, 16> nonce{};
  Mac mac{};
};
static_assert(sizeof(Hello) == 72);

struct Welcome {
  uint64_t magic = kWelcomeMagic;
  uint64_t target = 0;
  Mac mac{};
};
static_assert(sizeof(Welcome) == 32);

// Zeros fill a hello and a welcome up to more than a packet of any network has. So a path that drops long packets (a
// tunnel whose smaller MTU nobody is told of) does not carry a connection, and its end is not taken for reachable.
inline constexpr size_t kGreetingBytes = 9'216;
template <typename T>
std::array<char, kGreetingBytes> Padded(const T& greeting) {
  static_assert(sizeof(T) < kGreetingBytes);
  std::array<char, kGreetingBytes> bytes{};
  std::memcpy(bytes.data(), &greeting, sizeof greeting);
  return bytes;
}

enum class Op : uint32_t { kPut = 1, kGet = 2 };
struct Request {
  uint32_t op = 0;
  uint32_t flags = 0;  // 0
  uint64_t key = 0;
  uint64_t offset = 0;
  uint64_t length = 0;  // at least 1, at most the target's operation_bytes
  uint64_t id = 0;      // repeated in the reply
};
static_assert(sizeof(Request) == 40);

enum class ReplyCode : uint32_t { kOk = 0, kRefused = 1 };
struct Reply {
  uint64_t id = 0;
  uint32_t code = 0;
  uint32_t length = 0;  // of the bytes that follow: those of a get that was not refused
};
static_assert(sizeof(Reply) == 16);

// What a receiver checks before it uses the fields. A violation ends the connection.
bool Valid(const Request& request, uint64_t operation_bytes);
// `op`, `length` and `id` are those of the request that is to be answered next.
bool Valid(const Reply& reply, Op op, uint64_t length, uint64_t id);

// HMAC-SHA256 with the target's secret, cut to 128 bits; each direction has its own prefix. They cover all fields
// before the MAC, and that of the welcome also covers the hello.
Mac MacOf(const Secret& secret, const Hello& hello);
Mac MacOf(const Secret& secret, const Hello& hello, const Welcome& welcome);
// In constant time.
bool Same(const Mac& a, const Mac& b);

}  // namespace ropeteam::tcp

#endif  // ROPETEAM_TRANSPORT_TCP_CODEC_H_
