// SPDX-License-Identifier: Apache-2.0
//
// The transport over libfabric, for Amazon's EFA: one-sided writes and reads of an FI_EP_RDM endpoint, which all
// peers share. It is written by EFA's rules (no ordering between operations, registration modes FI_MR_LOCAL,
// VIRT_ADDR, ALLOCATED and PROV_KEY asked for, delivery-complete semantics).
//
// The tests run it over the providers "tcp;ofi_rxm", "verbs;ofi_rxm" and shm, by the same code. These are not for a
// network: ofi_rxm trusts its peers, and one packet of a stranger can end the process. transport/fabrics.h refuses
// them unless --insecure is given.
//
// A write completes only when its bytes are in the target's memory: FI_DELIVERY_COMPLETE is asked for, and a
// provider without it is refused. The target must run Poll() or Wait() for its memory to be reachable: tcp
// has no card that would do it.
//
// Peers are not fenced (TransportCapabilities::fences_peers): all have the same key to a region, because a key for
// each peer would pin the whole arena once more. Disconnect() of a peer that hangs completes when the provider gives
// the buffers back.
//
// A peer may read and write the regions whose keys it was given (64 random bits each if the provider lets us choose),
// and break its own connection. On tcp a refused access breaks the connection that it came on: the initiator sees
// kLinkFailed for everything that was in flight to that peer, and goes on over a new one. verbs;ofi_rxm makes no new
// one: there the peer is gone.
//
// After DeregisterRegion() further accesses are refused. On tcp a fragment that a peer is in the middle of
// sending is still received to its end: keep the memory mapped, and do not reuse it, for as long as a peer's
// fragment may take.
//
// Device memory (RegisterDmabuf()) goes with the provider "efa" and libfabric 1.20 or newer: see docs/efa.md.

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
// Peers connected at a time; the size of the table that hello reads land in (256 KiB).
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
};

// The transport listens when this returns. Call it before the process has other threads, or call
// SetOfiEnvironment() then: libfabric takes its sizes from the environment. Errors: kUnsupported (no
// libfabric in this build, or no such provider: the message lists those that are there), kInvalidArgument
// (address or device), kAlreadyExists (port in use), kNoSpace (locked memory), kIo.
Result<std::unique_ptr<Transport>> CreateOfiTransport(const OfiConfig& config);

// Gives the FI_* variables that are unset the values that Ropeteam wants. Not thread-safe (setenv); libfabric reads
// the variables once, at the process's first fi_getinfo.
void SetOfiEnvironment();

}  // namespace ropeteam

#endif  // ROPETEAM_TRANSPORT_OFI_OFI_TRANSPORT_H_
