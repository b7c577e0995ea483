// SPDX-License-Identifier: Apache-2.0
//
// A Transport moves bytes between registered memory of two nodes. It is one-sided: the target's program takes no part
// and gets no notice. A Transport does not retry, order or checksum: core/ does that, once for all transports. It does
// not deal with checkpoints.
//
// Threads: only the one thread that runs Poll() and Wait() may make calls marked [loop]. All other calls are safe from
// any thread.
//
// Ordering: none between any two operations (EFA's SRD delivers out of order). The only notice of arrived bytes is a
// message to the target, sent after the initiator's completion.
//
// Buffers: the local range of a Put() or Get() belongs to the transport from the call until Poll() returns its
// completion, even if the peer has died. Every accepted operation completes exactly once, and only when the device no
// longer uses the memory. When a peer is gone, all its outstanding operations complete with kPeerGone within 100 ms
// after the fabric has noticed. Disconnect() also completes them with kPeerGone, before it completes itself. The caller
// may write to the range of a Put() meanwhile (core repairs a bad chunk in place): then the bytes that arrive are
// unspecified. The caller must not free or unmap the range.
//
// On some fabrics the target side needs progress: run Poll() and Wait() even if this node has no outstanding operation.

#ifndef ROPETEAM_TRANSPORT_TRANSPORT_H_
#define ROPETEAM_TRANSPORT_TRANSPORT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/peer_access.h"
#include "core/base/status.h"

namespace ropeteam {

// Accepted operations of one transport that have not completed. 64 Ki × 4 MiB chunks are 256 GiB in flight, more than
// any node's share of one step. Beyond this limit Put() and Get() return kNoSpace.
inline constexpr size_t kOperationsOutstandingMax = 64 * 1024;

// Regions that one transport may have registered: the arena, staging, and some for GPU memory. Registration is for
// start-up, never for a save.
inline constexpr size_t kRegionsMax = 64;

// How long a peer with outstanding operations may be silent before a fabric reports it gone. A network that recovers on
// its own (a retrained link, a re-converging switch, a subnet manager's sweep) is usually back within a second, and
// then no operation needs to fail. Membership reports a node's death within a second, so recovery does not wait for
// this timeout. A longer one would only delay the choice of another holder. Used by verbs and tcp.
inline constexpr uint32_t kSilenceMsDefault = 2'000;

using PeerId = uint32_t;          // a connected peer, numbered by this transport; never reused
using RegionId = uint32_t;        // memory of this process that this transport has registered
using RemoteRegionId = uint32_t;  // memory of a peer, imported from the key that the peer has exported

struct TransportCapabilities {
  std::string name;      // "inproc", "tcp", "ofi", "verbs", "ucx"
  std::string provider;  // of libfabric: "tcp;ofi_rxm", "efa", …; empty for the other transports
  bool rdma = false;     // the network card moves the bytes
  // True: after Disconnect() has completed, no byte of that peer's operations reaches this node's memory, until
  // Connect() names the peer again. This holds even if the peer got no notice or connects again on its own. False: a
  // range that a peer may still be writing must not be reused for a while (core's quarantine).
  bool fences_peers = false;
  uint64_t operation_bytes = 0;  // the transport splits larger operations into pieces of this size
  std::string devices;           // the devices in use: "mlx5_0,mlx5_1", "lo"; empty if there are none
  std::string address;           // of this end, for messages: an IP address with port, or a GID
  uint64_t link_mbps = 0;        // of all devices together, megabits per second; 0: unknown
  bool dmabuf = false;           // RegisterDmabuf() works on at least one device
  bool admits_peers = false;     // SetPeers() excludes all others
  bool guards_chunks = false;    // GuardRegion() has an effect
};

enum class OperationKind : uint8_t { kPut, kGet, kDisconnect };

struct Completion {
  OperationKind kind = OperationKind::kPut;
  PeerId peer = 0;
  uint64_t context = 0;   // the caller's value from Put() or Get(); 0 for kDisconnect
  Code code = Code::kOk;  // kOk, kPeerGone, kLinkFailed, kInvalidArgument (the peer refused the range), kIo
};

class Transport {
 public:
  virtual ~Transport() = default;  // completes nothing: first Disconnect() every peer and drain Poll()

  virtual const TransportCapabilities& capabilities() const = 0;

  // Opaque bytes for a peer's Connect(); constant. At most kAddressBytesMax / 2.
  virtual std::string LocalAddress() const = 0;
  // One line for messages: the device, address and link in use ("tcp on lo 127.0.0.2:34567").
  virtual std::string Describe() const = 0;

