// SPDX-License-Identifier: Apache-2.0
//
// A Transport moves bytes between registered memory of two nodes, one-sided: the target's program takes no
// part and is not told. It does not retry, order or checksum: core/ does that, once for all transports. It knows
// nothing of checkpoints.
//
// Threads: calls marked [loop] may be made only from the one thread that runs Poll() and Wait(); every other
// call is safe from any thread.
//
// Ordering: none, between any two operations (EFA's SRD delivers out of order). A target learns that bytes
// have arrived only by a message sent after the initiator's completion.
//
// Buffers: the local range of a Put() or Get() belongs to the transport from the call until its completion
// is returned by Poll(), also when the peer has died. Every accepted operation completes exactly once, and only
// when the device no longer uses the memory. When a peer is gone, all its outstanding operations complete
// with kPeerGone within 100 ms after the fabric has noticed. Disconnect() also completes them with kPeerGone,
// before it completes itself. The caller may write to the range of a Put() meanwhile (core repairs a bad chunk in
// place): then the bytes that arrive are unspecified. It must not free or unmap the range.
//
// The target side needs progress on some fabrics: run Poll()/Wait() even if no operation of this node is
// outstanding.

#ifndef ROPETEAM_TRANSPORT_TRANSPORT_H_
#define ROPETEAM_TRANSPORT_TRANSPORT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/status.h"

namespace ropeteam {

// Accepted and not yet completed operations of one transport. 64 Ki × 4 MiB chunks is 256 GiB in flight, more
// than any node's share of one step; beyond it Put() and Get() answer kNoSpace.
inline constexpr size_t kOperationsOutstandingMax = 64 * 1024;

// Regions one transport may hold registered: the arena, staging, and room for GPU memory. Registration is for
// start-up, never for a save.
inline constexpr size_t kRegionsMax = 64;

// How long a peer that has operations outstanding may be silent before a fabric reports it gone. A network that
// recovers by itself (a retrained link, a re-converging switch, a subnet manager's sweep) is mostly back within a
// second, and then no operation needs to fail. Membership reports a node's death within a second, so recovery does
// not wait for this timeout. A longer one only delays the choice of another holder. Used by verbs and by ofi
// over tcp.
inline constexpr uint32_t kSilenceMsDefault = 2'000;

using PeerId = uint32_t;          // a connected peer, numbered by this transport; never reused
using RegionId = uint32_t;        // memory of this process that this transport has registered
using RemoteRegionId = uint32_t;  // memory of a peer, imported from the key that the peer exported

struct TransportCapabilities {
  std::string name;      // "inproc", "ofi", "verbs", "ucx"
  std::string provider;  // "tcp;ofi_rxm", "efa", …; libfabric's; empty with the other transports
  bool rdma = false;     // the network card moves the bytes
  // True: after Disconnect() has completed, no byte of that peer's operations reaches this node's memory, whether the
  // peer was told or not, and however often it connects again by itself, until Connect() names it again. False: a
  // range that a peer may still be writing must not be reused for a while (core's quarantine).
  bool fences_peers = false;
  uint64_t operation_bytes = 0;  // larger operations are split into this many bytes by the transport
  std::string devices;           // those in use, "mlx5_0,mlx5_1", "lo"; empty where there are none
  std::string address;           // of this end, for people: an IP address with port, or a GID
  uint64_t link_mbps = 0;        // of all devices together, megabits per second; 0: unknown
  bool dmabuf = false;           // RegisterDmabuf() works on at least one device
  bool admits_peers = false;     // SetPeers() excludes all others
};

enum class OperationKind : uint8_t { kPut, kGet, kDisconnect };

struct Completion {
  OperationKind kind = OperationKind::kPut;
  PeerId peer = 0;
  uint64_t context = 0;   // what the caller gave to Put() or Get(); 0 for kDisconnect
  Code code = Code::kOk;  // kOk, kPeerGone, kLinkFailed, kInvalidArgument (range refused by the peer), kIo
};

class Transport {
 public:
  virtual ~Transport() = default;  // completes nothing: Disconnect() every peer and drain Poll() first

  virtual const TransportCapabilities& capabilities() const = 0;

  // Opaque bytes that a peer passes to Connect(); constant. At most kAddressBytesMax / 2.
  virtual std::string LocalAddress() const = 0;
  // One line for people: the device, address and link in use ("tcp;ofi_rxm on lo 127.0.0.2:34567").
  virtual std::string Describe() const = 0;

