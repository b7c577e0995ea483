// SPDX-License-Identifier: Apache-2.0
//
// The transport for networks without RDMA: puts and gets over TCP connections of the kernel, between processes that
// prove to each other who they are before any other byte is read.
//
// An initiator opens one connection for each lane to a peer. It sends its puts and gets over it, and the peer carries
// them out between its own memory and the socket. The peer must run Poll() or Wait() for its memory to be reachable.
//
// LocalAddress() contains this instance's secret. Whoever has it, and an instance number that SetPeers() admits, can
// connect; so it must travel only through the authenticated control plane. A process without the secret has no byte
// read except a hello of fixed size (tcp/admission.h). Bytes are not encrypted: see docs/security.md.
//
// A refused range fails with kInvalidArgument, and the connection goes on. After DeregisterRegion(), or after
// PeerAccess::Set() has revoked the chunk (GuardRegion()), no byte reaches or leaves it: a put that had begun is refused,
// and a get of which bytes were sent ends its connection.
// Disconnect() closes the departed peer's connections at once (fences_peers).
//
// Each peer costs a descriptor for each lane and direction, and no buffer memory of this process.

#ifndef ROPETEAM_TRANSPORT_TCP_TCP_TRANSPORT_H_
#define ROPETEAM_TRANSPORT_TCP_TCP_TRANSPORT_H_

#include <cstdint>
#include <memory>
#include <string>

#include "core/base/status.h"
#include "transport/transport.h"

namespace ropeteam {

// 1 MiB: larger pieces gain nothing over loopback.
inline constexpr uint64_t kTcpOperationBytesDefault = 1 << 20;
inline constexpr uint64_t kTcpOperationBytesMax = 1 << 30;
// Pieces in flight on one lane. 16 × 1 MiB covers the bandwidth-delay product of 100 Gb/s at 1 ms.
inline constexpr uint32_t kTcpDepthDefault = 16;
inline constexpr uint32_t kTcpDepthMax = 1024;

struct TcpConfig {
  // Numeric IPv4 or IPv6 address of this machine to listen on, with an optional port: "10.0.0.3:7000", "[fd00::2]:7000".
  // Port 0 or none: the system chooses. Names are never resolved and 0.0.0.0 is refused. Empty: the first IPv4 address
  // of each `device`. Several, comma-separated, at most eight: a lane for each.
  std::string listen_address = "127.0.0.1";
  // Network interfaces ("eth0"), comma-separated. With listen addresses: the interface of each, as a check.
  std::string device = "";
  uint64_t operation_bytes = kTcpOperationBytesDefault;
  uint32_t depth = kTcpDepthDefault;
  // A lane with pieces in flight that is silent for this long is broken, unless the peer's kernel answers a bare TCP
  // connection meanwhile and acknowledges what was sent over the lane.
  uint32_t silence_ms = kSilenceMsDefault;
};

// The transport listens when this returns. Errors: kInvalidArgument (address, device, operation_bytes, depth),
// kAlreadyExists (port in use), kIo.
Result<std::unique_ptr<Transport>> CreateTcpTransport(const TcpConfig& config);

}  // namespace ropeteam

#endif  // ROPETEAM_TRANSPORT_TCP_TCP_TRANSPORT_H_
