// SPDX-License-Identifier: Apache-2.0
//
// The thread that owns the Transport. It registers the arena's chunks once, connects to members of the view when needed, and
// carries out the Engine's transfers. It also makes the progress that peers need to reach this node's memory.
//
// Every submitted transfer is answered exactly once, by `on_done`, when the fabric no longer uses the local range. This
// also holds if the peer is unknown or has left, or the plane is stopped. Failed transfers are not retried here. A put
// from device memory that cannot begin is answered with kNotFound.
//
// A member whose connection has failed is reconnected as long as it is in the view:
//
//   link         means                                               leaves when
//   kIdle        nothing was transferred yet                         a transfer -> kUp
//   kUp          transfers pass                                      one ends with kPeerGone -> kLost,
//                                                                      on_link(down)
//   kLost        the fabric has reported the peer gone; the pause    the pause is over -> kClosing
//                before the next try
//   kClosing     the old connection is being closed                  it is closed, connecting succeeds -> kProbing;
//                                                                      connecting fails -> kLost
//   kProbing     a few bytes of the peer's arena are being read,     the bytes arrive, or the peer's guard refuses
//                over the new connection                               them -> kUp, on_link(up); the read fails ->
//                                                                      kLost
//
// In kLost, kClosing and kProbing every transfer with the peer is answered at once with kPeerGone. The old connection
// is closed only when the next one is made. A fabric that fences refuses the peer in between, and two nodes that have
// lost each other would otherwise refuse each other alternately.
//
// On a fabric that does not fence, puts need a lease (SetLease()): the others may have declared this node dead and
// reused the memory that it writes to. The plane checks the clock before each put and before each round of progress.
// When the lease has expired, it closes the connections with outstanding puts, so that puts in the transport's queue
// are not sent either. Such a link counts as lost and is reconnected.

#ifndef ROPETEAM_NODE_DATA_PLANE_H_
#define ROPETEAM_NODE_DATA_PLANE_H_

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/base/view.h"
#include "core/engine/engine.h"
#include "node/device_buffers.h"
#include "transport/transport.h"

namespace ropeteam {

// The content of Member.data_address: two strings, each preceded by its length as 16 bits little-endian.
std::string PackDataAddress(const std::string& endpoint, const std::string& region_key);
bool UnpackDataAddress(std::string_view packed, std::string* endpoint, std::string* region_key);

struct TransferDone {
  uint64_t tag = 0;
  Code code = Code::kOk;
};

// The first and the longest pause before a lost member is reconnected; it doubles in between. A retrained link is back
// within about 100 ms. The longest pause and one attempt (1.5 s over TCP without an answer) are well below the 5 s
// within which saves must commit again. An attempt per second costs a node nothing.
inline constexpr TimeUs kReconnectPauseUs = 100'000;
inline constexpr TimeUs kReconnectPauseMaxUs = 1'000'000;
// Reserved for the plane: no transfer has this tag.
inline constexpr uint64_t kProbeTag = UINT64_MAX;

class DataPlane {
 public:
  // Both are called on the plane's thread, and must not block.
  struct Callbacks {
    std::function<void(std::vector<TransferDone> done)> on_done;
    // Transfers of this departed instance cannot write any more bytes here. Only on transports that can tell.
    std::function<void(NodeId peer)> on_fenced;
    // The connection with this member was lost or was re-established. A member counts as reachable until the first
    // call. `up` alternates.
    std::function<void(NodeId peer, bool up, std::string reason)> on_link;
  };

  // Registers `arena` from `chunks_begin` on: peers cannot reach the tables before it. The memory must stay mapped until
  // the plane is destroyed, and so must `access`, which limits what peers reach (Transport::GuardRegion()); null: no
  // limit. An error's message names the limit to raise.
  static Result<std::unique_ptr<DataPlane>> Create(std::unique_ptr<Transport> transport,
                                                   std::span<std::byte> arena, uint64_t chunks_begin,
                                                   PeerAccess* access = nullptr);
  ~DataPlane();  // Stop()

  // For Member.data_address; at most kAddressBytesMax bytes.
  const std::string& address() const { return address_; }
  std::string Describe() const { return transport_->Describe(); }
  const TransportCapabilities& capabilities() const { return transport_->capabilities(); }
  // "tcp", "ofi/efa": all nodes of a job must have the same.
  std::string transport_name() const;
  Transport::Counters counters() const { return transport_->counters(); }