  // Registers [base, base + length) for local use and for remote put and get. The memory must be mapped and
  // stay so until DeregisterRegion(). A length of 0 is allowed and can serve only operations of length 0.
  // Errors: kNoSpace (kRegionsMax, or the locked-memory limit: the message says which and what to set), kIo.
  virtual Result<RegionId> RegisterRegion(void* base, uint64_t length) = 0;
  // Registers `length` bytes at `offset` of a dmabuf (memory of a GPU, exported by its driver) for local use,
  // as the source of puts and the target of gets; it is never exported to peers. The file descriptor stays
  // the caller's and may be closed afterwards. Errors: kUnsupported (no device in use can: the caller copies
  // through host memory instead), kNoSpace, kIo (the device refused this dmabuf: errno in the message).
  virtual Result<RegionId> RegisterDmabuf(int /*fd*/, uint64_t /*offset*/, uint64_t /*length*/) {
    return Error(Code::kUnsupported, "transport %s cannot register a dmabuf", capabilities().name.c_str());
  }
  // No operation on the region may be outstanding. If a peer still names it, the fabric refuses its operations,
  // provided that it checks keys. UCX without RDMA does not (docs/ucx.md): there bytes arrive as long as the memory
  // stays mapped at its address.
  virtual Status DeregisterRegion(RegionId region) = 0;
  // Opaque bytes from which a peer can import the region. At most kAddressBytesMax / 2.
  virtual std::string ExportRegion(RegionId region) const = 0;

  // [loop] From now on, only the transports that have these LocalAddress()es may reach this node's memory; each call replaces
  // the one before. A peer that is no longer named loses its access; Disconnect() says what happens to its last bytes.
  // Before the first call everyone who has a region's key may reach it. If admits_peers is false, this does nothing.
  virtual void SetPeers(const std::vector<std::string>& /*addresses*/) {}
  // [loop] Starts to talk to the peer whose LocalAddress() this is; returns without waiting for it. A peer
  // that cannot be reached shows as kPeerGone on the first operation. Connecting again after Disconnect()
  // gives another PeerId.
  virtual Result<PeerId> Connect(const std::string& address) = 0;
  // [loop] Closes the connection: the peer's outstanding operations complete with kPeerGone, then one completion of kind
  // kDisconnect comes, after which the PeerId and its remote regions are invalid. Safe on a peer that is already
  // gone. If fences_peers is true it also fences the peer, even if nothing was ever exchanged with it.
  // Operations of other peers do not fail.
  virtual void Disconnect(PeerId peer) = 0;
  // [loop] Valid until the peer is disconnected. kInvalidArgument when `key` is not from ExportRegion().
  virtual Result<RemoteRegionId> ImportRegion(PeerId peer, const std::string& key) = 0;

  // [loop] Writes [local_offset, +length) of the local region to the remote region. Completion with kOk means
  // that the bytes are in the target's memory, where a message sent from now on will find them. Length 0 is
  // allowed and completes like any other. Any length: the transport splits and queues. Errors (no completion
  // follows): kInvalidArgument (unknown peer or region, range outside a region), kNoSpace.
  virtual Status Put(PeerId peer, RegionId local, uint64_t local_offset, RemoteRegionId remote,
                     uint64_t remote_offset, uint64_t length, uint64_t context) = 0;
  // [loop] Reads the remote range into the local one. Completion with kOk means that the bytes are here.
  // After any other code the local range holds unspecified bytes.
  virtual Status Get(PeerId peer, RegionId local, uint64_t local_offset, RemoteRegionId remote,
                     uint64_t remote_offset, uint64_t length, uint64_t context) = 0;

  // [loop] Makes progress and moves up to `capacity` completions to `out`; returns how many. Never blocks.
  virtual size_t Poll(Completion* out, size_t capacity) = 0;
  // [loop] Sleeps until progress may be possible, Wake() is called, or `timeout_us` has passed (UINT64_MAX:
  // no limit). Spins for a short while first when work is in flight; never when idle. May return early.
  virtual void Wait(uint64_t timeout_us) = 0;
  // Makes the current or the next Wait() return at once.
  virtual void Wake() = 0;

  // Counters since creation, for tests and metrics; any thread.
  struct Counters {
    uint64_t registrations = 0;
    uint64_t put_bytes = 0, get_bytes = 0;      // of completed operations
    uint64_t puts = 0, gets = 0, failures = 0;  // completed operations, and those of them not kOk
  };
  virtual Counters counters() const = 0;
};

}  // namespace ropeteam

#endif  // ROPETEAM_TRANSPORT_TRANSPORT_H_