  // Registers [base, base + length) for local use and for remote put and get. The memory must be mapped until
  // DeregisterRegion(). A length of 0 is allowed, for operations of length 0 only. Errors: kNoSpace (kRegionsMax, or
  // the locked-memory limit: the message has the limit and what to set), kIo.
  virtual Result<RegionId> RegisterRegion(void* base, uint64_t length) = 0;
  // Registers `length` bytes at `offset` of a dmabuf (memory of a GPU, exported by its driver) for local use, as the
  // source of puts and the target of gets. It is never exported to peers. The caller keeps the file descriptor and may
  // close it afterwards. Errors: kUnsupported (no device in use supports it: copy through host memory instead),
  // kNoSpace, kIo (the device refused this dmabuf: errno in the message).
  virtual Result<RegionId> RegisterDmabuf(int /*fd*/, uint64_t /*offset*/, uint64_t /*length*/) {
    return Error(Code::kUnsupported, "transport %s cannot register a dmabuf", capabilities().name.c_str());
  }
  // No operation on the region may be outstanding. If a peer still uses its key, the fabric refuses the operations,
  // provided that it checks keys. UCX without RDMA does not (docs/ucx.md): there, bytes arrive as long as the memory
  // stays mapped at its address.
  virtual Status DeregisterRegion(RegionId region) = 0;
  // From now on, a request of a peer for this region is carried out only as far as `access` allows it when its bytes
  // are moved; otherwise it is refused. Call it once, before the region is exported. `access` must outlive the region.
  // If guards_chunks is false, this does nothing: the device, or its library, serves requests without this program.
  virtual void GuardRegion(RegionId /*region*/, PeerAccess* /*access*/) {}
  // Opaque bytes from which a peer can import the region. At most kAddressBytesMax / 2.
  virtual std::string ExportRegion(RegionId region) const = 0;

  // [loop] From now on, only the transports with these LocalAddress()es may reach this node's memory. Each call
  // replaces the previous list. A peer that is no longer in the list loses its access; for its last bytes see
  // Disconnect(). Before the first call, any peer that has a region's key may reach the region. If admits_peers is
  // false, this does nothing.
  virtual void SetPeers(const std::vector<std::string>& /*addresses*/) {}
  // [loop] Starts a connection to the peer with this LocalAddress(); returns without waiting for it. If the peer is
  // unreachable, the first operation completes with kPeerGone. A new connection after Disconnect() has another PeerId.
  virtual Result<PeerId> Connect(const std::string& address) = 0;
  // [loop] Closes the connection. The peer's outstanding operations complete with kPeerGone, then one completion of
  // kind kDisconnect follows. After that the PeerId and its remote regions are invalid. It is safe for a peer that is
  // already gone. If fences_peers is true, it also fences the peer, even if nothing was ever exchanged with it.
  // Operations of other peers do not fail.
  virtual void Disconnect(PeerId peer) = 0;
  // [loop] Valid until the peer is disconnected. kInvalidArgument: `key` is not from ExportRegion().
  virtual Result<RemoteRegionId> ImportRegion(PeerId peer, const std::string& key) = 0;

  // [loop] Writes [local_offset, +length) of the local region to the remote region. Completion with kOk means that the
  // bytes are in the target's memory: a message sent from now on finds them there. Length 0 is allowed and completes
  // like any other. Any length is allowed: the transport splits and queues. Errors (no completion follows):
  // kInvalidArgument (unknown peer or region, range outside a region), kNoSpace.
  virtual Status Put(PeerId peer, RegionId local, uint64_t local_offset, RemoteRegionId remote,
                     uint64_t remote_offset, uint64_t length, uint64_t context) = 0;
  // [loop] Reads the remote range into the local one. Completion with kOk means that the bytes are here. After any
  // other code, the bytes in the local range are unspecified.
  virtual Status Get(PeerId peer, RegionId local, uint64_t local_offset, RemoteRegionId remote,
                     uint64_t remote_offset, uint64_t length, uint64_t context) = 0;

  // [loop] Makes progress and moves up to `capacity` completions to `out`; returns their number. Never blocks.
  virtual size_t Poll(Completion* out, size_t capacity) = 0;
  // [loop] Sleeps until progress may be possible, Wake() is called, or `timeout_us` has passed (UINT64_MAX: no limit).
  // Spins for a short time first if work is in flight, but never when idle. May return early. Operations that were
  // submitted since the last Poll() are started first.
  virtual void Wait(uint64_t timeout_us) = 0;
  // Makes the current or the next Wait() return at once.
  virtual void Wake() = 0;

  // Counters since creation, for tests and metrics; any thread.
  struct Counters {
    uint64_t registrations = 0;
    uint64_t put_bytes = 0, get_bytes = 0;      // of completed operations
    uint64_t puts = 0, gets = 0, failures = 0;  // completed operations, and the failed ones among them
  };
  virtual Counters counters() const = 0;
};

}  // namespace ropeteam

#endif  // ROPETEAM_TRANSPORT_TRANSPORT_H_