  void Start(Callbacks callbacks);
  // Answers outstanding transfers with kPeerGone, disconnects every peer, joins the thread. No callback after the
  // return. Idempotent.
  void Stop();

  // Device memory that puts may read, in addition to the arena. Any thread.
  DeviceBuffers& device_buffers() { return device_buffers_; }

  // Any thread.
  void Submit(std::vector<StartTransfer> transfers);
  // Sets the end of this node's lease, on EventLoop::Now()'s clock; 0: no lease. Any thread, effective at once. On a
  // fabric that does not fence, a put that would start after it is answered with kStale and never starts. A running put
  // is answered with kPeerGone. Gets are not refused. Before the first call there is no limit.
  void SetLease(TimeUs valid_until);
  // The view's members except this node. Only they may reach the arena, if the transport can enforce it
  // (TransportCapabilities::admits_peers). A node that is no longer in the list is disconnected, then fenced.
  void SetMembers(std::vector<Member> members);

  DataPlane(const DataPlane&) = delete;
  DataPlane& operator=(const DataPlane&) = delete;

 private:
  static constexpr uint64_t kProbeBytes = 8;
  enum class LinkState : uint8_t { kIdle, kUp, kLost, kClosing, kProbing };
  struct Peer {
    std::string data_address;
    LinkState state = LinkState::kIdle;
    PeerId peer = 0;  // in all states but kIdle; 0 in kLost if the connection was refused
    RemoteRegionId region = 0;
    TimeUs pause = 0;  // kLost
    size_t puts = 0;   // outstanding
  };
  struct Input {
    std::vector<StartTransfer> transfers;
    std::vector<std::vector<Member>> views;  // all views: a node that came and left in between is fenced, too
    bool stop = false;
  };

  DataPlane(std::unique_ptr<Transport> transport, RegionId region, uint64_t chunks_begin);
  void Run();
  uint64_t WaitUs() const;
  bool TakeInput();  // false: there was no input
  void ApplyMembers(const std::vector<Member>& members);
  void Leave(NodeId node, Peer& peer);
  Status Connect(NodeId node, Peer& peer);
  void Lose(NodeId node, Peer& peer, const std::string& reason);
  void StartReconnecting();
  void Reconnect(NodeId node, Peer& peer);
  void OnProbe(const Completion& completion);
  Peer* PeerOf(PeerId id, NodeId* node);
  bool LeaseHolds() const;
  void CutOffPuts();
  void StartWaiting();
  bool StartOne(const StartTransfer& transfer);  // false: the transport is full, try again later
  // False: the transport is full, try again later.
  bool StartFromDevice(Peer& peer, const StartTransfer& transfer);
  void CountStarted(Peer& peer, const StartTransfer& transfer);
  void Refuse(const StartTransfer& transfer, const Status& status, Code code);
  void Complete(const Completion& completion);
  void DrainForStop();
  void TellDone();

  const std::unique_ptr<Transport> transport_;
  DeviceBuffers device_buffers_;
  const RegionId region_;        // the chunks
  const uint64_t chunks_begin_;  // in the arena
  std::string address_;
  std::atomic<TimeUs> lease_until_{UINT64_MAX};
  Callbacks callbacks_;
  std::thread thread_;

  std::mutex mutex_;
  Input input_;  // guarded by mutex_

  // The thread's own.
  std::map<NodeId, Peer> peers_;                // of the newest view
  std::map<PeerId, NodeId> connected_;          // the members among them that have a connection
  std::map<PeerId, NodeId> leaving_;            // Disconnect() is running for a node that has left the view
  std::map<NodeId, TimeUs> lost_;               // members in kLost, and when each is tried again
  std::array<std::byte, kProbeBytes> probe_{};  // buffer for probes; its content is ignored
  RegionId probe_region_ = 0;
  std::deque<StartTransfer> waiting_;               // accepted, and not yet passed to the transport
  std::vector<TransferDone> done_;                  // not yet reported
  size_t puts_ = 0;                                 // outstanding puts of members
  size_t outstanding_ = 0;                          // passed to the transport, not completed
  std::map<uint64_t, DeviceBufferId> from_device_;  // outstanding puts from device memory, by tag
  bool stopping_ = false;
};

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_DATA_PLANE_H_
