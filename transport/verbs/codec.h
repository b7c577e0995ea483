// SPDX-License-Identifier: Apache-2.0
//
// The bytes that two verbs transports exchange. A transport's address and a region's key go through the
// control plane; the messages that make and close connections are datagrams. Each kind begins with its magic
// number and the version and ends with a checksum over all bytes before it, so foreign bytes are refused.
// Little-endian. The formats are private to this folder and change with kVersion. docs/verbs.md describes the
// protocol.

#ifndef ROPETEAM_TRANSPORT_VERBS_CODEC_H_
#define ROPETEAM_TRANSPORT_VERBS_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "core/base/status.h"

namespace ropeteam::verbs {

// Devices of one transport. Sixteen records fit into an address, whose size Transport::LocalAddress() limits.
// No machine known to us has more devices.
inline constexpr size_t kRailsMax = 16;

// The address of a port on its network.
struct PortAddress {
  uint64_t gid_high = 0, gid_low = 0;  // the sixteen bytes, copied in two halves
  uint16_t lid = 0;                    // InfiniBand; 0 on Ethernet
  uint8_t ethernet = 0;                // 1: RoCE
  uint8_t mtu = 0;                     // ibv_mtu
  auto Fields() { return std::tie(gid_high, gid_low, lid, ethernet, mtu); }
  friend bool operator==(const PortAddress&, const PortAddress&) = default;
};

// The address of a rail for datagrams.
struct RailAddress {
  PortAddress port;
  uint32_t queue_pair = 0;  // 24 bits, not 0
  uint32_t link_mbps = 0;
  auto Fields() { return std::tie(port, queue_pair, link_mbps); }
};

struct TransportAddress {
  uint64_t instance = 0;      // one run of one transport: random, never 0
  uint32_t datagram_key = 0;  // the Q_Key of all its datagram queue pairs: random, with the highest bit 0
  std::vector<RailAddress> rails;
  auto Fields() { return std::tie(instance, datagram_key, rails); }
};

struct RegionKey {
  uint64_t instance = 0;  // of the transport that registered it
  uint64_t base = 0;      // remote address of offset 0
  uint64_t length = 0;
  std::vector<uint32_t> keys;  // one per rail; empty for a region of length 0
  auto Fields() { return std::tie(instance, base, length, keys); }
};

enum class MessageKind : uint8_t {
  kRequest = 1,  // asks for a queue pair for this connection
  kAccept = 2,   // the queue pair exists
  kRefuse = 3,   // it was not made, or has been destroyed
  kClose = 4,    // asks to destroy it
  kClosed = 5,   // the connection no longer reaches the sender's memory
};

enum class Refusal : uint8_t {
  kNone = 0,
  kOtherInstance = 1,  // the requested instance is not here
  kFenced = 2,         // this node has disconnected the requesting instance
  kLeaving = 3,        // the transport is being destroyed
  kFull = 4,           // kInboundMax
  kNoRail = 5,         // the rail asked for is not here, or is down
  kDevice = 6,         // the device failed to make or connect the queue pair
};
const char* RefusalText(Refusal refusal);

// One datagram, in either direction.
struct Message {
  MessageKind kind = MessageKind::kRequest;
  Refusal refusal = Refusal::kNone;
  uint64_t sender = 0, receiver = 0;  // instances
  uint64_t connection = 0;            // chosen by the initiator: random, never 0
  uint64_t superseded = 0;  // kRequest: a connection of the initiator's to be destroyed first; 0: none
  uint8_t sender_rail = 0, receiver_rail = 0;
  uint8_t reads = 0;        // outstanding reads; kRequest: the initiator's wish; kAccept: its limit
  uint32_t queue_pair = 0;  // kRequest, kAccept: the sender's reliable queue pair, 24 bits …
  uint32_t sequence = 0;    // … and its first packet's number, 24 bits
  uint32_t datagram_queue_pair = 0, datagram_key = 0;  // for the answer, at `port`
  PortAddress port;
  auto Fields() {
    return std::tie(kind, refusal, sender, receiver, connection, superseded, sender_rail, receiver_rail,
                    reads, queue_pair, sequence, datagram_queue_pair, datagram_key, port);
  }
};
// Below the smallest MTU, 256.
inline constexpr size_t kMessageBytesMax = 192;

std::string Encode(const TransportAddress& address);
std::string Encode(const RegionKey& key);
std::string Encode(const Message& message);
// kInvalidArgument: the bytes do not come from Encode(); the outputs are unchanged.
Status Decode(std::string_view bytes, TransportAddress* address);
Status Decode(std::string_view bytes, RegionKey* key);
Status Decode(std::string_view bytes, Message* message);

}  // namespace ropeteam::verbs

#endif  // ROPETEAM_TRANSPORT_VERBS_CODEC_H_
