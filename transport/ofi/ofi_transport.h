// SPDX-License-Identifier: Apache-2.0
//
// The transport over libfabric: one-sided writes and reads of an FI_EP_RDM endpoint. It is written by the
// rules of Amazon's EFA (no ordering between operations, registration modes FI_MR_LOCAL, VIRT_ADDR, ALLOCATED
// and PROV_KEY asked for, delivery-complete semantics) and runs by default over the provider "tcp;ofi_rxm",
// so that the code that serves a cluster is the code that runs in every test.
//
// A write completes only when its bytes are in the target's memory: FI_DELIVERY_COMPLETE is asked for, and a
// provider without it is refused. The target must run Poll() or Wait() for its memory to be reachable: tcp
// has no card that would do it.
//
// Over tcp;ofi_rxm peers are fenced where /proc is mounted (TransportCapabilities::fences_peers): each has
// memory keys of its own, which Disconnect() revokes (ofi/grants.h), and its connections are ended. Over EFA
// and verbs;ofi_rxm they are not: a key for each peer would pin the whole arena once more. With an endpoint
// that all peers share, and with libfabric's native tcp, they are not either: libfabric may not make a
// connection again after it was reset.
//
// A peer may read and write the regions whose keys it was given (64 random bits each if the provider lets us choose),
// and break its own connection. On tcp a refused access breaks the connection that it came on: the initiator sees
// kLinkFailed for everything that was in flight to that peer, and goes on over a new one.
//
// After DeregisterRegion() further accesses are refused. On tcp a fragment that a peer is in the middle of
// sending is still received to its end: keep the memory mapped, and do not reuse it, for as long as a peer's
// fragment may take.
//
// Device memory (RegisterDmabuf()) goes with the provider "efa" and libfabric 1.20 or newer: see docs/efa.md.
//
// Each peer that is written to or read from costs 2 MiB, a dozen descriptors and an idle listening port on
// the same address, from the first operation on; a peer that only reaches into our memory costs a connection.

#ifndef ROPETEAM_TRANSPORT_OFI_OFI_TRANSPORT_H_
#define ROPETEAM_TRANSPORT_OFI_OFI_TRANSPORT_H_

#include <cstdint>
#include <memory>
#include <string>

#include "core/base/status.h"
#include "core/base/view.h"
#include "transport/transport.h"

namespace ropeteam {

// 1 MiB: on EFA 64 KiB operations reach a quarter of the bandwidth that 1 MiB ones do, and over loopback TCP
// larger ones gain nothing more.
inline constexpr uint64_t kOfiOperationBytesDefault = 1 << 20;
// Operations in flight to one peer. 16 × 1 MiB covers the bandwidth-delay product of 100 Gb/s at 1 ms.
inline constexpr uint32_t kOfiDepthDefault = 16;
inline constexpr uint32_t kOfiDepthMax = 1024;
// Peers connected at a time; the size of the table that hello reads land in (2.3 MiB).
inline constexpr uint32_t kOfiPeersMax = 16 * 1024;
static_assert(kOfiPeersMax >= kNodesMax);

struct OfiConfig {
  std::string provider = "tcp;ofi_rxm";  // as fi_getinfo names it; "efa", "verbs;ofi_rxm", …
  // Numeric IPv4 or IPv6 address of this machine to listen on, with an optional port: "127.0.0.1",
  // "10.0.0.3:7000", "[fd00::2]:7000". Port 0 or none: the system chooses. Names are never resolved and
  // 0.0.0.0 is refused. Ignored by providers that have no IP addresses (efa, shm). Empty: the first IPv4
  // address of `device`. Several, comma-separated: a rail for each, see `device`.
  std::string listen_address = "127.0.0.1";
  // Network interface ("eth0") or, where there are no IP addresses, libfabric's domain ("rdmap0s6-rdm").
  // Empty: the one that has listen_address; where there are no IP addresses every device, those of the NUMA
  // node of the calling thread first, at most eight. Several, comma-separated: a rail for each, and
  // operations are spread over them by what each has to do; when one fails the others carry on
  // (ofi/rails.h). Both ends must have rails, or neither.
  std::string device = "";
  uint64_t operation_bytes = kOfiOperationBytesDefault;
  uint32_t depth = kOfiDepthDefault;  // operations in flight to one peer
  // A peer with operations outstanding that is silent for this long, and whose kernel does not answer a bare
  // TCP connection meanwhile, is gone. For providers that listen by TCP and have an endpoint for each peer;
  // the others notice by themselves.
  uint32_t silence_ms = kSilenceMsDefault;
  // All peers over one endpoint, as EFA wants it. Without it, a provider that keeps one connection a peer
  // (tcp, verbs with ofi_rxm) gets one endpoint a peer: libfabric 1.17 can cancel what is outstanding to a
  // peer that hangs only by closing an endpoint, and one peer's broken connection then touches nobody else's
  // operations.
  bool shared_endpoint = false;
};

// The transport listens when this returns. Call it before the process has other threads, or call
// SetOfiEnvironment() then: libfabric takes its sizes from the environment. Errors: kUnsupported (no
// libfabric in this build, or no such provider: the message lists those that are there), kInvalidArgument
// (address or device), kAlreadyExists (port in use), kNoSpace (locked memory), kIo.
Result<std::unique_ptr<Transport>> CreateOfiTransport(const OfiConfig& config);

// Gives the FI_* variables that are unset the values that Ropeteam wants; both ends of a connection must
// agree on FI_OFI_RXM_EAGER_LIMIT. Without them each endpoint of ofi_rxm takes 70 MiB of receive buffers that
// one-sided operations never use, and a connection takes 10 ms instead of 2. Not thread-safe (setenv);
// libfabric reads the variables once, at the process's first fi_getinfo.
void SetOfiEnvironment();

}  // namespace ropeteam

#endif  // ROPETEAM_TRANSPORT_OFI_OFI_TRANSPORT_H_
